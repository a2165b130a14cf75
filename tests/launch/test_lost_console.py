"""Lost consoles: a full disk, a pipe without reader, closed streams."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.levels import extended
from tests.harness.resumed_runs import metrics_of
from tests.harness.streams import REASONS, ROOT, run_with

WORDS = (
    "train experiment=null model=llama_debug train.batch_size=1 train.seq_len=32 train.steps=4 "
    "checkpoint.every=2 launch.nproc_per_node=2 launch.device=cpu metrics.console=plain "
    "metrics.log_every=1 metrics.run_dir="
)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("stdout", "stderr"),
    [
        ("full", "fine"),
        extended("broken", "closed"),
        extended("closed", "full"),
    ],
)
def test_run_survives_a_lost_console(stdout: str, stderr: str, tmp_path: Path) -> None:
    """Oracle: status 0, every step, the last checkpoint, and one sentence in the summary, of two
    ranks."""
    run = tmp_path / "run"
    process = run_with(stdout, stderr, ["-m", "fsdptoys", *f"{WORDS}{run}".split()])
    assert process.returncode == 0, process.stderr
    assert [step["step"] for step in metrics_of(run)] == [1, 2, 3, 4]
    assert (run / "checkpoints/step-00000004/manifest.json").is_file()
    sentence = (
        f"Console output was lost before the first step (stdout: {REASONS[stdout]}"
    )
    assert (run / "summary.md").read_text().count(f"\n{sentence}") == 1
    if stderr == "fine":
        assert (
            process.stderr == f"fsdptoys: {sentence}); metrics.jsonl has every step.\n"
        )


PROGRAM = """
import json, logging, os, sys, threading, warnings
from pathlib import Path

import rich.console
from fsdptoys.metrics.console import PlainReporter, RichReporter
from fsdptoys.metrics.step import StepMetrics
from fsdptoys.utils.console_stream import install_streams, let_stdout_end, lost_output

install_streams()
install_streams()
let_stdout_end()
logging.raiseExceptions = True
opened = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
step = StepMetrics(1, 5.5, 1.2, 3e-4, 0.1, 4096, 33193.0, 0.01, None, None, None, None, 1.5)
for reporter in (
    PlainReporter(2, 1, sys.stdout),
    RichReporter(2, rich.console.Console(file=sys.stdout, force_terminal=True)),
):
    reporter.step(step)
    reporter.message("text")
    reporter.close()
for stream in (sys.stdout, sys.stderr):
    print("x" * 100_000, file=stream, flush=True)
    stream.buffer.write(b"bytes")
    stream.isatty(), stream.encoding, stream.fileno(), stream.errors
warnings.warn("a warning")
logging.error("an error")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
print("stays in the buffer", end="")
os.write(opened, json.dumps(lost_output()).encode())
sys.exit(3)
"""


UNBUFFERED = pytest.mark.parametrize("unbuffered", ["", extended("1")])


@UNBUFFERED
@pytest.mark.parametrize(
    "streams",
    [
        "fine fine",
        "full fine",
        "fine full",
        "broken broken",
        "closed broken",
        "full closed",
    ],
)
def test_printing_to_lost_streams_never_fails(
    streams: str, unbuffered: str, tmp_path: Path
) -> None:
    """Oracle: the program's own exit status; a file that it opens is no stream, and the loss is
    known."""
    stdout, stderr = streams.split()
    argv = ["-c", PROGRAM, str(tmp_path / "opened")]
    process = run_with(stdout, stderr, argv, PYTHONUNBUFFERED=unbuffered)
    assert process.returncode == 3, process.stderr
    lost = {
        name: REASONS[how]
        for name, how in (("stdout", stdout), ("stderr", stderr))
        if how != "fine"
    }
    assert json.loads((tmp_path / "opened").read_text()) == lost
    if stdout == "fine":
        assert "step 1/2" in process.stdout and process.stdout.endswith(
            "stays in the buffer"
        )
    if stderr == "fine":
        assert (
            "a warning" in process.stderr
            and "ZeroDivisionError" in process.stderr
            and "OSError" not in process.stderr
        )


@pytest.mark.parametrize(
    ("stdout", "status", "message"),
    [
        ("fine", 0, ""),
        ("broken", 141, ""),
        ("closed", 0, ""),
        (
            "full",
            1,
            (
                "fsdptoys: stdout cannot be written (No space left on device); the output is "
                "incomplete\n"
            ),
        ),
    ],
)
def test_command_reports_incomplete_output(
    stdout: str, status: int, message: str
) -> None:
    """Oracle: the status of a program that SIGPIPE ends, without a word, as after ``| head``; 1 for
    a full disk."""
    process = run_with(stdout, "fine", ["-m", "fsdptoys", "--help"])
    assert (process.returncode, process.stderr) == (status, message)


RESUMES_LATER = """
import resource, sys
from fsdptoys.utils.console_stream import install_streams, let_stdout_end

install_streams()
let_stdout_end()
before = resource.getrlimit(resource.RLIMIT_FSIZE)
print("first", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (6, before[1]))
print("second", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, before)
print("third", flush=True)
"""


def test_later_lines_are_written_once_there_is_space(tmp_path: Path) -> None:
    """Oracle: the file, with a limit on its size for a while, which fails as a full disk does."""
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.run(
            [sys.executable, "-c", RESUMES_LATER], stdout=log, cwd=ROOT, check=False
        )
    assert process.returncode == 0
    assert (tmp_path / "log").read_text() == "first\nthird\n"


@UNBUFFERED
def test_non_blocking_pipe_loses_no_output(unbuffered: str) -> None:
    """Oracle: 200 kB through a pipe that another process has made non-blocking, read late."""
    program = (
        "import os, sys; from fsdptoys.utils.console_stream import install_streams; "
        "install_streams(); os.set_blocking(1, False); print('x' * 200_000); sys.exit(3)"
    )
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"x" * 200_000 + b"\n"
        assert process.wait() == 3


FORKS = """
import os, sys
from pathlib import Path
from fsdptoys.launch.forked_process import ForkedProcess
from fsdptoys.utils.console_stream import install_streams

install_streams()
Path("worker.py").write_text(
    "import os\\n"
    "from fsdptoys.utils.console_stream import install_streams, let_stdout_end, lost_output\\n"
    "install_streams(); let_stdout_end(); opened = os.open('own', os.O_WRONLY | os.O_CREAT)\\n"
    "print('lost', flush=True); os.write(opened, str(lost_output()).encode())\\n"
)
folders = os.pathsep.join([os.getcwd(), sys.argv[1]])
sys.exit(ForkedProcess("worker", [], {**os.environ, "PYTHONPATH": folders}).wait())
"""


def test_fork_without_streams_does_not_print_into_its_files(tmp_path: Path) -> None:
    """Oracle: the first file that the fork of a launcher without streams opens, to which it prints
    nothing."""
    process = run_with(
        "closed", "fine", ["-c", FORKS, str(ROOT)], tmp_path, PYTHONPATH=str(ROOT)
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert (tmp_path / "own").read_text() == "{'stdout': 'it is closed'}"
