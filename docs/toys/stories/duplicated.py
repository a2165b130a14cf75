"""Story 1, a computation that runs twice: ``python docs/toys/stories/duplicated.py``, on two CPU
ranks in seconds.

A language model under the toy FSDP returns logits and loss, as those of libraries do. A hook
replaces the loss by a chunked one, which never makes all logits; but the model has made them before
the hook runs.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fsdptoys.toys.fsdp import fully_shard
from scripts.toys.record_toys import LiveBytes
from tests.harness.ranks import run_ranks

RANKS = 2
TOKENS = 1024
CHUNK = 128
WIDTH = 64
VOCABULARY = 8192


class LanguageModel(nn.Module):
    """An embedding, two blocks and a head, with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_N: Tensor, labels_N: Tensor | None = None) -> dict[str, Tensor]:
        """Logits, and the loss if there are labels."""
        output = {"hidden": self.embedding(tokens_N)}
        for block in self.blocks:
            output["hidden"] = block(output["hidden"])
        if labels_N is not None:
            output["logits"] = self.head(output["hidden"])
            output["loss"] = nn.functional.cross_entropy(output["logits"], labels_N)
        return output


def chunked_loss(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Cross entropy over chunks of tokens; the backward computes the logits of each chunk again."""

    def of_chunk(hidden_CD: Tensor, labels_C: Tensor) -> Tensor:
        return nn.functional.cross_entropy(hidden_CD @ weight_VD.T, labels_C, reduction="sum")

    chunks = zip(hidden_ND.split(CHUNK), labels_N.split(CHUNK), strict=True)
    sums = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum() / len(labels_N)


def add_chunked_loss(model: LanguageModel, labels_N: Tensor) -> None:
    """Replace the model's loss by the chunked one, from outside."""

    def replace(module: nn.Module, args: Any, output: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**output, "loss": chunked_loss(output["hidden"], model.head.weight, labels_N)}

    model.register_forward_hook(replace)


def measure(variant: str) -> tuple[float, int, int]:
    """Take two steps; return the second's loss, its peak of live bytes above the begin, and matmul
    FLOPs."""
    torch.manual_seed(0)
    model = LanguageModel()
    tokens_N, labels_N = torch.randint(VOCABULARY, (2, TOKENS))
    if variant != "plain":
        add_chunked_loss(model, labels_N)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        # The fix is here: without labels, the model leaves head and loss to the hook.
        output = model(tokens_N) if variant == "fixed" else model(tokens_N, labels_N)
        output["loss"].backward()
        return output["loss"].item()

    with FlopCounterMode(display=False) as flops:
        step()
    optimizer.step()
    optimizer.zero_grad()
    with LiveBytes().watch() as live:
        begin = time.perf_counter()
        loss = step()
    total = peak = 0
    for moment, change in live.changes:
        total += change if moment >= begin else 0
        peak = max(peak, total)
    return loss, peak, flops.get_total_flops()


def main() -> None:
    """Print a line for each variant."""
    outcomes = run_ranks(
        RANKS, lambda: [measure(variant) for variant in ("plain", "hooked", "fixed")]
    )
    (plain_loss, *plain), (loss, *hooked), (fixed_loss, *fixed) = outcomes[0]
    assert loss == fixed_loss
    print(
        f"rank 0 of {RANKS}: {TOKENS} tokens, {VOCABULARY} classes, logits of "
        f"{TOKENS * VOCABULARY / 2**18:.0f} MiB"
    )
    for name, (peak, flops) in {
        "plain loss": plain,
        "chunked by a hook": hooked,
        "fixed": fixed,
    }.items():
        print(f"{name:18} peak {peak / 2**20:6.1f} MiB, matmuls {flops / 1e9:.2f} GFLOP")
    print(
        f"loss {plain_loss:.4f}, {loss:.4f}, {fixed_loss:.4f}; the last two are equal in every bit"
    )
    print(
        f"the hook: {hooked[0] / fixed[0]:.1f} times the memory, {hooked[1] / fixed[1]:.2f} "
        "times the matmuls"
    )


if __name__ == "__main__":
    main()
