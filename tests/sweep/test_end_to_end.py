"""A sweep of real training runs: one that is done, one that runs out of memory, one that takes too long."""

import importlib
import json
import socket
import subprocess

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from fsdptoys.cli.main import main
from fsdptoys.sweep import JobStatus, Sweep, read_sweep
from fsdptoys.train.recorded_run import read_recorded_run
from tests.warm import WarmPopen

pytestmark = pytest.mark.launcher

FILE = """
title: three ends
base: [model=llama_debug, experiment=null, data=synthetic, train.steps=4, train.seq_len=16, plan.predict=false]
rows:
  - [parallel=single]
  - [parallel=single, model.ffn_dim={ffn_dim}, model.dim=65536]
{more}"""

ENDLESS = """  - [parallel=ddp, launch.nproc_per_node=1, launch.nnodes=2, "launch.rdzv_endpoint=localhost:{port}"]
time_limit_seconds: 4
"""
"""Waits for another machine, which costs nothing."""

MORE_THAN_ANY = 2**22
"""Columns of a float32 matrix with 65,536 rows, which takes 1 TiB."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Two jobs, then a third that the file has got in the meantime."""
    folder = tmp_path_factory.mktemp("end to end")
    path = folder / "mine.yaml"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsdptoys.launch.launch", "fsdptoys.train.run", "fsdptoys.metrics.plots", "matplotlib.figure"):
            importlib.import_module(name)
        patch.setattr(subprocess, "Popen", WarmPopen)
        patch.setattr(subprocess_handler, "Popen", WarmPopen)
        patch.chdir(folder)
        path.write_text(FILE.format(ffn_dim=MORE_THAN_ANY, more=""))
        assert main(["sweep", str(path), "--out", "it's here"]) == 1
        path.write_text(FILE.format(ffn_dim=MORE_THAN_ANY, more=ENDLESS.format(port=free_port())))
        assert main(["sweep", "--resume", "it's here", "--time-limit", "4"]) == 1
        return read_sweep(folder / "it's here")


def test_each_end_is_told_apart(ended: Sweep) -> None:
    """What each of the runs was made to do, by the launcher's own words."""
    good, out_of_memory, endless = ended.jobs
    assert (good.status, good.exit_status, good.reason) == (JobStatus.done, 0, None)
    assert out_of_memory.status is JobStatus.out_of_memory
    assert (
        out_of_memory.reason is not None and "host memory ran out on rank 0 in the construction" in out_of_memory.reason
    )
    assert endless.status is JobStatus.timed_out
    assert endless.reason == "it was ended after 4 s, the time limit of a job"


def test_jobs_that_had_ended_were_not_run_again(ended: Sweep) -> None:
    """The folder was gone on with after two jobs: neither has an earlier attempt, and the third came after them."""
    assert not list(ended.path.glob("jobs/*/attempt-*"))
    assert [job.name for job in ended.jobs] == ["01", "02", "03"]


def test_a_job_leaves_a_run_as_any_other(ended: Sweep) -> None:
    """Its run directory has the steps that were asked for; its log is what a launcher prints."""
    job = ended.jobs[0]
    run = read_recorded_run(ended.run_dir(job))
    assert run.finished and run.results.steps == 4 and run.world_size == 1
    assert "fsdptoys: found" in (ended.job_folder(job) / "log.txt").read_text()


def test_the_tables_have_all_rows(ended: Sweep) -> None:
    """A row a job, with what became of it."""
    rows = json.loads((ended.path / "table.json").read_text())
    text = json.dumps(rows)
    assert all(status in text for status in ("done", "out of memory", "timed out"))
    assert "out of memory" in (ended.path / "table.md").read_text()
