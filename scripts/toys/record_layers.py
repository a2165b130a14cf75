"""Record single layers on two ranks of a CPU, for ``draw_toys``: attention over slices, and experts
that are spread.

Each case is one layer's forward and backward under ``torch.profiler``; the fastest of some steps is
kept. Functions of the toys that compute are wrapped in marks, and gloo's works record begin and end
in the profiler. A receive is recorded until its rank waits for it.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from fsdptoys.toys import cp, ep
from scripts.common.progress import unit
from scripts.toys.record_toys import MARK, EndOfBackward, FastestStep, Recorded

WARMUP_STEPS = 3
TIMED_STEPS = 300
LENGTH = 512
HEADS = 8
KV_HEADS = 4
HEAD_WIDTH = 64
"""Of whole sequences, one a step."""
TOKENS = 1024
WIDTH = 128
FFN_WIDTH = 256
EXPERTS = 8
TOP_K = 2
"""Tokens of a rank."""
ATTENTIONS = ("ulysses", "unbalanced_ring", "ring")
ROUTINGS = ("equally popular experts", "three of four rows to experts of rank 0")
SWAPPED = ("q", "k", "v", "result", "result", "v", "k", "q")
PASSED = ("K V", "K V", "gradients", "gradients")
SENT = ("counts", "rows", "results", "results", "rows")
"""Contents of the all-to-alls or receives of a step on two ranks, in their order."""


def record_layers() -> dict[str, Recorded]:
    """Record every case on this rank, one after the other. A collective."""
    recordings = {}
    for kind in ATTENTIONS:
        with unit(kind, announce=dist.get_rank() == 0):
            recordings[kind] = _record(
                _attention(kind), SWAPPED if kind == "ulysses" else PASSED
            )
    for routing in ROUTINGS:
        with unit(routing, announce=dist.get_rank() == 0):
            recordings[routing] = _record(_experts(routing), SENT)
    return recordings


def _attention(kind: str) -> Callable[[], None]:
    """Return a step of attention over a sequence cut into one part a rank."""
    group: Any = dist.group.WORLD
    length = LENGTH // group.size()
    torch.manual_seed(group.rank())
    q, k, v = (
        torch.randn(1, heads, length, HEAD_WIDTH).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    model = cp.ContextParallel(torch.nn.Identity(), group, kind)

    def step() -> None:
        turns = {"forward": 0, "backward": 0}

        def block(
            phase: str, function: Any, q: Tensor, *args: Any, **options: Any
        ) -> Any:
            source = (group.rank() - turns[phase]) % group.size()
            turns[phase] += 1
            if not q.numel():
                return function(q, *args, **options)
            with record_function(f"{MARK}{phase} K V of rank {source}"):
                return function(q, *args, **options)

        heads = functools.partial(_marked, cp.causal, "its heads")
        forward = functools.partial(block, "forward", cp.attend_block)
        backward = functools.partial(block, "backward", cp.block_gradients)
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(cp, "attend_block", forward))
            patches.enter_context(mock.patch.object(cp, "block_gradients", backward))
            out = (
                model.attend(q, k, v, attend=heads)
                if kind == "ulysses"
                else model.attend(q, k, v)
            )
            out.backward(torch.ones_like(out))

    return step


def _experts(routing: str) -> Callable[[], None]:
    """Return a step of spread experts; tokens choose by chance."""
    group: Any = dist.group.WORLD
    torch.manual_seed(group.rank())
    layer = ep.Experts(
        torch.randn(EXPERTS, 2 * FFN_WIDTH, WIDTH),
        torch.randn(EXPERTS, WIDTH, FFN_WIDTH),
        group,
    )
    hidden_ND = torch.randn(TOKENS, WIDTH).requires_grad_()
    chances_NE = torch.ones(TOKENS, EXPERTS)
    if routing == ROUTINGS[1]:
        half = EXPERTS // 2
        first_N = torch.rand(TOKENS, 2) < 0.75
        experts_NK = torch.randint(half, (TOKENS, TOP_K)) + half * ~first_N
    else:
        experts_NK = torch.multinomial(chances_NE, TOP_K)
    weights_NK = torch.rand(TOKENS, TOP_K).requires_grad_()
    compute = layer.compute

    def marked(rows_RD: Tensor, local_R: Tensor) -> Any:
        return _marked(compute, f"{len(rows_RD)} rows", rows_RD, local_R)

    def step() -> None:
        with mock.patch.object(layer, "compute", marked):
            out = layer(hidden_ND, experts_NK, weights_NK)
            out.backward(torch.ones_like(out))

    return step


def _marked(function: Any, label: str, *args: Any, **options: Any) -> Any:
    """Call a function in a mark, with another around its backward."""
    marks: list[Any] = []

    def begin(_: Tensor) -> None:
        marks.append(record_function(f"{MARK}backward {label}"))
        marks[0].__enter__()

    first = EndOfBackward.apply(args[0], lambda: marks[0].__exit__(None, None, None))
    with record_function(f"{MARK}forward {label}"):
        out = function(first, *args[1:], **options)
    out.register_hook(begin)
    return out


def _record(step: Callable[[], None], labels: tuple[str, ...]) -> Recorded:
    """Run a step some times; return the fastest on this rank."""
    for _ in range(WARMUP_STEPS):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(TIMED_STEPS):
            dist.barrier()  # all ranks begin together
            with record_function(f"{MARK}step {number}"):
                step()
    fastest = FastestStep(profiler)
    recorded = Recorded(seconds=fastest.seconds, computing=fastest.computing())
    received = [
        event
        for event in fastest.events
        if event["name"] in ("gloo:all_to_all", "gloo:recv")
    ]
    for event, label in zip(received, labels, strict=True):
        kind = "all_to_all" if event["name"] == "gloo:all_to_all" else "receive"
        recorded.collectives.append(fastest.bar(event, kind, label))
    return recorded
