"""What tests of several folders ask for."""

import importlib
import os
import subprocess

import pytest


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreters that the test starts run without coverage, which slows them down: other tests run their lines."""
    for name in [name for name in os.environ if name.startswith("COVERAGE_PROCESS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test starts with ``python -m``, and the launchers among that start, are forks that have imported all."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from tests.warm import WarmPopen

    names = ["fsdptoys.launch", "fsdptoys.run", "fsdptoys.metrics.plot", "matplotlib.figure"]
    names += ["fsdptoys.parallel.fsdp1", "fsdptoys.parallel.fsdp2", "fsdptoys.checkpoint.plans"]
    for name in names:
        importlib.import_module(name)
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)
    monkeypatch.setattr(subprocess_handler, "Popen", WarmPopen)
