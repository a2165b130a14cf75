"""The toy DDP equals PyTorch's bitwise; its buckets; overlap of the toys with buckets; mistakes."""

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdptoys.toys import zero2
from fsdptoys.toys.buckets import assign_buckets
from fsdptoys.toys.ddp import DDP, Reducer
from fsdptoys.toys.zero1 import Zero1
from tests.harness.ranks import run_ranks

STEPS = 4
MANY_BUCKETS = 0.0005  # MiB: half a KiB, so that the model below has several
SWITCHES = [
    (25, False, False, False),
    (25, True, True, True),
    (MANY_BUCKETS, False, True, True),
    (MANY_BUCKETS, True, False, True),
    (MANY_BUCKETS, True, True, False),
]
"""Bucket size, gradients as views, accumulation, gradients zeroed: any two values of two meet."""


class Shared(nn.Module):
    """A weight used twice, a frozen one, running statistics, and several layouts and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.middle = nn.Linear(10, 10, bias=False)
        self.again = nn.Linear(10, 10)
        self.again.weight = self.middle.weight
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(10, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output."""
        hidden = self.frozen(self.again(self.middle(self.norm(self.first(x))).relu()))
        image = self.conv(hidden[:, :8].reshape(-1, 2, 2, 2)).flatten(1)
        return self.wide(hidden.double()) + image.double()


def follow(model: Any, accumulate: bool, keep_grads: bool) -> list[Tensor]:
    """Gradients, parameters and buffers after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    tensors: list[Tensor] = []
    for _ in range(STEPS):
        if accumulate:
            with model.no_sync():
                model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        tensors += [
            param.grad.clone() for param in model.parameters() if param.grad is not None
        ]
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep_grads)
        tensors += [
            tensor.clone() for tensor in (*model.parameters(), *model.buffers())
        ]
        with torch.no_grad():
            model.eval()
            tensors.append(model(torch.ones(4, 6)))
            model.train()
    return tensors


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.parametrize(("cap", "as_view", "accumulate", "keep_grads"), SWITCHES)
def test_every_setting_equals_native_ddp_bitwise(
    cap: float, as_view: bool, accumulate: bool, keep_grads: bool, ranks: int
) -> None:
    """Oracle: PyTorch's class with the same arguments, over four steps, with momentum."""

    def compare() -> None:
        torch.manual_seed(dist.get_rank())  # rank 0's parameters must win
        module = Shared()
        settings = {"bucket_cap_mb": cap, "gradient_as_bucket_view": as_view}
        toy, native = (
            follow(kind(copy.deepcopy(module), **settings), accumulate, keep_grads)
            for kind in (DDP, DistributedDataParallel)
        )
        assert len(toy) == len(native) and all(map(torch.equal, toy, native))

    run_ranks(ranks, compare)


@pytest.mark.parametrize(
    "seed",
    [
        *range(6),
        *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(6, 20)),
    ],
)
def test_bucket_assignment_equals_pytorch(seed: int) -> None:
    """Oracle: PyTorch's own assignment, over random sizes, two dtypes and limits."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 300, (30,), generator=generator).tolist()
    dtypes = [torch.float64 if size % 5 == 0 else torch.float32 for size in sizes]
    tensors = [
        torch.zeros(size, dtype=dtype)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    limit = int(torch.randint(1, 2000, (), generator=generator))
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, [limit])
    assert assign_buckets(tensors, limit) == sorted(expected, key=max)


SMALL = 0.0001  # MiB: a bucket a layer
MAKERS: dict[str, Callable[..., nn.Module]] = {
    "ddp": functools.partial(DDP, bucket_cap_mb=SMALL),
    "zero1": functools.partial(Zero1, bucket_cap_mb=SMALL),
    "zero2": functools.partial(zero2.Zero2, bucket_cap_mb=SMALL),
}


def record(
    make: Callable[..., nn.Module], overlap: bool
) -> tuple[list[str], list[Tensor]]:
    """Order of gradients and collectives in the last of three backwards, and the gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    wrapped = make(copy.deepcopy(module), overlap=overlap)
    events: list[str] = []
    for param in wrapped.parameters():
        param.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((dist, "all_reduce"), (zero2, "reduce_scatter_flat")):
            call = getattr(owner, name)

            def noted(
                *args: Any, original: Callable[..., Any] = call, **settings: Any
            ) -> Any:
                events.append("collective")
                return original(*args, **settings)

            patch.setattr(owner, name, noted)
        for _ in range(3):
            events.clear()
            wrapped.zero_grad()
            wrapped(torch.randn(2, 8, generator=generator)).square().sum().backward()
    owned = (
        wrapped.pieces() if isinstance(wrapped, zero2.Zero2) else wrapped.parameters()
    )
    return events, [param.grad.clone() for param in owned if param.grad is not None]


@pytest.mark.parametrize("toy", MAKERS)
def test_without_overlap_collectives_follow_the_backward_with_equal_gradients(
    toy: str,
) -> None:
    """Oracle: the order of recorded events; the gradients of the toy with overlap, in every bit."""

    def compare() -> None:
        early, gradients = record(MAKERS[toy], True)
        late, others = record(MAKERS[toy], False)
        last_gradient = len(early) - 1 - early[::-1].index("gradient")
        assert "collective" in early[:last_gradient]
        collectives = ["collective"] * (len(early) - 8)
        assert late == sorted(early, reverse=True) == ["gradient"] * 8 + collectives
        assert len(gradients) == len(others) > 0 and all(
            map(torch.equal, gradients, others)
        )

    run_ranks(2, compare)


def test_a_deleted_ddp_leaves_a_plain_module() -> None:
    """Oracle: the garbage collector's list of objects, and the gradient of the bare module."""

    def unwrap() -> None:
        module = nn.Linear(2, 2)
        wrapped = DDP(module)
        wrapped(torch.ones(1, 2)).sum().backward()
        module.zero_grad()
        del wrapped
        assert not any(isinstance(thing, Reducer) for thing in gc.get_objects())
        module(torch.ones(1, 2)).sum().backward()
        assert torch.equal(module.bias.grad, torch.ones(2))

    run_ranks(1, unwrap)


def forget_a_parameter(model: Any) -> None:
    for _ in range(2):
        model.module[0](model(torch.ones(2, 6)).detach()).sum().backward()


def share_a_checkpoint(model: Any) -> None:
    layer = model.module[0]
    model.module.forward = lambda x: checkpoint(
        layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True
    )
    model(torch.ones(2, 6, requires_grad=True)).sum().backward()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (forget_a_parameter, "a parameter got no gradient in the last backward"),
        (share_a_checkpoint, "a parameter got two gradients in one backward"),
    ],
)
def test_graphs_without_one_gradient_a_parameter_are_refused(
    mistake: Callable[[Any], None], message: str
) -> None:
    """Oracle: the expected message; PyTorch's class refuses both too, unless told to allow them."""

    def refusal() -> None:
        with pytest.raises(RuntimeError, match=message):
            mistake(DDP(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))))

    run_ranks(2, refusal)
