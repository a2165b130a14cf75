"""The toy DDP rejects the same mistakes as PyTorch's, with the same messages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.toys.ddp import DistributedDataParallel as Toy
from scripts.ranks import run_ranks
from tests.toys.test_ddp import Native, Reentrant, Tuple, wrong_sum


def raised(attempt: Callable[[Any], object], make: Any) -> tuple[str, str]:
    """Class of the error, and the start of its message."""
    try:
        attempt(make)
    except Exception as error:
        return type(error).__name__, " ".join(str(error).split()[:6])
    return "nothing", ""


def forget_a_parameter(make: Any) -> None:
    model = make(Tuple())
    for _ in range(2):
        model(torch.ones(2, 6))[0].sum().backward()


def share_a_checkpoint(make: Any) -> None:
    torch.manual_seed(0)
    model = make(Reentrant(), find_unused_parameters=True)
    model(torch.ones(2, 6, requires_grad=True)).sum().backward()


def wrong_argument(state: object, bucket: int) -> torch.futures.Future[Tensor]:
    raise AssertionError


def wrong_result(state: object, bucket: dist.GradBucket) -> int:
    raise AssertionError


def register_twice(make: Any) -> None:
    model = make(Tuple())
    for _ in range(2):
        model.register_comm_hook(None, wrong_sum)


class Changing(nn.Module):
    """One of two layers, chosen by the sign of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output."""
        return self.a(self.b(x)) if x.sum() > 0 else self.a(x)


def change_a_static_graph(make: Any, *signs: int) -> None:
    model = make(Changing(), static_graph=True)
    for sign in signs:
        model(torch.full((2, 6), float(sign))).sum().backward()


def set_a_static_graph_too_late(make: Any) -> None:
    model = make(Tuple())
    sum(output.sum() for output in model(torch.ones(2, 6))).backward()
    model._set_static_graph()


MISTAKES: dict[str, Callable[[Any], object]] = {
    "no gradients": lambda make: make(nn.Linear(2, 2).requires_grad_(False)),
    "no parameters": lambda make: make(nn.Module()),
    "lazy parameters": lambda make: make(nn.LazyLinear(3)),
    "two devices": lambda make: make(nn.Linear(2, 2), device_ids=[0, 1]),
    "a device on a CPU": lambda make: make(nn.Linear(2, 2), device_ids=[0]),
    "synchronized statistics on a CPU": lambda make: make(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))),
    "a group and a mesh": lambda make: make(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=object()),
    "no function": lambda make: make(Tuple()).register_comm_hook(None, 1),
    "a wrong annotation": lambda make: make(Tuple()).register_comm_hook(None, wrong_argument),
    "a wrong return annotation": lambda make: make(Tuple()).register_comm_hook(None, wrong_result),
    "two hooks": register_twice,
    "a parameter without gradient": forget_a_parameter,
    "a layer of two reentrant checkpoints": share_a_checkpoint,
    "a static graph, said too late": set_a_static_graph_too_late,
    "more of a static graph": lambda make: change_a_static_graph(make, -1, 1),
    "less of a static graph": lambda make: change_a_static_graph(make, 1, -1, -1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_the_errors_of_native_ddp(mistake: str) -> None:
    """Oracle: PyTorch's class; the same error class and start of the message."""
    attempt = MISTAKES[mistake]
    for native, toy in run_ranks(2, lambda: (raised(attempt, Native), raised(attempt, Toy))):
        assert toy == native != ("nothing", "")


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        (lambda rank: nn.Linear(2, 2 + rank), "appears not to match sizes"),
        (lambda rank: nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)]), "DDP expects same model across all"),
    ],
    ids=["shape", "number"],
)
def test_models_that_differ_across_ranks_are_refused_on_all_ranks(
    make_module: Callable[[int], nn.Module], message: str
) -> None:
    """Oracle: the documented check of shapes; every rank reports the difference without waiting."""

    def refusal() -> None:
        with pytest.raises(RuntimeError, match=message):
            Toy(make_module(dist.get_rank()))

    run_ranks(2, refusal)
