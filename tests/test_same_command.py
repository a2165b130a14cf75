"""The three ways to start a run are the same run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

OVERRIDES = [
    "experiment=null",
    "model=llama_debug",
    "train.steps=3",
    "train.seq_len=32",
    "train.grad_accum=2",
    "train.eval_every=2",
    "data.ragged=true",
]

COMMANDS = {
    "python -m fsdptoys": [sys.executable, "-m", "fsdptoys", "train"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", "fsdptoys", "train"),
    ],
    "launch.nproc_per_node": [sys.executable, "-m", "fsdptoys", "train", "launch.nproc_per_node=2"],
}


@pytest.mark.launcher
def test_every_way_to_start_a_run_gives_the_same_numbers(tmp_path: Path) -> None:
    """Oracle: each other: losses, norms and learning rates of every step, and the written configuration."""
    results = []
    for index, command in enumerate(COMMANDS.values()):
        folder = tmp_path / str(index)
        subprocess.run(
            [*command, *OVERRIDES, f"metrics.run_dir={folder}"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert len(steps) == 3
        numbers = ("step", "loss", "grad_norm", "learning_rate", "valid_tokens", "eval_loss")
        config = (folder / "config.yaml").read_text().replace(str(folder), "RUN_DIR")
        config = config.replace("nproc_per_node: 2", "nproc_per_node: -1")
        results.append(([[step[name] for name in numbers] for step in steps], config))
    assert results[0] == results[1] == results[2]
