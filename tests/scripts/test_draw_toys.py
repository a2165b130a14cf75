"""Records of the toys for the pictures, compared with the formulas of their pages."""

from pathlib import Path
from typing import Any

import pytest

from scripts.toys import record_layers, record_toys
from scripts.toys.draw_toys import (
    KEPT,
    STRATEGIES,
    TIMELINES,
    draw_memory,
    draw_timelines,
)
from scripts.toys.record_layers import ATTENTIONS, PASSED, ROUTINGS, SENT, SWAPPED
from scripts.toys.record_toys import Recorded, record
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Recorded]]:
    """Strategy → records of both ranks."""
    with pytest.MonkeyPatch.context() as patch:
        small = [
            "model.dim=128",
            "model.n_layers=2",
            "model.ffn_dim=352",
            "train.seq_len=16",
        ]
        patch.setattr(record_toys, "MODEL", [*record_toys.MODEL, *small])
        patch.setattr(record_toys, "TIMED_STEPS", 2)
        per_rank = run_ranks(
            2, record, [[f"parallel={name}"] for name in STRATEGIES], 1
        )
    return {
        name: [recorded[index] for recorded in per_rank]
        for index, name in enumerate(STRATEGIES)
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_memory_at_the_optimizer_step_matches_the_formula(
    steps: Any, name: str
) -> None:
    """Oracle: bytes of parameters, gradients and AdamW's states; the batch and rotary tables are
    within a percent."""
    for rank in steps[name]:
        formula = KEPT[name](2) * rank.parameters
        off = 0.001 if name == "toy_zero3" else 0.0  # balance of its unsplit tensors
        before = [
            size for moment, size in rank.memory if moment <= rank.phases["optimizer"]
        ]
        at_update = [
            before[-1],
            *(
                size
                for moment, size in rank.memory
                if moment > rank.phases["optimizer"]
            ),
        ]
        assert any(
            (1 - off) * formula <= size < (1.02 + off) * formula for size in at_update
        )


@pytest.mark.parametrize(
    ("name", "kinds"),
    {
        "toy_ddp": {"all_reduce"},
        "toy_zero1": {"all_reduce", "all_gather"},
        "toy_zero2": {"reduce_scatter", "all_gather"},
        "toy_zero3": {"broadcast", "reduce"},
        "toy_fsdp": {"reduce_scatter", "all_gather"},
    }.items(),
)
def test_timelines_have_the_documented_blocks_and_collectives(
    steps: Any, name: str, kinds: set[str]
) -> None:
    """Oracle: the pages, and the order of the model's modules."""
    for rank in steps[name]:
        assert {bar.kind for bar in rank.collectives} == kinds
        computing = sorted(rank.computing, key=lambda bar: bar.begin)
        assert [bar.label for bar in computing if bar.kind == "forward"] == [
            "emb",
            "0",
            "1",
            "head",
        ]
        assert [bar.label for bar in computing if bar.kind == "backward"] == [
            "head",
            "1",
            "0",
        ]


def test_every_strategy_has_a_picture(steps: Any, tmp_path: Path) -> None:
    """Oracle: the titles of the panels, and PNG's signature."""
    figures = [
        draw_timelines({f"parallel={name}": steps[name] for name in names})
        for names in TIMELINES.values()
    ]
    titles = [axes.get_title(loc="left") for figure in figures for axes in figure.axes]
    assert titles == [
        f"parallel={name}" for names in TIMELINES.values() for name in names
    ]
    draw_memory(steps).savefig(tmp_path / "memory.png", dpi=30)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_layers_exchange_what_the_pages_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the pages; all rows are computed, more of them on rank 0 with an uneven router."""
    for name, value in {"TIMED_STEPS": 2, "LENGTH": 32, "TOKENS": 64}.items():
        monkeypatch.setattr(record_layers, name, value)
    ranks = run_ranks(2, record_layers.record_layers)
    labels = {
        "ulysses": SWAPPED,
        "ring": PASSED,
        "unbalanced_ring": PASSED,
        **dict.fromkeys(ROUTINGS, SENT),
    }
    for rank in ranks:
        assert list(rank) == [*ATTENTIONS, *ROUTINGS]
        assert {
            case: tuple(bar.label for bar in layer.collectives)
            for case, layer in rank.items()
        } == labels
    for routing in ROUTINGS:
        rows = [int(rank[routing].computing[0].label.split()[0]) for rank in ranks]
        assert sum(rows) == 2 * 64 * record_layers.TOP_K
        assert (rows[0] > 2 * rows[1]) == (routing == ROUTINGS[1])
