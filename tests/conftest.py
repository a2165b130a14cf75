"""Fixtures and hooks of all tests."""

import gc
import importlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.measuring import without_coverage

# Otherwise every compiling process starts workers, each of which imports torch, for a handful of kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection, which would copy their pages in every fork."""
    gc.freeze()


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """Run the test and its processes without coverage, which slows them down; other tests cover the same lines."""
    with without_coverage():
        yield


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace ``python -m`` processes of the test and of its launchers by forks with the imports already done."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from tests.warm import WarmPopen

    names = ["fsdptoys.launch.launch", "fsdptoys.train.run", "fsdptoys.metrics.plots", "matplotlib.figure"]
    names += ["fsdptoys.parallel.fsdp1", "fsdptoys.parallel.fsdp2", "fsdptoys.checkpoint.dcp_io"]
    for name in names:
        importlib.import_module(name)
    monkeypatch.setattr(subprocess, "Popen", WarmPopen)
    monkeypatch.setattr(subprocess_handler, "Popen", WarmPopen)
