"""Runs of ``fsdptoys train`` in the environment of the real torch_npu, and their results."""

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

from fsdptoys.config.kernel_choice import KernelConfig

ROOT = Path(__file__).parents[2]
SECONDS = 600
MODEL = "model=llama_debug"
SMALL = [
    *(
        "experiment=null",
        "data=synthetic",
        "train.batch_size=2",
        "train.seq_len=64",
        "train.steps=3",
    ),
    *(
        "train.sum_dtype=float32",
        "optim.implementation=foreach",
        "checkpoint.final_weights=true",
    ),
]
"""Overrides of every run. AdamW's default form on an accelerator differs from a CPU's, and rounds
differently."""

PLAIN_KERNELS = [
    f"kernels.{field.name}=torch" for field in dataclasses.fields(KernelConfig)
]
"""PyTorch's own operations of a model: the stub computes none of torch_npu's fused ones."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    output: str
    """Its output, errors included."""
    folder: Path

    def steps(self) -> list[dict[str, Any]]:
        """The lines of its ``metrics.jsonl``."""
        return [
            json.loads(line)
            for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]

    def losses(self) -> list[float]:
        """Losses of its steps."""
        return [step["loss"] for step in self.steps()]

    def norms(self) -> list[float]:
        """Norms of its gradients."""
        return [step["grad_norm"] for step in self.steps()]

    def weights(self) -> dict[str, torch.Tensor]:
        """Its trained weights."""
        paths = sorted((self.folder / "weights").glob("*.safetensors"))
        return {
            name: tensor for path in paths for name, tensor in load_file(path).items()
        }


def run(
    environment: Path,
    folder: Path,
    device: str,
    overrides: Sequence[str],
    ranks: int = 2,
    variables: Mapping[str, str] | None = None,
    status: int = 0,
) -> Result:
    """Train, in processes of the environment.

    Args:
        environment: the folder made by ``scripts/torch_npu_env.sh``.
        folder: the run directory.
        device: ``npu`` or ``cpu``.
        overrides: in addition to those of every run.
        ranks: number of local ranks.
        variables: added environment variables of the processes.
        status: the expected exit status.
    """
    fixed = [
        f"launch.device={device}",
        f"launch.nproc_per_node={ranks}",
        f"metrics.run_dir={folder}",
    ]
    if not any(word.startswith("model=") for word in overrides):
        fixed.append(MODEL)
    command = ["-m", "fsdptoys", "train", *SMALL, *PLAIN_KERNELS, *fixed, *overrides]
    return Result(run_python(environment, command, variables, status), folder)


def run_fused(environment: Path, folder: Path, overrides: Sequence[str]) -> Result:
    """Train on two ranks with the default fused operators of an NPU, over stand-ins for their
    kernels."""
    fixed = ["launch.device=npu", f"metrics.run_dir={folder}"]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "-m",
        "tests.torch_npu.fused_run",
    ]
    return Result(
        run_python(environment, [*launcher, *SMALL, *fixed, *overrides]), folder
    )


def run_python(
    environment: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None = None,
    status: int = 0,
) -> str:
    """Run the environment's Python in the checkout, check its status, and return its output, errors
    included."""
    child = subprocess.run(
        [str(environment / "bin/python"), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert child.returncode == status, child.stdout
    return child.stdout


def differences(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> list[str]:
    """Names of the tensors that differ in any bit; all, if the names differ."""
    if one.keys() != other.keys() or not one:
        return sorted(one.keys() | other.keys()) or ["no weights"]
    return [
        name for name, tensor in one.items() if not torch.equal(tensor, other[name])
    ]
