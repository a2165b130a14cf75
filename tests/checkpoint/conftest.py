"""Checkpoints that several modules read."""

from pathlib import Path

import pytest

from tests.harness.folders import make_series


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3; not to be written to."""
    folder = tmp_path_factory.mktemp("series") / "checkpoints"
    make_series(folder)
    return folder
