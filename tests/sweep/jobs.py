"""Small sweeps, and commands that replace training, for the tests of this folder."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fsdptoys.cli.sweep import sweep_command
from fsdptoys.config.choices import list_choices
from fsdptoys.sweep.axes import Axis, read_axes
from fsdptoys.sweep.folder import Job, JobStatus, Sweep, read_sweep, write_job
from fsdptoys.sweep.slurm_queue import SLURM, begin_submission
from tests.harness.processes import wait_until

STANDIN = (sys.executable, "-I", "-S", str(Path(__file__).with_name("standin.py")))
"""In place of ``fsdptoys train``: ``train.seed`` decides how it ends."""

TINY = (
    "experiment=cpu_text",
    "model=llama_debug",
    "model.n_layers=1",
    "data=synthetic",
    "train.eval_every=0",
    "train.steps=2",
    "train.seq_len=16",
    "launch.device=cpu",
)


SUCCEED = (sys.executable, "-I", "-S", "-c", "")
SMALL = (
    "model=llama_debug",
    "experiment=null",
    "parallel=ddp",
    "launch.nproc_per_node=2",
)


def axes(*overrides: str) -> list[Axis]:
    return read_axes(overrides, list_choices())


def make_sweep(path: Path, rows: list[tuple[str, ...]]) -> Sweep:
    jobs = [
        Job(f"{number:02d}", (*TINY, *row), {}, f"run {number}")
        for number, row in enumerate(rows, 1)
    ]
    sweep = Sweep(path, "a title", "fsdptoys sweep", jobs, [], None)
    sweep.write()
    return sweep


def job_folder(path: Path, *overrides: str) -> Path:
    """Folder of the only job of a sweep."""
    return make_sweep(path, [overrides]).path / "jobs/01"


def write_status(folder: Path, status: JobStatus, reason: str | None = None) -> None:
    write_job(folder, Job("01", TINY, {}, "run 1", status, reason=reason))


ON_SLURM = f"hydra/launcher={SLURM}"


def hand_over(sweep: Sweep, ids: dict[str, str]) -> None:
    """Write the files of a submission: a folder for each id."""
    submission = begin_submission(
        sweep, SLURM, [job for job in sweep.jobs if job.name in ids]
    )
    for identity in ids.values():
        (submission.folder / identity).mkdir()
        (submission.folder / identity / f"{identity}_submitted.pkl").touch()


@contextlib.contextmanager
def once_ready(folder: Path, action: Callable[[], object]) -> Iterator[None]:
    """Run ``action`` in a thread once the command of a job has left its file ``ready``."""

    def act() -> None:
        wait_until((folder / "ready").exists, "a running job", [os.getpid()])
        action()

    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


def stand_in(body: str) -> tuple[str, ...]:
    """A command that replaces ``fsdptoys train`` and reads its arguments from ``sys.argv``."""
    start = (
        "import json, os, pathlib, signal, sys, time\nleave = "
        "pathlib.Path(os.environ['FSDPTOYS_OUTCOME_FILE'])\n"
    )
    return (sys.executable, "-c", start + body)


ENDS_WELL_WHEN_ASKED = """
def end(number, frame):
    leave.write_text(json.dumps({"status": 0, "stopped_by": signal.Signals(number).name}))
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, end)
leave.with_name("ready").touch()
while True:  # the handler waits for the end of a sleep that starts just after its signal
    time.sleep(0.01)
"""


def sweep(*argv: str, train: Sequence[str] = STANDIN) -> int:
    return sweep_command(argv, train)


def the_sweep() -> Sweep:
    (path,) = Path("sweeps").iterdir()
    return read_sweep(path)


def statuses(sweep: Sweep) -> list[str]:
    return [job.status.value for job in sweep.jobs]
