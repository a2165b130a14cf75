"""The buckets of the toy DDP, and its logging data about them and its times."""

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Native

from fsdptoys.toys.buckets import assign_buckets, views_like
from fsdptoys.toys.ddp import DistributedDataParallel as Toy
from scripts.ranks import run_ranks
from tests.toys.test_ddp import MANY_BUCKETS, Shared


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


def compare_logs() -> None:
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


def test_logging_data_equals_pytorch() -> None:
    """Oracle: the logging data of PyTorch's class; times, which differ, by their bounds."""
    run_ranks(2, compare_logs)


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


def deprecated_argument() -> None:
    with pytest.warns(FutureWarning, match="broadcast_buffers"):
        Toy(nn.Linear(2, 2), broadcast_buffers=False)


@needs_lists
def test_deprecated_argument_warns() -> None:
    """Oracle: PyTorch's category of the warning."""
    run_ranks(1, deprecated_argument)


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


def trains_alone() -> None:
    module = nn.Linear(2, 3)
    wrapped = Toy(module, process_group=Alone(0, 1))
    grads = []
    for model in (wrapped, wrapped, module):
        module.zero_grad()
        model(torch.ones(4, 2)).square().sum().backward()
        grads.append(module.weight.grad)
    assert wrapped._get_ddp_logging_data()["backend_name"] == "alone"
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[2])


def test_custom_process_group_is_supported() -> None:
    """Oracle: the gradients of the bare module."""
    run_ranks(1, trains_alone)
