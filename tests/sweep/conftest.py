"""Fixtures shared by several files of this folder."""

import os
from pathlib import Path

import pytest

from fsdptoys.sweep.slurm_settings import read_launcher


@pytest.fixture
def slurm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with no-op commands of SLURM's names, for decisions made before any command is called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "srun", "squeue", "scancel"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    read_launcher.cache_clear()
    return folder
