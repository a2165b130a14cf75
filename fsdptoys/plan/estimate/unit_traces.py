"""Traces of a model's units: embedding, each kind of block, head with loss.

Which tensors are kept depends on the operators that autograd and the device choose, so each unit
runs forward and backward once on the meta device, through the project's own modules, checkpointing
and loss, under the recorder and the device's kernels of a full trace. That takes about 50 ms and is
cached for the life of the process.

Shapes: B batch, T sequence, D width.
"""

import copy
import functools
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import AttentionKind
from fsdptoys.loss import OwnLoss, build_loss
from fsdptoys.loss.objective import Objective
from fsdptoys.loss.vocabulary import Vocabulary
from fsdptoys.memory import GradientCheckpointing, checkpoint_blocks
from fsdptoys.metrics.prediction import Category
from fsdptoys.models import DecoderModel, NativeModel
from fsdptoys.models.layers import RunnableBlock
from fsdptoys.models.self_attention import Attention
from fsdptoys.parallel.context import ContextForm, build_context
from fsdptoys.parallel.mesh import CONTEXT_AXIS, TENSOR_AXIS
from fsdptoys.plan.simulator.events import Mark
from fsdptoys.plan.trace.extrapolate_layers import block_kinds
from fsdptoys.plan.trace.fake_kernels import planned_kernels
from fsdptoys.plan.trace.groups import PlannedGroup
from fsdptoys.plan.trace.op_recorder import OpRecorder
from fsdptoys.utils.uncached import Uncached

from .segment import STAGE, Segment
from .stand_ins import Notice, Root, innermost
from .unit_recording import UnitInputs, record_unit

HEAD = ("norm", "lm_head")


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
    inputs = UnitInputs(
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
    for index, kind in enumerate(block_kinds(model)):
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
                inputs,
                mode,
                save,
                Uncached((model, index)),
            )
        )
    chunks = None if memory.chunk_tokens == "auto" else int(memory.chunk_tokens)
    objective = Objective(train.label_smoothing, train.z_loss_coef)
    loss = (memory.chunk_loss, chunks, memory.chunk_grad_dtype.torch, objective)
    tables = tuple(sorted(name for name in units if name.startswith("embed")))
    embedding = _embedding(key, tables, inputs, Uncached(model))
    own = OwnLoss.of(config.loss)
    head_key = f"{key}{id(type(config.loss))}{config.loss}"
    head = _head(head_key, inputs, loss, Uncached(own), Uncached(model))
    return [embedding, *blocks, head]


@functools.lru_cache(maxsize=1024)
def _block(
    key: str,
    kind: tuple[object, ...],
    parts: tuple[str, ...],
    inputs: UnitInputs,
    mode: GradientCheckpointing,
    save: Any,
    source: Uncached[tuple[DecoderModel, int]],
) -> Segment:
    model, index = source.value
    block = cast(RunnableBlock, copy.deepcopy(model.layers[index]).to(inputs.dtype))
    recorder = OpRecorder("meta", inputs.attention)
    for part in parts:
        outside = innermost(part.rpartition(".")[0], parts)
        _mark_part(block.get_submodule(part), part, outside, recorder)

    def execute(*args: Any) -> Any:
        recorder.add(Mark(STAGE, ""))
        return block.compute(*args)

    block.execute = execute
    if mode is not GradientCheckpointing.none:
        checkpoint_blocks([block], mode, save=save)
    assert isinstance(model, NativeModel)
    with torch.device("meta"):
        rotations = model.rotations(torch.arange(inputs.sequence))
    form, ranks = inputs.context
    if ranks > 1:
        context = build_context(
            form, cast(Any, PlannedGroup(CONTEXT_AXIS, ranks)), compiles=False
        )
        for module in block.modules():
            if isinstance(module, Attention):
                module.context = context

    def run(hidden_BTD: Tensor) -> Tensor:
        output: Tensor = block(hidden_BTD, rotations)
        return output

    saves = mode is not GradientCheckpointing.none
    return record_unit(
        block, run, model.config.dim, inputs, recorder, rotations or (), saves
    )


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
    key: str, parts: tuple[str, ...], inputs: UnitInputs, source: Uncached[DecoderModel]
) -> Segment:
    model = copy.copy(source.value)
    model._modules = dict(model._modules)
    tables = nn.ModuleDict()
    for name, module in source.value.named_children():
        if name.startswith("embed"):
            model._modules[name] = tables[name] = copy.deepcopy(module).to(inputs.dtype)
    tokens_BT = torch.empty(
        inputs.batch, inputs.sequence, dtype=torch.int64, device="meta"
    )
    recorder = OpRecorder("meta", inputs.attention)
    for part in parts:
        _mark_part(tables[part], part, "", recorder)
    trained = any(param.requires_grad for param in tables.parameters())

    assert isinstance(model, NativeModel)

    def run(anchor: Tensor) -> Tensor:
        recorder.add(Mark(STAGE, ""))
        hidden_BTD = model.embed(tokens_BT, tokens_BT[0])
        return hidden_BTD if trained else Root.apply(anchor, hidden_BTD)

    return record_unit(tables, run, None, inputs, recorder)


@functools.lru_cache(maxsize=1024)
def _head(
    key: str,
    inputs: UnitInputs,
    loss: tuple[bool, int | None, torch.dtype, Objective],
    own: Uncached[OwnLoss | None],
    source: Uncached[DecoderModel],
) -> Segment:
    group = (
        cast(Any, PlannedGroup(TENSOR_AXIS, inputs.features))
        if inputs.features > 1
        else None
    )
    vocabulary = Vocabulary(group) if group is not None else None
    model = source.value
    loss_fn = build_loss(*loss, vocabulary=vocabulary, own=own.value)
    both = nn.ModuleDict(
        {
            name: copy.deepcopy(model.get_submodule(name)).to(inputs.dtype)
            for name in HEAD
        }
    )
    norm, head = both.values()
    labels_BT = torch.empty(
        inputs.batch, inputs.sequence, dtype=torch.int64, device="meta"
    )
    recorder = OpRecorder("meta", inputs.attention)
    for name, part in both.items():
        _mark_part(part, name, "", recorder)

    def run(hidden_BTD: Tensor) -> Tensor:
        normed_BTD = norm(hidden_BTD)
        recorder.storages.region = Category.logits
        loss: Tensor = head(normed_BTD, labels_BT, loss_fn)
        recorder.storages.region = None
        return loss

    return record_unit(both, run, model.config.dim, inputs, recorder, [labels_BT])
