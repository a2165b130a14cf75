"""Fixtures shared by the tests of checkpoints."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.series import make_series


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3; not to be written to."""
    folder = tmp_path_factory.mktemp("series") / "checkpoints"
    make_series(folder)
    return folder


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where syncs are free; a killed process needs no syncs."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)
