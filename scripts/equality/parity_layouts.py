"""Layouts of the mesh against one process: losses, gradients by kind of parameter, norms, final
parameters.

Every row trains one model on the same global batches: DDP, FSDP1, FSDP2, HSDP, context parallelism
in each form, expert and tensor parallelism, pipelines with each schedule, and their combinations,
with ragged padding, with accumulation in pipelines and every second row and gradient checkpointing
in every third. The reference is one ordinary process that takes the global batch as one
micro-batch.

- layout mode (``train.deterministic=layout``): every loss, norm, gradient and parameter must be
  equal in every bit;
- default mode, in float32: every loss must be within 2e-6 relative of the one process, and the
  first gradients within 1e-4.

A cell is 0, or the first difference: its step, with the ratio of norms to one process or the
relative difference. Gradients of all parameters are compared at the first two steps and the last;
losses and norms at each.

``--layouts all`` trains every layout of every model, in both modes and dtypes, on every number of
ranks that it fits. ``--layouts pairs`` leaves half of these rows out: each (model, layout, mode,
dtype) is trained on the smallest number of ranks that it fits, and on every number only for the
models ``PAIRED_IN_FULL``, in layout mode and float32.
"""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from fsdptoys.config.schema import Config
from fsdptoys.train.trainer import Trainer
from fsdptoys.verify.measure import Arrays, Measure, NamedTensors, arrays
from fsdptoys.verify.tensors import gradients, parameters
from scripts.common.configured import configured
from scripts.common.progress import unit
from scripts.equality.layout_table import EXTRAS, LAYOUTS, Layout
from scripts.equality.parity_compare import (
    KINDS,
    PARAMETERS,
    Comparison,
    Trajectory,
    compare,
    kind_of,
)
from tests.harness.ranks import run_ranks

LOSS_TOLERANCE = 2e-6
"""Largest relative difference of a loss in default mode."""
GRADIENT_TOLERANCE = 1e-4
"""Largest relative difference of a parameter's first gradient in default mode; rounding makes about
1e-6."""
GLOBAL_BATCH = 8
"""Sequences of a step."""
LAYOUT_MODES = {"layout": "layout", "default": "false"}
"""Mode → its ``train.deterministic``."""
PAIRED_IN_FULL = ("llama_debug", "qwen3_moe_debug")
"""Presets that ``--layouts pairs`` trains on every number of ranks, in layout mode and float32."""


@dataclass(frozen=True)
class Training:
    """What all rows of a table train."""

    model: str
    dtype: str
    mode: str
    steps: int
    seq_len: int

    @property
    def title(self) -> str:
        """For tables and progress."""
        return f"{self.model}, {self.dtype}, {self.mode}"


def row_overrides(
    layout: Layout | None, training: Training, world_size: int, index: int
) -> list[str]:
    """Overrides of a row, or of the reference without a layout; ``index`` varies what must not
    matter."""
    model = training.model
    data_ranks = (
        1
        if layout is None
        else world_size // layout.shares // layout.features // layout.blocks
    )
    # Routers balance the micro-batches so far, so a model with experts takes the same ones in every
    # row.
    accumulates = (
        layout is not None
        and index % 2 == 1
        and data_ranks < GLOBAL_BATCH
        and "moe" not in model
    )
    accumulated = 2 if accumulates and model != "llama4_debug" else 1
    accumulated = (
        layout.blocks if layout is not None and layout.blocks > 1 else accumulated
    )
    line = (
        f"model={model} data=synthetic data.ragged=true "
        f"train.batch_size={GLOBAL_BATCH // data_ranks // accumulated} "
        f"train.grad_accum={accumulated} train.seq_len={training.seq_len} "
        f"train.steps={training.steps} train.deterministic={LAYOUT_MODES[training.mode]} "
        "train.max_grad_norm=0.5 optim.lr=1e-3 optim.weight_decay_on=all optim.warmup_steps=2 "
        "metrics.console=none launch.device=cpu "
        f"parallel.param_dtype={training.dtype} {EXTRAS.get(model, '')}"
    )
    overrides = line.split()
    if layout is None:
        return [*overrides, "parallel=single"]
    overrides += layout.of_reference(training.mode, model)
    if not any(word.startswith("parallel=") for word in layout.overrides):
        overrides.append("parallel=fsdp2")
    overrides += layout.overrides
    if layout.replicas > 1:
        overrides.append(
            f"mesh.fsdp_size={world_size // layout.replicas // layout.blocks}"
        )
    sizes = {
        "cp": layout.shares,
        "ep": layout.split,
        "tp": layout.features,
        "pp": layout.blocks,
    }
    overrides += [f"mesh.{axis}_size={size}" for axis, size in sizes.items()]
    return overrides + (
        ["memory.gradient_checkpointing=full"] if index % 3 == 2 else []
    )


def recorder(
    config: Config, on_gradients: Callable[[int, NamedTensors], None]
) -> Trainer:
    """Return a trainer that passes the gradients of some steps on before they are clipped."""
    trainer = Trainer(config)
    # Counting it takes a tenth of a row's time on rank 0, for which the others wait
    trainer.memory.enabled = False

    def look(step: int, phase: str) -> None:
        if phase == "optimizer" and step in recorded_steps(config.train.steps):
            with gradients(trainer) as grads:
                on_gradients(step, grads)

    trainer.on_phase = look
    return trainer


def recorded_steps(steps: int) -> set[int]:
    """Return the steps to compare gradients of."""
    return {1, 2, steps}


def train_and_compare(
    configs: Sequence[Config], references: Sequence[Trajectory], titles: Sequence[str]
) -> list[Comparison]:
    """Train rows one after another on the ranks that this one belongs to; returns the comparisons
    on rank 0."""
    compared = []
    for config, reference, title in zip(configs, references, titles, strict=True):
        with unit(title, announce=dist.get_rank() == 0):
            measure = Measure(reference.tensors())
            trainer = recorder(config, measure.add)
            trainer.train()
            measure.add(PARAMETERS, parameters(trainer))
            sums = measure.total()
            steps = trainer.history
            if dist.get_rank() == 0:
                losses = [step.loss for step in steps]
                norms = [step.grad_norm for step in steps]
                compared.append(compare(losses, norms, sums, reference))
    return compared


def train(config: Config) -> Trajectory:
    """Train one ordinary process."""
    gradients_by_step: dict[int, Arrays] = {}
    trainer = recorder(
        config, lambda step, grads: gradients_by_step.update({step: arrays(grads)})
    )
    trainer.train()
    assert gradients_by_step, "no gradients to compare with"
    steps = trainer.history
    losses = [step.loss for step in steps]
    norms = [step.grad_norm for step in steps]
    return Trajectory(
        losses, norms, gradients_by_step, arrays(trainer.strategy.full_parameters())
    )


def layout_configs(
    rows: Mapping[str, int], training: Training, world_size: int
) -> dict[str, Config]:
    """Configurations of rows, given as layouts with their indices."""
    return {
        name: configured(
            row_overrides(LAYOUTS[name], training, world_size, index), world_size
        )
        for name, index in rows.items()
    }


def rows_of(
    args: argparse.Namespace, training: Training, world_size: int
) -> dict[str, int]:
    """Layouts, with their indices, that are trained on this many ranks."""
    model = training.model
    mode = training.mode
    bits = (mode, training.dtype) == ("layout", "float32")
    in_full = not args.pairs or (model in PAIRED_IN_FULL and bits)
    rows = {}
    for index, (name, layout) in enumerate(LAYOUTS.items()):
        fitting = [
            size for size in sorted(args.world_sizes) if layout.fits(size, model, mode)
        ]
        fitting = fitting if in_full else fitting[:1]
        if name in args.layouts and world_size in fitting:
            rows[name] = index
    return rows


def count_rows(args: argparse.Namespace, tables: Sequence[Training]) -> int:
    """Number of rows of all tables."""
    sizes = args.world_sizes if args.layouts else []
    return sum(
        len(rows_of(args, training, size)) for training in tables for size in sizes
    )


def reference_of(training: Training, more: Sequence[str] = ()) -> Trajectory:
    """Train one ordinary process."""
    config = configured([*row_overrides(None, training, 1, 0), *more])
    trained: Trajectory = run_ranks(1, train, config)[0]
    return trained


def compare_layouts(
    args: argparse.Namespace, training: Training, console: Console
) -> list[str]:
    """Train and print one table; return the breaches."""
    model = training.model
    mode = training.mode
    make_reference = functools.cache(lambda *more: reference_of(training, more))
    table = Table(
        title=f"{training.title} mode, {args.steps} steps: differences from one process"
    )
    kinds = [
        kind
        for kind in KINDS
        if kind in {kind_of(name) for name in make_reference().parameters}
    ]
    for column in (
        "ranks",
        "layout",
        "loss",
        *kinds,
        "norm",
        "parameters",
        "largest loss difference",
    ):
        table.add_column(column, justify="left" if column == "layout" else "right")
    breaches = []
    for world_size in args.world_sizes:
        rows = rows_of(args, training, world_size)
        configs = layout_configs(rows, training, world_size)
        titles = [f"{training.title}, {name}, {world_size} ranks" for name in configs]
        references = [
            make_reference(*LAYOUTS[name].of_reference(mode, model)) for name in configs
        ]
        comparisons: list[Comparison] = run_ranks(
            world_size, train_and_compare, list(configs.values()), references, titles
        )[0]
        table.add_section()
        for name, title, row in zip(configs, titles, comparisons, strict=True):
            cells = [
                row.cells.get(key, "0")
                for key in ("loss", *kinds, "norm", "parameters")
            ]
            table.add_row(str(world_size), name, *cells, f"{row.loss_difference:.1e}")
            breaches += [
                f"{title}: {reason}" for reason in [breach_of(row, mode)] if reason
            ]
    console.print(table)
    return breaches


def breach_of(row: Comparison, mode: str) -> str:
    """The promise that a row breaks; empty if it keeps all."""
    if mode == "layout":
        return row.first()
    if row.loss_difference > LOSS_TOLERANCE:
        return f"a loss differs by {row.loss_difference:.1e}, over {LOSS_TOLERANCE:g}"
    return row.first(step=1, over=GRADIENT_TOLERANCE)
