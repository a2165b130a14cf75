"""Whole runs through the command line and ``scripts/parity.py``, in processes that load the device by themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_npu.ranks import SITE

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.launcher


def run(words: list[str], cwd: Path) -> str:
    """What a command prints where there are four simulated NPUs; it must end well."""
    unset = ("RANK", "WORLD_SIZE", "COVERAGE_PROCESS_")
    present = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    present |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{SITE}", "SIMULATED_NPU_DEVICES": "4", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=present, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_npus_train_to_the_losses_of_cpu_ranks_in_portable_mode(tmp_path: Path) -> None:
    """Oracle: the same arithmetic by the same kernels on CPU ranks, to the last bit of losses, norms and parameters."""
    words = "--device npu --against-cpu --world-sizes 2 --steps 3 --seq-len 16 --models llama_debug --dtypes float32"
    table = run([str(ROOT / "scripts" / "parity.py"), *words.split(), "--strategies", "ddp", "fsdp2"], tmp_path)
    assert "parity: no breach" in table and "portable mode" in table
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    assert [(row[1], row[-1]) for row in rows] == [(name, "every bit") for name in ("single", "ddp", "fsdp2")]


def test_a_mesh_of_two_axes_trains_on_npus_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Oracle: what the run says; both ask for groups that a group which is bound to an NPU cannot give."""
    words = "train model=llama_debug parallel=fsdp2 mesh.fsdp_size=2 train.seq_len=32 launch.device=npu "
    words += "checkpoint.every=2 checkpoint.resume=auto metrics.run_dir=run"
    said = [run(["-m", "fsdptoys", *words.split(), f"train.steps={steps}"], tmp_path) for steps in (2, 3)]
    first = next(line for line in said[0].splitlines() if line.startswith("fsdptoys: found"))
    assert first.startswith("fsdptoys: found 4 × Simulated NPU") and "HCCL_EXEC_TIMEOUT=660" in first
    assert "checkpoint of step 2 saved" in said[0] and "3 of 3 steps; all steps done" in said[1]
    assert "barrier(): using the device under current context" not in "".join(said)
