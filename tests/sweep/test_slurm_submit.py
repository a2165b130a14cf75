"""Whole jobs of a batch queue.

SLURM itself is used if present (``sinfo`` answers); everywhere, submitit's local launcher starts
real processes through the same plugin.
"""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from fsdptoys.cli.sweep import sweep_command
from fsdptoys.errors import ConfigError
from fsdptoys.sweep import slurm_submit as submitting
from fsdptoys.sweep.folder import JobStatus, Sweep, read_sweep
from fsdptoys.sweep.slurm_node import run_on_node
from fsdptoys.sweep.slurm_queue import jobs_in_queue
from fsdptoys.sweep.slurm_settings import LOCAL, read_launcher
from fsdptoys.sweep.slurm_submit import submit
from fsdptoys.utils.file_lock import is_locked
from tests.harness.levels import extended
from tests.sweep.jobs import (
    ENDS_WELL_WHEN_ASKED,
    ON_SLURM,
    TINY,
    make_sweep,
    once_ready,
    stand_in,
)


class ForkingPlugin:
    """Starts a job's task as the plugin's local launcher does, but with a stand-in for the
    training, and waits."""

    def __init__(self, sweep: Sweep, command: tuple[str, ...], folder: Path) -> None:
        self._sweep = sweep
        self._command = command
        self._folder = folder

    def launch(self, overrides: Sequence[Sequence[str]], first: int) -> list[object]:
        """Run the single submitted job."""
        ((word,),) = overrides
        folder = self._sweep.path.absolute() / word.partition("=")[2]
        arguments = (folder, 0, ["here"], 7, self._command)
        task = multiprocessing.get_context("fork").Process(
            target=run_on_node, args=arguments
        )
        task.start()
        submitted = self._folder / str(task.pid)
        submitted.mkdir(parents=True)
        (submitted / f"{task.pid}_submitted.pkl").touch()
        task.join()
        return [None]


ENDS_OF_SIGINT = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
leave.with_name("ready").touch()
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("number", "command"),
    [
        pytest.param(signal.SIGINT, ENDS_WELL_WHEN_ASKED, id="SIGINT"),
        extended(signal.SIGTERM, ENDS_WELL_WHEN_ASKED, id="SIGTERM"),
        extended(signal.SIGHUP, ENDS_OF_SIGINT, id="SIGHUP"),
    ],
)
def test_local_job_ends_with_the_command_that_waits_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    command: str,
) -> None:
    """Oracle: status, file and locks of the job's folder, after a real signal; a second job is
    unchanged."""
    read_launcher.cache_clear()
    monkeypatch.setattr(
        submitting,
        "_make_launcher",
        lambda sweep, launcher, options: ForkingPlugin(
            sweep, stand_in(command), Path(options["submitit_folder"]).parent
        ),
    )
    path = tmp_path / "sweep"
    folder = path / "jobs/01"
    argv = (
        *TINY,
        "train.seed=1,2",
        "launch.nproc_per_node=1",
        f"hydra/launcher={LOCAL}",
        "--out",
        str(path),
    )
    with once_ready(folder, lambda: os.kill(os.getpid(), number)):
        assert sweep_command(argv) == 128 + number
    assert [job.status for job in read_sweep(path).jobs] == [
        JobStatus.stopped,
        JobStatus.waiting,
    ]
    assert not is_locked(folder)


def test_local_jobs_use_the_plugin_and_failures_do_not_stop_others(
    tmp_path: Path, unmeasured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: real runs in submitit's processes: one that its launcher refuses, and one that
    succeeds."""
    read_launcher.cache_clear()
    sweep = make_sweep(
        tmp_path / "a sweep", [("train.seq_len=0",), ("parallel=single",)]
    )
    after: list[str] = []
    submit(
        sweep,
        sweep.jobs,
        [f"hydra/launcher={LOCAL}", "hydra.launcher.timeout_min=9"],
        lambda: after.append("job"),
    )
    first, second = read_sweep(sweep.path).jobs
    assert (first.status, first.exit_status) == (JobStatus.failed, 2)
    assert first.reason is not None and first.reason.startswith(
        "train.seq_len=0 must be at least 1"
    )
    assert second.status is JobStatus.completed, (
        sweep.job_folder(second) / "log.txt"
    ).read_text()
    assert (sweep.run_dir(second) / "metrics.jsonl").read_text().count("\n") == 2
    assert after == ["job", "job"]
    assert "02 done after" in capsys.readouterr().out


def _idle_nodes() -> int:
    if shutil.which("sinfo") is None:
        return 0
    answer = subprocess.run(
        ["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True
    )
    return (
        sum(int(line) for line in answer.stdout.split())
        if answer.returncode == 0
        else 0
    )


def test_slurm_runs_a_job_on_all_its_nodes(tmp_path: Path, unmeasured: None) -> None:
    """Oracle: a real SLURM: two nodes if two are free, and a partition that does not exist.

    FSDPTOYS_SHARED_FOLDER names a folder visible to all nodes, if they do not share the temporary
    folder.
    """
    free = _idle_nodes()
    if not free:
        pytest.skip("no SLURM with an idle node answers here")
    read_launcher.cache_clear()
    count = min(free, 2)
    shared = (
        Path(os.environ.get("FSDPTOYS_SHARED_FOLDER", tmp_path))
        / f"sweep-{os.getpid()}"
    )
    sweep = make_sweep(
        shared, [(f"launch.nnodes={count}", "launch.nproc_per_node=1", "parallel=ddp")]
    )
    overrides = [
        ON_SLURM,
        "hydra.launcher.timeout_min=10",
        "hydra.launcher.signal_delay_s=60",
    ]
    with pytest.raises(ConfigError, match=r"refuses the jobs \(.*partition"):
        submit(
            sweep,
            sweep.jobs,
            [*overrides, "hydra.launcher.partition=no-such-partition"],
        )
    submit(sweep, sweep.jobs, overrides)
    (job,) = read_sweep(sweep.path).jobs
    assert job.status is JobStatus.completed, (
        job,
        (sweep.job_folder(job) / "log.txt").read_text(),
    )
    environment = json.loads((sweep.run_dir(job) / "environment.json").read_text())
    assert environment["world_size"] == count
    assert jobs_in_queue(read_sweep(sweep.path)) == {}
