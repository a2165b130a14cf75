"""What tests of several folders ask for."""

import gc
import importlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.measuring import without_coverage

# Else every process that compiles starts others, each of which imports torch, to compile a handful of kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_collection_finish() -> None:
    """Look no more through what the imports have left, whose forks would copy it for that."""
    gc.freeze()


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """The test and what it starts run without coverage, which slows them down: other tests run their lines."""
    with without_coverage():
        yield


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test starts with ``python -m``, and the launchers among that start, are forks that have imported all."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from tests.warm import WarmPopen

    names = ["fsdptoys.launch.launch", "fsdptoys.train.run", "fsdptoys.metrics.plots", "matplotlib.figure"]
    names += ["fsdptoys.parallel.fsdp1", "fsdptoys.parallel.fsdp2", "fsdptoys.checkpoint.dcp_io"]
    for name in names:
        importlib.import_module(name)
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)
    monkeypatch.setattr(subprocess_handler, "Popen", WarmPopen)
