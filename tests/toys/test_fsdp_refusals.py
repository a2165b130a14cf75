"""The toy FSDP rejects unsupported and impossible options by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdptoys.toys.fsdp.policies import check_offload
from scripts.ranks import run_ranks
from tests.toys.fsdp_models import NATIVE, TOY, Case, Model, batches, build, shard_groups

TIED = Case(model={"tied": True}, shard=shard_groups)


class Traveling(nn.Module):
    """A parameter with its own all-gather input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2).as_subclass(Extended))


class Extended(Tensor):
    """A tensor with PyTorch's all-gather extension."""

    def fsdp_pre_all_gather(self) -> None:
        """Never called."""


def shard(module: nn.Module | None = None, **options: Any) -> Any:
    return TOY.fully_shard(module or Model(), **options)


def call(name: str, *args: Any, **options: Any) -> Callable[[], object]:
    """Call a method of a sharded model."""
    return lambda: getattr(build(TOY, Case()), name)(*args, **options)


REFUSALS: list[tuple[str, type[Exception], Callable[[], object]]] = [
    ("CPUOffloadPolicy", NotImplementedError, lambda: shard(offload_policy=NATIVE.CPUOffloadPolicy())),
    ("CPUOffloadPolicy", NotImplementedError, lambda: check_offload(TOY.CPUOffloadPolicy(pin_memory=False), "cuda")),
    ("dp_mesh_dims", NotImplementedError, lambda: shard(dp_mesh_dims=object())),
    ("mix", NotImplementedError, lambda: shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half()))),
    ("shard_placement_fn", NotImplementedError, lambda: shard(shard_placement_fn=lambda _: 1)),
    ("uneven", NotImplementedError, lambda: shard(nn.Linear(3, 3), shard_placement_fn=lambda _: Shard(-1))),
    ("containers", ValueError, lambda: shard(nn.ModuleList([Model()]))),
    ("factor of 2", ValueError, lambda: shard(reshard_after_forward=3)),
    ("bool or an int", ValueError, lambda: shard(reshard_after_forward="no")),
    ("scalar", ValueError, lambda: shard(nn.ParameterList([torch.ones(())]))),
    ("single root", RuntimeError, lambda: TOY.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])[0](torch.ones(2))),
    ("fully_shard\\(\\[", ValueError, lambda: build(TOY, TIED)(batches(1)[0])),
    ("fsdp_pre_all_gather", NotImplementedError, lambda: shard(Traveling())),
    ("only be applied", AssertionError, lambda: shard(shard(nn.Linear(2, 2)))),
    ("DTensor", NotImplementedError, lambda: shard(NATIVE.fully_shard(nn.Linear(2, 2)))),
    ("set_custom_all_gather", NotImplementedError, call("set_custom_all_gather", None)),
    ("set_custom_reduce_scatter", NotImplementedError, call("set_custom_reduce_scatter", None)),
    ("set_separate_reduce_scatter_group", NotImplementedError, call("set_separate_reduce_scatter_group")),
    ("set_allocate_memory", NotImplementedError, call("set_allocate_memory_from_process_group_for_comm", True)),
    ("set_symm_mem_for_comm", NotImplementedError, call("set_symm_mem_for_comm")),
    ("stream", NotImplementedError, call("set_all_reduce_hook", print, stream=object())),
    ("async", NotImplementedError, call("_set_unshard_async_op", False)),
    ("positive", ValueError, call("set_reduce_scatter_max_input_buffers", 0)),
    ("int", TypeError, call("set_reduce_scatter_max_input_buffers", True)),
    ("bool", ValueError, call("set_reshard_after_forward", 2)),
    ("FSDPModule", ValueError, call("set_modules_to_forward_prefetch", [nn.Linear(2, 2)])),
    ("no_such", ValueError, lambda: TOY.register_fsdp_forward_method(build(TOY, Case()), "no_such")),
]


@pytest.mark.parametrize(("match", "kind", "refused"), REFUSALS)
def test_unsupported_options_are_refused_by_name(
    match: str, kind: type[Exception], refused: Callable[[], object]
) -> None:
    """Oracle: the table in the package's docstring; PyTorch's messages where PyTorch refuses too."""

    def claim() -> None:
        with pytest.raises(kind, match=match):
            refused()

    run_ranks(2, claim)


def test_asynchronous_unshards_are_accepted() -> None:
    """Oracle: PyTorch's method, whose only other value is refused."""
    run_ranks(2, call("_set_unshard_async_op", True))
