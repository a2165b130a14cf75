"""Console output of a run."""

import io
import os
import pty
import subprocess
import sys
from dataclasses import replace

import pytest
import rich.console
from rich.cells import cell_len

from fsdptoys.metrics import Console, StepMetrics
from fsdptoys.metrics.console import PlainReporter, Reporter, RichReporter, build_reporter
from fsdptoys.metrics.step import (
    RoutingMetrics,
)
from fsdptoys.utils.text import printable

CPU_STEP = StepMetrics(1, 5.54321, 1.2345, 3e-4, 0.1234, 4096, 33193.1, 0.0123, None, None, None, None, 1.5)
GPU_STEP = StepMetrics(
    100, 2.5, 0.75, 3e-4, 0.1234, 65536, 531_100.0, 456.7, 0.4567, 112.34, 123.45, 131.25, 4.5
)  # fmt: skip
EXTREME_STEP = StepMetrics(
    100000, 12345.678, 1.5e10, 3e-14, 12345.6, 10**9, 1.5e9, 98765.4, 1.0, 1000.5, 1000.5, 1000.5, 4.5
)  # fmt: skip
NAN = float("nan")
BROKEN_STEP = replace(GPU_STEP, loss=NAN, grad_norm=float("inf"), eval_loss=NAN)
ROUTING = RoutingMetrics(2.1, 3.5, 0.98765, max_load=1.84, min_load=0.5, counts=[[92, 25, 25, 58]])
CPU_EXPERTS_STEP, GPU_EXPERTS_STEP = replace(CPU_STEP, routing=ROUTING), replace(GPU_STEP, routing=ROUTING)
COLLAPSED_STEP = replace(EXTREME_STEP, routing=replace(ROUTING, entropy=0.0, max_load=128.0))


def plain_lines(steps: int, log_every: int, shown: list[StepMetrics]) -> list[str]:
    stream = io.StringIO()
    reporter = PlainReporter(steps, log_every, stream)
    for metrics in shown:
        reporter.step(metrics)
    reporter.close()
    reporter.close()
    return stream.getvalue().splitlines()


def rich_lines(width: int, metrics: StepMetrics, steps: int = 100_000) -> list[str]:
    console = rich.console.Console(file=io.StringIO(), width=width, force_terminal=False, legacy_windows=False)
    reporter = RichReporter(steps, console)
    reporter.step(metrics)
    reporter.close()
    reporter.close()
    assert isinstance(console.file, io.StringIO)
    return [line for line in console.file.getvalue().splitlines() if line.strip()]


def test_plain_lines_on_a_cpu_and_on_a_device():
    """Oracle: the lines themselves."""
    assert plain_lines(20, 1, [CPU_STEP]) == [
        "step  1/20  loss 5.5432  grad norm 1.234  lr 3.00e-04  time 123.4 ms  tokens/s 33,193  "
        "TFLOP/s per rank 0.0123  resident set 1.5 GiB"
    ]
    assert plain_lines(20, 1, [replace(CPU_STEP, data_wait_seconds=0.01)]) == [
        "step  1/20  loss 5.5432  grad norm 1.234  lr 3.00e-04  time 123.4 ms  tokens/s 33,193  "
        "TFLOP/s per rank 0.0123  data wait 8.1%  resident set 1.5 GiB"
    ]
    counted = replace(CPU_STEP, memory_allocated_gib=0.00396, memory_peak_gib=0.14159)
    assert plain_lines(20, 1, [counted])[0].endswith("  memory 0.00396/0.1416 GiB allocated/peak  resident set 1.5 GiB")
    assert plain_lines(100, 10, [GPU_STEP]) == [
        "step 100/100  loss 2.5000  grad norm 0.75  lr 3.00e-04  time 123.4 ms  tokens/s 531,100  "
        "TFLOP/s per rank 457  MFU 45.7%  memory 112.3/123.5/131.2 GiB allocated/peak/reserved"
    ]
    assert plain_lines(20, 1, [CPU_EXPERTS_STEP]) == [
        "step  1/20  loss 5.5432  grad norm 1.234  lr 3.00e-04  time 123.4 ms  tokens/s 33,193  "
        "TFLOP/s per rank 0.0123  busiest expert 1.8x  entropy 0.988  resident set 1.5 GiB"
    ]


@pytest.mark.parametrize(
    ("planned", "done", "shown"),
    [(25, 25, [10, 20, 25]), (20, 20, [10, 20]), (25, 13, [10, 13]), (5, 5, [5])],
)
def test_plain_lines_are_printed_every_log_every_steps_and_for_the_last(planned, done, shown):
    """Oracle: the multiples of ``log_every`` and the last step, whether planned or stopped early; none twice."""
    lines = plain_lines(planned, 10, [replace(CPU_STEP, step=number) for number in range(1, done + 1)])
    assert [int(line.split()[1].split("/")[0]) for line in lines] == shown


def test_evaluations_and_non_finite_values_are_shown():
    """Oracle: nan and inf in both consoles; an evaluation has a line although its step has none."""
    for lines in (plain_lines(100, 1, [BROKEN_STEP]), rich_lines(100, BROKEN_STEP)):
        text = "\n".join(lines)
        assert "nan" in text and "inf" in text
        assert "step 100: held-out loss nan nats per token" in text
    assert plain_lines(100, 10, [replace(CPU_STEP, step=7, eval_loss=3.25), replace(CPU_STEP, step=10)])[0] == (
        "step 7: held-out loss 3.2500 nats per token"
    )


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
def test_live_table_fits_the_width_without_truncating_numbers(width, metrics):
    """Oracle: the rendered lines: none wider than the terminal, three for the table, and no ellipsis in it."""
    table = rich_lines(width, replace(metrics, eval_loss=None))[-3:]
    assert all(cell_len(line) <= width for line in table)
    assert "loss" in table[1]
    assert f"{metrics.loss:.4f}" in table[2]
    assert not any("\u2026" in line for line in table)
    assert len(table[1].split()) >= 2 or width == 40


@pytest.mark.parametrize("width", [80, 100])
def test_all_columns_fit_80_and_100_characters(width):
    """Oracle: all numbers of a step on a device, in one bar of one line and one row, at 80 and 100 columns."""
    bar, *_, row = rich_lines(width, GPU_STEP, steps=1000)
    assert bar.startswith("step 100/1000 ") and bar.endswith("left") and cell_len(bar) <= width
    assert row.split() == ["2.5000", "0.75", "3.00e-04", "123.4", "ms", "531,100", "457", "45.7%", "112.3/123.5/131.2"]


@pytest.mark.parametrize(
    ("metrics", "width", "cells"),
    [
        pytest.param(CPU_EXPERTS_STEP, 80, "5.5432 1.234 3.00e-04 123.4 ms 33,193 0.0123 1.8x 1.5 GiB", id="cpu at 80"),
        pytest.param(
            CPU_EXPERTS_STEP, 100, "5.5432 1.234 3.00e-04 123.4 ms 33,193 0.0123 1.8x 0.988 1.5 GiB", id="cpu at 100"
        ),
        pytest.param(
            GPU_EXPERTS_STEP, 80, "2.5000 0.75 3.00e-04 123.4 ms 531,100 457 1.8x 112.3/123.5/131.2", id="gpu at 80"
        ),
        pytest.param(
            GPU_EXPERTS_STEP,
            100,
            "2.5000 0.75 3.00e-04 123.4 ms 531,100 457 45.7% 1.8x 0.988 112.3/123.5/131.2",
            id="gpu at 100",
        ),
    ],
)
def test_busiest_expert_fits_80_characters(metrics, width, cells):
    """Oracle: the row; where it does not all fit, first the entropy gives way, then the MFU."""
    assert rich_lines(width, metrics)[-1].split() == cells.split(" ")


def test_column_positions_do_not_depend_on_the_numbers():
    """Oracle: the heading line, which is the same for all numbers."""
    other = replace(GPU_STEP, loss=11.25, grad_norm=100.123, tokens_per_second=12.0, step_time_seconds=3.0)
    assert rich_lines(100, GPU_STEP)[-3:-1] == rich_lines(100, other)[-3:-1]


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


def test_control_characters_in_model_text_are_escaped():
    """Oracle: escapes of control characters and of characters missing from the stream's encoding; line breaks stay."""
    ascii_stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert printable("a\x1b[2Jb\n\tc\r", io.StringIO()) == "a\\x1b[2Jb\n\tc\\r"
    assert printable("\u4e2d", ascii_stream) == "\\u4e2d"
    console = rich.console.Console(file=io.StringIO(), width=80)
    reporter = RichReporter(1, console)
    reporter.message("x[0] = [bold] :smile:")
    reporter.close()
    assert isinstance(console.file, io.StringIO)
    assert "x[0] = [bold] :smile:" in console.file.getvalue()


SCRIPT = """
import sys
from fsdptoys.metrics.config import Console
from fsdptoys.metrics.console import build_reporter
from fsdptoys.metrics.step import StepMetrics
reporter = build_reporter(Console.auto, 3, 1)
for step in (1, 2):
    reporter.step(StepMetrics(step, 5.5, 1.2, 3e-4, 0.1, 4096, 33193.0, 0.01, None, None, None, None, 1.5))
assert type(reporter).__name__ == "RichReporter"
if sys.argv[1] == "close":
    reporter.close()
    reporter.message("closed")
else:
    import os
    reporter._progress.refresh()
    os._exit(9)
"""


@pytest.mark.parametrize("end", ["close", "killed"])
def test_terminal_of_another_session_is_supported_and_keeps_its_cursor(end):
    """Oracle: the bytes on a pseudo-terminal of another session: the cursor is shown last."""
    mine, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, end], stdout=theirs, stdin=theirs, start_new_session=True, env=environment
    )
    os.close(theirs)
    drawn = b""
    while True:
        try:
            part = os.read(mine, 65536)
        except OSError:  # Linux's end of a pseudo-terminal
            break
        if not part:
            break
        drawn += part
    os.close(mine)
    assert process.wait() == (0 if end == "close" else 9)
    assert b"2/3" in drawn and b"33,193" in drawn
    assert drawn.rfind(b"\x1b[?25h") > drawn.rfind(b"\x1b[?25l")
