"""Several FSDP roots in one process share their streams without changing results."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from fsdptoys.patches import apply_patches, streams
from fsdptoys.patches.fsdp1_stream_reuse import STREAMS as FSDP1_STREAMS
from fsdptoys.patches.fsdp2_stream_reuse import STREAMS as FSDP2_STREAMS
from fsdptoys.patches.patch import parse_version
from fsdptoys.patches.streams import share_streams
from scripts.ranks import run_ranks

WIDTH = 6
# HSDP asks gloo for a mean, which it cannot give before 2.8.
FSDP2_HYBRID_ON_CPU = parse_version(torch.__version__) >= (2, 8)


def record_streams() -> set[Any]:
    """Give the CPU's streams a priority, and return the set of streams in use from now on.

    On an accelerator the default stream and that of the all-reduce have the same priority, 0.
    """

    class Stream(torch.cpu.Stream):
        def __init__(self, priority: int = 0) -> None:
            self.priority = priority

    used: set[Any] = set()
    run_on = torch.cpu.stream

    def stream(stream: Any) -> Any:
        used.add(stream)
        return run_on(stream)

    torch.cpu.Stream, torch.cpu.stream = Stream, stream  # type: ignore[misc,assignment]
    torch.cpu.current_stream().priority = 0  # type: ignore[attr-defined]
    return used


def make_root(strategy: str, seed: int, hybrid: bool = False) -> nn.Module:
    """Three blocks, each a unit, and the root around them."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    ranks = dist.get_world_size()
    mesh = init_device_mesh(
        "cpu", (ranks // 2, 2) if hybrid else (ranks,), mesh_dim_names=("replicate", "shard") if hybrid else ("shard",)
    )
    if strategy == "fsdp2":
        for block in blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(nn.Sequential(*blocks), mesh=mesh)
    options: dict[str, Any] = {
        "device_mesh": mesh,
        "device_id": torch.device("cpu"),
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
        "use_orig_params": True,
    }
    return FullyShardedDataParallel(
        nn.Sequential(*[FullyShardedDataParallel(block, **options) for block in blocks]), **options
    )


def gradients(root: nn.Module) -> list[list[float]]:
    local = [param.grad for param in root.parameters() if param.grad is not None]
    return [(grad.to_local() if hasattr(grad, "to_local") else grad).flatten().tolist() for grad in local]


def own_streams(strategy: str, root: Any) -> list[Any]:
    """A root's streams, in the order of the patch's list, after its first forward."""
    if strategy == "fsdp1":
        return [getattr(root, name) for name in FSDP1_STREAMS]
    return [getattr(root._get_fsdp_state()._comm_ctx, name) for name in FSDP2_STREAMS]


def step(strategy: str, hybrid: bool, patched: bool, order: str) -> tuple[int, list[list[list[float]]], bool, bool]:
    """Two steps of two roots, with accumulation.

    Args:
        strategy: ``fsdp1`` or ``fsdp2``.
        hybrid: whether the roots replicate.
        patched: whether they share their streams.
        order: in which the roots ``a`` and ``b`` go forward (small letters) and backward (capitals).

    Returns:
        The number of streams that anything ran on; the gradients of both; whether their streams are the same; whether
        the contexts that hold the streams are.
    """
    used = record_streams()
    with apply_patches([f"{strategy}_stream_reuse"] if patched else [], strategy):
        roots = {"a": make_root(strategy, 1, hybrid), "b": make_root(strategy, 2, hybrid)}
        torch.manual_seed(dist.get_rank())
        batches = {name: torch.randn(2, 4, WIDTH) for name in roots}
        losses = {}
        for index in range(2):
            for letter in order:
                if letter in roots:
                    losses[letter] = roots[letter](batches[letter][index]).square().sum()
                else:
                    losses[letter.lower()].backward()
        first, second = (own_streams(strategy, root) for root in roots.values())
        contexts = [root if strategy == "fsdp1" else root._get_fsdp_state()._comm_ctx for root in roots.values()]
        same = all(one is other for one, other in zip(first, second, strict=True))
        return len(used), [gradients(root) for root in roots.values()], same, contexts[0] is contexts[1]


def test_streams_without_a_readable_priority_are_shared() -> None:
    """Oracle: the first root's stream; torch_npu's streams raise RuntimeError on access to the priority."""

    class Stream(torch.cpu.Stream):
        @property
        def priority(self) -> int:
            raise RuntimeError("NPU dose not support Stream.get_priority() currently.")

    roots = [SimpleNamespace(stream=Stream()) for _ in range(2)]
    first = roots[0].stream
    for root in roots:
        share_streams(root, ["stream"], torch.device("cpu"))
    assert [root.stream for root in roots] == [first, first]


@pytest.mark.parametrize(
    ("strategy", "hybrid", "streams_of_a_root"),
    [
        ("fsdp1", False, 3),
        ("fsdp1", True, 4),
        ("fsdp2", False, 3),  # its fourth is for the all-reduce of HSDP
        pytest.param(
            "fsdp2",
            True,
            4,
            marks=pytest.mark.skipif(not FSDP2_HYBRID_ON_CPU, reason="gloo has no mean before torch 2.8"),
        ),
    ],
)
def test_two_roots_share_streams_with_bitwise_equal_gradients(
    strategy: str, hybrid: bool, streams_of_a_root: int
) -> None:
    """Oracle: unpatched PyTorch, one root after the other; every gradient bitwise, and streams seen in use."""
    ranks = 4 if hybrid else 2
    alone = run_ranks(ranks, step, strategy, hybrid, False, "aAbB")
    assert alone[0][0] == 2 * streams_of_a_root
    assert alone[0][1][0] and alone[0][1][0] != alone[0][1][1]
    for order in ("abAB", "abBA"):
        shared = run_ranks(ranks, step, strategy, hybrid, True, order)
        for rank in range(ranks):
            used, grads, same_streams, same_context = shared[rank]
            assert used == streams_of_a_root
            assert grads == alone[rank][1]
            assert same_streams and not same_context


def outcomes(strategy: str) -> list[str]:
    """Outcomes for one root, for two roots in an unsharded container, and for one root after another one has run."""
    streams._kept.clear()  # of earlier tests
    name = f"{strategy}_stream_reuse"
    with apply_patches([name], strategy) as patches:
        root, other = (make_root(strategy, seed) for seed in (1, 2))
        found = [patches.outcomes(model)[name] for model in (root, nn.ModuleList([root, other]))]
        root(torch.randn(4, WIDTH)).sum().backward()
        return [*found, patches.outcomes(other)[name]]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_patch_without_a_second_root_is_reported_to_have_no_effect(strategy: str) -> None:
    """Oracle: streams are shared with other roots of the process only, present or earlier."""
    applied = f"applied: the {strategy.upper()} roots of a process share their streams"
    for found in run_ranks(2, outcomes, strategy):
        assert found == [f"{applied}, no effect in this run: one root", applied, applied]


def mixed_roots() -> list[list[int]]:
    """For each root, its streams as numbers; the first and the last root are not hybrid, the two between are."""
    record_streams()
    numbers: dict[Any, int] = {}
    found = []
    with apply_patches(["fsdp1_stream_reuse"], "fsdp1"):
        for hybrid in (False, True, True, False):
            root = make_root("fsdp1", 1, hybrid)
            root(torch.randn(4, WIDTH)).sum().backward()
            streams = [*own_streams("fsdp1", root), root._default_stream]
            assert hybrid == (root._all_reduce_stream is not root._default_stream)
            found.append([numbers.setdefault(stream, len(numbers)) for stream in streams])
    return found


def test_plain_and_hybrid_roots_share_only_the_default_stream() -> None:
    """Oracle: written by hand: unshard, post-backward, pre-unshard, all-reduce, default; hybrid ones of priority -1."""
    plain, hybrid = [0, 1, 2, 3, 3], [4, 5, 6, 7, 3]
    assert run_ranks(4, mixed_roots) == [[plain, hybrid, hybrid, plain]] * 4


def runs_in_turn() -> tuple[bool, bool, bool]:
    """Whether two patched runs share streams, whether an unpatched run does, and whether each undid its patch."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

    original, streams, undone = FSDPCommContext.lazy_init, [], True
    for names in (["fsdp2_stream_reuse"], [], ["fsdp2_stream_reuse"]):
        with apply_patches(names, "fsdp2"):
            root = make_root("fsdp2", 1)
            root(torch.randn(4, WIDTH)).sum().backward()
            streams.append(own_streams("fsdp2", root))
        undone = undone and FSDPCommContext.lazy_init is original
    first, unpatched, second = streams
    return (
        all(one is other for one, other in zip(first, second, strict=True)),
        any(one is other for one, other in zip(first, unpatched, strict=True)),
        undone,
    )


def test_later_patched_runs_of_a_process_share_its_streams() -> None:
    """Oracle: identity of the streams."""
    assert run_ranks(2, runs_in_turn) == [(True, False, True)] * 2


def interleave_with_share_comm_ctx() -> str:
    from torch.distributed.fsdp import share_comm_ctx

    first, second = make_root("fsdp2", 1), make_root("fsdp2", 2)
    share_comm_ctx([first, second])  # type: ignore[list-item]
    losses = [root(torch.randn(4, WIDTH)).square().sum() for root in (first, second)]
    try:
        for loss in losses:
            loss.backward()
    except IndexError as error:
        return str(error)
    return ""


@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "share_comm_ctx"), reason="came with torch 2.10")
def test_share_comm_ctx_breaks_interleaved_backwards() -> None:
    """Oracle: PyTorch's error; once this fails, PyTorch separates the prefetch orders and the patch is obsolete."""
    assert run_ranks(2, interleave_with_share_comm_ctx) == ["list index out of range"] * 2
