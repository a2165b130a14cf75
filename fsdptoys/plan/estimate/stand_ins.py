"""Stand-ins for the forwards of a model's segments, which note where their contents belong.

A forward calls the modules that are units or own parameters, so that their hooks gather, prefetch,
reshard, cast and reduce as in training. In the backward it gives each parameter a gradient without
computing it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fsdptoys.config.schema import Config
from fsdptoys.models import DecoderModel
from fsdptoys.models.layers import RunnableBlock
from fsdptoys.models.stages import Stage
from fsdptoys.parallel.pipeline import Pipeline
from fsdptoys.plan.trace.op_recorder import OpRecorder
from fsdptoys.utils.dtensor import is_dtensor

TOKENS = 4099  # Of a sequence; divides no other size
IN_BACKWARD = {"forward": "backward", "saved": "", "output": ""}
"""Kind of a note → its kind where a segment is recomputed; empty for none."""


class Note(NamedTuple):
    """Place of a part of a segment's contents in a trace."""

    kind: str
    """``forward`` and ``backward``: a stage begins, in the backward also one that is recomputed;
    ``end``: the backward of a stage ends; ``gradient``: a parameter's gradient is final and the
    next block; ``saved``: the next block is one that leaves the device; ``output``: the next block
    is the segment's output."""
    segment: int
    name: str = ""  # Stage or parameter
    visit: int = 0  # Number of the stage in the forward, or of the saved block


@dataclass(frozen=True)
class Layout:
    """The parts of a segment's contents that the trainer depends on."""

    # Names of modules, in the order of the forward; empty outside of these
    stages: tuple[str, ...]
    # Parameters in the order of the backward, and whether theirs are views
    gradients: tuple[tuple[str, bool], ...]
    # Bytes of a token of each tensor that activation offload takes besides the input
    saved_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Segments:
    """Stand-ins for the forwards of a model's segments; see ``train.parallelize.StandIns``."""

    config: Config
    recorder: OpRecorder
    layouts: Sequence[Layout]

    def replace(self, model: DecoderModel) -> None:
        """Replace the forwards of embedding, blocks and head."""
        embedding = _StandIn(self, 0, model)
        _change_class(model, _EmptyModel, embedding.run_segment)
        blocks = cast(Sequence[RunnableBlock], model.layers)
        for number, block in enumerate(blocks, start=1):
            block.execute = _StandIn(self, number, block).run_segment
        _StandIn(self, len(self.layouts) - 1, model)

    def prepare(self, pipeline: Pipeline) -> None:
        """Give every stage equally many layers and the same hidden states."""
        pipeline.divide = _equal_stages
        pipeline.fixed_shape = (1, TOKENS, self.config.model.dim)


def _equal_stages(model: DecoderModel, count: int, seq_len: int) -> list[Stage]:
    size = len(model.layers) // count
    return [
        Stage(index * size, (index + 1) * size, index == 0, index == count - 1)
        for index in range(count)
    ]


def innermost(name: str, parts: Any) -> str:
    """The longest of the parts that contains a module or parameter; empty if none does."""
    return max(
        (part for part in parts if part and _within(name, part)),
        key=len,
        default="",
    )


class _EmptyModule(nn.Module):
    """A module of the model that keeps its parameters and hooks, and computes nothing."""

    stand_in: Callable[[Tensor], Tensor]

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.stand_in(hidden)


class _EmptyModel(nn.Module):
    """A model that embeds nothing."""

    stand_in: Callable[[Tensor], Tensor]

    def embed(self, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        return self.stand_in(tokens_BT)


def _change_class(
    module: nn.Module, kind: type[nn.Module], stand_in: Callable[[Tensor], Tensor]
) -> None:
    """Derive a module's class from its own, as ``fully_shard`` does.

    Strategies ask for the class of a module.
    """
    changed: Any = module
    changed.__class__ = type(type(module).__name__, (kind, type(module)), {})
    changed.stand_in = stand_in


class _StandIn:
    """The forward of a segment; a module's stages are run from its forward."""

    def __init__(self, segments: Segments, number: int, root: nn.Module) -> None:
        self.recorder = segments.recorder
        self.number = number
        self.layout = segments.layouts[number]
        self.root = root
        self.dtype = segments.config.parallel.param_dtype.torch
        self.width = segments.config.model.dim
        self.next_stage = 0  # Index among the layout's stages
        self.owners: dict[str, nn.Module] = {}
        self.own: dict[str, list[tuple[str, str, bool]]] = {}
        """Module → its parameters in the order of the forward: full name, name, whether the
        gradient is a view."""
        for name, is_view in reversed(self.layout.gradients):
            owner, _, leaf = name.rpartition(".")
            self.owners[owner] = root.get_submodule(owner)
            self.own.setdefault(owner, []).append((name, leaf, is_view))
        self.replace_modules()

    def replace_modules(self) -> None:
        """Replace the forwards of the modules inside of the one that contains the stages."""
        parts = set(self.layout.stages) - {""}
        for part in parts:
            run = functools.partial(self.run, part)
            _change_class(self.root.get_submodule(part), _EmptyModule, run)
        for owner, module in self.owners.items():
            if owner not in self.layout.stages:
                take = functools.partial(self.take, owner)
                _change_class(module, _EmptyModule, take)

    def run_segment(self, hidden: Tensor, *_: Any) -> Tensor:
        """Run the stages, from the forward of the module that contains them."""
        return self.run("", hidden)

    def run(self, part: str, hidden: Tensor) -> Tensor:
        """Run the stages within a module from the next one on."""
        stages = self.layout.stages
        if part == stages[0]:
            self.next_stage = 0
        if not hidden.is_floating_point():  # token ids
            hidden = torch.empty((), dtype=self.dtype, device=hidden.device).expand(
                1, TOKENS, self.width
            )
            # Blocks have a backward even where all parameters of the embedding are frozen.
            hidden = Root.apply(torch.empty((), requires_grad=True), hidden)
        while self.next_stage < len(stages) and _within(stages[self.next_stage], part):
            name = stages[self.next_stage]
            if name == part:
                hidden = self._stage(name, hidden)
            else:
                inside = [
                    stage
                    for stage in stages
                    if stage != part and _within(stage, part) and _within(name, stage)
                ]
                hidden = self.root.get_submodule(min(inside, key=len))(hidden)
        if self.next_stage == len(stages):
            shape = () if part == "lm_head" else hidden.shape
            hidden = _Output.apply(hidden, shape, self._note("output"))
        return hidden

    def _stage(self, part: str, hidden: Tensor) -> Tensor:
        stages = self.layout.stages
        visit = self.next_stage
        self.next_stage += 1
        sizes = self.layout.saved_bytes if visit == 0 else ()
        saved = [self._save(number, size) for number, size in enumerate(sizes)]
        begin = self._note("forward", part, visit)
        hidden = Notice.apply(
            hidden, begin, self._note("end", part, visit), hidden, *saved
        )
        if visit == stages.index(part):
            for owner in self.own:
                if innermost(owner, stages) == part:
                    hidden = (
                        self.take(owner, hidden)
                        if owner == part
                        else self.root.get_submodule(owner)(hidden)
                    )
        left: Tensor = Notice.apply(
            hidden, lambda: None, self._note("backward", part, visit)
        )
        return left

    def take(self, owner: str, hidden: Tensor) -> Tensor:
        """Use a module's parameters."""
        for name, leaf, is_view in self.own[owner]:
            param = getattr(self.owners[owner], leaf)
            # Of experts that ranks split
            param = param.to_local() if is_dtensor(param) else param
            hidden = _Parameter.apply(
                hidden, param, is_view, self._note("gradient", name)
            )
        return hidden

    def _save(self, number: int, size: int) -> Tensor:
        """A tensor that checkpointing saves, of ``size`` bytes a token."""
        self._note("saved", visit=number)()
        device = torch.device(self.recorder.device_type)
        empty = functools.partial(torch.empty, dtype=self.dtype, device=device)
        return torch.mm(empty(TOKENS, 0), empty(0, size // self.dtype.itemsize))

    def _note(self, kind: str, name: str = "", visit: int = 0) -> Callable[[], None]:
        def note() -> None:
            is_backward = torch._C._current_graph_task_id() != -1
            final_kind = IN_BACKWARD.get(kind, kind) if is_backward else kind
            if final_kind:
                self.recorder.add(Note(final_kind, self.number, name, visit))  # type: ignore[arg-type]

        return note


class Root(torch.autograd.Function):
    """A tensor that requires a gradient, which is not computed."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor) -> Tensor:
        """Return the tensor."""
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        """Return no gradients."""
        return None, None


def _within(name: str, part: str) -> bool:
    return not part or f"{name}.".startswith(f"{part}.")


class Notice(torch.autograd.Function):
    """Identity that calls a function in its forward and one in its backward.

    It saves tensors for the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, begin: Any, end: Any, *tensors: Tensor
    ) -> Tensor:
        """Call ``begin``."""
        ctx.end = end
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors)
        begin()
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Call ``end``."""
        ctx.end()
        return (grads[0], *[None] * (2 + ctx.count))


class _Parameter(torch.autograd.Function):
    """Use a parameter, with a gradient without values.

    It saves a tensor, so that checkpointing recomputes it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, param: Tensor, is_view: bool, note: Any
    ) -> Tensor:
        ctx.like = (param.shape, param.dtype, param.device)
        ctx.is_view = is_view
        ctx.note = note
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grads[0], None, None, None
        ctx.note()
        shape, dtype, device = ctx.like
        gradient = torch.empty(shape, dtype=dtype, device=device)
        return (
            grads[0],
            gradient.view_as(gradient) if ctx.is_view else gradient,
            None,
            None,
        )


class _Output(torch.autograd.Function):
    """A new tensor: the next segment's input, or the loss in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shape: Any, note: Any) -> Tensor:
        ctx.like = hidden.shape, hidden.dtype, hidden.device
        note()
        return torch.empty(
            shape, dtype=hidden.dtype if shape else torch.float32, device=hidden.device
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        shape, dtype, device = ctx.like
        same = grads[0].shape == shape
        return (
            grads[0]
            if same
            else torch.empty((), dtype=dtype, device=device).expand(shape),
            None,
            None,
        )
