"""``fsdptoys models``: size and FLOPs of the model presets, counted on models built on the meta
device."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from fsdptoys.config.choices import list_choices
from fsdptoys.config.compose import compose_presets
from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig
from fsdptoys.utils.text import suggestion

from .commands import parse

GAP = 2
"""Spaces between columns."""


@dataclass(frozen=True)
class ModelFacts:
    """Counts of a preset; shared parameters count once."""

    name: str
    family: str
    parameters: int
    active_parameters: int
    """Parameters used for one token."""
    embedding_parameters: int
    """Token and position embeddings, including a shared head."""
    expert_parameters: int
    """Parameters of routed experts."""
    dense_parameters: int
    """Parameters outside embeddings and routed experts."""
    n_layers: int
    dim: int
    max_seq_len: int
    flops_per_token: float
    """FLOPs of forward and backward, in sequences of ``max_seq_len``."""


@dataclass(frozen=True)
class _Column:
    heading: tuple[str, str]
    importance: int
    """A narrow terminal drops the least important columns first."""
    cells: list[str]
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        return max(map(len, [*self.heading, *self.cells]))


NOTES = (
    "Parameters: a weight that is shared counts once. Active: those that one token meets, all "
    "but the experts that it is not sent to. Embedding: look-ups of tokens and positions, and "
    "the head where it shares their weight.\nFLOPs: forward and backward of one token in a "
    "sequence of the whole context, 6 for each weight of a matrix product (of experts only the "
    "active), and attention over half of the square, since it is causal. Look-ups count nothing, "
    "nor does recomputation."
)
"""Explanation below the table."""


def models_command(words: Sequence[str]) -> int:
    """Run ``fsdptoys models``; return the exit status."""
    options = parse("models", words)
    presets = list_choices()["model"]
    names = list(dict.fromkeys(options.words))
    for name in names:
        if name not in presets:
            fix = suggestion(
                name, presets, "write fsdptoys models for all of them", "fsdptoys models "
            )
            raise ConfigError(f"{name} is not a model preset; {fix}")
    facts = [measure(config) for config in compose_presets(names or presets)]
    if not names:
        facts.sort(key=lambda fact: (fact.family, fact.parameters))
    if options.json:
        print(json.dumps([asdict(fact) for fact in facts], indent=2))
    else:
        print_table(facts, Console())
    return 0


def measure(config: ModelConfig) -> ModelFacts:
    """Build a model on the meta device and count its parameters and FLOPs."""
    with torch.device("meta"):
        model = config.build()
    counts = model.parameter_counts()
    return ModelFacts(
        name=config.name,
        family=config.family,
        parameters=counts.total,
        active_parameters=counts.active,
        embedding_parameters=counts.embedding,
        expert_parameters=counts.experts,
        dense_parameters=counts.dense,
        n_layers=config.n_layers,
        dim=config.dim,
        max_seq_len=config.max_seq_len,
        flops_per_token=model.flops_per_token(config.max_seq_len),
    )


def print_table(facts: Sequence[ModelFacts], console: Console) -> None:
    """Print one row per model, in as many columns as fit, and the explanation."""
    columns = [
        _Column(("", "model"), 10, [fact.name for fact in facts], "left"),
        _Column(("", "family"), 3, [fact.family for fact in facts], "left"),
        _Column(("", "parameters"), 9, [human_count(fact.parameters) for fact in facts]),
        _Column(("", "active"), 7, [human_count(fact.active_parameters) for fact in facts]),
        _Column(("", "embedding"), 1, [human_count(fact.embedding_parameters) for fact in facts]),
        _Column(("routed", "experts"), 5, [human_count(fact.expert_parameters) for fact in facts]),
        _Column(("", "layers"), 4, [str(fact.n_layers) for fact in facts]),
        _Column(("", "width"), 2, [str(fact.dim) for fact in facts]),
        _Column(("", "context"), 6, [f"{fact.max_seq_len:,}" for fact in facts]),
        _Column(("FLOPs", "a token"), 8, [human_flops(fact.flops_per_token) for fact in facts]),
    ]
    left_out = []
    while len(columns) > 1 and sum(column.width + GAP for column in columns) - GAP > console.width:
        least = min(columns, key=lambda column: column.importance)
        columns.remove(least)
        left_out.append(" ".join(least.heading).strip())
    table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(justify=column.justify, no_wrap=True, min_width=column.width)
    for number, row in enumerate(
        zip(*((*column.heading, *column.cells) for column in columns), strict=True)
    ):
        if any(row):
            table.add_row(*row, style="dim" if number < 2 else None)
    console.print(table, highlight=False)
    console.print()
    if left_out:
        console.print(
            f"Left out for want of width: {', '.join(left_out)}; --json has all numbers.",
            highlight=False,
        )
    console.print(NOTES, highlight=False, markup=False)


def human_count(value: float) -> str:
    """Format a count with three digits and a unit, as 8.03B; a dash for 0."""
    return "-" if value == 0 else "{}{}".format(*_scale(value, ("", "K", "M", "B", "T")))


def human_flops(value: float) -> str:
    """Format FLOPs with three digits and a unit, as 46.2 GFLOP."""
    return "{} {}FLOP".format(*_scale(value, ("", "K", "M", "G", "T", "P")))


def _scale(value: float, units: Sequence[str]) -> tuple[str, str]:
    steps = 0
    while value >= 999.5 and steps < len(units) - 1:
        value /= 1000
        steps += 1
    number = f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"
    return (f"{value:.0f}" if steps == 0 else number), units[steps]
