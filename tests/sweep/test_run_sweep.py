"""The ``fsdptoys sweep`` command, with processes that replace training (``standin``), and with real
runs."""

import dataclasses
import resource
import signal
import sys
from pathlib import Path

import pytest

from fsdptoys.cli.main import main
from fsdptoys.cli.sweep import read_arguments
from fsdptoys.errors import ConfigError
from fsdptoys.sweep import JobStatus, Sweep, read_sweep, validate
from fsdptoys.sweep.folder import write_job
from fsdptoys.sweep.run_sweep import with_recorded_arguments
from fsdptoys.train.recorded_run import read_recorded_run
from fsdptoys.utils.file_lock import FolderLock
from tests.harness.warm_processes import start_warm
from tests.sweep.jobs import SMALL, statuses, sweep, the_sweep


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_jobs_run_in_order_and_failures_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: status 1 for one failed job; the others are done, and the tables exist."""
    assert sweep(*SMALL, "train.seed=0,2,0", "train.steps=5,6") == 1
    result = the_sweep()
    assert statuses(result) == ["done", "done", "out of memory", "out of memory"]
    assert [one.reason for one in result.skipped] == [
        "it is the same run as 01",
        "it is the same run as 02",
    ]
    assert result.title == "seed-steps" and result.argv[-1] == "train.steps=5,6"
    printed = capsys.readouterr().out
    assert "fsdptoys: seed-steps: 4 jobs, 4 to run in sweeps/" in printed
    assert "[3/4] 03 train.seed=2 train.steps=5\n" in printed
    assert "host memory ran out on rank 0 (sweeps/" in printed
    assert {path.name for path in result.path.glob("table.*")} == {
        "table.md",
        "table.csv",
        "table.json",
    }
    assert (
        "fsdptoys: 2 of 4 jobs are not done; fsdptoys sweep --resume sweeps/" in printed
    )


def test_finished_jobs_are_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: attempts: none with --resume, one with --retry of the failed job, and the newest
    folder with these arguments.
    """
    argv = (*SMALL, "train.seed=0,1")
    assert sweep(*argv) == 1
    assert sweep("--resume", *argv) == 1
    path = the_sweep().path
    assert not list(path.glob("jobs/*/attempt-*"))
    assert sweep("--resume", str(path), "--retry") == 1
    assert [
        str(attempt.relative_to(path)) for attempt in path.glob("jobs/*/attempt-*")
    ] == ["jobs/02/attempt-1"]
    assert "2 jobs, 2 of which have ended already, 0 to run" in capsys.readouterr().out


def test_grid_can_be_extended() -> None:
    """Oracle: new arguments for an old folder: equal runs keep their numbers; other jobs stay
    unchanged."""
    assert sweep(*SMALL, "train.seed=0,1") == 1
    path = the_sweep().path
    assert (
        sweep(*SMALL, "train.seed=2,0", "train.steps=10,6", "--resume", str(path)) == 1
    )
    result = read_sweep(path)
    assert [(job.name, job.varied) for job in result.jobs] == [
        ("01", {"train.seed": "0", "train.steps": "10"}),
        ("02", {"train.seed": "1"}),
        ("03", {"train.seed": "2", "train.steps": "10"}),
        ("04", {"train.seed": "2", "train.steps": "6"}),
        ("05", {"train.seed": "0", "train.steps": "6"}),
    ]
    assert not list(path.glob("jobs/*/attempt-*"))
    assert sweep("--resume", *SMALL, "train.seed=2,0", "train.steps=10,6") == 1


def test_changed_code_runs_jobs_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the same arguments with another fingerprint: the old job is kept as an attempt, and a
    sentence reports it.
    """
    assert sweep(*SMALL, "train.seed=0,7") == 1
    monkeypatch.setattr(validate, "code_version", lambda: "another")
    assert sweep("--resume", *SMALL, "train.seed=0,7") == 1
    path = the_sweep().path
    assert sorted(attempt.parent.name for attempt in path.glob("jobs/*/attempt-1")) == [
        "01",
        "02",
    ]
    assert (
        "01 train.seed=0 runs again, since FSDPToys, PyTorch, a preset or the machine"
        in capsys.readouterr().out
    )


def test_full_disk_is_reported_and_the_sweep_can_be_resumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: one sentence, when the system refuses the sweep files of over 100 bytes, as a full
    disk would."""
    fill = (
        "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_FSIZE, (100, "
        "r.getrlimit(r.RLIMIT_FSIZE)[1]))"
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(ConfigError) as mistake:
            sweep(
                *SMALL, "train.seed=0", train=(sys.executable, "-I", "-S", "-c", fill)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    path = the_sweep().path
    assert str(mistake.value) == (
        f"{path} cannot be written (File too large); make room, and continue with fsdptoys sweep "
        f"--resume {path}"
    )
    assert not list(path.rglob("*.part"))
    assert sweep("--resume", str(path)) == 0


def test_train_multirun_equals_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: ``-m`` and ``sweep`` print the same jobs; several values without it are refused."""
    argv = [*SMALL, "train.seed=1,2", "mesh.fsdp_size=-1,3", "--dry-run"]
    assert main(["train", "-m", *argv]) == 0
    of_train = capsys.readouterr().out
    for same in (["sweep"], ["sweep", "-m"]):
        assert main([*same, *argv]) == 0
        assert capsys.readouterr().out == of_train
    assert of_train.splitlines()[:3] == [
        "fsdptoys: seed-fsdp_size: 2 jobs, 2 to run",
        "  01 train.seed=1 mesh.fsdp_size=-1",
        "  02 train.seed=2 mesh.fsdp_size=-1",
    ]
    assert (
        "  skipped train.seed=1 mesh.fsdp_size=3: mesh.fsdp_size=3 shards parameters"
        in of_train
    )
    assert not Path("sweeps").exists()


def test_users_file_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the folder's arguments name it by its absolute path; from another folder --resume
    reads it again."""
    Path("mine.yaml").write_text(
        f"base: [{', '.join(SMALL)}]\ngrid: {{train.seed: [0]}}"
    )
    assert sweep("mine.yaml") == 0
    path = the_sweep().path.absolute()
    assert read_sweep(path).argv == (str(tmp_path / "mine.yaml"),)
    assert sweep("mine.yaml", "--resume") == 0
    Path("mine.yaml").write_text(
        f"base: [{', '.join(SMALL)}]\ngrid: {{train.seed: [0, 4]}}"
    )
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert sweep("--resume", str(path)) == 1
    assert statuses(read_sweep(path)) == ["done", "failed"]
    assert not list(path.glob("jobs/*/attempt-*"))


def test_under_torchrun_the_right_command_is_suggested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message; each rank would start a sweep of its own."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main(["sweep", "debug"]) == 2
    finally:
        signal.signal(signal.SIGINT, before)
    assert (
        "write fsdptoys sweep debug launch.nproc_per_node=4, without torchrun"
        in capsys.readouterr().err
    )


def test_folder_is_locked_against_a_second_sweep(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: a process holds the lock, another (with its own file handle) requests it."""
    assert sweep(*SMALL, "train.seed=0") == 0
    path = the_sweep().path
    lock = FolderLock(path)
    assert main(["sweep", "--resume", str(path)]) == 2
    lock.release()
    assert (
        f"{path} is being worked on by another fsdptoys sweep; wait for its end"
        in capsys.readouterr().err
    )


def test_sweep_with_a_running_job_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: its recorded status is running and its run directory is locked: another process
    started it."""
    assert sweep(*SMALL, "train.seed=0") == 0
    result = the_sweep()
    job = result.jobs[0]
    running = dataclasses.replace(job, status=JobStatus.running)
    write_job(result.job_folder(job), running)
    lock = FolderLock(result.run_dir(job))
    assert main(["sweep", "--resume", str(result.path)]) == 2
    lock.release()
    assert f"job 01 of {result.path} is still running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "is_used"),
    [
        ("hydra.launcher.partition=gpu", True),
        ("hydra.launcher.timeout_min=60", True),
        ("hydra.launcher.setup=['touch x']", False),
        ("hydra.launcher.additional_parameters={wrap: true}", False),
        ("+hydra.launcher.srun_args=[--task-prolog=x]", False),
        ("hydra.launcher._target_=os.system", False),
        ("hydra.launcher.partition='gpu\ntouch x'", False),
        ("hydra.launcher.partition=${oc.env:HOME}", False),
        ("hydra.launcher.name='\x1b[2J'", False),
    ],
)
def test_recorded_launcher_arguments_that_run_commands_are_refused(
    tmp_path: Path, option: str, is_used: bool
) -> None:
    """Oracle: the arguments in use, or a sentence that shows them; typed arguments are used in
    either case."""
    launcher = ["hydra/launcher=submitit_slurm", option]
    before = Sweep(tmp_path, "t", "c", [], [], None, ("train.seed=1,2", *launcher))

    def resumed(*overrides: str) -> list[str]:
        arguments = read_arguments(["--resume", str(tmp_path), *overrides])
        return with_recorded_arguments(arguments, before).launcher_overrides

    if is_used:
        assert resumed() == launcher
    else:
        with pytest.raises(
            ConfigError, match="may run commands on the nodes"
        ) as caught:
            resumed()
        message = str(caught.value)
        assert message.isprintable() and option.split("=")[0] in message
    assert resumed(*launcher) == launcher


FILE = """
title: two ends
base:
  [model=llama_debug, experiment=null, data=synthetic, train.steps=4, train.seq_len=16,
  plan.predict=false]
rows:
  - [parallel=single]
  - [parallel=single, model.ffn_dim={ffn_dim}, model.dim=65536]
"""

MORE_THAN_ANY = 2**22
"""Columns of a float32 matrix with 65,536 rows, which takes 1 TiB."""


def test_real_jobs_end_as_configured_and_fill_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the configured end of each run, in the launcher's message.

    A job writes an ordinary run directory with the requested steps, its log is a launcher's output,
    and the tables have the outcome of each.
    """
    start_warm(monkeypatch)
    Path("mine.yaml").write_text(FILE.format(ffn_dim=MORE_THAN_ANY))
    assert main(["sweep", "mine.yaml", "--out", "it's here"]) == 1
    sweep = read_sweep(tmp_path / "it's here")
    good, bad = sweep.jobs
    assert (good.status, good.exit_status, good.reason) == (
        JobStatus.completed,
        0,
        None,
    )
    assert bad.status is JobStatus.out_of_memory
    assert "host memory ran out on rank 0 in the construction" in (bad.reason or "")
    run = read_recorded_run(sweep.run_dir(good))
    assert run.finished and run.results.steps == 4 and run.world_size == 1
    assert "fsdptoys: found" in (sweep.job_folder(good) / "log.txt").read_text()
    text = (sweep.path / "table.json").read_text()
    assert "done" in text and "out of memory" in text
    assert "out of memory" in (sweep.path / "table.md").read_text()
