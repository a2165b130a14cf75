"""The toy FSDP's parameters: state dicts, initialization, dtypes, tensor parallelism; and the options it refuses."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdptoys.toys.fsdp.initialize import reset
from fsdptoys.toys.fsdp.internals import local_tensor
from fsdptoys.toys.fsdp.policies import check_offload
from scripts.ranks import run_ranks
from tests.toys.fsdp_models import (
    NATIVE,
    TOY,
    Case,
    Model,
    assert_matches_native,
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


REFUSALS_OF_TENSORS: dict[str, Callable[[Any], object]] = {
    "other axes": lambda layer: TOY.fully_shard(layer, mesh=mesh_of((2, 2))[TENSOR]),
    "as an int": lambda layer: TOY.fully_shard(layer, mesh=mesh_of((4, 1))[DATA], reshard_after_forward=2),
    "reset_parameters": lambda layer: TOY.initialize(TOY.fully_shard(layer, mesh=mesh_of((2, 2))[DATA]), "cpu"),
}


def refuses_unsupported_options_by_name() -> None:
    for match, call in REFUSALS_OF_TENSORS.items():
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


def gather_extended() -> None:
    """Give a local tensor PyTorch's all-gather extension between two gathers."""
    layer = shard(nn.Linear(2, 2))
    layer.unshard()
    layer.reshard()
    layer.weight._local_tensor.fsdp_pre_all_gather = Extended.fsdp_pre_all_gather
    layer.unshard()


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
    ("fsdp_pre_all_gather of 'weight'", NotImplementedError, lambda: shard(Traveling())),
    ("fsdp_pre_all_gather of 'weight'", NotImplementedError, gather_extended),
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


@pytest.mark.parametrize(
    "accepted",
    [call("_set_unshard_async_op", True), lambda: shard(offload_policy=TOY.OffloadPolicy())],
    ids=["asynchronous unshards", "no offload"],
)
def test_default_values_of_refused_options_are_accepted(accepted: Callable[[], object]) -> None:
    """Oracle: PyTorch's defaults, whose other values are refused."""
    run_ranks(2, lambda: accepted() and None)
