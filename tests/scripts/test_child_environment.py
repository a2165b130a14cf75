"""Environment of the scripts' child processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.child_environment import ROOT, child_environment


def test_children_import_carried_packages_after_this_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a child that imports a package which only a folder of PYTHONPATH has, and this checkout's package."""
    (tmp_path / "carried.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ask = "import carried, fsdptoys; print(fsdptoys.__path__[0])"
    words = [sys.executable, "-c", ask]
    done = subprocess.run(words, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == ROOT
