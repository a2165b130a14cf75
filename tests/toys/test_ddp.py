"""The toy DDP equals PyTorch's bitwise in gradients, parameters and buffers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as Native
from torch.utils.checkpoint import checkpoint

from fsdptoys.toys.ddp import DistributedDataParallel as Toy
from scripts.ranks import run_ranks

STEPS = 4
MANY_BUCKETS = 0.0005  # MiB: half a KiB, so that the models below have several
SWITCHES = [
    (None, False, False, False),
    (None, True, True, True),
    (MANY_BUCKETS, False, True, True),
    (MANY_BUCKETS, True, False, True),
    (MANY_BUCKETS, True, True, False),
]
"""Bucket size, gradients as views, accumulation, gradients kept and zeroed: any two values of two of them meet."""


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


class Branches(nn.Module):
    """Each rank uses another branch in each step; one branch is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.step = dist.get_rank()

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Compute the output."""
        self.step += 1
        hidden = self.trunk(x)
        # The second is an output that the loss does not use.
        return {"used": (self.branches[self.step % 4](hidden),), "spare": [self.branches[4](hidden), "text"]}


class Reentrant(nn.Module):
    """One layer run by two reentrant checkpoints, and an unused one: for a static graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.unused = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output."""
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.twice, hidden, use_reentrant=True)
        return hidden


def loss_of(output: Any) -> Tensor:
    return (output["used"][0] if isinstance(output, dict) else output).square().mean()


def assert_same(run: Callable[[Any], list[Tensor]]) -> None:
    """Compare results of the toy with those of PyTorch's class in every bit."""
    torch.testing.assert_close(run(Toy), run(Native), rtol=0, atol=0, equal_nan=True)


def follow(model: Any, accumulate: bool, keep_grads: bool) -> list[Tensor]:
    """Gradients, parameters and buffers after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    seen: list[Tensor] = []
    for _ in range(STEPS):
        if accumulate:
            with model.no_sync():
                loss_of(model(torch.randn(4, 6, generator=generator))).backward()
        loss_of(model(torch.randn(4, 6, generator=generator))).backward()
        nothing = torch.full((), torch.nan)
        seen += [nothing if param.grad is None else param.grad.clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep_grads)
        seen += [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
        with torch.no_grad():
            model.eval()
            seen.append(loss_of(model(torch.ones(4, 6))))
            model.train()
    return seen


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    ("make_module", "cap", "as_view", "accumulate", "keep_grads"),
    [
        (module, *switches)
        for module in (Shared, Branches, Reentrant)
        for switches in SWITCHES
        # With a static graph, native counts parameters used without reduction, and waits for them in the next step.
        if not (module is Reentrant and switches[2])
    ],
)
def test_every_setting_equals_native_ddp_bitwise(
    make_module: type[nn.Module], cap: float | None, as_view: bool, accumulate: bool, keep_grads: bool, ranks: int
) -> None:
    """Oracle: PyTorch's class with the same arguments, over four steps, with momentum; three ranks round otherwise."""

    def compare() -> None:
        torch.manual_seed(dist.get_rank())  # rank 0's parameters must win
        module = make_module()
        settings = {
            "bucket_cap_mb": cap,
            "gradient_as_bucket_view": as_view,
            "find_unused_parameters": make_module is Branches,
            "static_graph": make_module is Reentrant,
        }
        assert_same(lambda kind: follow(kind(copy.deepcopy(module), **settings), accumulate, keep_grads))

    run_ranks(ranks, compare)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [param.grad.to_dense().clone() for param in model.parameters() if param.grad is not None]


def averaged_gradients(make: Callable[..., nn.Module], hook: Any = None) -> list[Tensor]:
    """Of a sparse and a dense module, under a communication hook if there is one."""
    torch.manual_seed(3)
    sparse = make(nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 3)))
    dense = make(Shared(), bucket_cap_mb=MANY_BUCKETS)
    if hook is not None:
        dense.register_comm_hook(None, hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        sparse(torch.randint(0, 10, (6, 2), generator=generator)).square().mean().backward()
        dense(torch.randn(4, 6, generator=generator)).square().mean().backward()
    return gradients_of(sparse) + gradients_of(dense)


def wrong_sum(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that doubles instead of communicating, and returns a list like older hooks."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([bucket.buffer() * 2])
    return future.then(lambda done: done.value()[0])


def follow_static(model: Any, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Gradients of three backwards of a static graph."""
    seen = []
    for step in range(3):
        model.zero_grad()
        loss(torch.full((2, 6), 1.0 + step + dist.get_rank())).backward()
        seen += gradients_of(model)
    return seen


def two_forwards(make: Callable[..., nn.Module]) -> list[Tensor]:
    torch.manual_seed(5)
    model = make(Tuple(), static_graph=True)
    return follow_static(model, lambda x: sum(part.square().sum() for part in (*model(x), *model(x))))


def checkpointed_outside(make: Callable[..., nn.Module]) -> list[Tensor]:
    torch.manual_seed(6)
    model = make(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), static_graph=True)
    return follow_static(model, lambda x: checkpoint(model, x, use_reentrant=False).square().sum())


def follow_join(make: Callable[..., nn.Module], by_all: bool) -> list[Tensor]:
    """Parameters after rank 1 has taken two steps more than rank 0, one of them without reduction."""
    torch.manual_seed(4)
    model: Any = make(Shared())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=by_all):
        for step in range(2 + 2 * dist.get_rank()):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            if step == 2:
                with model.no_sync():
                    model(x).square().mean().backward()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


class Tuple(nn.Module):
    """Two outputs of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the output."""
        return self.a(x), self.b(x)


def rank_input(*shape: int) -> Tensor:
    return torch.full(shape, float(dist.get_rank()))


def ignored_gradient(kind: Any, ignored: str) -> list[Tensor]:
    """The gradient of a shared and of another parameter, where the names ignored are of the latter or of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    kind._set_params_and_buffers_to_ignore_for_model(model, [ignored])
    kind(model)(rank_input(2, 3)).square().sum().backward()
    return gradients_of(model)


FEATURES: dict[str, Callable[[Any], list[Tensor]]] = {
    "plain and sparse": averaged_gradients,
    "all-reduce hook": lambda make: averaged_gradients(make, allreduce_hook),
    "fp16 hook": lambda make: averaged_gradients(make, fp16_compress_hook),
    "own hook": lambda make: averaged_gradients(make, wrong_sum),
    "two forwards of a static graph": two_forwards,
    "a checkpoint around a static graph": checkpointed_outside,
    "a shared parameter of which one name is ignored": lambda make: ignored_gradient(make, "0.weight"),
    "an ignored parameter": lambda make: ignored_gradient(make, "2.weight"),
    "join": lambda make: follow_join(make, True),
    "join, divided by who is left": lambda make: follow_join(make, False),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_equals_native_ddp_bitwise(feature: str) -> None:
    """Oracle: PyTorch's class used in the same way, also where one rank has more data than the other."""
    run_ranks(2, lambda: assert_same(FEATURES[feature]))
