"""Layouts of the mesh against one process: losses, gradients by kind of parameter, norms, final parameters.

Every row trains one model on the same global batches: DDP, FSDP1, FSDP2, HSDP, context parallelism in each form, expert
parallelism, and their combinations, with ragged padding, with accumulation in every second row and gradient
checkpointing in every third. The reference is one ordinary process that takes the global batch as one micro-batch.

- layout mode (``train.deterministic=layout``): every loss, norm, gradient and parameter must be equal in every bit;
- default mode, in float32: every loss must be within 2e-6 relative of the one process, and the first gradients within
  1e-4.

A cell is 0, or the first difference: its step, with the ratio of norms to one process or the relative difference.
Gradients of all parameters are compared at the first two steps and the last; losses and norms at each.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.models import MoEConfig
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import is_dtensor
from scripts.progress import unit
from scripts.ranks import run_ranks

LOSS_TOLERANCE = 2e-6
"""Largest relative difference of a loss in default mode."""
GRADIENT_TOLERANCE = 1e-4
"""Largest relative difference of a parameter's first gradient in default mode; rounding makes about 1e-6."""
NOISE = 1e-4
"""Share of the norm of all gradients up to which a gradient counts as rounding: a bias of keys has none but this."""
GLOBAL_BATCH = 8
"""Sequences of a step."""
LAYOUT_MODES = {"layout": ["train.deterministic=layout"], "default": ["train.deterministic=false"]}
"""Mode → overrides that make it."""
EXTRAS = {"llama_debug": ["memory.chunk_loss=true"], "qwen3_debug": ["data.mask_documents=true"]}
"""Preset → overrides of all its rows."""
KINDS = ("embedding", "attention", "mlp", "experts", "router", "norms", "head")


Arrays = dict[str, npt.NDArray[np.float32]]
"""Name of a parameter → values; not tensors, whose memory would end with the rank that sends them."""


@dataclass(frozen=True)
class Layout:
    """A way to lay out the ranks."""

    overrides: tuple[str, ...]
    shares: int = 1
    """Ranks that share a sequence."""
    split: int = 1
    """Ranks that split the experts."""
    replicas: int = 1
    rings: bool = False
    """Whether the layout mode refuses it, since its partial sums depend on the number of ranks."""

    def fits(self, world_size: int, config: Config) -> bool:
        """Whether a model can be trained so on this many ranks."""
        shard = world_size // self.replicas
        if self.split > 1 and not isinstance(config.model, MoEConfig):
            return False
        if "parallel.context=ulysses" in self.overrides and config.model.n_heads % self.shares:
            return False
        return shard > 1 and all(shard % size == 0 for size in (self.shares, self.split))


def _layouts() -> dict[str, Layout]:
    plain = {name: Layout((f"parallel={name}",)) for name in ("ddp", "fsdp1", "fsdp2")}
    made = plain | {"hsdp": Layout((), replicas=2)}
    for form in ("ulysses", "gathered", "ring"):
        for cp in (2, 4):
            made[f"cp {cp} {form}"] = Layout((f"parallel.context={form}",), shares=cp, rings=form == "ring")
    made["cp 8 gathered"] = Layout(("parallel.context=gathered",), shares=8)
    made["hsdp, cp 2"] = Layout((), shares=2, replicas=2)
    made |= {f"ep {ep}": Layout((), split=ep) for ep in (2, 4, 8)}
    made |= {"cp 2, ep 2": Layout((), 2, 2), "cp 2, ep 4": Layout((), 2, 4), "cp 4, ep 2": Layout((), 4, 2)}
    return made | {"hsdp, ep 2": Layout((), split=2, replicas=2), "hsdp, cp 2, ep 2": Layout((), 2, 2, 2)}


LAYOUTS = _layouts()
"""Row of a table → layout; FSDP2 unless it names another strategy."""


@dataclass
class Trajectory:
    """Numbers of a training run to compare."""

    losses: list[float]
    norms: list[float]
    gradients: dict[int, Arrays]
    """Step → name → full gradient before clipping."""
    parameters: Arrays


class Difference(NamedTuple):
    """Something that is not equal in every bit."""

    step: int
    column: str
    sentence: str
    size: float
    """Relative difference."""


@dataclass
class Comparison:
    """A row against the reference."""

    loss_difference: float
    """Largest relative difference of a loss; infinite if one is nan."""
    differences: list[Difference] = field(default_factory=list)
    """In the order of a step: loss, gradients, norm; then parameters."""
    cells: dict[str, str] = field(default_factory=dict)
    """Column → the first difference; missing for none."""

    def note(self, difference: Difference, cell: str) -> None:
        """Add a difference."""
        self.differences.append(difference)
        self.cells.setdefault(difference.column, cell)

    def first(self, step: int | None = None, over: float = 0.0) -> str:
        """The first difference, at ``step`` if given, of more than ``over``; empty for none.

        A wrong loss comes first. Gradients of one step are found together; the one that differs most is named, since
        the backward spreads an error to all earlier layers.
        """
        found = [each for each in self.differences if each.size > over and each.step == (step or each.step)]
        if not found:
            return ""
        together = [each for each in found if each.step == found[0].step and each.column in KINDS]
        named = max(together, key=lambda each: each.size) if found[0].column in KINDS else found[0]
        return f"step {named.step}: {named.sentence}"


def kind_of(name: str) -> str:
    """Kind of a parameter, by its name."""
    parts = name.split(".")
    if "norm" in parts[-2]:
        return "norms"
    known = {"attn": "attention", "experts": "experts", "router": "router", "lm_head": "head"}
    found = [kind for part, kind in known.items() if part in parts]
    return found[0] if found else "embedding" if parts[0].startswith("embed") else "mlp"


def row_overrides(
    layout: Layout | None, model: str, dtype: str, mode: str, world_size: int, steps: int, seq_len: int, place: int
) -> list[str]:
    """Overrides of a row, or of the reference without a layout; ``place`` varies what must not matter."""
    data_ranks = 1 if layout is None else world_size // layout.shares
    # Routers balance the micro-batches so far, so a model with experts takes the same ones in every row.
    accumulates = layout is not None and place % 2 == 1 and data_ranks < GLOBAL_BATCH and "moe" not in model
    accumulated = 2 if accumulates and model != "llama4_debug" else 1
    words = [
        f"model={model}",
        "data=synthetic",
        "data.ragged=true",
        f"train.batch_size={GLOBAL_BATCH // data_ranks // accumulated}",
        f"train.grad_accum={accumulated}",
        f"train.seq_len={seq_len}",
        f"train.steps={steps}",
        "train.max_grad_norm=0.5",
        *LAYOUT_MODES[mode],
        "optim.lr=1e-3",
        "optim.weight_decay_on=all",
        "optim.warmup_steps=2",
        "metrics.console=none",
        "launch.device=cpu",
        *EXTRAS.get(model, []),
    ]
    if layout is None:
        return [*words, "parallel=single", f"parallel.param_dtype={dtype}"]
    if not any(word.startswith("parallel=") for word in layout.overrides):
        words.append("parallel=fsdp2")
    words += [*layout.overrides, f"parallel.param_dtype={dtype}"]
    if layout.replicas > 1:
        words.append(f"mesh.fsdp_size={world_size // layout.replicas}")
    words += [f"mesh.cp_size={layout.shares}", f"mesh.ep_size={layout.split}"]
    return words + (["memory.gradient_checkpointing=full"] if place % 3 == 2 else [])


class _Recorder(Trainer):
    """A trainer that passes the gradients of some steps on before they are clipped."""

    def __init__(self, config: Config, on_gradients: Callable[[int, Arrays], None]) -> None:
        super().__init__(config)
        self._on_gradients = on_gradients

    def _clip(self, max_norm: float, unscale: float) -> Tensor:
        step = self.steps_done + 1
        if step in recorded_steps(self.config.train.steps):
            self._on_gradients(step, full_gradients(self))
        return super()._clip(max_norm, unscale)


def recorded_steps(steps: int) -> set[int]:
    """Steps whose gradients are compared."""
    return {1, 2, steps}


@torch.no_grad()
def full_gradients(trainer: Trainer) -> Arrays:
    """Every gradient in full, as the norm sees it; a collective."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = trainer.strategy.model
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
            named = {name.replace("_fsdp_wrapped_module.", ""): param.grad for name, param in model.named_parameters()}
            return arrays((name, grad) for name, grad in named.items() if grad is not None)
    grads = ((name, param.grad) for name, param in trainer.strategy.named_parameters())
    full = ((name, grad.full_tensor() if is_dtensor(grad) else grad) for name, grad in grads if grad is not None)
    return arrays(full)


def arrays(tensors: Iterable[tuple[str, Tensor]]) -> Arrays:
    """Copies in host memory."""
    return {name: tensor.to("cpu", torch.float32, copy=True).numpy() for name, tensor in tensors}


def train_and_compare(configs: Sequence[Config], reference: Trajectory, titles: Sequence[str]) -> list[Comparison]:
    """Train rows one after another on the ranks that this one belongs to; rank 0's comparisons count."""
    compared = []
    for config, title in zip(configs, titles, strict=True):
        with unit(title, announce=dist.get_rank() == 0):
            compared.append(compare(train(config), reference))
    return compared


def train(config: Config) -> Trajectory:
    """Train on all ranks. A collective."""
    gradients: dict[int, Arrays] = {}
    trainer = _Recorder(config, gradients.__setitem__)
    trainer.train()
    parameters = arrays(trainer.strategy.full_parameters())
    steps = trainer.history
    return Trajectory([step.loss for step in steps], [step.grad_norm for step in steps], gradients, parameters)


def compare(row: Trajectory, reference: Trajectory) -> Comparison:
    """Compare two trajectories in the order of a step."""
    relative = [_relative(a, b) for a, b in zip(row.losses, reference.losses, strict=True)]
    result = Comparison(max(relative))
    for step, (loss, expected) in enumerate(zip(row.losses, reference.losses, strict=True), 1):
        if loss != expected:
            size, sentence = _relative(loss, expected), f"loss {loss:.9g} instead of {expected:.9g}"
            result.note(Difference(step, "loss", sentence, size), f"{size:.0e} at {step}")
        for name, grad in reference.gradients.get(step, {}).items():
            found, least = row.gradients[step].get(name), NOISE * reference.norms[step - 1]
            _compare_tensors(result, kind_of(name), step, f"gradient of {name}", found, grad, least)
        norm, expected = row.norms[step - 1], reference.norms[step - 1]
        if norm != expected:
            size, sentence = _relative(norm, expected), f"gradient norm {norm:.9g} instead of {expected:.9g}"
            result.note(Difference(step, "norm", sentence, size), f"{size:.0e} at {step}")
    for name, param in reference.parameters.items():
        _compare_tensors(result, "parameters", len(row.losses), f"parameter {name}", row.parameters[name], param)
    return result


def _compare_tensors(
    result: Comparison,
    column: str,
    step: int,
    name: str,
    found: npt.NDArray[np.float32] | None,
    expected: npt.NDArray[np.float32],
    least: float = 1e-30,
) -> None:
    if found is None:
        result.note(Difference(step, column, f"{name} is missing", math.inf), f"none at {step}")
    elif not np.array_equal(found, expected):
        size = float(np.linalg.norm(expected))
        ratio = float(np.linalg.norm(found)) / max(size, 1e-30)
        difference = float(np.linalg.norm(found - expected)) / max(size, least)
        difference = math.inf if math.isnan(difference) else difference
        sentence = f"{name} has {ratio:.6g} times the norm, and differs by {difference:.1e} of it"
        cell = f"{ratio:.4g}× at {step}" if abs(ratio - 1) > 1e-3 else f"{difference:.0e} at {step}"
        result.note(Difference(step, column, sentence, difference), cell)


def _relative(value: float, expected: float) -> float:
    difference = abs(value - expected) / abs(expected)
    return math.inf if math.isnan(difference) else difference


def layout_configs(
    names: Sequence[str], model: str, dtype: str, mode: str, world_size: int, steps: int, seq_len: int
) -> dict[str, Config]:
    """Configurations of the rows that a model and a number of ranks have."""
    configs = {}
    for place, name in enumerate(names):
        layout = LAYOUTS[name]
        if (layout.rings and mode == "layout") or not layout.fits(world_size, compose_config([f"model={model}"])):
            continue
        config = compose_config(row_overrides(layout, model, dtype, mode, world_size, steps, seq_len, place))
        config.validate(world_size, "cpu")
        configs[name] = config
    return configs


def count_rows(args: argparse.Namespace, tables: Sequence[tuple[str, str, str]]) -> int:
    """Number of rows of all tables."""
    if not args.layouts:
        return 0
    models = {model: compose_config([f"model={model}"]) for model, _, _ in tables}
    return sum(
        LAYOUTS[name].fits(world_size, models[model]) and not (LAYOUTS[name].rings and mode == "layout")
        for model, _, mode in tables
        for world_size in args.world_sizes
        for name in args.layouts
    )


def reference_of(model: str, dtype: str, mode: str, steps: int, seq_len: int) -> Trajectory:
    """Train one ordinary process."""
    config = compose_config(row_overrides(None, model, dtype, mode, 1, steps, seq_len, 0))
    config.validate(1, "cpu")
    trained: Trajectory = run_ranks(1, train, config, timeout_seconds=3600)[0]
    return trained


def compare_layouts(args: argparse.Namespace, model: str, dtype: str, mode: str, console: Console) -> list[str]:
    """Train and print one table; return the breaches."""
    reference = reference_of(model, dtype, mode, args.steps, args.seq_len)
    table = Table(title=f"{model}, {dtype}, {mode} mode, {args.steps} steps: differences from one process")
    kinds = [kind for kind in KINDS if kind in {kind_of(name) for name in reference.parameters}]
    for column in ("ranks", "layout", "loss", *kinds, "norm", "parameters", "largest loss difference"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    breaches = []
    for world_size in args.world_sizes:
        configs = layout_configs(args.layouts, model, dtype, mode, world_size, args.steps, args.seq_len)
        titles = [f"{model}, {dtype}, {mode}, {name}, {world_size} ranks" for name in configs]
        rows: list[Comparison] = run_ranks(
            world_size, train_and_compare, list(configs.values()), reference, titles, timeout_seconds=3600
        )[0]
        table.add_section()
        for name, title, row in zip(configs, titles, rows, strict=True):
            cells = [row.cells.get(key, "0") for key in ("loss", *kinds, "norm", "parameters")]
            table.add_row(str(world_size), name, *cells, f"{row.loss_difference:.1e}")
            breaches += [f"{title}: {reason}" for reason in [breach_of(row, mode)] if reason]
    console.print(table)
    return breaches


def breach_of(row: Comparison, mode: str) -> str:
    """The promise that a row breaks; empty if it keeps all."""
    if mode == "layout":
        return row.first()
    if row.loss_difference > LOSS_TOLERANCE:
        return f"a loss differs by {row.loss_difference:.1e}, over {LOSS_TOLERANCE:g}"
    return row.first(step=1, over=GRADIENT_TOLERANCE)
