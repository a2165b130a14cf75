"""Traces of a model's units: embedding, each kind of block, head with loss.

Which tensors are kept depends on the operators that autograd and the device choose, so each unit
runs forward and backward once on the meta device, through the project's own modules, checkpointing
and loss, under the recorder and the device's kernels of a full trace. That takes about 50 ms and is
cached for the life of the process.

Shapes: B batch, T sequence, D width.
"""

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import AttentionKind
from fsdptoys.loss import build_loss
from fsdptoys.loss.objective import Objective
from fsdptoys.loss.vocabulary import Vocabulary
from fsdptoys.memory import GradientCheckpointing, checkpoint_blocks
from fsdptoys.memory.activation_offload import MIN_BYTES
from fsdptoys.metrics.prediction import Category
from fsdptoys.models import DecoderModel, choose_ops, npu_kernels, use_ops
from fsdptoys.models.layers import RunnableBlock
from fsdptoys.models.self_attention import Attention
from fsdptoys.parallel.context import ContextForm, build_context
from fsdptoys.parallel.mesh import CONTEXT_AXIS, TENSOR_AXIS
from fsdptoys.plan.simulator.events import Alloc, Free, Mark
from fsdptoys.plan.trace.extrapolate_layers import block_kind
from fsdptoys.plan.trace.fake_device import replaced
from fsdptoys.plan.trace.fake_exchanges import fake_exchanges
from fsdptoys.plan.trace.fake_kernels import planned_kernels, replace_kernels
from fsdptoys.plan.trace.groups import PlannedGroup
from fsdptoys.plan.trace.op_costs import fuses_rms_norm
from fsdptoys.plan.trace.op_recorder import OpRecorder
from fsdptoys.utils.uncached import Uncached

from .segment import GRADIENT, STAGE, Piece, Segment, join_kernels
from .skeleton import Notice, Root, innermost

HEAD = ("norm", "lm_head")


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


def segments_of(
    config: Config,
    model: DecoderModel,
    attention: AttentionKind,
    units: Collection[str] = (),
) -> list[Segment]:
    """Trace embedding, blocks and head on the meta device, or return cached traces; ``units`` are
    names of modules."""
    train = config.train
    memory = config.memory
    dtype = config.parallel.param_dtype.torch
    context = getattr(config.parallel, "context", ContextForm.auto), config.mesh.cp_size
    common = _Common(
        attention,
        tuple(planned_kernels(config).names().items()),
        dtype,
        train.batch_size,
        train.seq_len,
        context,
        config.plan.expert_imbalance,
        config.mesh.tp_size,
    )
    shape = vars(config.model) | {"name": "", "init_from": None, "n_layers": 0}
    packed = config.parallel.capabilities.mixed_dtypes
    key = repr((type(config.model), shape, config.tune, packed))
    first = memory.checkpointing_start_index
    every = memory.checkpointing_every
    chosen = range(model.config.n_layers)[first::every]
    blocks = []
    for index, kind in enumerate(_kinds(model)):
        mode = (
            memory.gradient_checkpointing
            if index in chosen
            else GradientCheckpointing.none
        )
        save = (
            tuple(memory.checkpointing_save)
            if mode is GradientCheckpointing.selective
            else ()
        )
        prefix = f"layers.{index}."
        parts = (name.removeprefix(prefix) for name in units if name.startswith(prefix))
        blocks.append(
            _block(
                key,
                kind,
                tuple(sorted(parts)),
                common,
                mode,
                save,
                Uncached((model, index)),
            )
        )
    chunks = None if memory.chunk_tokens == "auto" else int(memory.chunk_tokens)
    objective = Objective(train.label_smoothing, train.z_loss_coef)
    loss = (memory.chunk_loss, chunks, memory.chunk_grad_dtype.torch, objective)
    tables = tuple(sorted(name for name in units if name.startswith("embed")))
    embedding = _embedding(key, tables, common, Uncached(model))
    return [embedding, *blocks, _head(key, common, loss, Uncached(model))]


@dataclass(frozen=True)
class _Common:
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


@functools.lru_cache(maxsize=64)
def _kinds(model: DecoderModel) -> list[tuple[object, ...]]:
    return [block_kind(block) for block in model.layers]


@functools.lru_cache(maxsize=1024)
def _block(
    key: str,
    kind: tuple[object, ...],
    parts: tuple[str, ...],
    common: _Common,
    mode: GradientCheckpointing,
    save: Any,
    source: Uncached[tuple[DecoderModel, int]],
) -> Segment:
    model, index = source.value
    block = cast(RunnableBlock, copy.deepcopy(model.layers[index]).to(common.dtype))
    recorder = OpRecorder("meta", common.attention)
    for part in parts:
        outside = innermost(part.rpartition(".")[0], parts)
        _mark_part(block.get_submodule(part), part, outside, recorder)
    block.execute = functools.partial(_begun, block.compute, recorder)
    if mode is not GradientCheckpointing.none:
        checkpoint_blocks([block], mode, save=save)
    with torch.device("meta"):
        rotations = model.rotations(torch.arange(common.sequence))
    form, ranks = common.context
    if ranks > 1:
        context = build_context(
            form, cast(Any, PlannedGroup(CONTEXT_AXIS, ranks)), compiles=False
        )
        for module in block.modules():
            if isinstance(module, Attention):
                module.context = context
    run = functools.partial(_run_block, block, rotations)
    keeps = mode is not GradientCheckpointing.none
    return _trace_unit(
        block, run, model.config.dim, common, recorder, rotations or (), keeps
    )


def _begun(forward: Callable[..., Any], recorder: OpRecorder, *args: Any) -> Any:
    recorder.add(Mark(STAGE, ""))
    return forward(*args)


def _run_block(block: nn.Module, rotations: Any, hidden_BTD: Tensor) -> Any:
    return block(hidden_BTD, rotations)


def _mark_part(
    module: nn.Module, part: str, outside: str, recorder: OpRecorder
) -> None:
    """Mark where a part begins and ends, in forward and backward."""
    inside = functools.partial(recorder.add, Mark(STAGE, part))
    around = functools.partial(recorder.add, Mark(STAGE, outside))

    def begin(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (Notice.apply(args[0], inside, around), *args[1:])

    def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return Notice.apply(output, around, inside)
        # A router returns experts, which have no gradient, and their weights.
        *experts, weights = output
        return (*experts, Notice.apply(weights, around, inside))

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)


@functools.lru_cache(maxsize=1024)
def _embedding(
    key: str, parts: tuple[str, ...], common: _Common, source: Uncached[DecoderModel]
) -> Segment:
    model = copy.copy(source.value)
    model._modules = dict(model._modules)
    tables = nn.ModuleDict()
    for name, module in source.value.named_children():
        if name.startswith("embed"):
            model._modules[name] = tables[name] = copy.deepcopy(module).to(common.dtype)
    tokens_BT = torch.empty(
        common.batch, common.sequence, dtype=torch.int64, device="meta"
    )
    recorder = OpRecorder("meta", common.attention)
    for part in parts:
        _mark_part(tables[part], part, "", recorder)
    trained = any(param.requires_grad for param in tables.parameters())

    def embed(anchor: Tensor) -> Tensor:
        hidden_BTD = model.embed(tokens_BT, tokens_BT[0])
        return hidden_BTD if trained else Root.apply(anchor, hidden_BTD)

    run = functools.partial(_begun, embed, recorder)
    return _trace_unit(tables, run, None, common, recorder)


@functools.lru_cache(maxsize=1024)
def _head(
    key: str,
    common: _Common,
    loss: tuple[bool, int | None, torch.dtype, Objective],
    source: Uncached[DecoderModel],
) -> Segment:
    group = (
        cast(Any, PlannedGroup(TENSOR_AXIS, common.features))
        if common.features > 1
        else None
    )
    vocabulary = Vocabulary(group) if group is not None else None
    model = source.value
    loss_fn = build_loss(*loss, vocabulary=vocabulary)
    both = nn.ModuleDict(
        {
            name: copy.deepcopy(model.get_submodule(name)).to(common.dtype)
            for name in HEAD
        }
    )
    norm, head = both.values()
    labels_BT = torch.empty(
        common.batch, common.sequence, dtype=torch.int64, device="meta"
    )
    recorder = OpRecorder("meta", common.attention)
    for name, part in both.items():
        _mark_part(part, name, "", recorder)

    def run(hidden_BTD: Tensor) -> Tensor:
        normed_BTD = norm(hidden_BTD)
        recorder.enter_region(Category.logits)
        loss: Tensor = head(normed_BTD, labels_BT, loss_fn)
        recorder.enter_region(None)
        return loss

    return _trace_unit(both, run, model.config.dim, common, recorder, [labels_BT])


def _note_gradient(recorder: OpRecorder, name: str, param: Tensor) -> None:
    recorder.add(Mark(GRADIENT, name))


def _note_view(views: set[str], name: str, gradient: Tensor) -> None:
    if gradient._is_view():
        views.add(name)


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


def _trace_unit(
    module: nn.Module,
    run: Callable[[Tensor], Tensor],
    dim: int | None,
    common: _Common,
    recorder: OpRecorder,
    others: Sequence[Tensor] = (),
    keeps: bool = False,
) -> Segment:
    """Run a unit, with an input of width ``dim`` if any; its parameters and ``others`` are not part
    of its memory. ``keeps`` notes the tensors that its forward keeps."""

    def number(tensor: Tensor) -> int:
        storage = recorder.find(tensor)
        return storage.block if storage is not None else 0

    blocks: dict[str, int] = {}

    def note(name: str, gradient: Tensor) -> None:
        blocks[name] = number(gradient)

    anchor = torch.empty((), device="meta", requires_grad=True)
    with (
        kernels_of(common.attention),
        fake_exchanges(recorder, common.imbalance),
        recorder.watch(),
    ):
        use_ops(module, choose_ops(dict(common.kernels)))
        causal = npu_kernels.causal_mask(anchor.device)
        for tensor in (anchor, *module.parameters(), *others, causal):
            recorder.see(tensor.detach())
        hidden = anchor
        if dim is not None:
            shape = common.batch, common.part, dim
            hidden = _End.apply(anchor, shape, common.dtype)
            hidden.register_hook(functools.partial(note, "input"))
        input_block = number(hidden) if dim is not None else 0
        before = recorder.blocks
        recorder.mark(0, "forward")
        output = run(hidden)
        del hidden
        output_block = number(output)
        recorder.categorize(output, Category.activations)
        recorder.mark(0, "turn")
        loss = output
        if output.ndim:
            output.register_hook(functools.partial(note, "output"))
            loss = _End.apply(output, (), torch.float32)
        del output
        recorder.mark(0, "backward")
        views: set[str] = set()
        for name, param in module.named_parameters():
            if param.requires_grad:
                param.register_hook(functools.partial(_note_view, views, name))
                param.register_post_accumulate_grad_hook(
                    functools.partial(_note_gradient, recorder, name)
                )
        loss.backward()
        gradients = {
            name: param.grad
            for name, param in module.named_parameters()
            if param.grad is not None
        }
        for gradient in gradients.values():
            recorder.categorize(gradient, Category.reduction_buffers)
        numbers = {name: number(gradient) for name, gradient in gradients.items()}
        recorder.mark(0, "end")
        trace = recorder.finish()
    output_gradient = blocks.get("output", 0)
    input_gradient = blocks.get("input", 0)
    ends = input_block, output_block, output_gradient, input_gradient
    handed_on = {input_block, output_block, input_gradient}
    passes: dict[str, list[Piece]] = {
        "forward": [],
        "turn": [],
        "backward": [],
        "end": [],
    }
    current = passes["end"]
    live = dict[int, int]()
    saved = dict[int, int]()
    current.append(Piece(Mark(0, ""), []))
    for event in trace.events:
        if isinstance(event, Mark) and event.step in (0, STAGE, GRADIENT):
            if event.step == 0:
                current = passes[event.phase]
            # The backward begins outside of parts.
            current.append(
                Piece(Mark(STAGE, "") if event.phase == "backward" else event, [])
            )
            if event.phase == "turn" and keeps:
                saved = {
                    block: size
                    for block, size in live.items()
                    if size >= MIN_BYTES and block not in (input_block, output_block)
                }
        elif isinstance(event, Alloc):
            if event.block == output_gradient:
                current[-1].events.clear()  # of the sink
            elif event.block > before:
                live[event.block] = event.bytes
                current[-1].events.append(
                    event._replace(
                        category=trace.categories.get(event.block, event.category)
                    )
                )
        elif not isinstance(event, Free) or event.block in {*live, *ends} - handed_on:
            current[-1].events.append(event)
            live.pop(getattr(event, "block", 0), None)
    # Numbers that autograd computes for this trace alone.
    left = live.keys() - handed_on - {*numbers.values()}
    passes["backward"][-1].events.extend(map(Free, sorted(left)))
    forward, backward = (
        [Piece(mark, join_kernels(events)) for mark, events in passes[name]]
        for name in ("forward", "backward")
    )
    last = (recorder.blocks, recorder.device_events)
    tokens = common.batch * common.part
    return Segment(
        forward, backward, *last, *ends, saved, numbers, frozenset(views), tokens
    )
