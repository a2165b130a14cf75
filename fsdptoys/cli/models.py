"""``fsdptoys models``: size and FLOPs of the model presets, counted on models built on the meta
device."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from fsdptoys.config.compose import compose_presets, list_presets
from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig
from fsdptoys.utils.tables import align_columns
from fsdptoys.utils.text import suggestion

from .commands import parse

HEADINGS = (
    *("model", "family", "parameters", "active", "embedding", "routed experts"),
    *("layers", "width", "context", "FLOPs a token"),
)
NOTES = """
Parameters: a weight that is shared counts once. Active: those that one token meets, all but the
experts that it is not sent to. Embedding: look-ups of tokens and positions, and the head where it
shares their weight.
FLOPs: forward and backward of one token in a sequence of the whole context, 6 for each weight of a
matrix product (of experts only the active), and attention over half of the square, since it is
causal. Look-ups count nothing, nor does recomputation."""


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


def models_command(argv: Sequence[str]) -> int:
    """Run ``fsdptoys models``; return the exit status."""
    options = parse("models", argv)
    presets = list_presets()
    names = list(dict.fromkeys(options.arguments))
    for name in names:
        if name not in presets:
            fix = suggestion(
                name,
                presets,
                "write fsdptoys models for all of them",
                "fsdptoys models ",
            )
            raise ConfigError(f"{name} is not a model preset; {fix}")
    facts = [measure(config) for config in compose_presets(names or presets)]
    if not names:
        facts.sort(key=lambda fact: (fact.family, fact.parameters))
    if options.json:
        print(json.dumps([asdict(fact) for fact in facts], indent=2))
    else:
        print_table(facts)
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


def print_table(facts: Sequence[ModelFacts]) -> None:
    """Print one row per model, and the explanation."""
    rows = [
        (
            fact.name,
            fact.family,
            human_count(fact.parameters),
            human_count(fact.active_parameters),
            human_count(fact.embedding_parameters),
            human_count(fact.expert_parameters),
            str(fact.n_layers),
            str(fact.dim),
            f"{fact.max_seq_len:,}",
            f"{human_count(fact.flops_per_token).replace('B', 'G')}FLOP",
        )
        for fact in facts
    ]
    print(*align_columns([HEADINGS, *rows], range(2, len(HEADINGS))), NOTES, sep="\n")


def human_count(value: float) -> str:
    """Format a count with three digits and a unit, as 8.03B; a dash for 0."""
    if value == 0:
        return "-"
    units = ["", "K", "M", "B", "T", "P"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    digits = f"{value:#.3g}".rstrip(".") if len(units) < 6 else f"{value:.0f}"
    return digits + units[0]
