"""The FSDP to read is PyTorch's: the same bits and state dicts, and what is left out is refused."""

import copy
import functools
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import Shard as ShardPlacement

from fsdptoys.toys.fsdp.initialise import reset
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
    train,
    whole,
)

BF16 = {"param_dtype": torch.bfloat16}
ACCUMULATE = Case(before=lambda model, index, count: model.set_requires_gradient_sync(index == count - 1))


def freeze(model: Model) -> None:
    model.blocks[1].requires_grad_(False)
    model.norm.weight.requires_grad_(False)


def recompute(reentrant: bool) -> Callable[[Model], None]:
    def prepare(model: Model) -> None:
        for block in model.blocks:
            block.recomputes = reentrant  # type: ignore[union-attr,assignment]

    return prepare


def prefetch(model: Any) -> None:
    blocks = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[2].set_modules_to_backward_prefetch(blocks[1::-1])


def last(model: Any, index: int, count: int) -> None:
    model.set_is_last_backward(index == count - 1)
    model.set_reshard_after_backward(index == count - 1)
    model.set_requires_gradient_sync(index == count - 1)


def wide(param: nn.Parameter) -> ShardPlacement | None:
    """Along the second dim where it divides."""
    return Shard(1) if param.ndim == 2 and param.shape[1] % dist.get_world_size() == 0 else None


CASES: dict[str, Case] = {
    "by default": Case(clips=True),
    "without resharding": Case(options={"reshard_after_forward": False}),
    "root resharded": Case(told=lambda model: model.set_reshard_after_forward(True)),
    "bf16": Case(options={"mp_policy": BF16}),
    "bf16 reduced in float32": Case(options={"mp_policy": {**BF16, "reduce_dtype": torch.float32}}),
    "reduced in float64": Case(options={"mp_policy": {"reduce_dtype": torch.float64}}),
    "reduced in float16": Case(options={"mp_policy": {"reduce_dtype": torch.float16}}),
    "outputs cast": Case(shard=shard_groups, options={"mp_policy": {**BF16, "output_dtype": torch.float32}}),
    "accumulation": ACCUMULATE,
    "accumulation in float32": Case(
        options={"mp_policy": {**BF16, "reduce_dtype": torch.float32}}, before=ACCUMULATE.before
    ),
    "accumulation without freeing": Case(before=last, micro_batches=3),
    "norm and head together": Case(shard=shard_groups),
    "head by chunks": Case(shard=shard_groups, model={"chunks": 3}),
    "head by chunks, freed": Case(
        shard=shard_groups, model={"chunks": 3}, told=lambda model: model.norm.set_reshard_after_forward(True)
    ),
    "tied weights": Case(shard=shard_tied, model={"tied": True}),
    "frozen parameters": Case(prepare=freeze),
    "second dim": Case(options={"shard_placement_fn": wide}, model={"dim": 16}),
    "recomputing inside": Case(prepare=recompute(False)),
    "recomputing inside, reentrant": Case(prepare=recompute(True)),
    "recomputing around": Case(model={"around": False}),
    "recomputing around, reentrant": Case(model={"around": True}),
    "blocks used twice": Case(model={"twice": True}),
    "two forwards, one backward": Case(together=True),
    "prefetch lists": Case(told=prefetch),
    "look-up not gathered": Case(shard=shard_groups, told=lambda model: model.embed.set_unshard_in_backward(False)),
    "more reductions on their way": Case(told=lambda model: model.set_reduce_scatter_max_input_buffers(3)),
    "more ranks than rows": Case(model={"dim": 1}),
}
"""Way to train → what PyTorch's implementation does with the same arguments."""

CASES_OF_FOUR = {
    "by default": Case(clips=True),
    "reshard to two ranks": Case(options={"reshard_after_forward": 2}),
    "HSDP": Case(axes=(2, 2), clips=True),
    "HSDP, bf16 reduced in float32": Case(axes=(2, 2), options={"mp_policy": {**BF16, "reduce_dtype": torch.float32}}),
    "HSDP, replicas last": Case(
        axes=(2, 2), before=lambda model, index, count: model.set_requires_all_reduce(index == count - 1)
    ),
    "HSDP of whole replicas": Case(axes=(4, 1)),
    "second dim": Case(options={"shard_placement_fn": wide}, model={"dim": 16}),
    "more ranks than rows": Case(model={"dim": 2}),
}


def matches_native(case: Case) -> None:
    ours, theirs = train(TOY, case), train(NATIVE, case)
    assert ours[0] == theirs[0]
    assert {name for name, value in theirs[1].items() if not torch.equal(value, ours[1][name])} == set()


Claims = Mapping[str, Callable[[], None]]


def check(claims: Claims) -> dict[str, str]:
    """Try every claim; what went wrong with each that does not hold, on this rank."""
    warnings.filterwarnings("ignore")
    failures: dict[str, str] = {}
    for name, claim in claims.items():
        try:
            claim()
        except Exception:
            failures[name] = traceback.format_exc(-4)
    return failures


def assert_hold(ranks: int, claims: Claims) -> None:
    told = run_ranks(ranks, check, claims)
    assert told == [{}] * ranks, "\n".join(f"{name}: {text}" for each in told for name, text in each.items())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_matches_pytorch_bitwise(ranks: int) -> None:
    """Oracle: PyTorch's ``fully_shard`` with the same arguments; losses, norms and parameters after some steps.

    On one rank a part of what two do; on four what needs four.
    """
    cases = CASES_OF_FOUR if ranks == 4 else CASES
    if ranks == 1:
        cases = {name: CASES[name] for name in ("by default", "accumulation in float32", "norm and head together")}
    claims = {name: functools.partial(matches_native, case) for name, case in cases.items()}
    if ranks == 4:
        claims["second dim, resharded to two ranks"] = functools.partial(reshards_other_dims_to_fewer_ranks)
    assert_hold(ranks, claims)


# What a user can see of it, on two ranks.


def shows_sharded_parameters_but_in_the_forward() -> None:
    seen: list[bool] = []
    model = build(TOY, Case())
    block = model.blocks[0]
    block.up.register_forward_hook(lambda module, *_: seen.append(isinstance(module.weight, DTensor)))
    assert type(block).__name__ == "FSDPBlock" and isinstance(block, TOY.FSDPModule) and isinstance(block, nn.Module)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    backward(model, batches(1)[0])
    assert seen == [False]
    assert all(isinstance(param, DTensor) and isinstance(param.grad, DTensor) for param in model.parameters())


def keeps_one_storage_for_whole_parameters() -> None:
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


def holds_its_share_of_parameters_and_gradients() -> None:
    model, ranks = build(TOY, Case()), dist.get_world_size()
    backward(model, batches(1)[0])
    full = Model()
    rows = {name: (-(-param.shape[0] // ranks), param[0].numel()) for name, param in full.named_parameters()}
    padded = sum(4 * count * elements for count, elements in rows.values())
    for tensors in (list(model.parameters()), [param.grad for param in model.parameters()]):
        storages = {local_tensor(each).untyped_storage().data_ptr(): local_tensor(each) for each in tensors}
        assert len(storages) == 4  # one a unit
        assert sum(each.untyped_storage().nbytes() for each in storages.values()) == padded


def unshards_beside_other_work() -> None:
    model = build(TOY, Case())
    handle = model.blocks[0].unshard(async_op=True)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    handle.wait()
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    model.blocks[0].reshard()
    assert torch.equal(whole(model)["blocks.0.up.weight"], build_plain()["blocks.0.up.weight"])


def build_plain() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return Model().state_dict()


def trace(library: Any, case: Case, steps: int) -> list[str]:
    """What happens in the last of some steps: beginnings of blocks' forwards and of collectives."""
    model, events = build(library, case), []  # type: ignore[var-annotated]
    for index, block in enumerate(model.blocks):
        block.norm.register_forward_hook(lambda *_, index=index: events.append(f"forward {index}"))
        block.norm.register_full_backward_hook(lambda *_, index=index: events.append(f"backward {index}"))
    names = {"all_gather_single": "gather", "reduce_scatter_single": "reduce"}
    names = (
        names
        if hasattr(dist, "all_gather_single")
        else {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce"}
    )
    originals = {name: getattr(dist, name) for name in names}
    for name, word in names.items():

        def noted(*args: Any, name: str = name, word: str = word, **kwargs: Any) -> Any:
            events.append(word)
            return originals[name](*args, **kwargs)

        setattr(dist, name, noted)
    try:
        for tokens_BT in batches(steps):
            events.clear()
            backward(model, tokens_BT)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return events


def gathers_the_next_unit_before_this_one_computes() -> None:
    # The root, whose unit has embedding, norm and head, is not freed after the forward.
    forward = ["gather", "gather", "gather", "forward 0", "gather", "forward 1", "forward 2"]
    backward_ = ["gather", "gather", "backward 2", "reduce", "gather", "backward 1", "reduce", "backward 0", "reduce"]
    assert trace(TOY, Case(), 2) == [*forward, *backward_, "reduce"]


def gathers_as_often_as_pytorch() -> None:
    for case in (Case(), Case(shard=shard_groups), Case(options={"reshard_after_forward": False})):
        ours, theirs = trace(TOY, case, 3), trace(NATIVE, case, 3)
        assert [ours.count(word) for word in ("gather", "reduce")] == [
            theirs.count(word) for word in ("gather", "reduce")
        ]


def forgets_a_wrong_guess() -> None:
    model, tokens_BT = build(TOY, Case()), batches(1)[0]
    backward(model, tokens_BT)
    removed = model.blocks[1]
    del model.blocks[1]
    backward(model, tokens_BT)
    assert isinstance(removed.up.weight, DTensor)
    removed.unshard()
    assert not isinstance(removed.up.weight, DTensor)


def begins_anew_after_an_exception() -> None:
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


def divides_by_what_it_is_told() -> None:
    grads = []
    for factor in (None, 8.0):
        model = build(TOY, Case())
        for module in model.modules():
            if isinstance(module, TOY.FSDPModule) and factor is not None:
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)
        backward(model, batches(1)[0])
        grads.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(torch.equal(mean * dist.get_world_size(), part * 8) for mean, part in zip(*grads, strict=True))


def calls_the_hook_with_reduced_gradients() -> None:
    model, seen = build(TOY, Case()), []
    model.blocks[0].set_all_reduce_hook(lambda flat: seen.append(flat.clone()))
    backward(model, batches(1)[0])
    grads = [local_tensor(param.grad).flatten() for param in model.blocks[0].parameters()]
    assert len(seen) == 1 and seen[0].sum() == pytest.approx(2 * sum(grad.sum().item() for grad in grads), rel=1e-5)


def reduces_zeros_where_only_one_rank_used_a_unit() -> None:
    model, (tokens_BT,) = build(TOY, Case()), batches(1)
    model.set_reduce_scatter_unused_params(True)
    block = model.blocks[1]
    forward = block.forward
    block.forward = forward if dist.get_rank() == 0 else lambda hidden_BTD: 1.0 * hidden_BTD
    backward(model, tokens_BT)
    grads = [param.grad.full_tensor() for param in block.parameters()]
    assert all(grad.abs().sum() > 0 for grad in grads)


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


def runs_a_part_by_itself() -> None:
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


def ignores_what_it_is_told_to() -> None:
    model = Model()
    kept = set(model.blocks[0].norm.parameters())
    TOY.fully_shard(model, mesh=mesh_of(), ignored_params=kept)
    backward(model, batches(1)[0])
    assert {param for param in model.parameters() if not isinstance(param, DTensor)} == kept
    assert all(param.grad is not None for param in kept)


def exchanges_state_dicts_with_pytorch() -> None:
    for source, target in ((TOY, NATIVE), (NATIVE, TOY)):
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
    for source, target in ((TOY, NATIVE), (NATIVE, TOY)):
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
        assert all(
            torch.equal(old, new) for old, new in zip(*(whole(m).values() for m in (trained, fresh)), strict=True)
        )


def is_made_on_the_meta_device() -> None:
    for shard in (shard_blocks, shard_groups):
        with torch.device("meta"):
            model = Model()
        shard(TOY, model, mesh_of())
        with pytest.raises(RuntimeError, match="materialized from meta"):
            model(batches(1)[0])
        with torch.device("meta"):
            model = Model()
        shard(TOY, model, mesh_of())
        model.to_empty(device="cpu")
        with torch.no_grad():
            for param, values in zip(model.parameters(), build(TOY, Case(shard=shard)).parameters(), strict=True):
                param.copy_(values)
        assert backward(model, batches(1)[0]) == backward(build(TOY, Case(shard=shard)), batches(1)[0])


def draws_the_values_of_an_ordinary_construction() -> None:
    # In all forms of units; a weight that is shared is that of the first module.
    for shard, tied in ((shard_blocks, False), (shard_groups, False), (shard_tied, True)):
        expected = build(TOY, Case(shard=shard, model={"tied": tied}))
        with torch.device("meta"):
            model = Model(tied=tied)
        shard(TOY, model, mesh_of())
        held: list[tuple[int, int]] = []

        def draw(module: nn.Module, model: Model = model, held: list[tuple[int, int]] = held) -> None:
            plain = [param for param in model.parameters() if not isinstance(param, DTensor)]
            held.append((len(plain), len(list(module.parameters(recurse=False)))))
            reset(module)

        torch.manual_seed(0)
        TOY.initialise(model, "cpu", draw)
        assert {name for name, value in whole(expected).items() if not torch.equal(value, whole(model)[name])} == set()
        assert all(whole_ones == own for whole_ones, own in held)
        assert torch.equal(backward(model, batches(1)[0]), backward(expected, batches(1)[0]))


def changes_its_number_format_between_steps() -> None:
    # PyTorch's can before its first step.
    (tokens_BT,) = batches(1)
    expected = [
        backward(build(library, Case(told=lambda model: model.double())), tokens_BT) for library in (TOY, NATIVE)
    ]
    model = build(TOY, Case())
    backward(model, tokens_BT)
    model.double()
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    assert expected == [backward(model, tokens_BT)] * 2


def refuses_what_it_leaves_out_by_name() -> None:
    mesh, policy = mesh_of(), NATIVE.CPUOffloadPolicy(pin_memory=False)
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())
    refusals: list[tuple[str, type[Exception], Callable[[], Any]]] = [
        ("CPUOffloadPolicy", NotImplementedError, lambda: TOY.fully_shard(Model(), mesh=mesh, offload_policy=policy)),
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
        ("only be applied", AssertionError, lambda: TOY.fully_shard(TOY.fully_shard(nn.Linear(2, 2)))),
        ("DTensor", NotImplementedError, lambda: TOY.fully_shard(NATIVE.fully_shard(nn.Linear(2, 2)))),
    ]
    sharded = build(TOY, Case())
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
        ("positive", ValueError, lambda: sharded.set_reduce_scatter_max_input_buffers(0)),
        ("int", TypeError, lambda: sharded.set_reduce_scatter_max_input_buffers(True)),
        ("bool", ValueError, lambda: sharded.set_reshard_after_forward(2)),
        ("FSDPModule", ValueError, lambda: sharded.set_modules_to_forward_prefetch([nn.Linear(2, 2)])),
        ("no_such", ValueError, lambda: TOY.register_fsdp_forward_method(sharded, "no_such")),
    ]
    for match, kind, call in refusals:
        with pytest.raises(kind, match=match):
            call()


def reshards_other_dims_to_fewer_ranks() -> None:
    # PyTorch's cannot.
    outcomes = [
        train(TOY, Case(options={"shard_placement_fn": wide, "reshard_after_forward": choice}, model={"dim": 16}))
        for choice in (True, 2)
    ]
    assert outcomes[0][0] == outcomes[1][0]


CLAIMS = [
    shows_sharded_parameters_but_in_the_forward,
    keeps_one_storage_for_whole_parameters,
    holds_its_share_of_parameters_and_gradients,
    unshards_beside_other_work,
    gathers_the_next_unit_before_this_one_computes,
    gathers_as_often_as_pytorch,
    forgets_a_wrong_guess,
    begins_anew_after_an_exception,
    calls_hooks_of_accumulated_gradients,
    divides_by_what_it_is_told,
    calls_the_hook_with_reduced_gradients,
    reduces_zeros_where_only_one_rank_used_a_unit,
    runs_other_methods_as_a_forward,
    trains_after_inference_mode,
    runs_a_part_by_itself,
    slices_into_plain_modules,
    ignores_what_it_is_told_to,
    exchanges_state_dicts_with_pytorch,
    exchanges_checkpoints_with_pytorch,
    is_made_on_the_meta_device,
    draws_the_values_of_an_ordinary_construction,
    changes_its_number_format_between_steps,
    refuses_what_it_leaves_out_by_name,
]


def test_what_a_user_sees_is_what_pytorch_documents() -> None:
    """Oracle: the documentation of ``torch.distributed.fsdp.fully_shard``; its values where values are compared."""
    assert_hold(2, {claim.__name__: claim for claim in CLAIMS})
