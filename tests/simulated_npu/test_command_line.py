"""Complete runs through the command line and ``scripts/parity.py``, in processes that autoload the
device."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_npu.ranks import SITE

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.launcher


def run(argv: list[str], cwd: Path, status: int = 0, **variables: str) -> str:
    """Run a command with four simulated NPUs, check its exit status, and return its output."""
    variables |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{SITE}",
        "SIMULATED_NPU_DEVICES": "4",
    }
    present = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("COVERAGE_PROCESS_")
    }
    child = subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env=present | variables,
        capture_output=True,
        text=True,
    )
    assert child.returncode == status, child.stdout + child.stderr
    return child.stdout if status == 0 else child.stderr


def train(overrides: str, cwd: Path, status: int = 0, **variables: str) -> str:
    """Output of a small run."""
    small = "train model=llama_debug experiment=null train.seq_len=32 launch.device=npu"
    return run(
        ["-m", "fsdptoys", *small.split(), *overrides.split()], cwd, status, **variables
    )


def losses(run_dir: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    lines = [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.mark.extended
def test_portable_mode_matches_cpu_ranks_bitwise(tmp_path: Path) -> None:
    """Oracle: the same arithmetic by the same kernels on CPU ranks, to the last bit of losses,
    norms and parameters."""
    overrides = (
        "--device npu --against-cpu --world-sizes 2 --steps 3 --seq-len 16 --models llama_debug "
        "--dtypes float32"
    )
    table = run(
        [
            str(ROOT / "scripts" / "parity.py"),
            *overrides.split(),
            "--strategies",
            "ddp",
            "fsdp2",
        ],
        tmp_path,
    )
    assert "parity: no breach" in table and "portable mode" in table
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in table.splitlines()
        if line.startswith("│")
    ]
    assert [(row[1], row[-1]) for row in rows] == [
        (name, "every bit") for name in ("single", "ddp", "fsdp2")
    ]


@pytest.mark.extended
def test_two_dimensional_mesh_trains_and_resumes(tmp_path: Path) -> None:
    """Oracle: the run's output; both need process groups that a group bound to an NPU cannot
    create."""
    overrides = (
        "parallel=fsdp2 mesh.fsdp_size=2 checkpoint.every=2 checkpoint.resume=auto "
        "metrics.run_dir=run"
    )
    outputs = [train(f"{overrides} train.steps={steps}", tmp_path) for steps in (2, 3)]
    first = next(
        line for line in outputs[0].splitlines() if line.startswith("fsdptoys: found")
    )
    assert (
        first.startswith("fsdptoys: found 4 × Simulated NPU")
        and "HCCL_EXEC_TIMEOUT=660" in first
    )
    assert (
        "checkpoint of step 2 saved" in outputs[0]
        and "3 of 3 steps; all steps done" in outputs[1]
    )
    assert "barrier(): using the device under current context" not in "".join(outputs)


@pytest.mark.extended
def test_cpu_ranks_resume_from_a_checkpoint_of_npus(tmp_path: Path) -> None:
    """Oracle: the same four steps on CPU ranks without a break, to the last bit of losses and
    norms."""
    overrides = (
        "train.steps={} parallel=fsdp2 launch.nproc_per_node=2 launch.device={} "
        "metrics.run_dir={} "
    )
    overrides += (
        "train.sum_dtype=float32 optim.implementation=foreach optim.schedule=constant "
        "checkpoint.every=2"
    )
    train(
        overrides.format(2, "npu", "run") + " memory.optimizer_offload=true",
        tmp_path,
        SIMULATED_NPU_DELAYED="1",
    )
    train(overrides.format(4, "cpu", "run") + " checkpoint.resume=auto", tmp_path)
    train(overrides.format(4, "cpu", "whole"), tmp_path)
    assert losses(tmp_path / "run")[2:] == losses(tmp_path / "whole")[2:]
    assert len(losses(tmp_path / "whole")) == 4


def test_profile_uses_the_pytorch_profiler_and_snapshot_has_stacks(
    tmp_path: Path,
) -> None:
    """Oracle: the files; a device without torch_npu is traced by PyTorch alone."""
    overrides = (
        "parallel=single launch.nproc_per_node=1 train.steps=3 metrics.run_dir=run "
        "profile.enabled=true "
    )
    overrides += "profile.skip_steps=1 profile.warmup_steps=0 profile.active_steps=1 "
    overrides += "profile.snapshot=true "
    output = train(
        overrides + "profile.snapshot_first_step=2 profile.snapshot_steps=1", tmp_path
    )
    assert (
        "trace of step 2: run/profile/rank0.json.gz" in output
        and "memory snapshot (steps 2 to 2)" in output
    )
    with open(tmp_path / "run" / "profile" / "memory-rank0.pickle", "rb") as file:
        entries = pickle.load(file)["device_traces"][0]
    assert {"alloc", "free_completed"} <= {entry["action"] for entry in entries}
    assert any(
        "trainer.py" in frame["filename"]
        for entry in entries
        for frame in entry["frames"]
    )


@pytest.mark.extended
def test_out_of_memory_message_lists_live_tensors_and_options(tmp_path: Path) -> None:
    """Oracle: the device's capacity, and switches of memory by name."""
    overrides = (
        "parallel=fsdp2 launch.nproc_per_node=2 train.steps=2 train.seq_len=512 "
        "train.batch_size=16"
    )
    output = train(overrides, tmp_path, 1, SIMULATED_NPU_MIB="24")
    assert (
        "the memory of the npu device ran out on rank" in output
        and "24.00 MiB in all" in output
    )
    assert (
        "activations, temporaries, gathered parameters" in output
        and "memory.gradient_checkpointing=full" in output
    )


@pytest.mark.extended
def test_smoke_test_passes_on_an_npu(tmp_path: Path) -> None:
    """Oracle: the checks' own, in float64 and by the input of one rank's collectives."""
    argv = [
        str(ROOT / "scripts" / "gpu_smoke.py"),
        "--device",
        "npu",
        "--checks",
        "device",
        "process group",
        "loss",
    ]
    lines = [json.loads(line) for line in run(argv, tmp_path).splitlines()]
    assert [line["status"] for line in lines] == ["passed"] * 3
    assert (
        "Simulated NPU" in lines[0]["facts"]["machine"]
        and lines[2]["facts"]["backend"] == "hccl"
    )
