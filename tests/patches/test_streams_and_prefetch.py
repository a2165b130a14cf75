"""Several FSDP roots in a process share their streams, and units inside a checkpointed block are
gathered in order."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPCommContext,
    FSDPParamGroup,
)
from torch.utils.checkpoint import checkpoint

from fsdptoys.patches import PATCHES, apply_patches, streams
from fsdptoys.patches.patch import parse_version
from fsdptoys.patches.streams import share_streams
from tests.harness.ranks import run_ranks
from tests.harness.roots import WIDTH, Gradients, make_root, streams_of, train_two


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

    torch.cpu.Stream = Stream
    torch.cpu.stream = stream
    torch.cpu.current_stream().priority = 0
    return used


def same_streams(streams: list[Any], others: list[Any]) -> list[bool]:
    return [stream is other for stream, other in zip(streams, others, strict=True)]


def train_recorded(
    strategy: str, hybrid: bool, patched: bool, order: str
) -> tuple[int, list[Gradients], tuple[bool, bool]]:
    """Train two roots in an order.

    Returns:
        The number of streams that anything ran on; the gradients of both roots; whether their
        streams are the same, and the contexts that have the streams.
    """
    used = record_streams()
    roots, gradients = train_two(strategy, hybrid, patched, order)
    contexts = [
        root if strategy == "fsdp1" else root._get_fsdp_state()._comm_ctx
        for root in roots
    ]
    same = all(same_streams(*(streams_of(strategy, root) for root in roots)))
    return len(used), gradients, (same, contexts[0] is contexts[1])


def forward_and_backward(root: nn.Module) -> None:
    root(torch.randn(4, WIDTH)).sum().backward()


def test_streams_without_a_readable_priority_are_shared() -> None:
    """Oracle: the first root's stream; torch_npu's streams raise RuntimeError on access to the
    priority."""

    class Stream(torch.cpu.Stream):
        @property
        def priority(self) -> int:
            raise RuntimeError("NPU dose not support Stream.get_priority() currently.")

    roots = [SimpleNamespace(stream=Stream()) for _ in range(2)]
    first = roots[0].stream
    for root in roots:
        share_streams(root, ["stream"], torch.device("cpu"))
    assert [root.stream for root in roots] == [first, first]


old_gloo = pytest.mark.skipif(
    parse_version(torch.__version__) < (2, 8), reason="HSDP asks gloo for a mean"
)


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
    """Oracle: unpatched PyTorch, one root after the other; every gradient bitwise, and streams seen
    in use."""
    ranks = 4 if hybrid else 2
    alone = run_ranks(ranks, train_recorded, strategy, hybrid, False, "aAbB")
    used, (first, second), _ = alone[0]
    assert used == 2 * streams_of_a_root
    assert first and first != second
    shared = run_ranks(ranks, train_recorded, strategy, hybrid, True, order)
    assert shared == [
        (streams_of_a_root, gradients, (True, False)) for _, gradients, _ in alone
    ]


def report_outcomes(strategy: str) -> list[str]:
    """Outcomes for one root, for two roots in an unsharded container, and for one root after
    another one has run."""
    streams._shared_streams.clear()  # of earlier tests
    name = f"{strategy}_stream_reuse"
    with apply_patches([name], strategy) as patches:
        root, other = (make_root(strategy, seed) for seed in (1, 2))
        outcomes = [
            patches.outcomes(model)[name]
            for model in (root, nn.ModuleList([root, other]))
        ]
        forward_and_backward(root)
        return [*outcomes, patches.outcomes(other)[name]]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_patch_without_a_second_root_is_reported_to_have_no_effect(
    strategy: str,
) -> None:
    """Oracle: streams are shared with other roots of the process only, present or earlier."""
    applied = f"applied: the {strategy.upper()} roots of a process share their streams"
    for outcomes in run_ranks(2, report_outcomes, strategy):
        assert outcomes == [
            f"{applied}, no effect in this run: one root",
            applied,
            applied,
        ]


def number_streams() -> list[list[int]]:
    """Return each root's streams as numbers; the first and the last root are not hybrid, the two
    between are."""
    record_streams()
    numbers: dict[Any, int] = {}
    of_roots = []
    with apply_patches(["fsdp1_stream_reuse"], "fsdp1"):
        for hybrid in (False, True, True, False):
            root: Any = make_root("fsdp1", hybrid=hybrid)
            forward_and_backward(root)
            assert hybrid == (root._all_reduce_stream is not root._default_stream)
            streams = [*streams_of("fsdp1", root), root._default_stream]
            of_roots.append(
                [numbers.setdefault(stream, len(numbers)) for stream in streams]
            )
    return of_roots


def test_plain_and_hybrid_roots_share_only_the_default_stream() -> None:
    """Oracle: written by hand: unshard, post-backward, pre-unshard, all-reduce, default; hybrid
    ones of priority -1."""
    plain = [0, 1, 2, 3, 3]
    hybrid = [4, 5, 6, 7, 3]
    assert run_ranks(4, number_streams) == [[plain, hybrid, hybrid, plain]] * 4


def run_in_turn() -> tuple[bool, bool]:
    """Return whether two patched runs share streams, and whether an unpatched run does."""
    original = FSDPCommContext.lazy_init
    streams = []
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
    first = make_root("fsdp2", 1)
    second = make_root("fsdp2", 2)
    torch.distributed.fsdp.share_comm_ctx([first, second])
    losses = [root(torch.randn(4, WIDTH)).square().sum() for root in (first, second)]
    with pytest.raises(IndexError, match="list index out of range"):
        for loss in losses:
            loss.backward()


@pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "share_comm_ctx"), reason="came with torch 2.10"
)
def test_share_comm_ctx_breaks_interleaved_backwards() -> None:
    """Oracle: PyTorch's error; once this fails, PyTorch separates the prefetch orders and the patch
    is obsolete."""
    run_ranks(2, interleave_with_share_comm_ctx)


PREFETCH = PATCHES["fsdp2_backward_prefetch"]


class Block(nn.Module):
    """Weights of its own, and two units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [batch, WIDTH] to the same shape."""
        hidden_states = hidden_states + self.attn(self.norm(hidden_states)).relu()
        return hidden_states + self.mlp(hidden_states).relu()


def make_model() -> nn.Module:
    """Two checkpointed blocks, ``0`` and ``1``, and a head, ``2``."""
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    head = nn.Linear(WIDTH, 3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False
        )
        for unit in (block.attn, block.mlp, block):
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(head, mesh=mesh, reshard_after_forward=True)
    return fully_shard(nn.Sequential(*blocks, head), mesh=mesh)


def post_forward_until_2_9(self: Any, module: nn.Module, args: Any, output: Any) -> Any:
    """The hook of torch 2.9 after a unit's forward, without its logging."""
    self.reshard()
    self._record_post_forward()
    self._training_state = TrainingState.IDLE
    return output


def backward_gathers(
    without_fix: bool, patched: bool
) -> tuple[list[str], list[list[float]]]:
    """Names of the units gathered in the backward, in order, and the gradients."""
    if without_fix:
        FSDPParamGroup.post_forward = post_forward_until_2_9
    if patched:
        PREFETCH.install()
    gathered: list[str] = []
    unshard = FSDPParamGroup.unshard

    def noted_unshard(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self._all_gather_result
        unshard(self, *args, **kwargs)
        if before is None and self._all_gather_result is not None:
            gathered.append(self._module_fqn)

    FSDPParamGroup.unshard = noted_unshard
    model = make_model()
    torch.manual_seed(dist.get_rank())
    loss = model(torch.randn(4, WIDTH)).square().sum()
    assert gathered == ["0", "0.attn", "0.mlp", "1", "1.attn", "1.mlp", "2"]
    gathered.clear()
    loss.backward()
    return gathered, [
        param.grad.to_local().flatten().tolist() for param in model.parameters()
    ]


IN_ORDER = ["2", "1", "1.mlp", "1.attn", "0", "0.mlp", "0.attn"]
DISTURBED = [
    "2",
    "1",
    "1.mlp",
    "1.attn",
    "1.mlp",
    "1.attn",
    "2",
    "0",
    "0.mlp",
    "0.attn",
    "0.mlp",
    "0.attn",
    "1.mlp",
]
"""Every inner unit twice, and ``2`` and ``1.mlp`` once more after their backward was over."""


@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize("without_fix", [False, True], ids=["installed", "without_fix"])
def test_recomputation_keeps_the_prefetch_order_if_patched_or_fixed_upstream(
    without_fix: bool, patched: bool
) -> None:
    """Oracle: the reverse of the forward's order; the patch's range names the versions without the
    fix.

    There this shows the patch mending PyTorch itself; under later versions, PyTorch without its own
    fix.
    """
    lacks_fix = without_fix or PREFETCH.reason_against(torch.__version__) is None
    expected = DISTURBED if lacks_fix and not patched else IN_ORDER
    changed = run_ranks(2, backward_gathers, without_fix, patched)
    stock = run_ranks(2, backward_gathers, False, False)
    for rank in range(2):
        gathered, grads = changed[rank]
        assert gathered == expected
        assert grads and grads == stock[rank][1]
