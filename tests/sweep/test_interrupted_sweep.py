"""``fsdptoys sweep`` interrupted by signals, with processes that replace training (``standin``)."""

import os
import pty
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fsdptoys.sweep import read_sweep
from fsdptoys.utils.console_stream import install_streams, let_stdout_end
from tests.harness.launchers import runs
from tests.harness.processes import wait_until
from tests.sweep.jobs import SMALL, SUCCEED, statuses, sweep, the_sweep


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def interrupted(
    numbers: Sequence[int],
    *argv: str,
    behind: bool = False,
    closes_terminal: bool = False,
) -> int:
    """Exit status of a sweep in its own process that receives signals once its job is running.

    Args:
        numbers: numbers of the signals.
        argv: arguments of the sweep.
        behind: ignores SIGINT from its start, as background processes of shells do.
        closes_terminal: prints to a terminal closed before the signals arrive.
    """
    terminal = pty.openpty() if closes_terminal else ()
    child = os.fork()
    if not child:
        try:
            if behind:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            if terminal:
                os.close(terminal[0])
                os.dup2(terminal[1], 1)
                sys.stdout = os.fdopen(1, "w")
                install_streams()
                let_stdout_end()
            os._exit(sweep(*argv))
        finally:
            os._exit(99)
    wait_until(
        lambda: list(Path("sweeps").glob("*/jobs/*/ready")), "a running job", [child]
    )
    for end in terminal:
        os.close(end)
    os.kill(child, numbers[0])
    for number in numbers[1:]:
        wait_until(
            lambda: list(Path("sweeps").glob("*/jobs/*/asked")),
            "the signal's arrival at the job",
            [child],
        )
        os.kill(child, number)
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    wait_until(
        lambda: os.waitid(os.P_PID, child, ended), "the end of the sweep", [child]
    )
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("numbers", "status"),
    [([signal.SIGTERM], 143), ([signal.SIGINT, signal.SIGINT], 130)],
)
def test_signal_keeps_finished_jobs_and_the_sweep_can_be_resumed(
    numbers: list[int], status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Oracle: real signals to a real process: the running job is stopped, the next waits, and
    --resume runs both."""
    seeds = "0,6,0" if len(numbers) > 1 else "0,5,0"
    assert (
        interrupted(numbers, *SMALL, f"train.seed={seeds}", "train.steps=5,6") == status
    )
    result = the_sweep()
    assert statuses(result) == ["done", "done", "stopped", "waiting"]
    assert result.jobs[2].exit_status == -(
        signal.SIGKILL if len(numbers) > 1 else signal.SIGHUP
    )
    printed = capfd.readouterr().out
    assert (
        f"fsdptoys: stopped by {signal.Signals(numbers[0]).name}; fsdptoys sweep --resume "
        f"{result.path} continues it"
    ) in printed
    assert sweep("--resume", str(result.path), train=SUCCEED) == 0
    assert statuses(read_sweep(result.path)) == ["done"] * 4
    assert [
        attempt.parent.name for attempt in result.path.glob("jobs/*/attempt-1")
    ] == ["03"]


def test_closed_terminal_does_not_prevent_the_tables() -> None:
    """Oracle: failed prints are ignored: the job is stopped, the tables record it, and the status
    is SIGHUP's."""
    assert (
        interrupted([signal.SIGHUP], *SMALL, "train.seed=5", closes_terminal=True)
        == 128 + signal.SIGHUP
    )
    result = the_sweep()
    assert statuses(result) == ["stopped"]
    assert "stopped" in (result.path / "table.md").read_text()


@pytest.mark.parametrize("behind", [False, True])
def test_jobs_end_with_a_killed_sweep(behind: bool) -> None:
    """Oracle: SIGKILL leaves the job's file at running; its process ends, and --resume runs it
    again."""
    assert (
        interrupted([signal.SIGKILL], *SMALL, "train.seed=8", behind=behind)
        == -signal.SIGKILL
    )
    result = the_sweep()
    assert statuses(result) == ["running"]
    process = int((result.job_folder(result.jobs[0]) / "ready").read_text())
    wait_until(lambda: not runs(process), "the end of the job", [process])
    assert sweep("--resume", str(result.path), train=SUCCEED) == 0
