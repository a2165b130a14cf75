"""Memory, FLOPs and traffic of a model's parts, measured by running each part once on the meta device.

Which tensors are kept depends on the operators that autograd and the device choose, so one block of each kind runs
forward and backward over tensors without memory, through the project's own modules, checkpointing and loss. A kind
takes about 50 ms and is cached for the life of the process. The device's kernels that the meta device lacks are
replaced as in traces (``trace.fake_kernels``).

Shapes: B batch, T sequence, D width.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import AttentionKind
from fsdptoys.loss import build_loss
from fsdptoys.loss.objective import Objective
from fsdptoys.memory import GradientCheckpointing, checkpoint_blocks
from fsdptoys.memory.activation_offload import MIN_BYTES
from fsdptoys.models import DecoderModel, choose_kernels, grouped, npu_kernels, use_kernels
from fsdptoys.models.kernels import IMPLEMENTATIONS
from fsdptoys.plan.trace.extrapolate_layers import block_kind
from fsdptoys.plan.trace.fake_device import replaced
from fsdptoys.plan.trace.fake_kernels import replace_kernels
from fsdptoys.plan.trace.op_costs import fuses_rms_norm

from .meta_trace import PARTS, Mark, MetaTrace, Sink, Source, Stage

T = TypeVar("T")


@dataclass(frozen=True)
class Segment:
    """A part of the model in forward and backward."""

    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    output_bytes: int
    output: int  # Number of the output's storage
    offloadable: dict[int, int]
    """Number → bytes of the kept storages that activation offload moves, including a kept input."""
    gradients: dict[str, list[int]]  # Part → numbers of its parameters' gradients, which outlive the backward


@dataclass(frozen=True)
class Segments:
    """All parts of a model."""

    embedding: Segment
    blocks: tuple[Segment, ...]  # In order; equal blocks are one object
    head: Segment  # Norm, head and loss


def segments_of(config: Config, model: DecoderModel, attention: AttentionKind) -> Segments:
    """Measure the parts of a model, or return cached measurements; the model is on the meta device."""
    train, memory = config.train, config.memory
    dtype = config.parallel.param_dtype.torch
    common = _Common(attention, tuple(config.kernels.names().items()), dtype, train.batch_size, train.seq_len)
    key = repr(replace(config.model, name="", init_from=None))
    kinds = _kinds(key, Uncached(model))
    chosen = set(range(model.config.n_layers)[memory.checkpointing_start_index :: memory.checkpointing_every])
    first = {kind: kinds.index(kind) for kind in kinds}
    blocks = []
    for index, kind in enumerate(kinds):
        mode = memory.gradient_checkpointing if index in chosen else GradientCheckpointing.none
        save = tuple(memory.checkpointing_save) if mode is GradientCheckpointing.selective else ()
        blocks.append(_block(key, first[kind], common, mode, save, Uncached(model)))
    chunks = None if memory.chunk_tokens == "auto" else int(memory.chunk_tokens)
    objective = Objective(train.label_smoothing, train.z_loss_coef)
    loss = (memory.chunk_loss, chunks, memory.chunk_grad_dtype.torch, objective)
    head = _head(key, common, loss, Uncached(model))
    return Segments(_embedding(key, common, Uncached(model)), tuple(blocks), head)


@dataclass(frozen=True)
class Uncached(Generic[T]):
    """An argument that ``lru_cache`` ignores because another one, its key, identifies it."""

    value: T = field(compare=False)


@dataclass(frozen=True)
class _Common:
    attention: AttentionKind
    kernels: tuple[tuple[str, str], ...]  # Operation and its implementation
    dtype: torch.dtype
    batch: int
    length: int


@functools.lru_cache(maxsize=16)
def _kinds(key: str, source: Uncached[DecoderModel]) -> list[tuple[object, ...]]:
    return [block_kind(block) for block in source.value.layers]


@functools.lru_cache(maxsize=1024)
def _block(
    key: str, index: int, common: _Common, mode: GradientCheckpointing, save: Any, source: Uncached[DecoderModel]
) -> Segment:
    model = source.value
    block = copy.deepcopy(model.layers[index]).to(common.dtype)
    trace = MetaTrace(common.attention)
    for part in PARTS:
        _mark_part(block.get_submodule(part), part, trace)
    if mode is not GradientCheckpointing.none:
        checkpoint_blocks([block], mode, save=save)
    with torch.device("meta"):
        rotations = model.rotations(common.length)
    trace.ignore(*(rotations or ()))
    return _measure(block, lambda hidden: block(hidden, rotations), model.config.dim, common, trace)


def _mark_part(module: nn.Module, part: str, trace: MetaTrace) -> None:
    forward = module.forward

    def marked(hidden: Tensor, *args: Any) -> Tensor:
        made: Tensor = Mark.apply(forward(Mark.apply(hidden, trace, part, True), *args), trace, part, False)
        return made

    module.forward = marked


@functools.lru_cache(maxsize=1024)
def _embedding(key: str, common: _Common, source: Uncached[DecoderModel]) -> Segment:
    model = copy.copy(source.value)
    model._modules = dict(model._modules)
    tables = nn.ModuleList()
    for name, module in source.value.named_children():
        if name.startswith("embed"):
            model._modules[name] = copy.deepcopy(module).to(common.dtype)
            tables.append(model.get_submodule(name))
    tokens_BT = torch.empty(common.batch, common.length, dtype=torch.int64, device="meta")
    return _measure(tables, lambda _: model.embed(tokens_BT), None, common, MetaTrace(common.attention))


@functools.lru_cache(maxsize=1024)
def _head(
    key: str, common: _Common, loss: tuple[bool, int | None, torch.dtype, Objective], source: Uncached[DecoderModel]
) -> Segment:
    model, loss_fn = source.value, build_loss(*loss)
    norm, head = both = nn.ModuleList([copy.deepcopy(part).to(common.dtype) for part in (model.norm, model.lm_head)])
    labels_BT = torch.empty(common.batch, common.length, dtype=torch.int64, device="meta")
    trace = MetaTrace(common.attention)
    return _measure(both, lambda hidden: head(norm(hidden), labels_BT, loss_fn), model.config.dim, common, trace)


@contextmanager
def _kernels_of(attention: AttentionKind) -> Iterator[None]:
    """Use a device's kernels on the meta device."""

    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **_: Any) -> Tensor:
        shared = query.shape[1] // key.shape[1]
        if shared > 1 and not fuses_rms_norm():
            # torch 2.7's operator has no shared heads in its gradient.
            key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)[0]
        return out

    def choose_product(given: Any, device_type: str, dtype: torch.dtype, *widths: int) -> grouped.Product:
        # CUDA's grouped matmul takes bfloat16 only; the loop's one group stands for all. torch 2.7 has none.
        product: grouped.Product = grouped.Looped()
        if attention is not AttentionKind.cpu and dtype is torch.bfloat16:
            with suppress(AttributeError):
                product = given(device_type, dtype, *widths)
        return product

    fused = [(F, "scaled_dot_product_attention", attend)] if attention is AttentionKind.cpu else []
    implementations = IMPLEMENTATIONS["grouped_matmul"]
    with replace_kernels(attention), mock.patch.dict(implementations), replaced(*fused):
        for name, given in implementations.items():
            implementations[name] = functools.partial(choose_product, given)
        yield


def _measure(
    module: nn.Module, run: Callable[[Tensor], Tensor], dim: int | None, common: _Common, trace: MetaTrace
) -> Segment:
    """Run a part, with an input of width ``dim`` if any; the module's gradients count, its parameters do not."""
    anchor = torch.empty((), device="meta", requires_grad=True)
    trace.ignore(anchor, *module.parameters())
    with _kernels_of(trace.attention), trace:
        use_kernels(module, choose_kernels(dict(common.kernels)))
        trace.ignore(npu_kernels.causal_mask(anchor.device))  # shared by all blocks
        shape = (common.batch, common.length, dim)
        hidden = anchor if dim is None else Source.apply(anchor, shape, common.dtype)
        trace.begin()
        output = run(hidden)
        del hidden
        trace.cut()
        forward, trace.stages = trace.stages, []
        made = output.untyped_storage()._cdata
        number, output_bytes = trace.numbers[made], trace.sizes[made]
        large = {trace.numbers[key]: size for key, size in trace.sizes.items() if size >= MIN_BYTES and key != made}
        loss = output if output.ndim == 0 else Sink.apply(output)
        del output
        trace.cut(backward=True)
        trace.stages.clear()
        loss.backward()
        trace.cut()
        gradients: dict[str, list[int]] = {}
        for name, param in module.named_parameters():
            part = name.split(".")[0] if name.startswith(PARTS) else ""
            if param.grad is not None:
                gradients.setdefault(part, []).append(trace.numbers[param.grad.untyped_storage()._cdata])
    return Segment(tuple(forward), tuple(trace.stages), output_bytes, number, large, gradients)
