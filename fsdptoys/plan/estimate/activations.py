"""Memory, FLOPs and traffic of a model's parts, measured by running each part once on the meta device.

Which tensors are kept depends on the operators that autograd and the device choose, so one block of each kind runs
forward and backward over tensors without memory, through the project's own modules, checkpointing and loss. A kind
takes about 50 ms and is cached for the life of the process. The device's kernels that the meta device lacks are
replaced as in traces (``trace.fake_kernels``).

Shapes: B batch, T sequence, D width.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
from fsdptoys.plan.trace.op_costs import TRAFFIC, Operator, cost_of, fuses_rms_norm, has_no_kernel, scratch_bytes
from fsdptoys.profiler.dispatch import arguments_of, given, tensors_in
from fsdptoys.utils.uncached import Uncached

INPUT = 0  # Number of the storage of a part's input
PARTS = ("attn", "mlp")  # Parts of a block that are stages of their own; others are if they are units
HEAD = ("norm", "lm_head")


@dataclass(frozen=True)
class Stage:
    """A section of a forward or backward."""

    part: str  # Name of a part of the block, the innermost one; empty outside
    backward: bool  # Whether gradients are computed; False for recomputation
    peak_bytes: int  # Highest live bytes, relative to the start
    net_bytes: int  # Live bytes at the end minus those at the start
    operators: tuple[Operator, ...]
    storages: tuple[tuple[int, int], ...]
    """Births and deaths in order: storage number, and bytes or 0 for a death; ``INPUT`` is the part's input."""


class MetaTrace(TorchDispatchMode):
    """Records live storages and executed operators on the meta device; ``cut`` divides them into stages."""

    def __init__(self, attention: AttentionKind) -> None:
        super().__init__()
        self.attention, self.part, self.backward = attention, "", False
        self.live = self._peak = self._start = 0
        self.sizes: dict[int, int] = {}
        self.numbers: dict[int, int] = {}
        self.ignored: set[int] = set()  # Storages from before: parameters and inputs
        self.stages: list[Stage] = []
        self.operators: list[Operator] = []
        self._storages: list[tuple[int, int]] = []
        self._count = INPUT  # Number of the next storage; the input has the first

    def ignore(self, *tensors: Tensor) -> None:
        """Leave out storages from before."""
        self.ignored.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def cut(self, part: str = "", backward: bool = False) -> None:
        """End a stage and start one."""
        if self.operators or self._storages:
            peak_bytes, net_bytes = self._peak - self._start, self.live - self._start
            events = tuple(self.operators), tuple(self._storages)
            self.stages.append(Stage(self.part, self.backward, peak_bytes, net_bytes, *events))
        self.part, self.backward = part, backward
        self.begin()

    def begin(self) -> None:
        """Discard the events since the last cut."""
        self._count = max(self._count, INPUT + 1)
        self._peak = self._start = self.live
        self.operators, self._storages = [], []

    def scratch(self, sizes: list[int]) -> None:
        """Count a kernel's temporary memory."""
        self._peak = max(self._peak, self.live + sum(-(-size // 512) * 512 for size in sizes))
        numbers = range(self._count, self._count + len(sizes))
        self._count += len(sizes)
        self._storages += [*zip(numbers, sizes, strict=True), *((number, 0) for number in numbers)]

    def see(self, tensor: Tensor) -> None:
        """Record a new storage until it dies."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes or key in self.ignored:
            return
        size = -(-storage.nbytes() // 512) * 512
        if size == 0:
            return
        number = self.numbers[key] = self._count
        self._count += 1
        self.sizes[key] = size
        self.live += size
        self._peak = max(self._peak, self.live)
        self._storages.append((number, size))

        def die() -> None:
            self.live -= self.sizes.pop(key)
            self._storages.append((self.numbers.pop(key), 0))

        weakref.finalize(storage, die).atexit = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        inputs = [
            (argument, tensor)
            for argument, value in given(arguments_of(func), args, kwargs)
            for tensor in tensors_in(value)
        ]
        results = func(*args, **kwargs)
        made = list(tensors_in(results))
        for tensor in made:
            self.see(tensor)
        storages = {tensor.untyped_storage()._cdata for _, tensor in inputs}
        fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in storages]
        mutates = name in TRAFFIC or any(argument.writes for argument, _ in inputs)
        if func.is_view or has_no_kernel(name) or not (fresh or mutates):
            return results
        if scratch := scratch_bytes(name, args, self.attention):
            self.scratch(scratch)
        self.operators.append(cost_of(func, args, kwargs, results, inputs, fresh))
        return results


class Mark(torch.autograd.Function):
    """Identity that cuts stages in forward and backward, between one part and another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, trace: MetaTrace, before: str, after: str) -> Tensor:
        """Return the tensor."""
        ctx.trace, ctx.before = trace, before
        trace.cut(after)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient."""
        ctx.trace.cut(ctx.before, backward=True)
        return grads[0], None, None, None


class Source(torch.autograd.Function):
    """An input without history; its gradient is discarded."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of that shape."""
        return anchor.new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return a placeholder."""
        return grads[0].new_empty((), dtype=torch.float32), None, None


class Sink(torch.autograd.Function):
    """Consumer of a part's output, which provides its gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        """Return a scalar."""
        ctx.shape, ctx.dtype = output.shape, output.dtype
        return output.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return a gradient of the output's shape."""
        return grads[0].new_empty(ctx.shape, dtype=ctx.dtype)


@dataclass(frozen=True)
class Segment:
    """A part of the model in forward and backward."""

    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    output_bytes: int
    output: int  # Number of the output's storage
    offloadable: dict[int, int]
    """Number → bytes of the kept storages that activation offload moves, including a kept input."""
    gradients: dict[str, int]  # Parameter → number of its gradient, which outlives the backward


@dataclass(frozen=True)
class Segments:
    """All parts of a model."""

    embedding: Segment
    blocks: tuple[Segment, ...]  # In order; equal blocks are one object
    head: Segment  # Norm, head and loss


def segments_of(
    config: Config, model: DecoderModel, attention: AttentionKind, parts: Sequence[Sequence[str]] = ()
) -> Segments:
    """Measure the parts of a model, or return cached measurements; the model is on the meta device.

    ``parts`` names parts of each block that are stages of their own, besides ``PARTS``.
    """
    train, memory = config.train, config.memory
    dtype = config.parallel.param_dtype.torch
    common = _Common(attention, tuple(config.kernels.names().items()), dtype, train.batch_size, train.seq_len)
    key = repr(replace(config.model, name="", init_from=None))
    kinds = _kinds(model)
    chosen = set(range(model.config.n_layers)[memory.checkpointing_start_index :: memory.checkpointing_every])
    first = {kind: kinds.index(kind) for kind in kinds}
    blocks = []
    for index, kind in enumerate(kinds):
        mode = memory.gradient_checkpointing if index in chosen else GradientCheckpointing.none
        save = tuple(memory.checkpointing_save) if mode is GradientCheckpointing.selective else ()
        marked = tuple(sorted({*PARTS, *(parts[index] if parts else ())} - {""}))
        blocks.append(_block(key, first[kind], marked, common, mode, save, Uncached(model)))
    chunks = None if memory.chunk_tokens == "auto" else int(memory.chunk_tokens)
    objective = Objective(train.label_smoothing, train.z_loss_coef)
    loss = (memory.chunk_loss, chunks, memory.chunk_grad_dtype.torch, objective)
    head = _head(key, common, loss, Uncached(model))
    return Segments(_embedding(key, common, Uncached(model)), tuple(blocks), head)


@dataclass(frozen=True)
class _Common:
    attention: AttentionKind
    kernels: tuple[tuple[str, str], ...]  # Operation and its implementation
    dtype: torch.dtype
    batch: int
    length: int


@functools.lru_cache(maxsize=16)
def _kinds(model: DecoderModel) -> list[tuple[object, ...]]:
    return [block_kind(block) for block in model.layers]


@functools.lru_cache(maxsize=1024)
def _block(
    key: str,
    index: int,
    parts: tuple[str, ...],
    common: _Common,
    mode: GradientCheckpointing,
    save: Any,
    source: Uncached[DecoderModel],
) -> Segment:
    model = source.value
    block = copy.deepcopy(model.layers[index]).to(common.dtype)
    trace = MetaTrace(common.attention)
    for part in parts:
        _mark_part(block.get_submodule(part), part, innermost(part.rpartition(".")[0], parts), trace)
    if mode is not GradientCheckpointing.none:
        checkpoint_blocks([block], mode, save=save)
    with torch.device("meta"):
        rotations = model.rotations(torch.arange(common.length))
    trace.ignore(*(rotations or ()))
    return _measure(block, lambda hidden: block(hidden, rotations), model.config.dim, common, trace)


def innermost(name: str, parts: Collection[str]) -> str:
    """The longest of the parts that contains a module or parameter; empty if none does."""
    return max((part for part in parts if f"{name}.".startswith(f"{part}.")), key=len, default="")


def _mark_part(module: nn.Module, part: str, outside: str, trace: MetaTrace) -> None:
    forward = module.forward

    def marked(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = forward(Mark.apply(hidden, trace, outside, part), *args, **kwargs)
        if isinstance(made, Tensor):
            return Mark.apply(made, trace, part, outside)
        *others, last = made  # a router's experts, which have no gradient, and their weights
        return (*others, Mark.apply(last, trace, part, outside))

    module.forward = marked


@functools.lru_cache(maxsize=1024)
def _embedding(key: str, common: _Common, source: Uncached[DecoderModel]) -> Segment:
    model = copy.copy(source.value)
    model._modules = dict(model._modules)
    tables = nn.ModuleDict()
    for name, module in source.value.named_children():
        if name.startswith("embed"):
            model._modules[name] = tables[name] = copy.deepcopy(module).to(common.dtype)
    tokens_BT = torch.empty(common.batch, common.length, dtype=torch.int64, device="meta")
    return _measure(tables, lambda _: model.embed(tokens_BT, tokens_BT[0]), None, common, MetaTrace(common.attention))


@functools.lru_cache(maxsize=1024)
def _head(
    key: str, common: _Common, loss: tuple[bool, int | None, torch.dtype, Objective], source: Uncached[DecoderModel]
) -> Segment:
    model, loss_fn = source.value, build_loss(*loss)
    both = nn.ModuleDict({name: copy.deepcopy(model.get_submodule(name)).to(common.dtype) for name in HEAD})
    norm, head = both.values()
    labels_BT = torch.empty(common.batch, common.length, dtype=torch.int64, device="meta")
    trace = MetaTrace(common.attention)
    return _measure(both, lambda hidden: head(norm(hidden), labels_BT, loss_fn), model.config.dim, common, trace)


@contextmanager
def _kernels_of(attention: AttentionKind) -> Iterator[None]:
    """Use a device's kernels on the meta device."""

    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **_: Any) -> Tensor:
        shared = query.shape[1] // key.shape[1]
        if not torch.backends.cuda.flash_sdp_enabled():
            math = torch.ops.aten._scaled_dot_product_attention_math
            plain: Tensor = math(query, key, value, is_causal=is_causal, enable_gqa=shared > 1)[0]
            return plain
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
        gradients = {
            name: trace.numbers[param.grad.untyped_storage()._cdata]
            for name, param in module.named_parameters()
            if param.grad is not None
        }
    return Segment(tuple(forward), tuple(trace.stages), output_bytes, number, large, gradients)
