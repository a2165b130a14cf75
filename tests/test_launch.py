"""The launcher: what it chooses from hardware, and how workers end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fsdptoys.config import DeviceChoice
from fsdptoys.device import available_cores
from fsdptoys.errors import ConfigError
from fsdptoys.launch import (
    Hardware,
    choose_experiment,
    describe,
    find_hardware,
    first_failure,
    hardware_environment,
    plan_run,
)

ROOT = Path(__file__).parents[1]

WORKER = """
import os, signal, sys, time
from pathlib import Path
from fsdptoys.errors import ConfigError
from fsdptoys.launch import run_as_worker
from fsdptoys.profiler import ExplainedOutOfMemoryError

signal.signal(signal.SIGINT, signal.SIG_DFL)
rank, how = int(os.environ["RANK"]), sys.argv[1]

def work():
    if how == "raise":
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if rank == 1:
            raise ZeroDivisionError("nothing to divide by")
        dist.all_reduce(torch.ones(1))
    if how == "mistake":
        raise ConfigError("train.steps=0 must be at least 1; set train.steps=1")
    if how == "memory" and rank == 1:
        raise ExplainedOutOfMemoryError("host memory ran out on rank 1 in the forward of step 1")
    if how == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit" and rank == 1:
        sys.exit(7)
    if how == "environment":
        print("threads", os.environ["OMP_NUM_THREADS"], flush=True)
        return
    Path(f"pid{rank}.part").write_text(str(os.getpid()))
    os.rename(f"pid{rank}.part", f"pid{rank}")
    time.sleep(600)

sys.exit(run_as_worker(work))
"""

PARENT = """
import sys
from fsdptoys.launch import run_workers
sys.exit(run_workers("toy_worker", sys.argv[1:], 2, environment={"OMP_NUM_THREADS": "1"}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy_worker.py").write_text(WORKER)
    return tmp_path


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, how],
        cwd=folder,
        env=env | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.launcher
def test_exception_of_a_worker_is_shown_once_with_its_rank(folder: Path) -> None:
    """Oracle: rank 1 raises while rank 0 waits in gloo's all-reduce, whose own error is the consequence."""
    process = start(folder, "raise")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "fsdptoys: rank 1 failed:\nTraceback (most recent call last):\n" in stderr
    assert (stdout + stderr).count("ZeroDivisionError: nothing to divide by") == 1
    assert (stdout + stderr).count("Traceback") == 1


@pytest.mark.launcher
@pytest.mark.parametrize(
    "how, status, told",
    [
        ("mistake", 2, "train.steps=0 must be at least 1; set train.steps=1"),
        ("memory", 1, "rank 1 failed:\nhost memory ran out on rank 1 in the forward of step 1"),
        ("kill", 1, "rank 1 was ended by SIGKILL, as the system does where host memory runs out"),
        ("exit", 1, "rank 1 ended with status 7 and left no traceback"),
    ],
)
def test_failure_that_needs_no_traceback_has_none(folder: Path, how: str, status: int, told: str) -> None:
    """Oracle: stderr, whole."""
    process = start(folder, how)
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (status, f"fsdptoys: {told}\n")


@pytest.mark.launcher
def test_workers_get_the_environment_and_success_is_0(folder: Path) -> None:
    """Oracle: what each of the two workers prints."""
    process = start(folder, "environment")
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr, stdout.split()) == (0, "", ["threads", "1"] * 2)


@pytest.mark.launcher
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_all_workers(folder: Path, number: signal.Signals, status: int) -> None:
    """Oracle: the workers' process ids, which must be free afterwards."""
    process = start(folder, "sleep")
    pids = list(worker_pids(folder))
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (status, f"fsdptoys: stopped by {number.name}; all workers have ended\n")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def worker_pids(folder: Path) -> Iterator[int]:
    for rank in range(2):
        while not (folder / f"pid{rank}").exists():
            time.sleep(0.05)
        yield int((folder / f"pid{rank}").read_text())


@pytest.mark.parametrize(
    "records, exitcodes, shown",
    [
        ({0: ("RuntimeError: Connection closed by peer", 1), 1: ("ValueError: x", 2)}, {}, "rank 1 failed"),
        ({0: ("ValueError: x", 1), 1: ("ValueError: y", 2)}, {}, "rank 0 failed"),
        ({0: ("ValueError: x", 2), 1: ("ValueError: y", 1)}, {}, "rank 1 failed"),
        ({0: ("RuntimeError: Broken pipe", 1)}, {}, "rank 0 failed"),
        ({0: ("RuntimeError: Broken pipe", 1)}, {1: -9}, "rank 1 was ended by SIGKILL"),
        ({}, {0: -15, 1: -11}, "rank 1 was ended by SIGSEGV"),
        ({}, {0: -15}, "rank 0 was ended by SIGTERM"),
    ],
)
def test_cause_is_told_from_its_consequences(
    records: dict[int, tuple[str, int]], exitcodes: dict[int, int], shown: str, tmp_path: Path
) -> None:
    """Oracle: the rank that failed of itself, whichever the launcher saw first."""
    failures = {}
    for rank, (message, time_ns) in records.items():
        path = tmp_path / str(rank) / "error.json"
        path.parent.mkdir()
        extra = {"rank": rank, "time_ns": time_ns, "timestamp": "0", "py_callstack": message, "config_error": None}
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        failures[rank] = ProcessFailure(rank, 100 + rank, 1, str(path))
    failures |= {rank: ProcessFailure(rank, 100 + rank, code, "nowhere") for rank, code in exitcodes.items()}
    status, told = first_failure(ChildFailedError("toy", failures), tmp_path)
    assert status == 1 and told.startswith(shown)


@pytest.mark.parametrize(
    "device_type, present, expected",
    [
        ("cpu", {}, {"OMP_NUM_THREADS": "4"}),
        ("cpu", {"OMP_NUM_THREADS": "1"}, {}),
        ("cuda", {"OMP_NUM_THREADS": "1"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("npu", {"OMP_NUM_THREADS": "1"}, {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "x"}, {"OMP_NUM_THREADS": "4"}),
        ("npu", {"PYTORCH_NPU_ALLOC_CONF": "x"}, {"OMP_NUM_THREADS": "4"}),
        ("cuda", {"PYTORCH_ALLOC_CONF": "x"}, {"OMP_NUM_THREADS": "4"}),
        ("npu", {"PYTORCH_ALLOC_CONF": "x"}, {"OMP_NUM_THREADS": "4"}),
    ],
)
def test_environment_of_the_user_wins(device_type: str, present: dict[str, str], expected: dict[str, str]) -> None:
    """Oracle: the table; 8 cores and 2 ranks."""
    assert hardware_environment(device_type, 2, 8, False, present) == expected


def test_more_ranks_than_cores_get_one_thread_each() -> None:
    """Oracle: at least 1."""
    assert hardware_environment("cpu", 16, 2, False, {})["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("deterministic", [False, True])
def test_cublas_workspace_is_set_for_deterministic_runs_alone(deterministic: bool) -> None:
    """Oracle: cuBLAS's documentation on reproducibility."""
    environment = hardware_environment("cuda", 1, 1, deterministic, {})
    assert environment.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


@pytest.mark.parametrize(
    "device_type, world_size, experiment",
    [("cpu", 64, "cpu_text"), ("cuda", 8, "llama2_7b"), ("npu", 16, "llama2_7b"), ("cuda", 7, "llama3_1b")],
)
def test_hardware_decides_the_experiment(device_type: str, world_size: int, experiment: str) -> None:
    """Oracle: the table."""
    assert choose_experiment(device_type, world_size) == experiment


def test_a_device_that_is_not_there_is_a_mistake() -> None:
    """Oracle: no machine has both CUDA and NPU devices."""
    with pytest.raises(
        ConfigError, match=r"launch.device=npu finds no such device on this machine; set launch.device="
    ):
        find_hardware(DeviceChoice.npu)


def test_cores_are_at_most_those_of_the_affinity() -> None:
    """Oracle: the system's own count."""
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "words, present, world_size, local_ranks",
    [
        ([], {}, 2, 2),
        (["parallel=single"], {}, 1, 1),
        (["launch.nproc_per_node=3"], {}, 3, 3),
        (["launch.nproc_per_node=3", "launch.nnodes=2", "launch.rdzv_endpoint=x:1"], {}, 6, 3),
        (["launch.nproc_per_node=3"], TORCHRUN, 4, 2),
    ],
)
def test_ranks_of_a_plan(words: list[str], present: dict[str, str], world_size: int, local_ranks: int) -> None:
    """Oracle: two ranks on a CPU, one for ``single``, what is asked for, and above all torchrun's numbers."""
    plan = plan_run([*words, "launch.device=cpu"], present)
    assert (plan.world_size, plan.local_ranks) == (world_size, local_ranks)


@pytest.mark.parametrize(
    "present, told",
    [
        (TORCHRUN | {"WORLD_SIZE": "y"}, "WORLD_SIZE=y in the environment must be a number"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "LOCAL_RANK=nothing in the environment must be a number"),
    ],
)
def test_ranks_that_nobody_numbered_are_a_mistake(present: dict[str, str], told: str) -> None:
    """Oracle: the sentence; without LOCAL_RANK every rank would take the first device."""
    with pytest.raises(ConfigError, match=told):
        plan_run(["launch.device=cpu"], present)


def test_more_ranks_than_a_cpu_can_bear_are_a_mistake() -> None:
    """Oracle: the sentence."""
    with pytest.raises(ConfigError, match=r"launch.nproc_per_node=100000 is over 32 for each of \d+ cores; set"):
        plan_run(["launch.device=cpu", "launch.nproc_per_node=100000"], {})


@pytest.mark.parametrize(
    "words, experiment, model",
    [
        ([], "cpu_text", "llama_bytes"),
        (["model=llama_debug"], "cpu_text", "llama_debug"),
        (["experiment=null"], None, "llama_debug"),
        (["experiment=llama3_1b"], "llama3_1b", "llama3_1b"),
    ],
)
def test_words_of_the_user_win_over_the_experiment(words: list[str], experiment: str | None, model: str) -> None:
    """Oracle: the table."""
    choices = plan_run([*words, "launch.device=cpu"], {}).composition.choices
    assert (choices["experiment"], choices["model"]) == (experiment, model)


def test_line_names_what_was_found_and_chosen() -> None:
    """Oracle: the line, word for word, for a plan on made-up hardware."""
    plan = plan_run(["parallel=fsdp1", "launch.device=cpu"], {})
    made_up = SimpleNamespace(
        composition=plan.composition, hardware=Hardware("cuda", 2, "NVIDIA H200", 16), world_size=2
    )
    assert describe(made_up, {"OMP_NUM_THREADS": "8"}) == (  # type: ignore[arg-type]
        "found 2 × NVIDIA H200, 16 cores; running experiment=cpu_text model=llama_bytes data=text with fsdp1 on "
        "2 ranks, OMP_NUM_THREADS=8"
    )
