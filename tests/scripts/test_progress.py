"""Progress reports of long scripts."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.progress import Printer

ROOT = Path(__file__).parents[2]
WAITS_LONG = ["parity", "validate_plan", "chaos", "toys_memory", "draw_toys", "init_from_memory"]


@pytest.mark.parametrize("name", sorted({*(path.stem for path in (ROOT / "scripts").glob("bench_*.py")), *WAITS_LONG}))
def test_long_scripts_report_progress(name: str) -> None:
    """Oracle: its syntax tree, in which both functions of the helper are called."""
    tree = ast.parse((ROOT / "scripts" / f"{name}.py").read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    turns = "take_turns" if name == "bench_peers" else "unit"  # bench_peers uses peers/measure.py
    assert {"progress", turns} <= called


def test_remaining_time_is_extrapolated_from_finished_units() -> None:
    """Oracle: computed by hand: units of ten seconds, of which one takes longer, and the text between units."""
    printer = Printer(4, 100.0)
    assert printer.beat(105.0) == "[1/4] starting … running for 0:05, elapsed 0:05, time left not known yet"
    printer.begin("a", 100.0)
    assert printer.end("a", "12 MiB", 110.0) == "[1/4] a: 12 MiB … 0:10, elapsed 0:10, about 0:30 left"
    printer.doing("writing", 110.0)
    assert printer.beat(112.0) == "[2/4] writing … running for 0:02, elapsed 0:12, about 0:28 left"
    printer.begin("b", 112.0)
    assert printer.beat(130.0) == "[2/4] b … running for 0:18, elapsed 0:30, about 0:50 left"
    assert printer.end("b", "", 150.0) == "[2/4] b … 0:38, elapsed 0:50, about 0:50 left"


SLOW = """
import os, time
from scripts import progress
progress.BEAT_SECONDS = 0.2
with progress.progress(2):
    with progress.unit("slow \\x1b[31m" + "x" * 5000):
        while not os.path.exists("go"):
            time.sleep(0.01)
    with progress.unit("quick"):
        pass
print("the end")
"""


def start_slow(folder: Path, redirection: str) -> "subprocess.Popen[str]":
    """Start a script whose first unit ends when the file ``go`` exists."""
    (folder / "slow.py").write_text(SLOW)
    command = ["bash", "-c", f"PYTHONPATH={ROOT} exec {sys.executable} slow.py {redirection}"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_slow_unit_reports_periodically(tmp_path: Path) -> None:
    """Oracle: lines during the unit, between those of finished units; no escape sequences."""
    process = start_slow(tmp_path, "")
    assert process.stderr is not None
    lines = []
    while sum("running for" in line and "slow" in line for line in lines) < 2:
        lines.append(process.stderr.readline())
    (tmp_path / "go").touch()
    output, rest = process.communicate()
    lines += rest.splitlines()
    assert [line[:5] for line in lines if " … " in line and "running for" not in line] == ["[1/2]", "[2/2]"]
    assert not any("\x1b" in line for line in lines)
    assert (output, process.returncode) == ("the end\n", 0)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2> >(true)"])
def test_script_continues_without_stderr(redirection: str, tmp_path: Path) -> None:
    """Oracle: its output and its status."""
    (tmp_path / "go").touch()
    process = start_slow(tmp_path, redirection)
    assert (process.communicate()[0], process.returncode) == ("the end\n", 0)
