"""Progress reports of long scripts."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import progress
from scripts.progress import Printer

ROOT = Path(__file__).parents[2]
FINISHED = re.compile(r"\[(\d+)/(\d+)\] .+ … [\d:]+, elapsed [\d:]+, about [\d:]+ left")
WAITS_LONG = ["parity", "validate_plan", "chaos", "toys_memory", "draw_toys", "init_from_memory"]
SCRIPTS = sorted({path.stem for path in (ROOT / "scripts").glob("bench_*.py")} | set(WAITS_LONG))


@pytest.mark.parametrize("name", SCRIPTS)
def test_long_scripts_report_progress(name: str) -> None:
    """Oracle: its syntax tree, in which both functions of the helper are called."""
    tree = ast.parse((ROOT / "scripts" / f"{name}.py").read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    used = {node.name for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) for node in each.names}
    turns = {"take_turns"} if name == "bench_peers" else {"unit"}  # bench_peers uses peers/measure.py
    assert {"progress"} | turns <= called & used


LOSS = "bench_loss.py --shapes 96x16x300 --repeats 1 --threads 1 --chunk-tokens 32 --dtypes float32"
PARITY = "parity.py --world-sizes 1 2 --steps 1 --seq-len 16 --models gpt2_debug --strategies ddp --dtypes float32"


@pytest.mark.parametrize(
    ("command", "units"),
    [(LOSS, None), pytest.param(f"{PARITY} --modes default", 4, marks=pytest.mark.extended)],
    ids=["bench_loss", "parity"],
)
def test_every_finished_unit_is_reported_with_the_remaining_time(command: str, units: int | None) -> None:
    """Oracle: the numbers of the lines, from the first to the announced last."""
    script, *words = command.split()
    done = subprocess.run([sys.executable, ROOT / "scripts" / script, *words], capture_output=True, text=True)
    # Not line by line: PyTorch's profiler writes to stderr from C++, also into the middle of a line.
    found = list(re.finditer(FINISHED, done.stderr))
    numbers = [(int(line[1]), int(line[2])) for line in found]
    assert len(numbers) >= 4 and units in (None, len(numbers)), done.stderr
    assert numbers == [(number, len(numbers)) for number in range(1, len(numbers) + 1)]
    assert found[-1][0].endswith("about 0:00 left") and "│" in done.stdout and " left" not in done.stdout


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
    assert printer.end("c", "", 153.0).endswith("about 0:18 left")
    assert printer.end("d", "", 3853.0) == "[4/4] d … 0:00, elapsed 1:02:33, about 0:00 left"


SLOW = """
import os, time
from scripts import progress
with progress.progress(2):
    with progress.unit("slow \\x1b[31m" + "x" * 5000) as done:
        while not os.path.exists("go"):
            time.sleep(0.01)
        done.note = "é" * 5000
    with progress.unit("quick"):
        pass
print("the end")
"""


@pytest.fixture
def start_slow(tmp_path: Path) -> Callable[[str], "subprocess.Popen[str]"]:
    """Starts a script that reports every fifth of a second until there is a file ``go``."""
    text = (ROOT / "scripts" / "progress.py").read_text()
    assert "BEAT_SECONDS = 9.0" in text
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "progress.py").write_text(text.replace("BEAT_SECONDS = 9.0", "BEAT_SECONDS = 0.2"))
    (tmp_path / "slow.py").write_text(SLOW)

    def start(redirection: str) -> "subprocess.Popen[str]":
        command = ["bash", "-c", f"PYTHONPATH=. exec {sys.executable} slow.py {redirection}"]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def test_slow_unit_reports_periodically(start_slow: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path) -> None:
    """Oracle: lines during the unit, between those of finished units; no escape sequences."""
    process = start_slow("")
    assert process.stderr is not None
    lines = []
    while sum("running for" in line and "slow" in line for line in lines) < 2:
        lines.append(process.stderr.readline())
    (tmp_path / "go").touch()
    output, rest = process.communicate()
    lines += rest.splitlines()
    ends = [line[:5] for line in lines if " … " in line and "running for" not in line]
    assert ends == ["[1/2]", "[2/2]"]
    assert not any("\x1b" in line for line in lines)
    assert (output, process.returncode) == ("the end\n", 0)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2> >(true)", "<&- 2>&-"])
def test_script_continues_without_stderr(
    redirection: str, start_slow: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    """Oracle: its output and its status."""
    (tmp_path / "go").touch()
    process = start_slow(redirection)
    assert (process.communicate()[0], process.returncode) == ("the end\n", 0)


def test_units_are_silent_outside_of_progress(capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: no output; functions of scripts are called by tests, too."""
    with progress.unit("alone") as done:
        done.note = "a note"
    progress.doing("nothing")
    assert capfd.readouterr() == ("", "")
