"""The buckets of the toys, their layout and time; what a wrapped module is besides training; rejected mistakes."""

import copy
import functools
import gc
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as Native

from fsdptoys.toys import zero2
from fsdptoys.toys.buckets import assign_buckets, views_like
from fsdptoys.toys.ddp import DistributedDataParallel as Toy
from fsdptoys.toys.ddp.core import DDP, Reducer
from fsdptoys.toys.zero1 import Zero1
from scripts.ranks import run_ranks
from tests.toys.test_ddp import MANY_BUCKETS, Reentrant, Shared, Tuple, gradients_of, wrong_sum


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(6, 20))]
)
def test_bucket_assignment_equals_pytorch(seed: int) -> None:
    """Oracle: PyTorch's own assignment, over random sizes, two dtypes, sparse tensors and limits."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 300, (30,), generator=generator).tolist()
    tensors = [torch.zeros(size, dtype=torch.float64 if size % 5 == 0 else torch.float32) for size in sizes]
    sparse = [size % 7 == 0 for size in sizes]
    limits = torch.randint(1, 2000, (1 + seed % 3,), generator=generator).tolist()
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits, sparse)
    assert sorted(assign_buckets(tensors, limits, sparse)) == sorted(expected)


def test_bucket_views_keep_dense_layouts_and_do_not_overlap() -> None:
    """Oracle: a different number written through each view occurs once per element of its tensor."""
    tensors = [
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(()),
    ]
    buffer = torch.zeros(sum(tensor.numel() for tensor in tensors))
    views = views_like(buffer, tensors)
    for number, view in enumerate(views):
        view.fill_(number + 1)
    assert [int((buffer == n + 1).sum()) for n in range(3)] == [tensor.numel() for tensor in tensors]
    assert views[0].stride() == tensors[0].stride() and views[1].is_contiguous()


def logging_data(make: Any) -> list[dict[str, Any]]:
    """Logging data before training, and after steps of which the last is timed only with another rate."""
    torch.manual_seed(0)
    model = make(Shared(), bucket_cap_mb=MANY_BUCKETS)
    model._set_ddp_runtime_logging_sample_rate(4)
    data = [model._get_ddp_logging_data()]
    for step in range(14):
        model(torch.ones(4, 6)).square().sum().backward()
        if step in (2, 12, 13):
            data.append(model._get_ddp_logging_data())
    return data


def logs_as_pytorch() -> None:
    # All but times, which differ, and are compared with their bounds.
    for theirs, ours in zip(logging_data(Native), logging_data(Toy), strict=True):
        times = {name for name in theirs if "_time" in name}
        for log in (theirs, ours):  # the toy orders buckets of two dtypes by the time at which they are full
            log.update({name: sorted(log[name].split(", ")) for name in log if name.startswith("rebuilt_")})
        assert {name: ours.get(name) for name in theirs if name not in times} == {
            name: theirs[name] for name in theirs if name not in times
        }
        assert all(ours[name] >= 0 for name in times)
        for span in ("backward_comm_time", "backward_compute_time") if times else ():
            assert ours[span] >= ours["backward_compute_comm_overlap_time"]


needs_lists = pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(Native).parameters, reason="this torch has no lists"
)


def bucket_log(make: Any, sizes: list[float]) -> list[Any]:
    """Limits, and the sizes of buckets before and after the rebuild."""
    torch.manual_seed(0)
    model = make(nn.Sequential(*(nn.Linear(7, 7) for _ in range(6))), bucket_cap_mb_list=sizes)
    for _ in range(4):
        model(torch.ones(2, 7)).sum().backward()
    log = model._get_ddp_logging_data()
    names = ("bucket_cap_bytes", "bucket_sizes", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices")
    return [log[name] for name in names]


@needs_lists
@pytest.mark.parametrize("sizes", [[MANY_BUCKETS], [MANY_BUCKETS, 1], [2 * MANY_BUCKETS, MANY_BUCKETS / 4]])
def test_list_of_bucket_sizes_gives_the_buckets_of_pytorch(sizes: list[float]) -> None:
    """Oracle: PyTorch's class with the same list."""
    for native, toy in run_ranks(2, lambda: [bucket_log(Native, sizes), bucket_log(Toy, sizes)]):
        assert native == toy


def warns_of_a_deprecated_argument() -> None:
    with pytest.warns(FutureWarning, match="broadcast_buffers"):
        Toy(nn.Linear(2, 2), broadcast_buffers=False)


class Alone(dist.ProcessGroup):
    """A group of one rank, unknown to ``torch.distributed``."""

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        """Return the result of the only rank."""
        return self._done(tensors)

    allreduce = broadcast

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Any:
        """Return the result of the only rank."""
        outputs[0][0].copy_(inputs[0])
        return self._done(outputs)

    def getSize(self) -> int:  # noqa: N802 (PyTorch's name)
        """Return 1."""
        return 1

    def getBackendName(self) -> str:  # noqa: N802
        """Return a name of no backend."""
        return "alone"

    def _done(self, value: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(value)
        return torch._C._distributed_c10d._create_work_from_future(future)


def trains_with_a_custom_process_group() -> None:
    module = nn.Linear(2, 3)
    wrapped = Toy(module, process_group=Alone(0, 1))
    grads = []
    for model in (wrapped, wrapped, module):
        module.zero_grad()
        model(torch.ones(4, 2)).square().sum().backward()
        grads.append(module.weight.grad)
    assert wrapped._get_ddp_logging_data()["backend_name"] == "alone"
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[2])


def reduces_again_after_saving() -> None:
    torch.manual_seed(0)
    model = Toy(Shared())
    assert set(model.state_dict()) == {f"module.{name}" for name in model.module.state_dict()}
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
    grad = gradients_of(loaded)[0]
    gathered = [torch.zeros_like(grad) for _ in range(2)]
    dist.all_gather(gathered, grad)
    assert gathered[0].equal(gathered[1])


def frees_its_reducer() -> None:
    # And the bare module trains as if never wrapped.
    module = nn.Linear(2, 2)
    first = Toy(module)
    first(torch.ones(1, 2)).sum().backward()
    module.zero_grad()
    del first
    assert not any(isinstance(thing, Reducer) for thing in gc.get_objects())
    module(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module.bias.grad, torch.ones(2))


@pytest.mark.parametrize(
    ("ranks", "claim"),
    [
        (2, logs_as_pytorch),
        (2, reduces_again_after_saving),
        (1, trains_with_a_custom_process_group),
        (1, frees_its_reducer),
        pytest.param(1, warns_of_a_deprecated_argument, marks=needs_lists),
    ],
)
def test_wrapped_module_behaves_as_documented_besides_training(ranks: int, claim: Callable[[], None]) -> None:
    """Oracle: PyTorch's class and its documentation, the bare module, and the garbage collector's list of objects."""
    run_ranks(ranks, claim)


SMALL = 0.0001  # MiB: a bucket a layer


def hooked(module: nn.Module, **settings: Any) -> nn.Module:
    wrapped = Toy(module, bucket_cap_mb=SMALL, **settings)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


MAKERS: dict[str, Callable[..., nn.Module]] = {
    "core": functools.partial(DDP, bucket_cap_mb=SMALL),
    "unused parameters": functools.partial(Toy, bucket_cap_mb=SMALL, find_unused_parameters=True),
    "static graph": functools.partial(Toy, bucket_cap_mb=SMALL, static_graph=True),
    "hook": hooked,
    "zero1": functools.partial(Zero1, bucket_cap_mb=SMALL),
    "zero2": functools.partial(zero2.Zero2, bucket_cap_mb=SMALL),
}


def record(make: Callable[..., nn.Module], overlap: bool) -> tuple[list[str], list[Tensor]]:
    """Order of gradients and collectives in the last of three backwards, and the gradients after it."""
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

            def noted(*args: Any, original: Callable[..., Any] = call, **settings: Any) -> Any:
                events.append("collective")
                return original(*args, **settings)

            patch.setattr(owner, name, noted)
        for _ in range(3):
            events.clear()
            wrapped.zero_grad()
            wrapped(torch.randn(2, 8, generator=generator)).square().sum().backward()
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


class Changing(Tuple):
    """One or both of two layers, chosen by the sign of the input."""

    def forward(self, x: Tensor) -> Any:
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
