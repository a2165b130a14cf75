"""Without overlap the toys reduce after the backward, to the same bits."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fsdptoys.toys import zero2
from fsdptoys.toys.ddp import DistributedDataParallel
from fsdptoys.toys.ddp.core import DDP
from fsdptoys.toys.zero1 import Zero1
from scripts.ranks import run_ranks

SMALL = 0.0001  # MiB: a bucket a layer


def hooked(module: nn.Module, **settings: Any) -> nn.Module:
    wrapped = DistributedDataParallel(module, bucket_cap_mb=SMALL, **settings)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


MAKERS: dict[str, Callable[..., nn.Module]] = {
    "core": lambda module, **settings: DDP(module, bucket_cap_mb=SMALL, **settings),
    "unused parameters": lambda module, **settings: DistributedDataParallel(
        module, bucket_cap_mb=SMALL, find_unused_parameters=True, **settings
    ),
    "static graph": lambda module, **settings: DistributedDataParallel(
        module, bucket_cap_mb=SMALL, static_graph=True, **settings
    ),
    "hook": hooked,
    "zero1": lambda module, **settings: Zero1(module, bucket_cap_mb=SMALL, **settings),
    "zero2": lambda module, **settings: zero2.Zero2(module, bucket_cap_mb=SMALL, **settings),
}


def record(make: Callable[..., nn.Module], overlap: bool) -> tuple[list[str], list[Tensor]]:
    """Order of gradients and collectives in the last of three backwards, and the gradients after it."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    wrapped = make(copy.deepcopy(module), overlap=overlap)
    events: list[str] = []
    for param in wrapped.parameters():
        param.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    places = (dist, "all_reduce"), (zero2, "reduce_scatter_flat")
    before = [getattr(*place) for place in places]
    for (owner, name), original in zip(places, before, strict=True):

        def noted(*args: Any, original: Callable[..., Any] = original, **settings: Any) -> Any:
            events.append("collective")
            return original(*args, **settings)

        setattr(owner, name, noted)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        events.clear()
        wrapped.zero_grad()
        wrapped(torch.randn(2, 8, generator=generator)).square().sum().backward()
    for (owner, name), original in zip(places, before, strict=True):
        setattr(owner, name, original)
    held = wrapped.pieces() if isinstance(wrapped, zero2.Zero2) else wrapped.parameters()
    return events, [param.grad.clone() for param in held if param.grad is not None]


@pytest.mark.parametrize("toy", MAKERS)
def test_without_overlap_collectives_follow_the_backward_with_equal_gradients(toy: str) -> None:
    """Oracle: the order of recorded events; the gradients of the same toy with overlap, in every bit."""

    def compare() -> None:
        early, gradients = record(MAKERS[toy], True)
        late, others = record(MAKERS[toy], False)
        last_gradient = len(early) - 1 - early[::-1].index("gradient")
        assert "collective" in early[:last_gradient]
        assert late == sorted(early, reverse=True) == ["gradient"] * 8 + ["collective"] * (len(early) - 8)
        assert len(gradients) == len(others) > 0 and all(map(torch.equal, gradients, others))

    run_ranks(2, compare)
