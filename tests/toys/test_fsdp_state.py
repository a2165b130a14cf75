"""Parameters of the toy FSDP: state dicts, checkpoints, initialization, other dtypes."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from fsdptoys.toys.fsdp.initialize import reset
from fsdptoys.toys.fsdp.internals import local_tensor
from scripts.ranks import run_ranks
from tests.toys.fsdp_models import (
    NATIVE,
    TOY,
    Case,
    Model,
    backward,
    batches,
    build,
    mesh_of,
    shard_blocks,
    shard_groups,
    shard_tied,
    whole,
)

BOTH_WAYS = [(TOY, NATIVE), (NATIVE, TOY)]


def exchanges_state_dicts_with_pytorch() -> None:
    for source, target in BOTH_WAYS:
        for assign in (False, True):
            trained, fresh = build(source, Case()), build(target, Case())
            backward(trained, batches(1)[0])
            with torch.no_grad():
                for param in trained.parameters():
                    param.mul_(2)
            state = trained.state_dict()
            for value, other in zip(state.values(), fresh.state_dict().values(), strict=True):
                assert value.placements == other.placements and value.stride() == other.stride()
                assert value.shape == other.shape and value.to_local().shape == other.to_local().shape
            fresh.load_state_dict(state, assign=assign)
            expected = backward(trained, batches(1)[0])
            assert torch.equal(expected, backward(fresh, batches(1)[0]))
            if target is TOY:  # parameters are views of one flat shard again
                locals_ = [local_tensor(param) for param in fresh.blocks[0].parameters()]
                assert len({each.untyped_storage().data_ptr() for each in locals_}) == 1


def exchanges_checkpoints_with_pytorch() -> None:
    for source, target in BOTH_WAYS:
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        trained, fresh = build(source, Case()), build(target, Case())
        with torch.no_grad():
            for param in trained.parameters():
                param.add_(1)
        dcp.save({"model": trained.state_dict()}, checkpoint_id=folder[0])
        state = {"model": fresh.state_dict()}
        dcp.load(state, checkpoint_id=folder[0])
        fresh.load_state_dict(state["model"])
        assert all(map(torch.equal, whole(trained).values(), whole(fresh).values()))


def on_meta(shard: Any, tied: bool = False) -> Any:
    with torch.device("meta"):
        model = Model(tied=tied)
    shard(TOY, model, mesh_of())
    return model


def initializes_from_the_meta_device() -> None:
    for shard in (shard_blocks, shard_groups):
        model = on_meta(shard)
        with pytest.raises(RuntimeError, match=r"materialized from meta .*'embed\.weight'"):
            model(batches(1)[0])
        model = on_meta(shard)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for param, values in zip(model.parameters(), build(TOY, Case(shard=shard)).parameters(), strict=True):
                param.copy_(values)
        assert backward(model, batches(1)[0]) == backward(build(TOY, Case(shard=shard)), batches(1)[0])


def draws_the_values_of_a_regular_construction() -> None:
    # With all unit layouts; a shared weight belongs to the first module.
    for shard, tied in ((shard_blocks, False), (shard_groups, False), (shard_tied, True)):
        expected = build(TOY, Case(shard=shard, model={"tied": tied}))
        model = on_meta(shard, tied)
        counts: list[tuple[int, int]] = []

        def draw(module: nn.Module, model: Model = model, counts: list[tuple[int, int]] = counts) -> None:
            plain = [param for param in model.parameters() if not isinstance(param, DTensor)]
            counts.append((len(plain), len(list(module.parameters(recurse=False)))))
            reset(module)

        torch.manual_seed(0)
        TOY.initialize(model, "cpu", draw)
        assert {name for name, value in whole(expected).items() if not torch.equal(value, whole(model)[name])} == set()
        assert all(gathered == own for gathered, own in counts)
        assert torch.equal(backward(model, batches(1)[0]), backward(expected, batches(1)[0]))


def changes_its_dtype_between_steps() -> None:
    # PyTorch's can before its first step.
    (tokens_BT,) = batches(1)
    expected = [
        backward(build(library, Case(configure=lambda model: model.double())), tokens_BT) for library in (TOY, NATIVE)
    ]
    model = build(TOY, Case())
    backward(model, tokens_BT)
    model.double()
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    assert expected == [backward(model, tokens_BT)] * 2


@pytest.mark.parametrize(
    "claim",
    [
        exchanges_state_dicts_with_pytorch,
        exchanges_checkpoints_with_pytorch,
        initializes_from_the_meta_device,
        draws_the_values_of_a_regular_construction,
        changes_its_dtype_between_steps,
    ],
)
def test_state_dicts_checkpoints_and_initialization_match_pytorch(claim: Callable[[], None]) -> None:
    """Oracle: PyTorch's ``fully_shard``, which accepts the toy's tensors, and the reverse."""
    run_ranks(2, claim)
