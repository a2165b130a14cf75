"""Checkpoints that several modules read, and places to write to."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdptoys.checkpoint import manifest
from tests.harness.folders import make_series


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3; not to be written to."""
    folder = tmp_path_factory.mktemp("series") / "checkpoints"
    make_series(folder)
    return folder


@pytest.fixture
def without_retry_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without pauses."""
    monkeypatch.setattr(manifest, "RETRY_PAUSES_SECONDS", (0.0, 0.0))


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory with free syncs; a killed process needs none."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)
