"""The toy ZeROs: any optimizer, unused parameters, deferred initial values."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Native

from fsdptoys.toys.partition import Evenness, assign_owners
from fsdptoys.toys.zero3 import Share, Zero3
from tests.harness.ranks import run_ranks
from tests.toys.zero_runs import CPU, make


class Blocks(nn.Module):
    """Blocks between two layers with a shared weight, and unused layers; one block may be used by
    rank 0 only."""

    def __init__(self, all_alike: bool = True) -> None:
        super().__init__()
        self.all_alike = all_alike
        self.first = nn.Linear(12, 12)
        self.last = nn.Linear(12, 12)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12))
            for _ in range(4)
        )
        self.skipped = nn.ModuleList([nn.Linear(12, 5), nn.Linear(12, 7)])

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output."""
        hidden = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != 2 or self.all_alike or not dist.get_rank():
                hidden = hidden + block(hidden)
        return self.last(hidden)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, weight_decay=0.1
    ),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    # Not elementwise: it uses rows and columns, so it needs the unsplit tensors of ZeRO-3.
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}
ELEMENTWISE = [name for name in OPTIMIZERS if name != "adafactor"]


def parameters_after(kind: str, optimizer: str, all_alike: bool) -> dict[str, Tensor]:
    """All used parameters after three steps."""
    torch.manual_seed(0)
    module = Blocks(all_alike)
    if kind == "zero1":
        # as DDP, it needs a gradient of every parameter
        module.skipped.requires_grad_(False)
    model, params, attach = make(kind, module)
    if kind == "ddp":
        model = Native(module, find_unused_parameters=True)
        params = [
            param for name, param in module.named_parameters() if "skipped" not in name
        ]
    updating = OPTIMIZERS[optimizer](params)
    attach(updating)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        model(torch.randn(3, 12, generator=generator)).square().mean().backward()
        updating.step()
        updating.zero_grad()
    if isinstance(model, Zero3):
        for unit in model.units:
            model.gather(unit)
    return {
        name: param.detach()
        for name, param in module.named_parameters()
        if "skipped" not in name
    }


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        (kind, optimizer)
        for kind in ("zero1", "zero2", "zero3")
        for optimizer in ELEMENTWISE
    ]
    + [("zero3", "adafactor")],
)
def test_any_optimizer_matches_ddp_over_full_parameters(
    kind: str, optimizer: str
) -> None:
    """Oracle: PyTorch's DDP and the same optimizer, bitwise where a reduction adds two numbers;
    shared weights, and under ZeRO-2 a block that one rank does not use."""

    def compare() -> None:
        parameters = [
            parameters_after(name, optimizer, kind != "zero2") for name in ("ddp", kind)
        ]
        torch.testing.assert_close(*parameters, rtol=0, atol=0)

    run_ranks(2, compare)


def gathered_at_most() -> int:
    """Return the largest number of gathered units at a time in a step, except the rest of the
    model."""
    module = Blocks()
    three = Zero3(module, list(module.blocks), CPU)
    counts = []
    resize = Share.resize

    def counting(share: Share, exists: bool) -> None:
        resize(share, exists)
        counts.append(
            sum(any(map(is_gathered, unit.shares)) for unit in three.units[1:])
        )

    def is_gathered(share: Share) -> bool:
        return share.owner != three.rank and share.flat.untyped_storage().size() > 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Share, "resize", counting)
        three(torch.ones(3, 12)).sum().backward()
    assert not any(is_gathered(share) for unit in three.units for share in unit.shares)
    return max(counts)


def test_at_most_two_blocks_are_gathered_at_a_time() -> None:
    """Oracle: the storages' sizes on every change: the computing block and the prefetched one."""
    assert run_ranks(2, gathered_at_most) == [2, 2]


def fill_deferred() -> list[str]:
    """Return the names of the parameters that this rank filled."""
    with torch.device("meta"):
        module = Blocks()
    filled: list[str] = []

    def fill(param: Tensor, name: str) -> None:
        filled.append(name)
        with torch.no_grad():
            param.fill_(len(name))

    three = Zero3(module, list(module.blocks), CPU, fill=fill)
    assert sorted(filled) == sorted(name for name, _ in three.owned())
    for unit in three.units:
        three.gather(unit)
    assert all((param == len(name)).all() for name, param in module.named_parameters())
    assert module.last.weight is module.first.weight
    return filled


def test_deferred_parameters_are_initialized_by_their_owners_only() -> None:
    """Oracle: the names passed to the fill, and values derived from them."""
    filled = run_ranks(2, fill_deferred)
    assert sorted(filled[0] + filled[1]) == sorted(dict(Blocks().named_parameters()))


@pytest.mark.parametrize("evenness", Evenness)
@pytest.mark.parametrize("seed", range(10))
def test_owner_loads_differ_by_at_most_the_largest_tensor(
    evenness: Evenness, seed: int
) -> None:
    """Oracle: the bound of largest-first assignment: no rank exceeds the mean by more than the
    largest tensor."""
    generator = torch.Generator().manual_seed(seed)
    units = [
        torch.randint(1, 1000, (1 + int(n),), generator=generator).tolist()
        for n in range(12)
    ]
    owners = assign_owners(units, 4, evenness)
    judged = (
        units
        if evenness is Evenness.unit
        else [[size for unit in units for size in unit]]
    )
    flat = (
        owners
        if evenness is Evenness.unit
        else [[owner for unit in owners for owner in unit]]
    )
    for sizes, ranks in zip(judged, flat, strict=True):
        rank_bytes = [
            sum(size for size, owner in zip(sizes, ranks, strict=True) if owner == rank)
            for rank in range(4)
        ]
        assert max(rank_bytes) <= sum(sizes) / 4 + max(sizes)
    assert copy.deepcopy(owners) == assign_owners(units, 4, evenness)


def test_unit_evenness_spreads_every_block_over_all_ranks() -> None:
    """Oracle: counted; of each block's four equal tensors every one of four ranks owns one."""
    units = [[10, 10, 10, 10]] * 3 + [[5, 5, 5, 5]]
    assert all(
        set(owners) == {0, 1, 2, 3} for owners in assign_owners(units, 4, Evenness.unit)
    )
