"""Runs of ``fsdptoys train`` in the environment of the real torch_npu, and what they leave behind."""

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fsdptoys.kernels import KernelConfig

ROOT = Path(__file__).parents[2]
SECONDS = 200
MODEL = "model=llama_debug"
SMALL = [
    *("experiment=null", "data=synthetic", "train.batch_size=2", "train.seq_len=64", "train.steps=3"),
    *("train.sum_dtype=float32", "optim.implementation=foreach", "checkpoint.final_weights=true"),
]
"""Of every run. AdamW by default takes another form on an accelerator than on a CPU, and rounds differently."""

PLAIN_KERNELS = [f"kernels.{each.name}=torch" for each in dataclasses.fields(KernelConfig)]
"""A model's operations as PyTorch has them: the stub computes none of torch_npu's fused ones."""


@dataclass(frozen=True)
class Result:
    """A run that has ended."""

    status: int
    told: str
    """What it printed, errors among it."""
    folder: Path

    def steps(self) -> list[dict[str, Any]]:
        """The lines of its ``metrics.jsonl``."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def losses(self) -> list[float]:
        """Of its steps."""
        return [step["loss"] for step in self.steps()]

    def norms(self) -> list[float]:
        """Of its gradients."""
        return [step["grad_norm"] for step in self.steps()]

    def weights(self) -> dict[str, torch.Tensor]:
        """That it trained."""
        found = sorted((self.folder / "weights").glob("*.safetensors"))
        return {name: tensor for path in found for name, tensor in load_file(path).items()}


def run(
    environment: Path,
    folder: Path,
    device: str,
    words: Sequence[str],
    ranks: int = 2,
    variables: Mapping[str, str] | None = None,
) -> Result:
    """Train, in processes of the environment.

    Args:
        environment: as ``scripts/torch_npu_env.sh`` makes it.
        folder: the run directory.
        device: ``npu`` or ``cpu``.
        words: overrides beside those of every run.
        ranks: on this machine.
        variables: of the processes' environment.
    """
    fixed = [f"launch.device={device}", f"launch.nproc_per_node={ranks}", f"metrics.run_dir={folder}"]
    if not any(word.startswith("model=") for word in words):
        fixed.append(MODEL)
    command = [str(environment / "bin/python"), "-m", "fsdptoys", "train", *SMALL, *PLAIN_KERNELS, *fixed, *words]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
    set_here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(variables or {})}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | set_here,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    return Result(done.returncode, done.stdout, folder)


def differences(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not equal to the last bit; all, where the names differ."""
    if one.keys() != other.keys() or not one:
        return sorted(one.keys() | other.keys()) or ["no weights"]
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
