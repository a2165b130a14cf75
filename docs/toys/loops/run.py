"""Run the loops on two ranks, and compare each with one process: ``python docs/toys/loops/run.py``.

    python docs/toys/loops/run.py toy_fsdp        # one of them

Exits with status 1 if a loss or a parameter differs in any bit.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.ranks import run_ranks

HERE = Path(__file__).resolve().parent
RANKS = 2
STEPS = 5
LOOPS = ("toy_ddp", "toy_zero1", "toy_zero2", "toy_zero3", "toy_fsdp", "own")


class Model(nn.Module):
    """Three blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits."""
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def load(name: str) -> Any:
    """Import a loop by its file."""
    spec = importlib.util.spec_from_file_location(f"loop_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(name: str) -> tuple[list[float], list[Any]]:
    """Run a loop on this rank, on its part of the batches; return losses and parameters."""
    torch.manual_seed(0)
    model = Model()
    batches = [
        [(torch.randn(8, 16), torch.randint(10, (8,))) for _ in range(RANKS)] for _ in range(STEPS)
    ]
    mine = batches if name == "single" else [of_all[dist.get_rank()] for of_all in batches]
    losses, params = load(name).train(model, mine)
    # The ranks' processes end, and their tensors with them
    return losses, [param.numpy() for param in params]


def main(argv: list[str] | None = None) -> int:
    """Print a line for each loop; return 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LOOPS))
    names = parser.parse_args(argv).names or LOOPS
    if unknown := sorted(set(names) - set(LOOPS)):
        parser.error(f"{', '.join(unknown)} is none of the loops: {', '.join(LOOPS)}")
    ((losses, params),) = run_ranks(1, train, "single")
    print("single   ", *(f"{loss:.6f}" for loss in losses))
    outcomes = run_ranks(RANKS, lambda: [train(name) for name in names])
    status = 0
    for number, name in enumerate(names):
        means = [
            sum(rank_losses) / RANKS
            for rank_losses in zip(*(rank[number][0] for rank in outcomes), strict=True)
        ]
        equal = means == losses and all(
            np.array_equal(one, other)
            for rank in outcomes
            for one, other in zip(rank[number][1], params, strict=True)
        )
        print(
            f"{name:9}",
            *(f"{loss:.6f}" for loss in means),
            "every bit of one process" if equal else "DIFFERS",
        )
        status |= not equal
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
