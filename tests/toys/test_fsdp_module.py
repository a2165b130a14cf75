"""The toy FSDP behaves as PyTorch documents its own, and the layout of its flat shards."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdptoys.toys.fsdp.layout import lay_out
from tests.harness.ranks import run_ranks
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
    whole,
)


def exposes_sharded_parameters_outside_the_forward() -> None:
    is_sharded: list[bool] = []
    model = build(TOY, Case())
    block = model.blocks[0]
    block.up.register_forward_hook(
        lambda module, *_: is_sharded.append(isinstance(module.weight, DTensor))
    )
    assert (
        type(block).__name__ == "FSDPBlock"
        and isinstance(block, TOY.FSDPModule)
        and isinstance(block, nn.Module)
    )
    assert all(isinstance(param, DTensor) for param in model.parameters())
    backward(model, batches(1)[0])
    assert is_sharded == [False]
    assert all(
        isinstance(param, DTensor) and isinstance(param.grad, DTensor)
        for param in model.parameters()
    )


def keeps_one_storage_for_full_parameters() -> None:
    model = build(TOY, Case())
    block = model.blocks[0]
    weights = []
    for _ in range(2):
        backward(model, batches(1)[0])
        block.unshard()
        weight = block.up.weight
        bias = block.down.bias
        storage = weight.untyped_storage()
        assert storage.size() >= sum(param.numel() * 4 for param in block.parameters())
        assert storage.data_ptr() == bias.untyped_storage().data_ptr()
        weights.append(weight)
        block.reshard()
        assert storage.size() == 0
    assert weights[0] is weights[1]


def trace(library: Any, case: Case, steps: int) -> list[str]:
    """Events of the last step: starts of blocks' forwards and of collectives."""
    model = build(library, case)
    events = []
    for index, block in enumerate(model.blocks):
        block.norm.register_forward_hook(
            lambda *_, index=index: events.append(f"forward {index}")
        )
        block.norm.register_full_backward_hook(
            lambda *_, index=index: events.append(f"backward {index}")
        )
    event_of = {"all_gather_single": "gather", "reduce_scatter_single": "reduce"}
    if not hasattr(dist, "all_gather_single"):
        event_of = {
            "all_gather_into_tensor": "gather",
            "reduce_scatter_tensor": "reduce",
        }
    with pytest.MonkeyPatch.context() as patch:
        for name, word in event_of.items():
            original = getattr(dist, name)

            def noted(
                *args: Any, original: Any = original, word: str = word, **kwargs: Any
            ) -> Any:
                events.append(word)
                return original(*args, **kwargs)

            patch.setattr(dist, name, noted)
        for tokens_BT in batches(steps):
            events.clear()
            backward(model, tokens_BT)
    return events


def gathers_the_next_unit_before_this_one_computes() -> None:
    # The root, whose unit has embedding, norm and head, is not freed after the forward.
    forward = [
        "gather",
        "gather",
        "gather",
        "forward 0",
        "gather",
        "forward 1",
        "forward 2",
    ]
    backward_ = [
        "gather",
        "gather",
        "backward 2",
        "reduce",
        "gather",
        "backward 1",
        "reduce",
        "backward 0",
        "reduce",
    ]
    assert trace(TOY, Case(), 2) == [*forward, *backward_, "reduce"]


def gathers_as_often_as_pytorch() -> None:
    for case in (
        Case(),
        Case(shard=shard_groups),
        Case(options={"reshard_after_forward": False}),
    ):
        toy = trace(TOY, case, 3)
        native = trace(NATIVE, case, 3)
        for word in ("gather", "reduce"):
            assert toy.count(word) == native.count(word)


def reshards_after_a_wrong_prefetch() -> None:
    model = build(TOY, Case())
    tokens_BT = batches(1)[0]
    backward(model, tokens_BT)
    removed = model.blocks[1]
    del model.blocks[1]
    backward(model, tokens_BT)
    assert isinstance(removed.up.weight, DTensor)
    removed.unshard()
    assert not isinstance(removed.up.weight, DTensor)


def calls_hooks_of_accumulated_gradients() -> None:
    model = build(TOY, Case())
    called = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda param, name=name: called.append((name, param.grad is not None))
        )
    backward(model, batches(1)[0])
    assert sorted(called) == sorted(
        (name, True) for name, _ in model.named_parameters()
    )


def trains_after_inference_mode() -> None:
    model = build(TOY, Case())
    (tokens_BT,) = batches(1)
    with torch.inference_mode():
        model(tokens_BT)
    assert backward(model, tokens_BT) == backward(build(TOY, Case()), tokens_BT)


def runs_a_submodule_alone() -> None:
    model = build(TOY, Case())
    hidden = model.blocks[0](torch.ones(2, 13))
    hidden.sum().backward()
    assert all(param.grad is not None for param in model.blocks[0].parameters())
    assert backward(model, batches(1)[0]) == backward(build(TOY, Case()), batches(1)[0])


BOTH_WAYS = [(TOY, NATIVE), (NATIVE, TOY)]


def exchanges_state_dicts_with_pytorch() -> None:
    for source, target in BOTH_WAYS:
        for assign in (False, True):
            trained = build(source, Case())
            fresh = build(target, Case())
            backward(trained, batches(1)[0])
            with torch.no_grad():
                for param in trained.parameters():
                    param.mul_(2)
            state = trained.state_dict()
            for value, other in zip(
                state.values(), fresh.state_dict().values(), strict=True
            ):
                assert (
                    value.placements == other.placements
                    and value.stride() == other.stride()
                )
                assert (
                    value.shape == other.shape
                    and value.to_local().shape == other.to_local().shape
                )
            fresh.load_state_dict(state, assign=assign)
            assert torch.equal(
                backward(trained, batches(1)[0]), backward(fresh, batches(1)[0])
            )
            if target is TOY:  # parameters are views of one flat shard again
                parts = [param.to_local() for param in fresh.blocks[0].parameters()]
                assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


def exchanges_checkpoints_with_pytorch() -> None:
    for source, target in BOTH_WAYS:
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        trained = build(source, Case())
        fresh = build(target, Case())
        with torch.no_grad():
            for param in trained.parameters():
                param.add_(1)
        dcp.save({"model": trained.state_dict()}, checkpoint_id=folder[0])
        state = {"model": fresh.state_dict()}
        dcp.load(state, checkpoint_id=folder[0])
        fresh.load_state_dict(state["model"])
        assert all(map(torch.equal, whole(trained).values(), whole(fresh).values()))


def initializes_from_the_meta_device() -> None:
    for shard in (shard_blocks, shard_groups):
        with torch.device("meta"):
            model: Any = Model()
        shard(TOY, model, mesh_of())
        model.to_empty(device="cpu")
        expected = build(TOY, Case(shard=shard))
        with torch.no_grad():
            for param, values in zip(
                model.parameters(), expected.parameters(), strict=True
            ):
                param.copy_(values)
        assert backward(model, batches(1)[0]) == backward(expected, batches(1)[0])


def changes_its_dtype_between_steps() -> None:
    # PyTorch's can before its first step.
    (tokens_BT,) = batches(1)
    doubled = Case(configure=lambda model: model.double())
    expected = [
        backward(build(library, doubled), tokens_BT) for library in (TOY, NATIVE)
    ]
    model = build(TOY, Case())
    backward(model, tokens_BT)
    model.double()
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    assert expected == [backward(model, tokens_BT)] * 2


def refuses_units_that_one_flat_shard_cannot_hold() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(
        NotImplementedError,
        match=r"cannot mix torch\.float32 on cpu and torch\.float64",
    ):
        TOY.fully_shard(mixed, mesh=mesh_of())
    with pytest.raises(
        ValueError, match=r"dim 1 of a parameter of shape \(2, 3\) cannot be sharded"
    ):
        TOY.fully_shard(
            nn.Linear(3, 2, bias=False),
            mesh=mesh_of(),
            shard_placement_fn=lambda _: Shard(1),
        )


@pytest.mark.parametrize(
    "claim",
    [
        exposes_sharded_parameters_outside_the_forward,
        keeps_one_storage_for_full_parameters,
        gathers_the_next_unit_before_this_one_computes,
        gathers_as_often_as_pytorch,
        reshards_after_a_wrong_prefetch,
        calls_hooks_of_accumulated_gradients,
        trains_after_inference_mode,
        runs_a_submodule_alone,
        exchanges_state_dicts_with_pytorch,
        exchanges_checkpoints_with_pytorch,
        initializes_from_the_meta_device,
        changes_its_dtype_between_steps,
        refuses_units_that_one_flat_shard_cannot_hold,
    ],
)
def test_fully_shard_behaves_as_pytorch_documents(claim: Callable[[], None]) -> None:
    """Oracle: PyTorch's ``fully_shard``, its documentation, and its tensors."""
    run_ranks(2, claim)


SHAPES = [
    ((6, 3), 0),
    ((2,), 0),
    ((1, 5), 0),
    ((4, 8, 3), 1),
    ((4, 3, 8), 2),
    ((7,), 0),
    ((0, 3), 0),
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_flat_layout_matches_torch_chunk_with_zero_padding_and_is_read_back(
    ranks: int,
) -> None:
    """Oracle: ``torch.chunk``, which DTensor uses for sharding; the tensors, some of which are not
    contiguous."""
    pieces, numel = lay_out(
        [shape for shape, _ in SHAPES], [dim for _, dim in SHAPES], ranks
    )
    flat_RS = torch.full((ranks, numel), torch.nan)
    wholes = [
        torch.rand(shape[::-1]).permute(*range(len(shape))[::-1]) for shape, _ in SHAPES
    ]
    for piece, tensor in zip(pieces, wholes, strict=True):
        piece.write(tensor, flat_RS)
    for piece, tensor, (shape, dim) in zip(pieces, wholes, SHAPES, strict=True):
        chunks = list(tensor.chunk(ranks, dim))
        for rank in range(ranks):
            chunk = chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)
            columns = flat_RS[rank, piece.offset : piece.offset + piece.numel]
            assert torch.equal(piece.local_view(flat_RS[rank], rank), chunk)
            assert columns[chunk.numel() :].eq(0).all()
        read = torch.full(shape, torch.nan)
        piece.read(read, flat_RS)
        assert torch.equal(read, tensor)
    assert sum(piece.numel for piece in pieces) == numel
