"""Jobs that a batch queue takes: what is asked of it, one node's part of a job, and jobs that really went through.

SLURM itself is used where there is one (``sinfo`` answers); everywhere, submitit's local launcher starts real processes
through the same plugin, and ``squeue``'s answers are those that SLURM 22.05 gave.
"""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from submitit.core.utils import JobPaths
from submitit.slurm.slurm import _make_sbatch_string

from fsdptoys.errors import ConfigError
from fsdptoys.metrics.lock import FolderLock, is_locked
from fsdptoys.sweep import node as nodes
from fsdptoys.sweep import queue
from fsdptoys.sweep.arrange import arrange
from fsdptoys.sweep.folder import Job, JobStatus, Sweep, read_job, read_sweep, write_job
from fsdptoys.sweep.grid import Combination
from fsdptoys.sweep.node import run_on_node
from fsdptoys.sweep.queue import (
    Handed,
    ask_queue,
    begin_submission,
    in_queue,
    jobs_in_queue,
    read_submissions,
    watch_jobs,
)
from fsdptoys.sweeping import submission as submitting
from fsdptoys.sweeping.batch import LOCAL, SLURM, Place, ask_for, plan_job, read_launcher, take_launcher_words
from fsdptoys.sweeping.command import run_sweep
from fsdptoys.sweeping.submission import submit

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


@pytest.fixture
def slurm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with commands of SLURM's names that do nothing, for what is decided before any is called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "srun", "squeue", "scancel"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    read_launcher.cache_clear()
    return folder


def make_sweep(path: Path, rows: list[tuple[str, ...]], time_limit_seconds: float | None = None) -> Sweep:
    jobs = [Job(f"{number:02d}", (*TINY, *row), {}, f"run {number}") for number, row in enumerate(rows, 1)]
    sweep = Sweep(path, "a title", "fsdptoys sweep", jobs, [], time_limit_seconds)
    sweep.write()
    return sweep


CUDA = ("launch.device=cuda", "launch.nproc_per_node=8")
ON_SLURM = f"hydra/launcher={SLURM}"


@pytest.mark.parametrize(
    ("words", "launcher_words", "told"),
    [
        (
            CUDA,
            ("hydra.launcher.partition=gpu",),
            "hydra.launcher.partition=gpu is of no use without a launcher; add hydra/launcher=submitit_slurm",
        ),
        (
            CUDA,
            ("hydra/launcher=submitit_slrum",),
            "hydra/launcher=submitit_slrum must be submitit_slurm or submitit_local; did you mean submitit_slurm?",
        ),
        (
            CUDA,
            ("hydra/launcher=joblib",),
            "hydra/launcher=joblib must be submitit_slurm or submitit_local; leave it out to run the jobs here, one "
            "after another",
        ),
        (
            CUDA,
            (ON_SLURM, f"hydra/launcher={LOCAL}"),
            "hydra/launcher=submitit_slurm hydra/launcher=submitit_local names 2 launchers, but all jobs go to one; "
            "keep one of them",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.partitoin=gpu"),
            "hydra.launcher.partitoin=gpu is no option of hydra/launcher=submitit_slurm; did you mean "
            "hydra.launcher.partition?",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.partition=gpu,cpu"),
            "hydra.launcher.partition=gpu,cpu gives several values, but all jobs go to one launcher; keep one of them",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.tasks_per_node=8"),
            "hydra.launcher.tasks_per_node=8 cannot be set, since one task on a node starts its launch.nproc_per_node "
            "ranks; leave it out",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.max_num_timeout=2"),
            "hydra.launcher.max_num_timeout=2 cannot be set, since a job of a sweep begins anew and would run out of "
            "time again; leave it out",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.nodes=2"),
            "hydra.launcher.nodes=2 and launch.nnodes=1 contradict each other; leave out hydra.launcher.nodes",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.gpus_per_node=4"),
            "hydra.launcher.gpus_per_node=4 is under launch.nproc_per_node=8; leave out hydra.launcher.gpus_per_node",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.timeout_min=5"),
            "hydra.launcher.timeout_min=5 ends jobs before their own limit of 600 s; set hydra.launcher.timeout_min=13",
        ),
        (
            ("launch.nproc_per_node=8",),
            (ON_SLURM,),
            "hydra/launcher=submitit_slurm runs jobs on machines that are not looked at before, so their devices must "
            "be named; add launch.device=cuda (or npu, or cpu)",
        ),
        (
            ("launch.device=cuda",),
            (ON_SLURM,),
            "hydra/launcher=submitit_slurm runs jobs on machines that are not looked at before, so the ranks on each "
            "must be named; add launch.nproc_per_node=8",
        ),
        (
            (*CUDA, "launch.nnodes=2", "launch.rdzv_endpoint=here:29400"),
            (ON_SLURM,),
            "launch.rdzv_endpoint=here:29400 is for machines that are known before; leave it out, the queue chooses "
            "them",
        ),
        (
            ("launch.nnodes=2",),
            (f"hydra/launcher={LOCAL}",),
            "launch.nnodes=2 needs other machines, and hydra/launcher=submitit_local has this one alone; set "
            "hydra/launcher=submitit_slurm",
        ),
        (
            (*CUDA, "train.seq_len=64", "mesh.fsdp_size=3"),
            (ON_SLURM,),
            None,  # the run's own mistake, told as it always is
        ),
    ],
)
def test_what_cannot_be_submitted_is_told_in_one_sentence(
    words: tuple[str, ...], launcher_words: tuple[str, ...], told: str | None, slurm_commands: Path
) -> None:
    """Held against the sentences as a user should read them."""
    with pytest.raises(ConfigError) as refusal:
        plan_job(("model=llama_debug", *words), launcher_words, 600)
    if told is None:
        assert str(refusal.value).startswith("mesh.fsdp_size=3 ")
    else:
        assert str(refusal.value) == told


def test_a_machine_without_slurm_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Held against the sentence; PATH has no command at all."""
    read_launcher.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^hydra/launcher=submitit_slurm needs sbatch, which is not on this machine"):
        read_launcher((ON_SLURM,))


@pytest.mark.parametrize(
    ("place", "said", "limit", "expected"),
    [
        (Place(2, 8, "cuda"), (), None, {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "time": "60"}),
        (Place(1, 4, "cpu"), (), None, {"nodes": "1", "cpus-per-task": "4", "gpus-per-node": None}),
        # 600 s of the job, 120 s between the signal and the limit, 60 s before the launcher starts
        (Place(1, 4, "cpu"), (), 600.0, {"time": "13"}),
        (Place(1, 4, "cpu"), ("hydra.launcher.timeout_min=30",), 600.0, {"time": "30"}),
        (
            Place(1, 8, "cuda"),
            ("hydra.launcher.gres='gpu:h100:8'",),
            None,
            {"gres": "gpu:h100:8", "gpus-per-node": None},
        ),
        (Place(1, 4, "cpu"), ("hydra.launcher.cpus_per_task=16",), None, {"cpus-per-task": "16", "signal": "USR1@120"}),
        (Place(1, 4, "cpu"), ("hydra.launcher.signal_delay_s=30",), None, {"signal": "USR1@30"}),
        (
            Place(1, 4, "cpu"),
            ("+hydra.launcher.additional_parameters.reservation=maintenance",),
            None,
            {"reservation": "maintenance", "signal": "USR1@120"},
        ),
    ],
)
def test_a_run_says_what_its_batch_script_asks_for(
    place: Place, said: tuple[str, ...], limit: float | None, expected: dict[str, str | None], slurm_commands: Path
) -> None:
    """Held against the ``#SBATCH`` lines that submitit writes of the same options."""
    launcher = read_launcher((ON_SLURM, *said))
    options = {**launcher.options, **ask_for(place, launcher, limit)}
    renamed = {"timeout_min": "time", "tasks_per_node": "ntasks_per_node", "name": "job_name"}
    left_out = {"_target_", "submitit_folder", "max_num_timeout", "mem_gb"}
    script = _make_sbatch_string(
        "true",
        "folder",
        **{renamed.get(key, key): value for key, value in options.items() if key not in left_out and value is not None},
    )
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]
    written = dict(line.partition("=")[::2] for line in lines)
    assert {key: written.get(key) for key in expected} == expected


def test_what_the_user_has_set_up_comes_after_what_the_task_needs(slurm_commands: Path) -> None:
    """Held against the list that was typed."""
    launcher = read_launcher((ON_SLURM, "hydra.launcher.setup=['module load cuda']"))
    setup = ask_for(Place(1, 1, "cpu"), launcher, None)["setup"]
    assert setup[-1] == "module load cuda" and any("SRUN_CPUS_PER_TASK" in line for line in setup[:-1])


def test_a_login_node_need_not_have_the_devices_of_the_jobs(slurm_commands: Path) -> None:
    """Held against a run of 2 × 8 GPUs, on a machine that may have none; the queue chooses where they meet."""
    plan = plan_job((*CUDA, "launch.nnodes=2", "parallel=fsdp2"), (ON_SLURM, "hydra.launcher.partition=gpu"))
    assert (plan.world_size, plan.local_ranks, plan.hardware.device_type) == (16, 8, "cuda")
    assert plan.composition.choices["experiment"] == "llama2_7b"
    assert plan.hardware.name == "SLURM partition=gpu"
    assert not any("rdzv_endpoint" in word for word in plan.words)


def test_words_of_the_launcher_are_taken_out_of_those_of_the_run() -> None:
    """Held against what was typed, in its order."""
    words = ["parallel=fsdp1,fsdp2", "hydra/launcher=submitit_slurm", "+hydra.launcher.additional_parameters.x=1"]
    assert take_launcher_words(words) == (words[:1], words[1:])
    assert take_launcher_words(["hydra.run.dir=x"]) == (["hydra.run.dir=x"], [])


def test_ids_are_read_from_the_folders_that_submitit_makes(tmp_path: Path) -> None:
    """Held against submitit's own paths, of an array of two and of a job by itself."""
    sweep = make_sweep(tmp_path, [(), (), ()])
    array, single = begin_submission(sweep, SLURM, sweep.jobs[:2]), begin_submission(sweep, SLURM, sweep.jobs[2:])
    for submission, ids in ((array, ["12_0", "12_1"]), (single, ["13"])):
        (submission.folder / "12").mkdir()  # an array's script stands in a folder of its own
        for identity in ids:
            path = JobPaths(submission.folder / "%j", identity).submitted_pickle
            path.parent.mkdir(exist_ok=True)
            path.touch()
    assert [one.ids() for one in read_submissions(sweep)] == [{"01": "12_0", "02": "12_1"}, {"03": "13"}]


SQUEUE = """#!/bin/sh
case "$*" in *--jobs*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1;; esac
echo '12_1 PENDING'
echo '12_0 RUNNING'
echo '13 CANCELLED'
"""


def test_jobs_that_the_queue_still_has_are_known_by_what_squeue_says(
    tmp_path: Path, slurm_commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against the states; SLURM refuses a question about a job that it has forgotten, and lists all others."""
    (slurm_commands / "squeue").write_text(SQUEUE)
    sweep = make_sweep(tmp_path / "sweep", [(), (), ()])
    hand_over(sweep, {"01": "12_0", "02": "12_1"})
    hand_over(sweep, {"03": "13"})
    states = ask_queue(["12_0", "13", "99"])
    assert states is not None
    assert [in_queue(states, identity) for identity in ("12_0", "12_1", "13", "99")] == [True, True, False, False]
    assert jobs_in_queue(sweep) == {"01": "12_0", "02": "12_1"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"SLURM was given and may still run \(01, 02, 03\), and squeue"):
        jobs_in_queue(sweep)


def hand_over(sweep: Sweep, ids: dict[str, str]) -> None:
    """Leave what a submission leaves: a folder for each id."""
    submission = begin_submission(sweep, SLURM, [job for job in sweep.jobs if job.name in ids])
    for identity in ids.values():
        (submission.folder / identity).mkdir()
        (submission.folder / identity / f"{identity}_submitted.pkl").touch()


def test_jobs_that_left_the_queue_without_a_word_are_closed(
    tmp_path: Path, slurm_commands: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held against SLURM's states and what the jobs' own files say, which count where they tell an end."""
    monkeypatch.setattr(queue, "ASK_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(queue, "POLL_SECONDS", 0.01)
    (slurm_commands / "squeue").write_text("#!/bin/sh\necho '12_0 CANCELLED'\necho '12_2 OUT_OF_MEMORY'\n")
    sweep = make_sweep(tmp_path / "sweep", [(), (), (), ()])
    hand_over(sweep, {"01": "12_0", "02": "12_1", "03": "12_2", "04": "12_3"})
    for name, status in (("03", JobStatus.running), ("04", JobStatus.done)):
        write_job(sweep.path / "jobs" / name, Job(name, TINY, {}, "", status, seconds=1.0))
    (submission,) = read_submissions(sweep)
    watch_jobs(sweep, [Handed(submission, submission.jobs)], lambda: None)
    jobs = read_sweep(sweep.path).jobs
    assert [job.status for job in jobs] == [
        JobStatus.stopped,
        JobStatus.stopped,
        JobStatus.out_of_memory,
        JobStatus.done,
    ]
    log = submission.folder / "12_0" / "12_0_0_log.err"
    assert jobs[0].reason == f"it ended without a word of its own (SLURM says CANCELLED); {log} may tell more"
    assert jobs[1].reason is not None and "(it has left the queue)" in jobs[1].reason
    assert "04 done" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_leaves_the_jobs_in_the_queue_and_says_how_to_end_them(
    tmp_path: Path, slurm_commands: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """Held against the ids that squeue tells, by a real signal to a command that waits for jobs of an earlier one."""
    (slurm_commands / "squeue").write_text(SQUEUE)
    sweep = make_sweep(tmp_path / "a sweep", [(), ()])
    hand_over(sweep, {"01": "12_0", "02": "12_1"})

    def interrupt() -> None:
        wait_for(lambda: told.append(capsys.readouterr().out) or "12_1" in told[-1])
        os.kill(os.getpid(), number)

    told: list[str] = []
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt) as request:
        submit(sweep, sweep.jobs, [ON_SLURM])
    interrupting.join()
    assert "SLURM has the jobs 01 as 12_0, 02 as 12_1" in told[-1]
    assert getattr(request.value, "number", signal.SIGINT) == number
    assert f"scancel 12 ends them, and fsdptoys sweep --resume '{sweep.path}' takes" in capsys.readouterr().err
    assert len(read_submissions(sweep)) == 1


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for what a process does, for as long as it may take one on a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.02)


def has_ended(process: int) -> bool:
    """Whether a process is gone, or waits for nobody but who started it."""
    asked = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True)
    return asked.stdout.strip()[:1] in ("", "Z")


def stand_in(body: str) -> tuple[str, ...]:
    """A command in the place of ``fsdptoys train``, which finds its words in ``sys.argv``."""
    start = "import json, os, pathlib, signal, sys, time\nleave = pathlib.Path(os.environ['FSDPTOYS_OUTCOME_FILE'])\n"
    return (sys.executable, "-c", start + body)


ENDS_WELL_WHEN_ASKED = """
def end(number, frame):
    leave.write_text(json.dumps({"status": 0, "stopped_by": signal.Signals(number).name}))
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, end)
leave.with_name("ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "status", "reason"),
    [
        (
            signal.SIGUSR1,
            JobStatus.timed_out,
            "the queue asked it to end (SIGUSR1), as it does before its own time limit",
        ),
        (
            signal.SIGUSR2,
            JobStatus.timed_out,
            "the queue asked it to end (SIGUSR2), as it does before its own time limit",
        ),
        (signal.SIGTERM, JobStatus.stopped, "the queue ended it (SIGTERM)"),
    ],
)
def test_a_queues_signal_asks_the_launcher_to_end_well(
    tmp_path: Path, number: signal.Signals, status: JobStatus, reason: str
) -> None:
    """Held against the launcher's status 0, with which the job would else count as done."""
    folder = make_sweep(tmp_path, [()]).path / "jobs/01"

    def ask() -> None:
        wait_for((folder / "ready").exists)
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    run_on_node(folder, 0, ["here"], 7, stand_in(ENDS_WELL_WHEN_ASKED))
    asking.join()
    job = read_job(folder)
    assert (job.status, job.reason, job.exit_status) == (status, reason, 0)


def test_all_nodes_meet_at_the_first_one_and_the_first_alone_writes(tmp_path: Path) -> None:
    """Held against the words that two nodes' launchers were given, and the one job file."""
    folder = make_sweep(tmp_path, [("launch.nnodes=2",)]).path / "jobs/01"
    command = stand_in("leave.with_name(leave.stem + '-words.json').write_text(json.dumps(sys.argv[1:]))")
    context = multiprocessing.get_context("fork")
    other = context.Process(target=run_on_node, args=(folder, 1, ["n1", "n2"], 12345, command))
    other.start()
    other.join()
    assert read_job(folder).status is JobStatus.waiting
    run_on_node(folder, 0, ["n1", "n2"], 12345, command)
    first, second = (
        json.loads((folder / f"{name}-words.json").read_text()) for name in ("outcome", "outcome-node1-12345")
    )
    assert first == second == ["launch.rdzv_endpoint=n1:22345", *TINY, "launch.nnodes=2", first[-1]]
    assert first[-1] == f"metrics.run_dir='{folder}/run'"
    assert read_job(folder).status is JobStatus.done and other.exitcode == 0


@pytest.mark.parametrize(
    "second_hand",
    [
        "another machine ended the run; its output says why",
        "rank 0 failed: the connection to another rank broke [Connection closed by peer [127.0.0.1]:60571]",
    ],
)
def test_the_node_that_failed_says_why(tmp_path: Path, second_hand: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against the reason that only the second node's launcher knew, beside those of earlier starts of the job."""
    folder = make_sweep(tmp_path, [("launch.nnodes=2",)]).path / "jobs/01"
    known = {"status": 1, "reason": "rank 1 was ended by SIGKILL", "out_of_memory": True}
    (folder / "outcome-node1-6.json").write_text(json.dumps({"status": 1, "reason": "an earlier start's"}))
    (folder / "outcome-node1-7.json").write_text(json.dumps({"status": 1, "reason": "an earlier start's"}))
    (folder / "outcome-node1-7.2.json").write_text(json.dumps(known))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    unknown = json.dumps({"status": 1, "reason": second_hand})
    run_on_node(folder, 0, ["n1", "n2"], 7, stand_in(f"leave.write_text({unknown!r}); sys.exit(1)"))
    job = read_job(folder)
    assert (job.status, job.reason) == (JobStatus.out_of_memory, "node 1: rank 1 was ended by SIGKILL")


def test_a_node_that_failed_alone_fails_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against the exception of which the queue ends all nodes: the first one goes on as if nothing were."""
    monkeypatch.setattr(nodes, "FIRST_NODE_SECONDS", 0.5)
    sweep = make_sweep(tmp_path, [("launch.nnodes=2",)])
    folder = sweep.job_folder(sweep.jobs[0])
    write_job(folder, Job("01", TINY, {}, "run 1", JobStatus.running))
    with pytest.raises(RuntimeError, match="node 1: its launcher ended with status 3, the first goes on"):
        run_on_node(folder, 1, ["n1", "n2"], 7, stand_in("sys.exit(3)"))


def test_a_node_ends_its_launcher_when_the_first_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against a launcher that would sleep for a minute, of a job that ends meanwhile."""
    monkeypatch.setattr(nodes, "LAUNCHERS_SECONDS", 0.5)
    sweep = make_sweep(tmp_path, [("launch.nnodes=2",)])
    folder = sweep.job_folder(sweep.jobs[0])
    write_job(folder, Job("01", TINY, {}, "run 1", JobStatus.running))

    def end() -> None:
        wait_for((folder / "ready").exists)
        time.sleep(2 * nodes.POLL_SECONDS)
        write_job(folder, Job("01", TINY, {}, "run 1", JobStatus.timed_out))

    ending = threading.Thread(target=end)
    ending.start()
    run_on_node(folder, 1, ["n1", "n2"], 7, stand_in("leave.with_name('ready').touch(); time.sleep(60)"))
    ending.join()
    assert not list(folder.glob("outcome-node1*"))


def test_a_launcher_ends_with_its_nodes_task(tmp_path: Path) -> None:
    """Held against a launcher that would sleep for a minute, after SIGKILL to the task that started it."""
    folder = make_sweep(tmp_path, [("launch.nnodes=2",)]).path / "jobs/01"
    sleeps = "leave.with_name('pid').write_text(str(os.getpid())); leave.with_name('ready').touch(); time.sleep(60)"
    arguments = (folder, 1, ["n1", "n2"], 7, stand_in(sleeps))
    task = multiprocessing.get_context("fork").Process(target=run_on_node, args=arguments)
    task.start()
    wait_for((folder / "ready").exists)
    task.kill()
    task.join()
    launcher = int((folder / "pid").read_text())
    wait_for(lambda: has_ended(launcher), 30)


@pytest.mark.parametrize("late", [False, True])
def test_a_job_that_was_run_in_the_meantime_is_left_alone(
    tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against its file, by a command that would leave another; late is just before this process has the lock."""
    sweep = make_sweep(tmp_path, [()])
    folder = sweep.job_folder(sweep.jobs[0])
    done = Job("01", TINY, {}, "run 1", JobStatus.done)

    class LateLock(FolderLock):
        def __init__(self, folder: Path) -> None:
            write_job(folder, done)
            super().__init__(folder)

    if late:
        monkeypatch.setattr(nodes, "FolderLock", LateLock)
    else:
        write_job(folder, done)
    run_on_node(folder, 0, ["here"], 7, stand_in("sys.exit(1)"))
    assert read_job(folder) == done and not (folder / "log.txt").exists()


@pytest.mark.parametrize("failures", [2, 3])
def test_a_file_that_is_stale_for_a_moment_is_read_again(
    tmp_path: Path, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against the job that was written; three failures are a mistake, told in a sentence."""
    sweep = make_sweep(tmp_path, [()])
    left = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))] * failures
    read = Path.read_text

    def read_stale(path: Path, encoding: str | None = None) -> str:
        if left:
            raise left.pop()
        return read(path, encoding)

    monkeypatch.setattr(Path, "read_text", read_stale)
    if failures == 2:
        assert read_job(sweep.job_folder(sweep.jobs[0])) == sweep.jobs[0]
    else:
        with pytest.raises(ConfigError, match=os.strerror(errno.ESTALE)):
            read_job(sweep.job_folder(sweep.jobs[0]))


def test_a_job_that_the_queue_starts_again_begins_anew(tmp_path: Path) -> None:
    """Held against the file that the first start has left, which is kept, and is not there for the second."""
    sweep = make_sweep(tmp_path, [()])
    folder = sweep.job_folder(sweep.jobs[0])
    (folder / "run").mkdir()
    (folder / "run" / "left").touch()
    write_job(folder, Job("01", TINY, {}, "run 1", JobStatus.stopped, reason="the queue ended it (SIGTERM)"))
    run_on_node(folder, 0, ["here"], 7, stand_in("sys.exit(leave.parent.joinpath('run', 'left').exists())"))
    assert read_job(folder).status is JobStatus.done
    assert (folder / "attempt-1" / "run" / "left").exists()


class ForkingPlugin:
    """Starts a job's task as the plugin's local launcher does, but with a stand-in for the training, and waits."""

    def __init__(self, sweep: Sweep, command: tuple[str, ...], folder: Path) -> None:
        self._sweep, self._command, self._folder = sweep, command, folder

    def launch(self, overrides: Sequence[Sequence[str]], first: int) -> list[object]:
        """Run the one job that is handed over."""
        ((word,),) = overrides
        folder = self._sweep.path.absolute() / word.partition("=")[2]
        arguments = (folder, 0, ["here"], 7, self._command)
        task = multiprocessing.get_context("fork").Process(target=run_on_node, args=arguments)
        task.start()
        place = self._folder / str(task.pid)
        place.mkdir(parents=True)
        (place / f"{task.pid}_submitted.pkl").touch()
        task.join()
        return [None]


ENDS_OF_SIGINT = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
leave.with_name("ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (signal.SIGINT, ENDS_WELL_WHEN_ASKED),
        (signal.SIGTERM, ENDS_WELL_WHEN_ASKED),
        (signal.SIGHUP, ENDS_OF_SIGINT),
    ],
    ids=["SIGINT", "SIGTERM", "SIGHUP"],
)
def test_a_local_job_ends_with_the_command_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, command: str
) -> None:
    """Held against status, file and locks of the job's folder, after a real signal; a second job is left as it was."""
    read_launcher.cache_clear()
    monkeypatch.setattr(submitting, "GRACE_SECONDS", 3.0)
    monkeypatch.setattr(
        submitting,
        "_make_launcher",
        lambda sweep, launcher, asked: ForkingPlugin(sweep, stand_in(command), Path(asked["submitit_folder"]).parent),
    )
    path = tmp_path / "sweep"
    folder = path / "jobs/01"

    def ask() -> None:
        wait_for((folder / "ready").exists)
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    words = (*TINY, "train.seed=1,2", "launch.nproc_per_node=1", f"hydra/launcher={LOCAL}", "--out", str(path))
    assert run_sweep(words, {}) == 128 + number
    asking.join()
    assert [job.status for job in read_sweep(path).jobs] == [JobStatus.stopped, JobStatus.waiting]
    assert not is_locked(folder)


def test_a_local_job_whose_task_was_killed_is_stopped(tmp_path: Path) -> None:
    """Held against the file, which says that it runs: a terminal's signals may end the task before it writes."""
    sweep = make_sweep(tmp_path, [()])
    write_job(sweep.job_folder(sweep.jobs[0]), Job("01", TINY, {}, "run 1", JobStatus.running))
    over = threading.Thread(target=lambda: None)
    over.start()
    over.join()
    submitting._end_local(sweep, Handed(begin_submission(sweep, LOCAL, sweep.jobs), ("01",), over))
    job = read_job(sweep.job_folder(sweep.jobs[0]))
    assert (job.status, job.reason) == (JobStatus.stopped, "the sweep was ended")


def test_jobs_that_the_queue_has_stay_and_no_number_is_given_twice(tmp_path: Path) -> None:
    """Held against the names: 02 waits in the queue, 03 waits for nobody, 04 is a folder that an earlier start left."""
    sweep = make_sweep(tmp_path, [(), (), ()])
    (tmp_path / "jobs/04").mkdir()
    asked = [(Combination((*TINY, "train.seed=9"), {"train.seed": "9"}), "another")]
    arrangement = arrange(asked, [], sweep, queued=["02"])
    assert [job.name for job in arrangement.jobs] == ["02", "05"]
    assert [job.name for job in arrangement.to_run] == ["05"]


@pytest.mark.launcher
def test_local_jobs_go_through_the_plugin_and_a_failed_one_stops_no_other(
    tmp_path: Path, unmeasured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held against real runs in submitit's processes: one that its launcher refuses, and one that is good."""
    read_launcher.cache_clear()
    sweep = make_sweep(tmp_path / "a sweep", [("train.seq_len=0",), ("parallel=single",)])
    after: list[str] = []
    submit(sweep, sweep.jobs, [f"hydra/launcher={LOCAL}", "hydra.launcher.timeout_min=9"], lambda: after.append("job"))
    first, second = read_sweep(sweep.path).jobs
    assert (first.status, first.exit_status) == (JobStatus.failed, 2)
    assert first.reason is not None and first.reason.startswith("train.seq_len=0 must be at least 1")
    assert second.status is JobStatus.done, (sweep.job_folder(second) / "log.txt").read_text()
    assert (sweep.run_dir(second) / "metrics.jsonl").read_text().count("\n") == 2
    assert after == ["job", "job"]
    assert "02 done in" in capsys.readouterr().out


def _idle_nodes() -> int:
    if shutil.which("sinfo") is None:
        return 0
    asked = subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True)
    return sum(int(line) for line in asked.stdout.split()) if asked.returncode == 0 else 0


@pytest.mark.launcher
def test_slurm_runs_a_job_on_all_its_nodes(tmp_path: Path, unmeasured: None) -> None:
    """Held against a real SLURM: two nodes where two are free, and a partition that it does not have.

    FSDPTOYS_SHARED_FOLDER names a folder that all nodes see, where they do not share that of temporary files.
    """
    free = _idle_nodes()
    if not free:
        pytest.skip("no SLURM with an idle node answers here")
    read_launcher.cache_clear()
    count = min(free, 2)
    shared = Path(os.environ.get("FSDPTOYS_SHARED_FOLDER", tmp_path)) / f"sweep-{os.getpid()}"
    sweep = make_sweep(shared, [(f"launch.nnodes={count}", "launch.nproc_per_node=1", "parallel=ddp")])
    words = [ON_SLURM, "hydra.launcher.timeout_min=10", "hydra.launcher.signal_delay_s=60"]
    with pytest.raises(ConfigError, match=r"refuses the jobs \(.*partition"):
        submit(sweep, sweep.jobs, [*words, "hydra.launcher.partition=no-such-partition"])
    submit(sweep, sweep.jobs, words)
    (job,) = read_sweep(sweep.path).jobs
    assert job.status is JobStatus.done, (job, (sweep.job_folder(job) / "log.txt").read_text())
    environment = json.loads((sweep.run_dir(job) / "environment.json").read_text())
    assert environment["world_size"] == count
    assert jobs_in_queue(read_sweep(sweep.path)) == {}
