"""Console output of a run."""

import contextlib
import io
import multiprocessing
import os
import pty
import sys
from dataclasses import replace

import pytest
import rich.console
from rich.cells import cell_len

from fsdptoys.metrics import Console, StepMetrics
from fsdptoys.metrics.console import (
    PlainReporter,
    Reporter,
    RichReporter,
    build_reporter,
)
from fsdptoys.metrics.step import RoutingMetrics

CPU_STEP = StepMetrics(
    1, 5.54321, 1.2345, 3e-4, 0.1234, 4096, 33193.1, 0.0123, None, None, None, None, 1.5
)
GPU_STEP = StepMetrics(
    100, 2.5, 0.75, 3e-4, 0.1234, 65536, 531_100.0, 456.7, 0.4567, 112.34, 123.45, 131.25, 4.5
)  # fmt: skip
EXTREME_STEP = StepMetrics(
    100000, 12345.678, 1.5e10, 3e-14, 12345.6, 10**9, 1.5e9, 98765.4, 1.0, 1000.5, 1000.5, 1000.5,
    4.5,
)  # fmt: skip
NAN = float("nan")
BROKEN_STEP = replace(GPU_STEP, loss=NAN, grad_norm=float("inf"), eval_loss=NAN)
ROUTING = RoutingMetrics(
    2.1, 3.5, 0.98765, max_load=1.84, min_load=0.5, counts=[[92, 25, 25, 58]]
)
CPU_EXPERTS_STEP = replace(CPU_STEP, routing=ROUTING)
GPU_EXPERTS_STEP = replace(GPU_STEP, routing=ROUTING)
COLLAPSED_STEP = replace(
    EXTREME_STEP, routing=replace(ROUTING, entropy=0.0, max_load=128.0)
)


def plain_lines(steps: int, log_every: int, run: list[StepMetrics]) -> list[str]:
    stream = io.StringIO()
    reporter = PlainReporter(steps, log_every, stream)
    for metrics in run:
        reporter.step(metrics)
    reporter.close()
    reporter.close()
    return stream.getvalue().splitlines()


def rich_lines(width: int, metrics: StepMetrics, steps: int = 100_000) -> list[str]:
    console = rich.console.Console(
        file=io.StringIO(), width=width, force_terminal=False, legacy_windows=False
    )
    reporter = RichReporter(steps, console)
    reporter.step(metrics)
    reporter.close()
    reporter.close()
    assert isinstance(console.file, io.StringIO)
    return [line for line in console.file.getvalue().splitlines() if line.strip()]


ON_CPU = (
    "step  1/20  loss 5.5432  grad norm 1.234  lr 3.00e-04  time 123.4 ms  tokens/s 33,193  "
    "TFLOP/s per rank 0.0123  "
)
ON_GPU = (
    "step 100/100  loss 2.5000  grad norm 0.75  lr 3.00e-04  time 123.4 ms  tokens/s 531,100  "
    "TFLOP/s per rank 457  MFU 45.7%  memory 112.3/123.5/131.2 GiB allocated/peak/reserved"
)


@pytest.mark.parametrize(
    ("metrics", "planned", "line"),
    [
        (CPU_STEP, 20, f"{ON_CPU}resident set 1.5 GiB"),
        (
            replace(CPU_STEP, data_wait_seconds=0.01),
            20,
            f"{ON_CPU}data wait 8.1%  resident set 1.5 GiB",
        ),
        (
            replace(CPU_STEP, memory_allocated_gib=0.00396, memory_peak_gib=0.14159),
            20,
            f"{ON_CPU}memory 4.055/145 MiB allocated/peak  resident set 1.5 GiB",
        ),
        (
            CPU_EXPERTS_STEP,
            20,
            f"{ON_CPU}busiest expert 1.8x  entropy 0.988  resident set 1.5 GiB",
        ),
        (
            replace(CPU_STEP, skipped=True),
            20,
            ON_CPU.replace("loss", "skipped  loss") + "resident set 1.5 GiB",
        ),
        (GPU_STEP, 100, ON_GPU),
    ],
    ids=["cpu", "data wait", "counted memory", "experts", "skipped", "gpu"],
)
def test_plain_line_of_a_step(metrics, planned, line):
    """Oracle: the line itself."""
    assert plain_lines(planned, 1, [metrics])[0] == line


@pytest.mark.parametrize(
    ("planned", "last", "numbers"),
    [(25, 25, [10, 20, 25]), (20, 20, [10, 20]), (25, 13, [10, 13]), (5, 5, [5])],
)
def test_plain_lines_are_printed_every_log_every_steps_and_for_the_last(
    planned, last, numbers
):
    """Oracle: the multiples of ``log_every`` and the last step, whether planned or stopped early;
    none twice."""
    lines = plain_lines(
        planned, 10, [replace(CPU_STEP, step=number) for number in range(1, last + 1)]
    )
    assert [int(line.split()[1].split("/")[0]) for line in lines] == numbers


def test_evaluations_and_non_finite_values_are_shown():
    """Oracle: nan and inf in both consoles; an evaluation has a line although its step has none."""
    for lines in (plain_lines(100, 1, [BROKEN_STEP]), rich_lines(100, BROKEN_STEP)):
        text = "\n".join(lines)
        assert "nan" in text and "inf" in text
        assert "step 100: held-out loss nan nats per token" in text
    assert plain_lines(
        100, 10, [replace(CPU_STEP, step=7, eval_loss=3.25), replace(CPU_STEP, step=10)]
    )[0] == ("step 7: held-out loss 3.2500 nats per token")


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100, 200])
@pytest.mark.parametrize(
    "metrics",
    [
        pytest.param(CPU_STEP, id="cpu"),
        pytest.param(GPU_STEP, id="gpu"),
        pytest.param(EXTREME_STEP, id="big"),
        pytest.param(BROKEN_STEP, id="nan"),
        pytest.param(GPU_EXPERTS_STEP, id="experts"),
        pytest.param(COLLAPSED_STEP, id="collapsed"),
    ],
)
def test_live_numbers_fit_the_width_and_are_complete(width, metrics):
    """Oracle: the rendered lines, none wider than the terminal, and the words of the plain line."""
    lines = rich_lines(width, replace(metrics, eval_loss=None))
    assert all(cell_len(line) <= width for line in lines)
    plain_line = plain_lines(100_000, 1, [replace(metrics, eval_loss=None)])[0]
    live_cells = " ".join(lines).split()
    assert [cell for cell in plain_line.split()[2:] if cell not in live_cells] == []


def test_console_follows_the_config(monkeypatch, capsys):
    """Oracle: the class of each choice; standard output is no terminal under the test."""
    assert type(build_reporter(Console.auto, 1, 1)) is PlainReporter
    assert type(build_reporter(Console.plain, 1, 1)) is PlainReporter
    reporter = build_reporter(Console.rich, 1, 1)
    assert type(reporter) is RichReporter
    reporter.close()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert type(build_reporter(Console.auto, 1, 1)) is PlainReporter
    capsys.readouterr()
    silent = build_reporter(Console.none, 1, 1)
    assert type(silent) is Reporter
    silent.step(GPU_STEP)
    silent.message("text")
    silent.close()
    assert capsys.readouterr().out == ""


def test_markup_in_model_text_is_shown_literally():
    """Oracle: the text itself."""
    console = rich.console.Console(file=io.StringIO(), width=80)
    reporter = RichReporter(1, console)
    reporter.message("x[0] = [bold] :smile:")
    reporter.close()
    assert isinstance(console.file, io.StringIO)
    assert "x[0] = [bold] :smile:" in console.file.getvalue()


def show_steps(terminal: int, closes: bool) -> None:
    """Show two steps in a session of its own; end the process without closing unless ``closes``."""
    os.setsid()
    os.dup2(terminal, 0)
    os.dup2(terminal, 1)
    os.environ.update(TERM="xterm-256color", COLUMNS="100", LINES="40")
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    reporter = build_reporter(Console.auto, 3, 1)
    assert isinstance(reporter, RichReporter)
    for number in (1, 2):
        reporter.step(replace(CPU_STEP, step=number))
    if closes:
        reporter.close()
        reporter.message("closed")
        sys.stdout.flush()
        os._exit(0)
    reporter._progress.refresh()
    os._exit(9)


@pytest.mark.parametrize("closes", [True, False])
def test_terminal_of_another_session_is_supported_and_keeps_its_cursor(closes):
    """Oracle: the bytes on a pseudo-terminal of another session: the cursor is shown last."""
    terminal, other = pty.openpty()
    process = multiprocessing.get_context("fork").Process(
        target=show_steps, args=(other, closes)
    )
    process.start()
    os.close(other)
    drawn = b""
    with contextlib.suppress(OSError):  # Linux's end of a pseudo-terminal
        while part := os.read(terminal, 65536):
            drawn += part
    os.close(terminal)
    process.join()
    assert process.exitcode == (0 if closes else 9)
    assert b"2/3" in drawn and b"33,193" in drawn
    assert drawn.rfind(b"\x1b[?25h") > drawn.rfind(b"\x1b[?25l")
