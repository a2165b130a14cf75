"""What scripts share: progress reports, child processes, ranks that fail, and the page of
versions."""

import ast
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scripts.common.child_environment import child_environment
from scripts.common.progress import Printer
from scripts.versions import COMMANDS, Result, Row, main
from tests.harness.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
WAITS_LONG = [
    "parity.py",
    "chaos.py",
    "planner/validate_plan.py",
    "toys/toys_memory.py",
    "toys/draw_toys.py",
    "benchmarks/init_from_memory.py",
    *sorted(
        path.relative_to(SCRIPTS).as_posix()
        for path in SCRIPTS.glob("benchmarks/bench_*.py")
    ),
]


@pytest.mark.parametrize("name", WAITS_LONG)
def test_long_scripts_report_progress(name: str) -> None:
    """Oracle: its syntax tree, in which both functions of the helper are called."""
    tree = ast.parse((SCRIPTS / name).read_text())
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    # bench_peers uses peers/measure.py
    turns = "take_turns" if "bench_peers" in name else "unit"
    assert {"progress", turns} <= called


def test_remaining_time_is_extrapolated_from_finished_units() -> None:
    """Oracle: computed by hand: units of ten seconds, one of them longer, and the text between
    units."""
    printer = Printer(4, 100.0)
    assert (
        printer.beat(105.0)
        == "[1/4] starting … running for 0:05, elapsed 0:05, time left not known yet"
    )
    printer.begin("a", 100.0)
    assert (
        printer.end("a", "12 MiB", 110.0)
        == "[1/4] a: 12 MiB … 0:10, elapsed 0:10, about 0:30 left"
    )
    printer.doing("writing", 110.0)
    assert (
        printer.beat(112.0)
        == "[2/4] writing … running for 0:02, elapsed 0:12, about 0:28 left"
    )
    printer.begin("b", 112.0)
    assert (
        printer.beat(130.0)
        == "[2/4] b … running for 0:18, elapsed 0:30, about 0:50 left"
    )
    assert (
        printer.end("b", "", 150.0) == "[2/4] b … 0:38, elapsed 0:50, about 0:50 left"
    )


SLOW = """
import os, time
from scripts.common import progress
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
    """Start a script; its first unit ends when the file ``go`` exists."""
    (folder / "slow.py").write_text(SLOW)
    command = [
        "bash",
        "-c",
        f"PYTHONPATH={ROOT} exec {sys.executable} slow.py {redirection}",
    ]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


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
    assert [
        line[:5] for line in lines if " … " in line and "running for" not in line
    ] == [
        "[1/2]",
        "[2/2]",
    ]
    assert not any("\x1b" in line for line in lines)
    assert (output, process.returncode) == ("the end\n", 0)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2> >(true)"])
def test_script_continues_without_stderr(redirection: str, tmp_path: Path) -> None:
    """Oracle: its output and its status."""
    (tmp_path / "go").touch()
    process = start_slow(tmp_path, redirection)
    assert (process.communicate()[0], process.returncode) == ("the end\n", 0)


def test_children_import_carried_packages_after_this_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a child that imports a package which only a folder of PYTHONPATH has, and this
    checkout's package."""
    (tmp_path / "carried.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ask = "import carried, fsdptoys; print(fsdptoys.__path__[0])"
    command = [sys.executable, "-c", ask]
    process = subprocess.run(
        command,
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(process.stdout.strip()).parent == ROOT


def lose_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def lose_the_only_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("ranks", "function"), [(2, lose_rank_1), (1, lose_the_only_rank)]
)
def test_failure_names_the_rank_that_a_signal_ended(
    ranks: int, function: Callable[[], None]
) -> None:
    """Oracle: the signal, beside what is left to report: a lost connection, or nothing."""
    with pytest.raises(
        RuntimeError, match=rf"(?s)rank .*\nrank {ranks - 1} was ended by SIGKILL$"
    ):
        run_ranks(ranks, function)


def result(version: str, tests: list[Row]) -> Result:
    """A version under which every command passed."""
    commands = [Row(f"fsdptoys {arguments}", passed=1) for arguments, _ in COMMANDS]
    return Result(version, f"a machine, torch {version}", "abc1234", tests, commands)


@pytest.mark.parametrize("failed", [0, 1])
def test_status_is_1_if_any_version_failed(failed: int, tmp_path: Path) -> None:
    """Oracle: the status, and the failure's line of the page."""
    failures = ["test_it: assert <1>"][:failed]
    paths = []
    for version, tests in {
        "2.7.1": [Row("loss", failed=failed, failures=failures)],
        "2.15.0": [Row("loss")],
    }.items():
        paths.append(tmp_path / f"{version}.json")
        paths[-1].write_text(json.dumps(dataclasses.asdict(result(version, tests))))
    page = tmp_path / "page.md"
    assert (
        main(["page", str(page), "--command", "bash versions.sh", *map(str, paths)])
        == failed
    )
    assert ("- torch 2.7.1, loss: test_it: assert &lt;1>" in page.read_text()) == bool(
        failed
    )
