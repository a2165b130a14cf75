"""The toy FSDP shards parameters of tensor parallelism, as PyTorch's does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scripts.ranks import run_ranks
from tests.toys.fsdp_models import NATIVE, TOY, Case, Model, assert_matches_native, build, mesh_of

DATA, TENSOR = "replicate", "shard"


def shard_features(library: Any, model: Model, mesh: DeviceMesh, **options: Any) -> None:
    """The features of each feed-forward over one axis, then units over the other."""
    # DTensors throughout, since tensor parallelism cannot pass on local tensors of unequal sizes.
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh[TENSOR], plan)
        library.fully_shard([block.up, block.down], mesh=mesh[DATA], **options)
    library.fully_shard(model, mesh=mesh[DATA], **{key: options[key] for key in options if key == "mp_policy"})


def of_features(dim: int, **settings: Any) -> Case:
    return Case(shard_features, axes=(2, 2), alike=2, model={"dim": dim}, **settings)


def accumulate(model: Any, index: int, count: int) -> None:
    model.set_requires_gradient_sync(index == count - 1)


def shows_both_meshes_to_the_optimizer() -> None:
    ours, theirs = (build(library, of_features(6)) for library in (TOY, NATIVE))
    for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.placements == its.placements and mine.device_mesh == its.device_mesh, name
        assert mine.shape == its.shape and mine.stride() == its.stride()
        assert torch.equal(mine.to_local(), its.to_local())
    layer = ours.blocks[0].up
    layer.unshard()
    assert isinstance(layer.weight, DTensor) and layer.weight.placements == (Shard(0),)
    layer.reshard()


REFUSALS: dict[str, Callable[[Any], object]] = {
    "other axes": lambda layer: TOY.fully_shard(layer, mesh=mesh_of((2, 2))[TENSOR]),
    "as an int": lambda layer: TOY.fully_shard(layer, mesh=mesh_of((4, 1))[DATA], reshard_after_forward=2),
    "reset_parameters": lambda layer: TOY.initialize(TOY.fully_shard(layer, mesh=mesh_of((2, 2))[DATA]), "cpu"),
}


def refuses_unsupported_options_by_name() -> None:
    for match, call in REFUSALS.items():
        layer = nn.Sequential(nn.Linear(4, 4))
        parallelize_module(layer, mesh_of((2, 2))[TENSOR], {"0": ColwiseParallel()})
        with pytest.raises(NotImplementedError, match=match):
            call(layer)


KEPT = {"reshard_after_forward": False}
MIXED = {"mp_policy": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}}
CLAIMS: dict[str, Callable[[], None]] = {
    "uneven": lambda: assert_matches_native(of_features(3, micro_batches=1)),
    "not freed": lambda: assert_matches_native(of_features(6, options=KEPT, before=accumulate)),
    "mixed precision": lambda: assert_matches_native(of_features(8, options=MIXED, before=accumulate)),
    "both meshes": shows_both_meshes_to_the_optimizer,
    "refusals": refuses_unsupported_options_by_name,
}


@pytest.mark.skipif(not hasattr(DeviceMesh, "_concatenate"), reason="meshes of this torch cannot be joined")
@pytest.mark.parametrize("claim", CLAIMS)
def test_tensor_parallelism_matches_pytorch_bitwise(claim: str) -> None:
    """Oracle: PyTorch's ``fully_shard`` on two data-parallel times two tensor-parallel ranks, bitwise."""
    run_ranks(4, CLAIMS[claim])
