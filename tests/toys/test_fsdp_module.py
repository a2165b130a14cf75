"""The toy FSDP behaves as PyTorch documents its own, and the layout of its flat shards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor

from fsdptoys.toys.fsdp.internals import local_tensor
from fsdptoys.toys.fsdp.layout import lay_out
from scripts.ranks import run_ranks
from tests.toys.fsdp_models import NATIVE, TOY, Case, Model, backward, batches, build, mesh_of, shard_groups, whole


def exposes_sharded_parameters_outside_the_forward() -> None:
    seen: list[bool] = []
    model = build(TOY, Case())
    block = model.blocks[0]
    block.up.register_forward_hook(lambda module, *_: seen.append(isinstance(module.weight, DTensor)))
    assert type(block).__name__ == "FSDPBlock" and isinstance(block, TOY.FSDPModule) and isinstance(block, nn.Module)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    backward(model, batches(1)[0])
    assert seen == [False]
    assert all(isinstance(param, DTensor) and isinstance(param.grad, DTensor) for param in model.parameters())


def keeps_one_storage_for_full_parameters() -> None:
    model = build(TOY, Case())
    block, seen = model.blocks[0], []
    for _ in range(2):
        backward(model, batches(1)[0])
        block.unshard()
        weight, bias = block.up.weight, block.down.bias
        storage = weight.untyped_storage()
        assert storage.size() >= sum(param.numel() * 4 for param in block.parameters())
        assert storage.data_ptr() == bias.untyped_storage().data_ptr()
        seen.append(weight)
        block.reshard()
        assert storage.size() == 0
    assert seen[0] is seen[1]


def unshards_asynchronously() -> None:
    model = build(TOY, Case())
    handle = model.blocks[0].unshard(async_op=True)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    handle.wait()
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    model.blocks[0].reshard()
    torch.manual_seed(0)
    assert torch.equal(whole(model)["blocks.0.up.weight"], Model().blocks[0].up.weight)


def supports_unshard_of_full_parameters() -> None:
    model = build(TOY, Case(options={"reshard_after_forward": False}))
    for tokens_BT in batches(2):
        model(tokens_BT)
        model.blocks[0].unshard(async_op=True).wait()
        assert not isinstance(model.blocks[0].up.weight, DTensor)


def trace(library: Any, case: Case, steps: int) -> list[str]:
    """Events of the last step: starts of blocks' forwards and of collectives."""
    model, events = build(library, case), []
    for index, block in enumerate(model.blocks):
        block.norm.register_forward_hook(lambda *_, index=index: events.append(f"forward {index}"))
        block.norm.register_full_backward_hook(lambda *_, index=index: events.append(f"backward {index}"))
    words = {"all_gather_single": "gather", "reduce_scatter_single": "reduce"}
    if not hasattr(dist, "all_gather_single"):
        words = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce"}
    with pytest.MonkeyPatch.context() as patch:
        for name, word in words.items():
            original = getattr(dist, name)

            def noted(*args: Any, original: Any = original, word: str = word, **kwargs: Any) -> Any:
                events.append(word)
                return original(*args, **kwargs)

            patch.setattr(dist, name, noted)
        for tokens_BT in batches(steps):
            events.clear()
            backward(model, tokens_BT)
    return events


def gathers_the_next_unit_before_this_one_computes() -> None:
    # The root, whose unit has embedding, norm and head, is not freed after the forward.
    forward = ["gather", "gather", "gather", "forward 0", "gather", "forward 1", "forward 2"]
    backward_ = ["gather", "gather", "backward 2", "reduce", "gather", "backward 1", "reduce", "backward 0", "reduce"]
    assert trace(TOY, Case(), 2) == [*forward, *backward_, "reduce"]


def gathers_as_often_as_pytorch() -> None:
    for case in (Case(), Case(shard=shard_groups), Case(options={"reshard_after_forward": False})):
        ours, theirs = trace(TOY, case, 3), trace(NATIVE, case, 3)
        for word in ("gather", "reduce"):
            assert ours.count(word) == theirs.count(word)


def reshards_after_a_wrong_prefetch() -> None:
    model, tokens_BT = build(TOY, Case()), batches(1)[0]
    backward(model, tokens_BT)
    removed = model.blocks[1]
    del model.blocks[1]
    backward(model, tokens_BT)
    assert isinstance(removed.up.weight, DTensor)
    removed.unshard()
    assert not isinstance(removed.up.weight, DTensor)


def recovers_after_an_exception() -> None:
    def fails(*_: Any) -> None:
        raise KeyError("meant")

    outcomes = []
    for broken in (False, True):
        model, (tokens_BT,) = build(TOY, Case()), batches(1)
        backward(model, tokens_BT)
        model.zero_grad()
        if broken:
            for hooked in (model.blocks[1].register_forward_hook, model.blocks[1].norm.register_full_backward_hook):
                handle = hooked(fails)
                with pytest.raises(KeyError):
                    backward(model, tokens_BT)
                handle.remove()
                model.reset_iter_state()
                model.zero_grad()
        backward(model, tokens_BT)
        outcomes.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(torch.equal(old, new) for old, new in zip(*outcomes, strict=True))
    with pytest.raises(RuntimeError, match="root"):
        model.blocks[0].reset_iter_state()


def calls_hooks_of_accumulated_gradients() -> None:
    model, called = build(TOY, Case()), []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: called.append((name, param.grad is not None)))
    backward(model, batches(1)[0])
    assert sorted(called) == sorted((name, True) for name, _ in model.named_parameters())


def calls_the_hook_with_reduced_gradients() -> None:
    model, seen = build(TOY, Case()), []
    model.blocks[0].set_all_reduce_hook(lambda flat: seen.append(flat.clone()))
    backward(model, batches(1)[0])
    grads = [local_tensor(param.grad).flatten() for param in model.blocks[0].parameters()]
    assert len(seen) == 1 and seen[0].sum() == pytest.approx(2 * sum(grad.sum().item() for grad in grads), rel=1e-5)


def runs_other_methods_as_a_forward() -> None:
    results = []
    for library in (TOY, NATIVE):
        model = build(library, Case())
        library.register_fsdp_forward_method(model, "hidden")
        results.append(model.hidden(batches(1)[0]))
        library.register_fsdp_forward_method(model.norm, "forward")  # not sharded: nothing happens
    assert torch.equal(*results)


def trains_after_inference_mode() -> None:
    model, (tokens_BT,) = build(TOY, Case()), batches(1)
    with torch.inference_mode():
        model(tokens_BT)
    assert backward(model, tokens_BT) == backward(build(TOY, Case()), tokens_BT)


def runs_a_submodule_alone() -> None:
    model = build(TOY, Case())
    hidden = model.blocks[0](torch.ones(2, 13))
    hidden.sum().backward()
    assert all(param.grad is not None for param in model.blocks[0].parameters())
    with pytest.raises(RuntimeError, match="already been lazily initialized"):
        model(batches(1)[0])


def slices_into_plain_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    TOY.fully_shard(model, mesh=mesh_of())
    assert type(model).__name__ == "FSDPSequential" and type(model[:2]) is nn.Sequential and len(model[:2]) == 2
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model)


def coexists_with_replicated_modules() -> None:
    # ``replicate`` leaves sharded parts alone, and ``fully_shard`` replicated ones, in either order.
    for first in ("shard", "replicate"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        expected = copy.deepcopy(model)
        if first == "shard":
            TOY.fully_shard(model[0], mesh=mesh_of())
            replicate(model)
        else:
            replicate(model[1])
            TOY.fully_shard(model, mesh=mesh_of())
        for each in (model, expected):
            each(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
        for param in expected.parameters():
            dist.all_reduce(param.grad)
        assert isinstance(model[0].weight, DTensor) and not isinstance(model[1].weight, DTensor)
        assert torch.equal(model[0].weight.grad.full_tensor() * dist.get_world_size(), expected[0].weight.grad)
        assert torch.equal(model[1].weight.grad * dist.get_world_size(), expected[1].weight.grad)


def ignores_the_given_parameters() -> None:
    model = Model()
    kept = set(model.blocks[0].norm.parameters())
    TOY.fully_shard(model, mesh=mesh_of(), ignored_params=kept)
    backward(model, batches(1)[0])
    assert {param for param in model.parameters() if not isinstance(param, DTensor)} == kept
    assert all(param.grad is not None for param in kept)


def reduces_for_several_roots_in_one_queue() -> None:
    torch.manual_seed(0)
    parts, plain = ([nn.Sequential(nn.Linear(4, 4)) for _ in range(3)] for _ in range(2))
    for part, other in zip(parts, plain, strict=True):
        other.load_state_dict(part.state_dict())
        TOY.fully_shard(part[0], mesh=mesh_of())
        TOY.fully_shard(part, mesh=mesh_of())
    TOY.share_comm_ctx(parts)
    assert len({TOY.fully_shard.state(part).iteration.reductions for part in parts}) == 1
    for model in (nn.Sequential(*parts), nn.Sequential(*plain)):
        model(torch.ones(2, 4)).sum().backward()
    for part, other in zip(parts, plain, strict=True):
        assert torch.equal(part[0].weight.grad.full_tensor(), other[0].weight.grad)
        assert TOY.fully_shard.state(part[0]) is part[0]._get_fsdp_state() and TOY.fully_shard.state(other) is None


@pytest.mark.parametrize(
    "claim",
    [
        exposes_sharded_parameters_outside_the_forward,
        keeps_one_storage_for_full_parameters,
        unshards_asynchronously,
        supports_unshard_of_full_parameters,
        reduces_for_several_roots_in_one_queue,
        gathers_the_next_unit_before_this_one_computes,
        gathers_as_often_as_pytorch,
        reshards_after_a_wrong_prefetch,
        recovers_after_an_exception,
        calls_hooks_of_accumulated_gradients,
        calls_the_hook_with_reduced_gradients,
        runs_other_methods_as_a_forward,
        trains_after_inference_mode,
        runs_a_submodule_alone,
        slices_into_plain_modules,
        coexists_with_replicated_modules,
        ignores_the_given_parameters,
    ],
)
def test_fully_shard_behaves_as_pytorch_documents(claim: Callable[[], None]) -> None:
    """Oracle: the documentation of ``torch.distributed.fsdp.fully_shard``, and its values."""
    run_ranks(2, claim)


SHAPES = [((6, 3), 0), ((2,), 0), ((1, 5), 0), ((4, 8, 3), 1), ((4, 3, 8), 2), ((7,), 0), ((0, 3), 0)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_flat_layout_matches_torch_chunk_with_zero_padding_and_is_read_back(ranks: int) -> None:
    """Oracle: ``torch.chunk``, which DTensor uses for sharding; the tensors, some of which are not contiguous."""
    pieces, numel = lay_out([shape for shape, _ in SHAPES], [dim for _, dim in SHAPES], ranks)
    flat_RS = torch.full((ranks, numel), torch.nan)
    wholes = [torch.rand(shape[::-1]).permute(*range(len(shape))[::-1]) for shape, _ in SHAPES]
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
