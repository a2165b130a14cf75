"""A sweep of real training runs: one succeeds, one runs out of memory."""

import importlib
import json
import subprocess

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from fsdptoys.cli.main import main
from fsdptoys.sweep import JobStatus, Sweep, read_sweep
from fsdptoys.train.recorded_run import read_recorded_run
from tests.warm import WarmPopen

FILE = """
title: two ends
base: [model=llama_debug, experiment=null, data=synthetic, train.steps=4, train.seq_len=16, plan.predict=false]
rows:
  - [parallel=single]
  - [parallel=single, model.ffn_dim={ffn_dim}, model.dim=65536]
"""

MORE_THAN_ANY = 2**22
"""Columns of a float32 matrix with 65,536 rows, which takes 1 TiB."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep after its end."""
    folder = tmp_path_factory.mktemp("end to end")
    path = folder / "mine.yaml"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsdptoys.launch.launch", "fsdptoys.train.run", "fsdptoys.metrics.plots", "matplotlib.figure"):
            importlib.import_module(name)
        patch.setattr(subprocess, "Popen", WarmPopen)
        patch.setattr(subprocess_handler, "Popen", WarmPopen)
        patch.chdir(folder)
        path.write_text(FILE.format(ffn_dim=MORE_THAN_ANY))
        assert main(["sweep", str(path), "--out", "it's here"]) == 1
        return read_sweep(folder / "it's here")


def test_each_kind_of_end_is_recognized(ended: Sweep) -> None:
    """Oracle: the configured end of each run, in the launcher's message."""
    good, failed = ended.jobs
    assert (good.status, good.exit_status, good.reason) == (JobStatus.done, 0, None)
    assert failed.status is JobStatus.out_of_memory
    assert "host memory ran out on rank 0 in the construction" in (failed.reason or "")


def test_job_writes_an_ordinary_run_directory(ended: Sweep) -> None:
    """Oracle: its run directory has the requested steps; its log is a launcher's output."""
    job = ended.jobs[0]
    run = read_recorded_run(ended.run_dir(job))
    assert run.finished and run.results.steps == 4 and run.world_size == 1
    assert "fsdptoys: found" in (ended.job_folder(job) / "log.txt").read_text()


def test_tables_have_all_rows(ended: Sweep) -> None:
    """Oracle: one row a job, with its outcome."""
    rows = json.loads((ended.path / "table.json").read_text())
    text = json.dumps(rows)
    assert all(status in text for status in ("done", "out of memory"))
    assert "out of memory" in (ended.path / "table.md").read_text()
