"""Story 3, generators and the meta device: ``python docs/toys/stories/meta_generator.py``, on two
CPU ranks in seconds.

A model on the meta device has shapes and no values, so its construction draws nothing. Whatever is
drawn after it comes from another place of the generator's sequence than after an ordinary
construction.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.ranks import run_ranks

RANKS = 2
SEED = 7
SAMPLES = 1000


class Model(nn.Module):
    """Layers with PyTorch's default values, which ``init_weights`` replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights, as GPT-2 does: normal with 0.02."""
        for param in self.parameters():
            param.normal_(0, 0.02, generator=generator)


def build(device: str, generator: torch.Generator | None = None) -> Model:
    """Construct on a device, allocate on the CPU and initialize."""
    model = allocate() if device == "meta" else Model()
    model.init_weights(generator)
    return model


def allocate() -> Model:
    """Construct without values."""
    with torch.device("meta"):
        model = Model()
    return model.to_empty(device="cpu")


def advances(draw: Callable[[], object]) -> bool:
    """Whether a call moves the default generator."""
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    draw()
    return not torch.equal(before, torch.get_rng_state())


def equal_elements(one: Model, other: Model) -> str:
    """Number of elements that two models share."""
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    return f"{sum(int((a == b).sum()) for a, b in pairs)} of {sum(a.numel() for a, _ in pairs)}"


def shuffle(fixed: bool) -> tuple[bool, Tensor]:
    """Build on rank 0, broadcast, shuffle; return whether parameters are equal, and how often each
    sample is used."""
    torch.manual_seed(SEED)
    # Only rank 0 needs values before the broadcast, and host memory for one copy of the model.
    model = build("cpu") if dist.get_rank() == 0 else allocate()
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    own = torch.Generator().manual_seed(SEED) if fixed else None
    order = torch.randperm(SAMPLES, generator=own)
    mine = order[dist.get_rank() :: RANKS]
    uses = torch.bincount(mine, minlength=SAMPLES)
    dist.all_reduce(uses)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    copies = [torch.empty_like(flat) for _ in range(RANKS)]
    dist.all_gather(copies, flat)
    return torch.equal(*copies), uses


def report_shuffle(name: str, fixed: bool) -> None:
    """Print the samples that one epoch uses twice and never."""
    equal, uses = run_ranks(
        RANKS,
        lambda: [value if isinstance(value, bool) else value.tolist() for value in shuffle(fixed)],
    )[0]
    twice = uses.count(2)
    never = uses.count(0)
    print(
        f"{name:24} parameters equal: {equal}; of {SAMPLES} samples {twice} used twice, {never} "
        "never"
    )


def main() -> None:
    """Print the draws that move the generator, and the three consequences."""
    draws: dict[str, Callable[[], object]] = {
        "Linear on the CPU": lambda: nn.Linear(64, 64),
        "Linear on meta": lambda: nn.Linear(64, 64, device="meta"),
        "normal_ on meta": lambda: torch.empty(64, device="meta").normal_(),
        "dropout on meta": lambda: nn.functional.dropout(torch.ones(64, device="meta")),
        "randperm on meta": lambda: torch.randperm(64, device="meta"),
    }
    for name, draw in draws.items():
        print(f"{name:24} {'moves' if advances(draw) else 'does not move'} the generator")
    torch.manual_seed(SEED)
    eager = build("cpu")
    torch.manual_seed(SEED)
    deferred = build("meta")
    print(f"{'ordinary and deferred':24} {equal_elements(eager, deferred)} elements equal")
    eager, deferred = (
        build(device, torch.Generator().manual_seed(SEED)) for device in ("cpu", "meta")
    )
    print(f"{'with an own generator':24} {equal_elements(eager, deferred)} elements equal")
    report_shuffle("rank 0 on the CPU", False)
    report_shuffle("with an own generator", True)


if __name__ == "__main__":
    main()
