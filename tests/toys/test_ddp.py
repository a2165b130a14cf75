"""The toy DDP equals PyTorch's bitwise: gradients, parameters, buffers and buckets."""

import copy
import functools
import gc
import io
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as Native
from torch.utils.checkpoint import checkpoint

from fsdptoys.toys.ddp import DistributedDataParallel as Toy
from fsdptoys.toys.ddp.core import Reducer
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
        """Run it."""
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
        """Run it."""
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
        """Run it."""
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.twice, hidden, use_reentrant=True)
        return hidden


def loss_of(output: Any) -> Tensor:
    return (output["used"][0] if isinstance(output, dict) else output).square().mean()


def follow(
    make: Callable[[nn.Module], nn.Module], module: nn.Module, accumulate: bool, keep_grads: bool
) -> list[Tensor]:
    """Gradients, parameters and buffers after each step."""
    torch.manual_seed(1)  # the dropout of nothing, but checkpoints keep its state
    model = make(copy.deepcopy(module))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    seen: list[Tensor] = []
    for _ in range(STEPS):
        if accumulate:
            with model.no_sync():  # type: ignore[operator]
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


def differing_cases() -> list[str]:
    """Settings under which the toy differs from native DDP."""
    differing = []
    for make_module, (cap, as_view, accumulate, keep_grads) in product((Shared, Branches, Reentrant), SWITCHES):
        static = make_module is Reentrant
        if static and accumulate:
            continue  # native counts parameters used without reduction, and waits for them in the next step
        settings = {
            "bucket_cap_mb": cap,
            "gradient_as_bucket_view": as_view,
            "find_unused_parameters": make_module is Branches,
            "static_graph": static,
        }
        torch.manual_seed(dist.get_rank())  # rank 0's parameters must win
        module = make_module()
        native, toy = (
            follow(functools.partial(kind, **settings), module, accumulate, keep_grads) for kind in (Native, Toy)
        )
        if not all(a.equal(b) or (a.isnan().all() and b.isnan().all()) for a, b in zip(native, toy, strict=True)):
            differing.append(f"{make_module.__name__} {settings} accumulate={accumulate} keep_grads={keep_grads}")
    return differing


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_setting_equals_native_ddp_bitwise(ranks: int) -> None:
    """Oracle: PyTorch's class with the same arguments, over four steps, with momentum; three ranks round otherwise."""
    assert run_ranks(ranks, differing_cases) == [[]] * ranks


class Sparse(nn.Module):
    """An embedding with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.head(self.embedding(x))


def averaged_gradients(make: Callable[..., nn.Module], hook: Any) -> list[Tensor]:
    """Of a sparse and a dense module, under a communication hook if there is one."""
    torch.manual_seed(3)
    sparse, dense = make(Sparse()), make(Shared(), bucket_cap_mb=MANY_BUCKETS)
    if hook is not None:
        dense.register_comm_hook(None, hook)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        sparse(torch.randint(0, 10, (6, 2), generator=generator)).square().mean().backward()
        dense(torch.randn(4, 6, generator=generator)).square().mean().backward()
    return [
        param.grad.to_dense() for model in (sparse, dense) for param in model.parameters() if param.grad is not None
    ]


def wrong_sum(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that doubles instead of communicating, and returns a list like older hooks."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([bucket.buffer() * 2])
    return future.then(lambda done: done.value()[0])


def two_forwards(make: Callable[..., nn.Module]) -> list[Tensor]:
    """Gradients of one backward through two forwards, of a static graph."""
    torch.manual_seed(5)
    model, seen = make(Tuple(), static_graph=True), []
    for step in range(3):
        model.zero_grad()
        parts = [model(torch.full((2, 6), 1.0 + step + dist.get_rank())) for _ in range(2)]
        torch.stack([part.square().sum() for outputs in parts for part in outputs]).sum().backward()
        seen += [param.grad.clone() for param in model.parameters() if param.grad is not None]
    return seen


def recomputed(make: Callable[..., nn.Module]) -> list[Tensor]:
    """Gradients of a static graph whose wrapped module is checkpointed from outside."""
    torch.manual_seed(6)
    model, seen = make(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), static_graph=True), []
    for step in range(3):
        model.zero_grad()
        x = torch.full((2, 6), 1.0 + step + dist.get_rank())
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
        seen += [param.grad.clone() for param in model.parameters() if param.grad is not None]
    return seen


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


def differing_features() -> list[str]:
    """Features under which the toy differs from native DDP."""
    compared: dict[str, Callable[[Any], list[Tensor]]] = {
        "plain and sparse": lambda make: averaged_gradients(make, None),
        "all-reduce hook": lambda make: averaged_gradients(make, allreduce_hook),
        "fp16 hook": lambda make: averaged_gradients(make, fp16_compress_hook),
        "own hook": lambda make: averaged_gradients(make, wrong_sum),
        "two forwards of a static graph": two_forwards,
        "a checkpoint around a static graph": recomputed,
        "join": lambda make: follow_join(make, True),
        "join, divided by who is left": lambda make: follow_join(make, False),
    }
    return [
        name
        for name, run in compared.items()
        if not all(a.equal(b) for a, b in zip(run(Native), run(Toy), strict=True))
    ]


class Tuple(nn.Module):
    """Two outputs of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run it."""
        return self.a(x), self.b(x)


def test_hooks_sparse_gradients_and_join_equal_native_ddp_bitwise() -> None:
    """Oracle: PyTorch's class under the same hooks, and where one rank has more data than the other."""
    assert run_ranks(2, differing_features) == [[], []]


def failed_claims() -> list[str]:
    """Failed claims about a wrapped module outside training."""
    torch.manual_seed(0)
    model = Toy(Shared())
    names = {f"module.{name}" for name in model.module.state_dict()}
    checks = {"names have the prefix": set(model.state_dict()) == names}
    for _ in range(3):
        model(torch.ones(4, 6))  # unused outputs
    for _ in range(2):
        model(torch.ones(4, 6)).square().sum().backward(create_graph=True)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    loaded.zero_grad()
    loaded(torch.full((4, 6), float(dist.get_rank()))).square().mean().backward()
    grads = [param.grad for param in loaded.parameters() if param.grad is not None]
    together = [torch.zeros_like(grads[0]) for _ in range(2)]
    dist.all_gather(together, grads[0])
    checks["a saved module reduces again"] = together[0].equal(together[1])
    ignoring = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    Toy._set_params_and_buffers_to_ignore_for_model(ignoring, ["1.weight"])
    rank = float(dist.get_rank())
    Toy(ignoring)(torch.full((2, 3), rank)).sum().backward()
    kept = [torch.zeros(3, 3) for _ in range(2)]
    dist.all_gather(kept, ignoring[1].weight.grad)
    checks["an ignored parameter keeps its own gradient"] = not kept[0].equal(kept[1])
    grads = []
    for kind in (Toy, Native):
        tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
        tied[1].weight = tied[0].weight
        nn.init.ones_(tied[0].weight)
        kind._set_params_and_buffers_to_ignore_for_model(tied, ["0.weight"])
        kind(tied)(torch.full((2, 3), rank)).sum().backward()
        grads.append(tied[0].weight.grad)
    checks["a shared parameter is averaged unless all its names are ignored"] = grads[0].equal(grads[1])  # type: ignore[union-attr]
    return [name for name, holds in checks.items() if not holds]


def test_wrapped_module_behaves_as_documented_besides_training() -> None:
    """Oracle: PyTorch's documentation of its class; each check is named after its claim."""
    warnings.simplefilter("ignore")
    assert run_ranks(2, failed_claims) == [[], []]


def dead_reducers() -> bool:
    """Whether a reducer is freed with its module, so that hooks on surviving parameters have no effect."""
    module = nn.Linear(2, 2)
    first = Toy(module)
    first(torch.ones(1, 2)).sum().backward()
    module.zero_grad()
    del first
    alive = any(isinstance(thing, Reducer) for thing in gc.get_objects())
    module(torch.ones(1, 2)).sum().backward()
    return not alive and torch.equal(module.bias.grad, torch.ones(2))  # type: ignore[arg-type]


def test_reducer_is_collected_with_its_module() -> None:
    """Oracle: the garbage collector's list of live objects; the bare module trains as if never wrapped."""
    assert run_ranks(1, dead_reducers) == [True]
