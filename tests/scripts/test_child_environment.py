"""Environment of the scripts' child processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_gpu import ACCELERATE, COMPILED, Bench
from scripts.child_environment import ROOT, child_environment
from scripts.machine import without_clocks


def test_children_import_carried_packages_after_this_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a child that imports a package which only a folder of PYTHONPATH has, and this checkout's package."""
    (tmp_path / "carried.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ask = "import carried, fsdptoys; print(fsdptoys.__path__[0])"
    words = [sys.executable, "-c", ask]
    done = subprocess.run(words, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == ROOT


def test_peers_with_another_python_get_no_carried_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: PYTHONPATH of each contestant's process."""
    monkeypatch.setenv("PYTHONPATH", "carried")
    kept = os.pathsep.join([str(ROOT), "carried"])
    for python, theirs in ((sys.executable, kept), ("other", None)):
        bench = Bench("cuda", tmp_path, python, None, None, 90.0)
        assert bench.environment(COMPILED)["PYTHONPATH"] == kept
        assert bench.environment(ACCELERATE).get("PYTHONPATH") == theirs


def test_momentary_clocks_do_not_distinguish_machines() -> None:
    """Oracle: two lines of one GPU, idle and busy, and of another driver."""
    line = "NVIDIA H200, driver {}, SM clock {} MHz of 1980 MHz, memory clock {} MHz, power limit 700.00 W"
    idle, busy, other = (
        line.format(*each) for each in (("580.1", 345, 800), ("580.1", 1980, 3201), ("570.2", 345, 800))
    )
    assert without_clocks(idle) == without_clocks(busy) != without_clocks(other)
