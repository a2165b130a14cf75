"""The toy FSDP rejects unsupported and impossible options by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdptoys.toys.fsdp.policies import check_offload
from tests.toys.fsdp_models import NATIVE, TOY, Case, Model, assert_hold, batches, build, mesh_of, shard_groups


class Traveling(nn.Module):
    """A parameter with its own all-gather input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2).as_subclass(Extended))


class Extended(Tensor):
    """A tensor with PyTorch's all-gather extension."""

    def fsdp_pre_all_gather(self) -> None:
        """Never called."""


def refuses_unsupported_options_by_name() -> None:
    mesh, policy = mesh_of(), NATIVE.CPUOffloadPolicy()
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())
    refusals: list[tuple[str, type[Exception], Callable[[], Any]]] = [
        ("CPUOffloadPolicy", NotImplementedError, lambda: TOY.fully_shard(Model(), mesh=mesh, offload_policy=policy)),
        (
            "CPUOffloadPolicy",
            NotImplementedError,
            lambda: check_offload(TOY.CPUOffloadPolicy(pin_memory=False), "cuda"),
        ),
        ("dp_mesh_dims", NotImplementedError, lambda: TOY.fully_shard(Model(), mesh=mesh, dp_mesh_dims=object())),
        ("mix", NotImplementedError, lambda: TOY.fully_shard(mixed, mesh=mesh)),
        ("shard_placement_fn", NotImplementedError, lambda: TOY.fully_shard(Model(), shard_placement_fn=lambda _: 1)),
        (
            "uneven",
            NotImplementedError,
            lambda: TOY.fully_shard(nn.Linear(3, 3), shard_placement_fn=lambda _: Shard(-1)),
        ),
        ("containers", ValueError, lambda: TOY.fully_shard(nn.ModuleList([Model()]), mesh=mesh)),
        ("factor of 2", ValueError, lambda: TOY.fully_shard(Model(), mesh=mesh, reshard_after_forward=3)),
        ("bool or an int", ValueError, lambda: TOY.fully_shard(Model(), mesh=mesh, reshard_after_forward="no")),
        ("scalar", ValueError, lambda: TOY.fully_shard(nn.ParameterList([torch.ones(())]), mesh=mesh)),
        ("single root", RuntimeError, lambda: TOY.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])[0](torch.ones(2))),
        (
            "fully_shard\\(\\[",
            ValueError,
            lambda: build(TOY, Case(model={"tied": True}, shard=shard_groups))(batches(1)[0]),
        ),
        ("fsdp_pre_all_gather", NotImplementedError, lambda: TOY.fully_shard(Traveling())),
        ("only be applied", AssertionError, lambda: TOY.fully_shard(TOY.fully_shard(nn.Linear(2, 2)))),
        ("DTensor", NotImplementedError, lambda: TOY.fully_shard(NATIVE.fully_shard(nn.Linear(2, 2)))),
    ]
    sharded = build(TOY, Case())
    sharded._set_unshard_async_op(True)
    for name, arguments in {
        "set_custom_all_gather": (None,),
        "set_custom_reduce_scatter": (None,),
        "set_separate_reduce_scatter_group": (),
        "set_allocate_memory_from_process_group_for_comm": (True,),
        "set_symm_mem_for_comm": (),
    }.items():
        refusals.append((name, NotImplementedError, lambda name=name, a=arguments: getattr(sharded, name)(*a)))  # type: ignore[misc]
    refusals += [
        ("stream", NotImplementedError, lambda: sharded.set_all_reduce_hook(print, stream=object())),
        ("async", NotImplementedError, lambda: sharded._set_unshard_async_op(False)),
        ("positive", ValueError, lambda: sharded.set_reduce_scatter_max_input_buffers(0)),
        ("int", TypeError, lambda: sharded.set_reduce_scatter_max_input_buffers(True)),
        ("bool", ValueError, lambda: sharded.set_reshard_after_forward(2)),
        ("FSDPModule", ValueError, lambda: sharded.set_modules_to_forward_prefetch([nn.Linear(2, 2)])),
        ("no_such", ValueError, lambda: TOY.register_fsdp_forward_method(sharded, "no_such")),
    ]
    for match, kind, call in refusals:
        with pytest.raises(kind, match=match):
            call()


def test_unsupported_options_are_refused_by_name() -> None:
    """Oracle: the table in the package's docstring; PyTorch's messages where PyTorch refuses too."""
    assert_hold(2, {"refusals": refuses_unsupported_options_by_name})
