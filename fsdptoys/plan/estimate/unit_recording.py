"""Record the forward and backward of a unit on the meta device, as the pieces of a segment."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdptoys.device.profile import AttentionKind
from fsdptoys.memory.activation_offload import MIN_BYTES
from fsdptoys.metrics.prediction import Category
from fsdptoys.models import choose_ops, npu_kernels, use_ops
from fsdptoys.parallel.context import ContextForm
from fsdptoys.plan.simulator.events import Alloc, Free, Mark, Trace
from fsdptoys.plan.trace.fake_device import replaced
from fsdptoys.plan.trace.fake_exchanges import fake_exchanges
from fsdptoys.plan.trace.fake_kernels import replace_kernels
from fsdptoys.plan.trace.op_costs import fuses_rms_norm
from fsdptoys.plan.trace.op_recorder import OpRecorder

from .segment import GRADIENT, STAGE, Piece, Segment, join_kernels


class _End(torch.autograd.Function):
    """The beginning or end of a unit: an output of another shape, and a gradient of the input's,
    that share nothing."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        ctx.shape = tensor.shape
        ctx.dtype = tensor.dtype
        return tensor.new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].new_empty(ctx.shape, dtype=ctx.dtype), None, None


@dataclass(frozen=True)
class UnitInputs:
    """Sizes of a unit's input, and what decides on its operators."""

    attention: AttentionKind
    kernels: tuple[tuple[str, str], ...]  # Operation and its implementation
    dtype: torch.dtype
    batch: int
    length: int  # Of full sequences
    context: tuple[ContextForm, int]  # Form, and ranks that share a sequence
    imbalance: float  # Of the ranks' experts
    features: int  # Ranks that split features, and the tokens between layers

    @property
    def sequence(self) -> int:
        """Tokens of this rank's part of a sequence in attention and loss."""
        return self.length // self.context[1]

    @property
    def part(self) -> int:
        """Tokens of this rank between layers."""
        return self.sequence // self.features


@contextmanager
def kernels_of(attention: AttentionKind) -> Iterator[None]:
    """Use a device's kernels on the meta device."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **_: Any
    ) -> Tensor:
        shared = query.shape[1] // key.shape[1]
        if not torch.backends.cuda.flash_sdp_enabled():
            math = torch.ops.aten._scaled_dot_product_attention_math
            plain: Tensor = math(
                query, key, value, is_causal=is_causal, enable_gqa=shared > 1
            )[0]
            return plain
        if shared > 1 and not fuses_rms_norm():
            # torch 2.7's operator has no shared heads in its gradient.
            key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal
        )[0]
        return out

    fused = (
        [(F, "scaled_dot_product_attention", attend)]
        if attention is AttentionKind.cpu
        else []
    )
    with replace_kernels(attention), replaced(*fused):
        yield


class _Ends(NamedTuple):
    """Blocks of what a unit receives and returns; 0 if there is none."""

    input: int
    output: int
    output_gradient: int
    input_gradient: int

    @property
    def handed_on(self) -> set[int]:
        """Blocks that another unit frees."""
        return {self.input, self.output, self.input_gradient}


def record_unit(
    module: nn.Module,
    run: Callable[[Tensor], Tensor],
    dim: int | None,
    inputs: UnitInputs,
    recorder: OpRecorder,
    others: Sequence[Tensor] = (),
    saves: bool = False,
) -> Segment:
    """Run a unit, and cut its trace into pieces.

    Args:
        module: has the parameters, which are not part of the unit's memory.
        run: returns the unit's output.
        dim: width of the unit's input; None for the embedding, which has none.
        inputs: sizes of the input, and the device's choices.
        recorder: on which ``run`` marks stages.
        others: further tensors that are not part of the unit's memory.
        saves: whether the segment lists the tensors that checkpointing saves.
    """
    storages = recorder.storages

    def block_of(tensor: Tensor) -> int:
        storage = storages.find(tensor)
        return storage.block if storage is not None else 0

    blocks: dict[str, int] = {}
    views: set[str] = set()

    def note(name: str, gradient: Tensor) -> None:
        blocks[name] = block_of(gradient)

    def watch(name: str, param: nn.Parameter) -> None:
        def note_view(gradient: Tensor) -> None:
            if gradient._is_view():
                views.add(name)

        param.register_hook(note_view)
        param.register_post_accumulate_grad_hook(
            lambda _: recorder.add(Mark(GRADIENT, name))
        )

    anchor = torch.empty((), device="meta", requires_grad=True)
    with (
        kernels_of(inputs.attention),
        fake_exchanges(recorder, inputs.imbalance),
        recorder.watch(),
    ):
        use_ops(module, choose_ops(dict(inputs.kernels)))
        causal = npu_kernels.causal_mask(anchor.device)
        for tensor in (anchor, *module.parameters(), *others, causal):
            storages.see(tensor.detach())
        hidden = anchor
        if dim is not None:
            shape = inputs.batch, inputs.part, dim
            hidden = _End.apply(anchor, shape, inputs.dtype)
            hidden.register_hook(functools.partial(note, "input"))
        input_block = block_of(hidden) if dim is not None else 0
        before = storages.blocks
        recorder.mark(0, "forward")
        output = run(hidden)
        del hidden
        output_block = block_of(output)
        storages.categorize(output, Category.activations)
        recorder.mark(0, "turn")
        loss = output
        if output.ndim:
            output.register_hook(functools.partial(note, "output"))
            loss = _End.apply(output, (), torch.float32)
        del output
        recorder.mark(0, "backward")
        for name, param in module.named_parameters():
            if param.requires_grad:
                watch(name, param)
        loss.backward()
        gradients = {
            name: param.grad
            for name, param in module.named_parameters()
            if param.grad is not None
        }
        for gradient in gradients.values():
            storages.categorize(gradient, Category.reduction_buffers)
        numbers = {name: block_of(gradient) for name, gradient in gradients.items()}
        recorder.mark(0, "end")
        trace = recorder.finish()
    ends = _Ends(
        input_block, output_block, blocks.get("output", 0), blocks.get("input", 0)
    )
    forward, backward, saved = _cut(trace, before, ends, {*numbers.values()})
    return Segment(
        forward,
        backward,
        storages.blocks,
        recorder.exchanges.device_events,
        *ends,
        saved if saves else {},
        numbers,
        frozenset(views),
        inputs.batch * inputs.part,
    )


def _cut(
    trace: Trace, before: int, ends: _Ends, gradients: set[int]
) -> tuple[list[Piece], list[Piece], dict[int, int]]:
    """Cut a trace at its marks into the pieces of forward and backward.

    Blocks up to ``before`` are not part of it. Also returns the blocks, and their bytes, that live
    between the passes besides input and output.
    """
    passes: dict[str, list[Piece]] = {
        "forward": [],
        "turn": [],
        "backward": [],
        "end": [],
    }
    pieces = passes["end"]
    live = dict[int, int]()
    saved = dict[int, int]()
    pieces.append(Piece(Mark(0, ""), []))
    for event in trace.events:
        if isinstance(event, Mark) and event.step in (0, STAGE, GRADIENT):
            if event.step == 0:
                pieces = passes[event.phase]
            # The backward begins outside of parts.
            mark = Mark(STAGE, "") if event.phase == "backward" else event
            pieces.append(Piece(mark, []))
            if event.phase == "turn":
                saved = {
                    block: size
                    for block, size in live.items()
                    if size >= MIN_BYTES and block not in (ends.input, ends.output)
                }
        elif isinstance(event, Alloc):
            if event.block == ends.output_gradient:
                pieces[-1].events.clear()  # of the sink
            elif event.block > before:
                live[event.block] = event.bytes
                category = trace.categories.get(event.block, event.category)
                pieces[-1].events.append(event._replace(category=category))
        elif (
            not isinstance(event, Free)
            or event.block in {*live, *ends} - ends.handed_on
        ):
            pieces[-1].events.append(event)
            live.pop(getattr(event, "block", 0), None)
    # Numbers that autograd computes for this trace alone.
    left = live.keys() - ends.handed_on - gradients
    passes["backward"][-1].events.extend(map(Free, sorted(left)))
    forward, backward = (
        [Piece(mark, join_kernels(events)) for mark, events in passes[name]]
        for name in ("forward", "backward")
    )
    return forward, backward, saved
