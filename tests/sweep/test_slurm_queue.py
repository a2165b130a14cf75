"""Jobs in a batch queue: their settings, ids and states, and the command that waits for them.

Refusals are in ``tests/messages``; ``squeue``'s answers were recorded from SLURM 22.05.
"""

import os
import signal
import threading
from pathlib import Path

import pytest
import submitit
from submitit.core.utils import JobPaths
from submitit.slurm.slurm import _make_sbatch_string

from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.sweep import slurm_queue as queue
from fsdptoys.sweep.axes import Combination
from fsdptoys.sweep.folder import Job, JobStatus, read_sweep, write_job
from fsdptoys.sweep.job_list import arrange
from fsdptoys.sweep.slurm_queue import (
    SLURM,
    ask_queue,
    begin_submission,
    in_queue,
    jobs_in_queue,
    read_submissions,
    watch_jobs,
)
from fsdptoys.sweep.slurm_settings import (
    SLURM_COMMANDS,
    SlurmNeeds,
    plugin_options,
    read_launcher,
)
from fsdptoys.sweep.slurm_submit import submit
from fsdptoys.sweep.validate import (
    BatchQueue,
    JobHardware,
    ValidJob,
    validate_combinations,
)
from tests.harness.levels import extended
from tests.harness.processes import wait_until
from tests.sweep.jobs import ON_SLURM, TINY, hand_over, make_sweep


@pytest.fixture
def slurm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with no-op commands of SLURM's names, for decisions made before any command
    is called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in SLURM_COMMANDS:
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    read_launcher.cache_clear()
    return folder


def test_ids_are_read_from_submitits_folders(tmp_path: Path) -> None:
    """Oracle: submitit's own paths, of an array of two and of a single job."""
    sweep = make_sweep(tmp_path, [(), (), ()])
    array = begin_submission(sweep, SLURM, sweep.jobs[:2])
    single = begin_submission(sweep, SLURM, sweep.jobs[2:])
    for submission, ids in ((array, ["12_0", "12_1"]), (single, ["13"])):
        # an array's script is in a folder of its own
        (submission.folder / "12").mkdir()
        for identity in ids:
            path = JobPaths(submission.folder / "%j", identity).submitted_pickle
            path.parent.mkdir(exist_ok=True)
            path.touch()
    assert [one.ids() for one in read_submissions(sweep)] == [
        {"01": "12_0", "02": "12_1"},
        {"03": "13"},
    ]


SQUEUE = """#!/bin/sh
case "$*" in *--jobs*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1;; esac
echo '12_1 PENDING'
echo '12_0 RUNNING'
echo '13 CANCELLED'
"""


def test_queued_jobs_are_known_from_squeue(
    tmp_path: Path, slurm_commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the states; SLURM refuses a query for a forgotten job, and lists all others."""
    (slurm_commands / "squeue").write_text(SQUEUE)
    sweep = make_sweep(tmp_path / "sweep", [(), (), ()])
    hand_over(sweep, {"01": "12_0", "02": "12_1"})
    hand_over(sweep, {"03": "13"})
    states = ask_queue(["12_0", "13", "99"])
    assert states is not None
    assert [
        in_queue(states, identity) for identity in ("12_0", "12_1", "13", "99")
    ] == [
        True,
        True,
        False,
        False,
    ]
    assert jobs_in_queue(sweep) == {"01": "12_0", "02": "12_1"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"submitted to SLURM that may still run \(01, 02, 03\), and squeue",
    ):
        jobs_in_queue(sweep)


def test_jobs_that_left_the_queue_silently_are_closed(
    tmp_path: Path,
    slurm_commands: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: SLURM's states and the jobs' own files, which take precedence if they record an
    end."""
    monkeypatch.setattr(queue, "ASK_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(queue, "POLL_SECONDS", 0.01)
    (slurm_commands / "squeue").write_text(
        "#!/bin/sh\necho '12_0 CANCELLED'\necho '12_2 OUT_OF_MEMORY'\n"
    )
    sweep = make_sweep(tmp_path / "sweep", [(), (), (), ()])
    hand_over(sweep, {"01": "12_0", "02": "12_1", "03": "12_2", "04": "12_3"})
    for name, status in (("03", JobStatus.running), ("04", JobStatus.completed)):
        write_job(
            sweep.path / "jobs" / name, Job(name, TINY, {}, "", status, seconds=1.0)
        )
    (submission,) = read_submissions(sweep)
    watch_jobs(sweep, dict.fromkeys(submission.jobs, submission), lambda: None)
    jobs = read_sweep(sweep.path).jobs
    assert [job.status for job in jobs] == [
        JobStatus.stopped,
        JobStatus.stopped,
        JobStatus.out_of_memory,
        JobStatus.completed,
    ]
    log = submission.folder / "12_0" / "12_0_0_log.err"
    assert (
        jobs[0].reason
        == f"it ended without recording an outcome (SLURM says CANCELLED); see {log}"
    )
    assert jobs[1].reason is not None and "(it has left the queue)" in jobs[1].reason
    assert "04 done" in capsys.readouterr().out


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, extended(signal.SIGHUP)],
)
def test_ctrl_c_leaves_the_jobs_in_the_queue_and_prints_how_to_cancel_them(
    tmp_path: Path,
    slurm_commands: Path,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    """Oracle: the ids that squeue lists, after a real signal to a command that waits for previously
    submitted jobs."""
    (slurm_commands / "squeue").write_text(SQUEUE)
    sweep = make_sweep(tmp_path / "a sweep", [(), ()])
    hand_over(sweep, {"01": "12_0", "02": "12_1"})

    def interrupt() -> None:
        wait_until(
            lambda: printed.append(capsys.readouterr().out) or "12_1" in printed[-1],
            "the ids",
        )
        os.kill(os.getpid(), number)

    printed: list[str] = []
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt) as request:
        submit(sweep, sweep.jobs, [ON_SLURM])
    interrupting.join()
    assert "SLURM has the jobs 01 as 12_0, 02 as 12_1" in printed[-1]
    assert getattr(request.value, "number", signal.SIGINT) == number
    assert (
        f"scancel 12 ends them, and fsdptoys sweep --resume '{sweep.path}' collects"
        in capsys.readouterr().err
    )
    assert len(read_submissions(sweep)) == 1


def test_queued_jobs_stay_and_no_number_is_given_twice(tmp_path: Path) -> None:
    """Oracle: the names: 02 waits in the queue, 03 has no waiting command, 04 is the folder of an
    earlier start."""
    sweep = make_sweep(tmp_path, [(), (), ()])
    (tmp_path / "jobs/04").mkdir()
    combinations = [
        (Combination((*TINY, "train.seed=9"), {"train.seed": "9"}), "another")
    ]
    arrangement = arrange(combinations, [], sweep, queued=["02"])
    assert [job.name for job in arrangement.jobs] == ["02", "05"]
    assert [job.name for job in arrangement.to_run] == ["05"]


CPUS = SlurmNeeds(1, 4, "cpu")
GPUS = SlurmNeeds(2, 8, "cuda")


@pytest.mark.parametrize(
    ("needs", "setting", "limit", "expected"),
    [
        (GPUS, "", None, "nodes=2 ntasks-per-node=1 gpus-per-node=8 signal=USR1@120"),
        (GPUS, "gres='gpu:h100:8'", None, "gres=gpu:h100:8 gpus-per-node=None"),
        (CPUS, "", None, "nodes=1 cpus-per-task=4 gpus-per-node=None time=60"),
        # 600 s of the job, 120 s between the signal and the limit, 60 s before the launcher starts
        (CPUS, "", 600.0, "time=13"),
        (CPUS, "timeout_min=30", 600.0, "time=30"),
        (CPUS, "cpus_per_task=16", None, "cpus-per-task=16"),
        (
            CPUS,
            "additional_parameters.reservation=a",
            None,
            "reservation=a signal=USR1@120",
        ),
    ],
)
def test_options_of_the_batch_script_come_from_the_run(
    needs: SlurmNeeds,
    setting: str,
    limit: float | None,
    expected: str,
    slurm_commands: Path,
) -> None:
    """Oracle: the ``#SBATCH`` lines that submitit writes for the same options."""
    overrides = (
        [f"{'+' * setting.startswith('additional')}hydra.launcher.{setting}"]
        if setting
        else []
    )
    launcher = read_launcher((ON_SLURM, *overrides))
    options = {**launcher.options, **plugin_options(needs, launcher, limit)}
    renamed = {
        "timeout_min": "time",
        "tasks_per_node": "ntasks_per_node",
        "name": "job_name",
    }
    left_out = {"_target_", "submitit_folder", "max_num_timeout", "mem_gb"}
    own = {
        renamed.get(key, key): value
        for key, value in options.items()
        if key not in left_out and value is not None
    }
    script = _make_sbatch_string("true", "folder", **own)
    settings = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in script.splitlines()
        if line.startswith("#SBATCH --")
    )
    expected_settings = dict(word.split("=") for word in expected.split())
    assert {
        key: str(settings.get(key)) for key in expected_settings
    } == expected_settings


def test_login_node_needs_none_of_the_jobs_devices(slurm_commands: Path) -> None:
    """Oracle: a run of 2 × 8 GPUs, on a machine that may have none; the queue chooses the
    rendezvous node."""
    overrides = (
        "launch.device=cuda",
        "launch.nproc_per_node=8",
        "launch.nnodes=2",
        "parallel=fsdp2",
    )
    queue = BatchQueue((ON_SLURM, "hydra.launcher.partition=gpu"), None)
    hardware = queue.find(
        overrides, compose_config([*overrides, *queue.extra_overrides])
    )
    assert hardware == JobHardware("cuda", "submitit_slurm partition=gpu", 16, 8)
    (job,) = validate_combinations([Combination(overrides, {})], queue)
    assert (
        isinstance(job, ValidJob)
        and job.world_size == 16
        and job.config.model.name == "llama2_7b"
    )
    assert not any("rdzv_endpoint" in word for word in job.combination.overrides)


def test_submitit_never_asks_sacct(slurm_commands: Path, tmp_path: Path) -> None:
    """Oracle: a ``sacct`` that leaves a file; SLURM without an accounting database has none."""
    trace = tmp_path / "called"
    (slurm_commands / "sacct").write_text(f"#!/bin/sh\ntouch {trace}\n")
    (slurm_commands / "sacct").chmod(0o755)
    submit(make_sweep(tmp_path / "sweep", []), [], [ON_SLURM])
    assert submitit.SlurmJob.watcher.get_state("12_0", mode="force") == "UNKNOWN"
    assert not trace.exists()
