"""Several FSDP roots in one process share their streams without changing results."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

from fsdptoys.patches import apply_patches, streams
from fsdptoys.patches.patch import parse_version
from fsdptoys.patches.streams import share_streams
from scripts.ranks import run_ranks
from tests.patches.roots import WIDTH, Gradients, make_root, streams_of, train_two

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

    torch.cpu.Stream, torch.cpu.stream = Stream, stream
    torch.cpu.current_stream().priority = 0
    return used


def same_streams(streams: list[Any], others: list[Any]) -> list[bool]:
    return [stream is other for stream, other in zip(streams, others, strict=True)]


def train_recorded(
    strategy: str, hybrid: bool, patched: bool, order: str
) -> tuple[int, list[Gradients], tuple[bool, bool]]:
    """Train two roots in an order.

    Returns:
        The number of streams that anything ran on; the gradients of both roots; whether their streams are the same, and
        the contexts that have the streams.
    """
    used = record_streams()
    roots, gradients = train_two(strategy, hybrid, patched, order)
    contexts = [root if strategy == "fsdp1" else root._get_fsdp_state()._comm_ctx for root in roots]
    same = all(same_streams(*(streams_of(strategy, root) for root in roots)))
    return len(used), gradients, (same, contexts[0] is contexts[1])


def forward_and_backward(root: nn.Module) -> None:
    root(torch.randn(4, WIDTH)).sum().backward()


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


old_gloo = pytest.mark.skipif(not FSDP2_HYBRID_ON_CPU, reason="gloo has no mean before torch 2.8")


@pytest.mark.parametrize("order", ["abAB", "abBA"])
@pytest.mark.parametrize(
    ("strategy", "hybrid", "streams_of_a_root"),
    [
        ("fsdp1", False, 3),
        ("fsdp1", True, 4),
        ("fsdp2", False, 3),  # its fourth is for the all-reduce of HSDP
        pytest.param("fsdp2", True, 4, marks=old_gloo),
    ],
)
def test_two_roots_share_streams_with_bitwise_equal_gradients(
    strategy: str, hybrid: bool, streams_of_a_root: int, order: str
) -> None:
    """Oracle: unpatched PyTorch, one root after the other; every gradient bitwise, and streams seen in use."""
    ranks = 4 if hybrid else 2
    alone = run_ranks(ranks, train_recorded, strategy, hybrid, False, "aAbB")
    used, (first, second), _ = alone[0]
    assert used == 2 * streams_of_a_root
    assert first and first != second
    shared = run_ranks(ranks, train_recorded, strategy, hybrid, True, order)
    assert shared == [(streams_of_a_root, gradients, (True, False)) for _, gradients, _ in alone]


def report_outcomes(strategy: str) -> list[str]:
    """Outcomes for one root, for two roots in an unsharded container, and for one root after another one has run."""
    streams._kept.clear()  # of earlier tests
    name = f"{strategy}_stream_reuse"
    with apply_patches([name], strategy) as patches:
        root, other = (make_root(strategy, seed) for seed in (1, 2))
        outcomes = [patches.outcomes(model)[name] for model in (root, nn.ModuleList([root, other]))]
        forward_and_backward(root)
        return [*outcomes, patches.outcomes(other)[name]]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_patch_without_a_second_root_is_reported_to_have_no_effect(strategy: str) -> None:
    """Oracle: streams are shared with other roots of the process only, present or earlier."""
    applied = f"applied: the {strategy.upper()} roots of a process share their streams"
    for outcomes in run_ranks(2, report_outcomes, strategy):
        assert outcomes == [f"{applied}, no effect in this run: one root", applied, applied]


def number_streams() -> list[list[int]]:
    """Return each root's streams as numbers; the first and the last root are not hybrid, the two between are."""
    record_streams()
    numbers: dict[Any, int] = {}
    of_roots = []
    with apply_patches(["fsdp1_stream_reuse"], "fsdp1"):
        for hybrid in (False, True, True, False):
            root: Any = make_root("fsdp1", hybrid=hybrid)
            forward_and_backward(root)
            assert hybrid == (root._all_reduce_stream is not root._default_stream)
            streams = [*streams_of("fsdp1", root), root._default_stream]
            of_roots.append([numbers.setdefault(stream, len(numbers)) for stream in streams])
    return of_roots


def test_plain_and_hybrid_roots_share_only_the_default_stream() -> None:
    """Oracle: written by hand: unshard, post-backward, pre-unshard, all-reduce, default; hybrid ones of priority -1."""
    plain, hybrid = [0, 1, 2, 3, 3], [4, 5, 6, 7, 3]
    assert run_ranks(4, number_streams) == [[plain, hybrid, hybrid, plain]] * 4


def run_in_turn() -> tuple[bool, bool]:
    """Return whether two patched runs share streams, and whether an unpatched run does."""
    original, streams = FSDPCommContext.lazy_init, []
    for names in (["fsdp2_stream_reuse"], [], ["fsdp2_stream_reuse"]):
        with apply_patches(names, "fsdp2"):
            root = make_root("fsdp2")
            forward_and_backward(root)
            streams.append(streams_of("fsdp2", root))
        assert FSDPCommContext.lazy_init is original
    first, unpatched, second = streams
    return all(same_streams(first, second)), any(same_streams(first, unpatched))


def test_later_patched_runs_of_a_process_share_its_streams() -> None:
    """Oracle: identity of the streams."""
    assert run_ranks(2, run_in_turn) == [(True, False)] * 2


def interleave_with_share_comm_ctx() -> None:
    first, second = make_root("fsdp2", 1), make_root("fsdp2", 2)
    torch.distributed.fsdp.share_comm_ctx([first, second])
    losses = [root(torch.randn(4, WIDTH)).square().sum() for root in (first, second)]
    with pytest.raises(IndexError, match="list index out of range"):
        for loss in losses:
            loss.backward()


@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "share_comm_ctx"), reason="came with torch 2.10")
def test_share_comm_ctx_breaks_interleaved_backwards() -> None:
    """Oracle: PyTorch's error; once this fails, PyTorch separates the prefetch orders and the patch is obsolete."""
    run_ranks(2, interleave_with_share_comm_ctx)
