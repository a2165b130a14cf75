"""Following a job from outside: the display while its files grow, shrink and stop growing."""

import dataclasses
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from fsdptoys.report import live_reader
from fsdptoys.report.live import follow
from fsdptoys.report.live_reader import FollowedRun, State
from fsdptoys.report.live_view import CHART_LINES, draw_chart, draw_run
from fsdptoys.utils.file_lock import is_locked
from tests.harness.processes import wait_until
from tests.report.watched_runs import (
    POLL,
    Watching,
    WrittenRun,
    beat,
    console_of,
    step_numbers,
    step_of,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WrittenRun]:
    """A run, on a terminal that understands control codes."""
    monkeypatch.setenv("TERM", "xterm")
    run = WrittenRun(tmp_path / "run")
    yield run
    run.release()


def polled(run: WrittenRun) -> FollowedRun:
    followed = FollowedRun(run.path)
    followed.poll()
    return followed


def test_lines_appear_when_written_and_a_partial_line_is_waited_for(
    run: WrittenRun,
) -> None:
    """Oracle: the written steps, each once; a partial line is ignored until it is complete."""
    run.add(*(step_of(number) for number in range(1, 4)))
    watching = Watching(run.path)
    watching.wait_for_text("step  3/20")
    line = step_of(4, eval_loss=5.25).to_json()
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write(line[:40])
        file.flush()
        assert polled(run).results().steps == 3
        file.write(line[40:] + "\n")
    watching.wait_for_text("step 4: held-out loss 5.2500")
    run.add(step_of(5, skipped=True, skipped_steps=1))
    run.finish()
    assert watching.end() == 0
    assert step_numbers(watching.lines()) == [3, 4, 5]
    assert (
        watching.lines()[-1]
        == f"the run has ended: 20 of 20; all steps done; {run.path / 'summary.md'}"
    )
    assert any(
        line.startswith("step 5: optimizer step skipped") for line in watching.lines()
    )


@pytest.mark.parametrize("grows_past", [False, True])
def test_run_that_returns_to_a_checkpoint_is_read_again(
    run: WrittenRun, grows_past: bool
) -> None:
    """Oracle: the file's own steps, cut and written again with a look in between, or without."""
    run.add(*(step_of(number) for number in range(1, 5)))
    at_checkpoint = (run.path / "metrics.jsonl").stat().st_size
    run.add(*(step_of(number) for number in range(5, 8)))
    followed = FollowedRun(run.path)
    followed.poll()
    assert [metrics.step for metrics in followed.steps] == [*range(1, 8)]
    os.truncate(run.path / "metrics.jsonl", at_checkpoint)
    if not grows_past:
        followed.poll()
        assert [metrics.step for metrics in followed.steps] == [*range(1, 5)]
    run.add(*(step_of(number, loss=3.0) for number in range(5, 12)))
    followed.poll()
    assert [metrics.step for metrics in followed.steps] == [*range(1, 12)]
    assert [metrics.loss for metrics in followed.steps[4:]] == [3.0] * 7
    (run.path / "metrics.jsonl").unlink()
    followed.poll()
    assert followed.steps == []


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (
            WrittenRun.die,
            "the run ended without a summary after step 2, since it was killed or failed",
        ),
        (
            lambda run: run.finish("2 of 20; SIGTERM received"),
            "the run has ended: 2 of 20; SIGTERM received; ",
        ),
    ],
    ids=["killed", "stopped early"],
)
def test_watching_an_unfinished_run_exits_with_1(
    run: WrittenRun, end: Callable[[WrittenRun], None], sentence: str
) -> None:
    """Oracle: exit status, and the summary's own row in the last line."""
    run.add(step_of(1), step_of(2))
    watching = Watching(run.path)
    watching.wait_for_text("step  2/20")
    end(run)
    assert watching.end() == 1
    assert watching.lines()[-1].startswith(sentence)


@pytest.mark.parametrize("terminal", [False, True])
def test_ctrl_c_ends_watching_but_not_the_run(run: WrittenRun, terminal: bool) -> None:
    """Oracle: exit status 0, with unchanged lock and files of the run."""
    run.add(step_of(1))
    before = sorted(path.name for path in run.path.iterdir())
    stream = io.StringIO()

    def interrupt() -> None:
        try:
            wait_until(lambda: "1/20" in stream.getvalue(), "the first step")
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert follow(run.path, console_of(stream, terminal), POLL) == 0
    thread.join()
    assert "1/20" in stream.getvalue()
    assert (
        is_locked(run.path)
        and sorted(path.name for path in run.path.iterdir()) == before
    )


@pytest.mark.parametrize("width", [40, 80, 120])
def test_live_view_fits_the_width(run: WrittenRun, width: int) -> None:
    """Oracle: rich's own count of cells in every line; the written numbers are in the picture."""
    run.add(
        *(
            step_of(number, eval_loss=5.0 if number == 7 else None)
            for number in range(1, 10)
        )
    )
    run.add(step_of(10, loss_spike=9.5, skipped=True, skipped_steps=1))
    beat(run.path, 0, 11, "forward")
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=False)
    console.print(
        draw_run(polled(run), State.running, console, "job 01 of 8, \x1b[31mlr=1: ")
    )
    text = stream.getvalue()
    assert (
        all(cell_len(line) <= width for line in text.splitlines())
        and "\x1b" not in text
    )
    flat = " ".join(text.split())
    expected = [
        "2 ranks, a CPU",
        "step 10/20",
        "0:00:05 in steps, about 0:00:05 left",
        "500.0 ms median; 10% to 90%: 500.0 ms to 500.0 ms",
        "5.0000 after step 7",
        "skipped steps",
        "loss spikes",
        "768.00 MiB of rank 0",
        "rank 0 in step 11 (forward)",
    ]
    assert [text for text in expected if text not in flat and width > 40] == []


def test_terminal_is_redrawn_and_keeps_the_last_state(run: WrittenRun) -> None:
    """Oracle: the cursor-up escapes, and the final lines."""
    run.add(step_of(1))
    watching = Watching(run.path, terminal=True)
    watching.wait_for_text("1/20")
    run.add(step_of(2), step_of(3))
    watching.wait_for_text("3/20")
    run.finish()
    assert watching.end() == 0
    assert (
        "\x1b[1A" in watching.stream.getvalue()
        and "the run has ended: 20 of 20" in watching.lines()[-1]
    )


def test_rank_that_falls_behind_is_named(run: WrittenRun) -> None:
    """Oracle: heartbeat files of two ranks, read immediately and a minute later."""
    beat(run.path, 0, 7, "forward")
    beat(run.path, 1, 6, "backward")
    followed = FollowedRun(run.path)
    signs = followed.signs()
    now = max(sign.time for sign in signs.values())
    assert followed.late_ranks(signs, now) == {}
    (sentence,) = followed.late_ranks(signs, signs[1].time + 60).values()
    assert sentence.startswith(
        "rank 1 is late; its last heartbeat is of step 6 (backward), 60 s ago, pid "
    )
    # over the highest that Linux gives
    ended = {0: dataclasses.replace(signs[0], pid=2**22 + 1)}
    assert "rank 0 has ended; " in next(iter(followed.late_ranks(ended, now).values()))


def test_without_locks_a_run_is_running_while_its_ranks_have_heartbeats(
    run: WrittenRun,
) -> None:
    """Oracle: the states before and after the heartbeat of a live process."""
    run.add(step_of(1))
    run.die()
    followed = polled(run)
    assert followed.state() is State.gone
    beat(run.path, 0, 2, "forward")
    assert followed.state() is State.running


def test_chart_spans_the_range_of_the_values() -> None:
    """Oracle: a straight line falls by an eighth of a block a value; a non-finite value leaves a
    gap."""
    lines = draw_chart(
        [float(value) for value in range(8 * CHART_LINES, 0, -1)], 80, "loss"
    )
    assert len(lines) == CHART_LINES
    assert lines[0] == "  40 █▇▆▅▄▃▂▁" and lines[2].startswith("loss ")
    assert lines[-1].startswith("   1 ████") and lines[-1].endswith("█▇▆▅▄▃▂▁")
    assert draw_chart([2.0, float("nan"), 1.0], 80, "loss")[-1] == "   1 █ ▁"
    assert draw_chart([float("inf")], 80, "loss") == ["loss: no finite value yet"]
    assert max(map(len, draw_chart([1.0] * 5000 + [9.0] * 5000, 60, "loss"))) <= 60


@pytest.mark.launcher
@pytest.mark.usefixtures("unmeasured", "warm")
def test_real_run_is_followed_to_its_end(tmp_path: Path) -> None:
    """Oracle: the configured steps, the run's own name, the end of its summary, and its files
    alone."""
    argv = [
        "experiment=null",
        "parallel=single",
        "train.steps=20",
        "train.seq_len=64",
        "metrics.log_every=1",
    ]
    argv += ["metrics.run_dir=run", "metrics.console=none"]
    command = [sys.executable, "-m", "fsdptoys", "train", *argv]
    training = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(
            lambda: metrics.exists() or training.poll(),
            "the file of steps",
            [training.pid],
        )
        watching = Watching(tmp_path / "run")
        assert training.wait() == 0
        assert watching.end() == 0
    finally:
        training.kill()
        training.wait()
    assert watching.lines()[0].startswith(("llama_debug-single in ", "run in "))
    numbers = step_numbers(watching.lines())
    assert numbers == [*range(numbers[0], 21)]
    assert "20 of 20; all steps done" in watching.lines()[-1]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "config.yaml", "environment.json", "loss.png", "metrics.jsonl", "result.json", "summary.md",
    ]  # fmt: skip


def test_steps_never_appear_with_settings_older_than_them(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the file's settings; the run writes them and its first steps while the follower
    polls."""
    config = run.path / "config.yaml"
    text = config.read_text()
    config.unlink()
    followed = FollowedRun(run.path)
    read_tree = live_reader.read_tree

    def read_and_let_the_run_write(path: Path) -> dict[str, object]:
        try:
            return read_tree(path)
        finally:
            if not config.exists():
                config.write_text(text)
                run.add(step_of(1), step_of(2))

    followed.poll()
    (run.path / "environment.json").write_text("{}")
    monkeypatch.setattr(live_reader, "read_tree", read_and_let_the_run_write)
    for _ in range(2):
        followed.poll()
        assert not followed.steps or followed.settings.planned_steps == 20
