"""Run the loops that split sequences or experts on two ranks, next to one process: ``python
docs/toys/loops/split.py``.

Exits with status 1 if a loss differs by more than 1e-5 of it. The last bits do differ: a sum over
tokens is one of two sums here.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.toys import cp
from fsdptoys.toys.ep import Experts, MoE
from tests.harness.ranks import run_ranks

HERE = Path(__file__).resolve().parent
RANKS = 2
STEPS = 5
TOLERANCE = 1e-5
VOCABULARY = 10
LENGTH = 16
WIDTH = 32
EXPERTS = 4


class Decoder(nn.Module):
    """Attention with two heads, experts, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.embed_positions = nn.Embedding(LENGTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        stacks = torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 8, torch.randn(EXPERTS, WIDTH, WIDTH) / 8
        self.moe = MoE(torch.randn(EXPERTS, WIDTH), Experts(*stacks, alone), top_k=2)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, attend: Any = cp.causal
    ) -> Tensor:
        """Logits; without other arguments, of whole sequences."""
        positions = torch.arange(LENGTH) if positions is None else positions
        hidden = self.embed_tokens(tokens) + self.embed_positions(positions)
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        hidden = hidden + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return self.head(hidden + self.moe(hidden))


def load(name: str) -> Any:
    """Import a loop by its file."""
    spec = importlib.util.spec_from_file_location(f"loop_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(name: str) -> list[float]:
    """Run a loop on this rank; return its losses, which are this rank's parts of the batches'
    losses."""
    torch.manual_seed(0)
    model = Decoder()
    batches = [torch.randint(VOCABULARY, (4, LENGTH + 1)) for _ in range(STEPS)]
    losses: list[float] = load(name).train(
        model, [(batch[:, :-1], batch[:, 1:]) for batch in batches]
    )[0]
    return losses


def main() -> int:
    """Print a line for each loop; return 1 if one differs."""
    (expected,) = run_ranks(1, train, "toy_ep")  # on one rank nothing is split
    print("one process", *(f"{loss:.6f}" for loss in expected))
    status = 0
    for name in ("toy_cp", "toy_ep"):
        losses = [sum(parts) for parts in zip(*run_ranks(RANKS, train, name), strict=True)]
        apart = max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))
        print(f"{name:11}", *(f"{loss:.6f}" for loss in losses), f"at most {apart:.0e} apart")
        status |= apart > TOLERANCE
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
