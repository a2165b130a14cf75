"""Story 2, generators that differ: ``python docs/toys/stories/generators.py``, on two CPU ranks in
seconds.

One strategy draws initial values on the CPU and moves them; another draws each rank's shards on the
rank's device. With CUDA the second draws from CUDA's generator. Without it, NumPy's Philox stands
in: another algorithm with the same seed.
"""

import itertools
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from torch import Tensor, nn

from fsdptoys.parallel.init_weights import initialize
from fsdptoys.toys.fsdp import fully_shard
from tests.harness.ranks import run_ranks

RANKS = 2
SEED = 7
STD = 0.05
SIZES = [64, 256, 32]


def build(device: str = "cpu") -> nn.Sequential:
    """Two layers, without values on the meta device."""
    with torch.device(device):
        return nn.Sequential(
            *(nn.Linear(*sizes, bias=False) for sizes in itertools.pairwise(SIZES))
        )


def draw_on_cpu(param: Tensor) -> None:
    """Values of the CPU's default generator."""
    param.normal_(0, STD)


def draw_on_device(param: Tensor) -> None:
    """Values of the device's generator: CUDA's, or its stand-in."""
    if torch.cuda.is_available():
        param.copy_(torch.empty_like(param, device="cuda").normal_(0, STD))
    else:
        param.copy_(torch.from_numpy(philox.normal(0, STD, tuple(param.shape)).astype("float32")))


def draw_rows(name: str, rows: Tensor, generator: torch.Generator) -> None:
    """Values of the given generator, for :func:`initialize`, which makes it from seed, name and
    rows."""
    rows.normal_(0, STD, generator=generator)


@torch.no_grad()
def single(fill: Any) -> tuple[float, list[Any]]:
    """Initialize on one process; return the loss of a first batch and the values."""
    model = build()
    for name, param in model.named_parameters():
        fill(param, name)
    return first_loss(model), [param.numpy() for param in model.parameters()]


@torch.no_grad()
def sharded(fill: Any) -> tuple[float, list[Any]]:
    """Shard on the meta device, then initialize the shards; return the same."""
    model = fully_shard(build("meta"))
    model.to_empty(device="cpu")
    for name, param in model.named_parameters():
        fill(param, name)
    values = [param.full_tensor().numpy() for param in model.parameters()]
    return first_loss(model), values


def first_loss(model: nn.Module) -> float:
    """Loss of a fixed batch."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, SIZES[0], generator=generator)
    labels = torch.arange(16)
    return nn.functional.cross_entropy(model(inputs), labels).item()


def seeded() -> None:
    """Seed all generators, as every script does at its top."""
    global philox
    torch.manual_seed(SEED)
    philox = np.random.Generator(np.random.Philox(SEED))


def on_rank() -> list[tuple[float, list[Any]]]:
    """The values under FSDP: from the device's generator, and as in the fix."""
    seeded()
    # Every rank seeds alike and draws only its shard, so equal shards get equal values.
    buggy = sharded(lambda param, name: draw_on_device(param.to_local()))
    return [buggy, sharded(lambda param, name: initialize(param, name, draw_rows, SEED))]


def describe(name: str, run: tuple[float, list[Any]], reference: list[Any]) -> None:
    """Print a run's first loss, its values' spread, and the number of elements that it shares with
    a reference."""
    loss, values = run
    flat, flat_reference = (
        np.concatenate([value.ravel() for value in arrays]) for arrays in (values, reference)
    )
    equal = int((flat == flat_reference).sum())
    print(
        f"{name:26} first loss {loss:.4f}, std {flat.std():.4f}, elements equal to one process "
        f"{equal} of {flat.size}"
    )


def main() -> None:
    """Print a line for each way to initialize."""
    print(
        "device generator:",
        torch.cuda.get_device_name() if torch.cuda.is_available() else "NumPy's Philox, stand-in",
    )
    seeded()
    cpu = single(lambda param, name: draw_on_cpu(param))
    keyed = single(lambda param, name: initialize(param, name, draw_rows, SEED))
    (buggy, fixed), _ = run_ranks(RANKS, on_rank)
    describe("one process, CPU", cpu, cpu[1])
    describe("FSDP, device", buggy, cpu[1])
    halves = [np.array_equal(*np.split(value, RANKS)) for value in buggy[1]]
    print(f"{'':26} both ranks' shards are equal in {sum(halves)} of {len(halves)} parameters")
    describe("one process, by name", keyed, keyed[1])
    describe("FSDP, by name", fixed, keyed[1])
    torch.manual_seed(SEED)
    whole = torch.randn(32)
    torch.manual_seed(SEED)
    parts = torch.cat([torch.randn(8) for _ in range(4)])
    print(
        f"one CPU generator, 32 draws at once and 4 times 8: {int((whole == parts).sum())} of 32 "
        "equal"
    )


if __name__ == "__main__":
    main()
