"""Choice of traced depths, and the line through them."""

from dataclasses import dataclass, field

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.plan.trace.extrapolate_layers import choose_depths, extrapolate


@pytest.mark.parametrize(
    "words, depths",
    [
        (["model=llama2_7b"], [8, 12]),
        (["model=llama3_405b"], [8, 23]),
        (["model=llama2_7b", "plan.exact=true"], [32]),
        (["model=llama2_7b", "plan.allocator=native"], [32]),
        # Every fourth layer of Scout attends to all positions, the others to chunks.
        (["model=llama4_scout"], [8, 16]),
        # 5 layers without checkpointing, then periods of 3: 14 has three of them, and 80 has 22 more.
        (
            [
                "model=llama3_70b",
                "memory.gradient_checkpointing=full",
                "memory.checkpointing_every=3",
                "memory.checkpointing_start_index=5",
            ],
            [14, 26],
        ),
        (["model=llama_debug"], [2]),
        (["model=llama2_7b", "model.n_layers=20"], [20]),
    ],
)
def test_traced_depths_differ_by_full_periods_of_the_model(words: list[str], depths: list[int]) -> None:
    """Oracle: the table; the last depth and the model's differ by full periods."""
    assert choose_depths(compose_config(words)) == depths


@dataclass(frozen=True)
class Figures:
    """A replay's kinds of values."""

    name: str
    bytes: int
    seconds: float
    by_stream: dict[str, int] = field(default_factory=dict)
    phases: tuple["Figures", ...] = ()


def figures(n_layers: int) -> Figures:
    inner = Figures("forward", 100 * n_layers, 2.0 * n_layers)
    streams = {"compute": 5 + n_layers} | ({"late": n_layers - 4} if n_layers > 4 else {})
    return Figures("step", 7 + 3 * n_layers, 0.5 + 0.25 * n_layers, streams, (inner, inner))


def test_extrapolation_is_exact_for_linear_values() -> None:
    """Oracle: the same linear formulas at that depth; a key missing at the shallow depth counts as zero."""
    assert extrapolate(figures(4), figures(6), (4, 6), 32) == figures(32)
