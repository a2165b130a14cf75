"""Records of the toys for the pictures, compared with the formulas of their pages."""

from pathlib import Path
from typing import Any

import pytest

from scripts import draw_toys, record_layers, record_toys
from scripts.draw_toys import KEPT, STRATEGIES, TIMELINES, draw_memory, draw_timelines
from scripts.ranks import run_ranks
from scripts.record_layers import ATTENTIONS, PASSED, ROUTINGS, SENT, SWAPPED
from scripts.record_toys import Bar, Recorded, record

pytestmark = pytest.mark.extended

BLOCKS = 2


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Recorded]]:
    """Strategy → records of each of two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        small = ["model.dim=128", f"model.n_layers={BLOCKS}", "model.ffn_dim=352", "train.seq_len=16"]
        patch.setattr(record_toys, "MODEL", [*record_toys.MODEL, *small])
        patch.setattr(record_toys, "TIMED_STEPS", 2)
        per_rank = run_ranks(2, record, [[f"parallel={name}"] for name in STRATEGIES], 1)
    return {name: [recorded[index] for recorded in per_rank] for index, name in enumerate(STRATEGIES)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_memory_at_the_optimizer_step_matches_the_formula(steps: Any, name: str) -> None:
    """Oracle: bytes of parameters, gradients and AdamW's states; the batch and rotary tables are within a percent."""
    for rank in steps[name]:
        formula = KEPT[name](2) * rank.parameters
        off = 0.001 if name == "toy_zero3" else 0.0  # balance of its unsplit tensors
        before = [size for moment, size in rank.memory if moment <= rank.phases["optimizer"]]
        at_update = [before[-1], *(size for moment, size in rank.memory if moment > rank.phases["optimizer"])]
        assert any((1 - off) * formula <= size < (1.02 + off) * formula for size in at_update)
        assert max(size for _, size in rank.memory) > 1.02 * formula, "activations are on top of it"


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_block_computes_forward_and_backward_once_in_order(steps: Any, name: str) -> None:
    """Oracle: the model; the backward is the forward reversed."""
    for rank in steps[name]:
        forward, backward = (
            [bar.label for bar in sorted(rank.computing, key=lambda bar: bar.begin) if bar.kind == kind]
            for kind in ("forward", "backward")
        )
        assert forward == ["emb", "0", "1", "head"]
        assert backward == ["head", "1", "0"]
        assert any(bar.kind == "update" for bar in rank.computing)
        assert all(0 <= bar.begin < bar.end <= rank.seconds for bar in [*rank.computing, *rank.collectives])


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
def test_collectives_match_the_documentation(steps: Any, name: str, kinds: set[str]) -> None:
    """Oracle: the pages; the same on both ranks."""
    assert [{bar.kind for bar in rank.collectives} for rank in steps[name]] == [kinds] * 2


def test_fsdp_reduces_its_units_in_the_order_of_the_backward(steps: Any) -> None:
    """Oracle: the page."""
    labels = [[bar.label for bar in rank.collectives if bar.kind == "reduce_scatter"] for rank in steps["toy_fsdp"]]
    assert labels == [["norm…head", "1", "0", "emb"]] * 2


def test_every_strategy_has_a_picture(steps: Any, tmp_path: Path) -> None:
    """Oracle: the titles of the panels, and PNG's signature."""
    figures = [draw_timelines({f"parallel={name}": steps[name] for name in names}) for names in TIMELINES.values()]
    titles = [axes.get_title(loc="left") for figure in figures for axes in figure.axes]
    assert titles == [f"parallel={name}" for names in TIMELINES.values() for name in names]
    memory = draw_memory(steps)
    assert [axes.get_title().splitlines()[0] for axes in memory.axes] == STRATEGIES
    memory.savefig(tmp_path / "memory.png", dpi=30)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_layers_compute_and_exchange_what_the_pages_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the pages: rank 0 sees no keys of rank 1 unless the cut is balanced; rows are conserved."""
    for name, value in {"TIMED_STEPS": 2, "LENGTH": 32, "TOKENS": 64}.items():
        monkeypatch.setattr(record_layers, name, value)
    ranks = run_ranks(2, record_layers.record_layers)
    computed = [
        {case: [f"{bar.kind} {bar.label}" for bar in found.computing] for case, found in rank.items()} for rank in ranks
    ]
    phases = ("forward", "backward")
    turns = [[f"{phase} K V of rank {source}" for phase in phases for source in of] for of in ((0, 1), (1, 0))]
    assert [rank["ring"] for rank in computed] == turns
    assert [rank["unbalanced_ring"] for rank in computed] == [turns[0][::2], turns[1]]
    assert [rank["ulysses"] for rank in computed] == [["forward its heads", "backward its heads"]] * 2
    labels = {"ulysses": SWAPPED, "ring": PASSED, "unbalanced_ring": PASSED, **dict.fromkeys(ROUTINGS, SENT)}
    for rank in ranks:
        assert list(rank) == [*ATTENTIONS, *ROUTINGS]
        assert {case: tuple(bar.label for bar in found.collectives) for case, found in rank.items()} == labels
        for found in rank.values():
            assert all(0 <= bar.begin < bar.end <= found.seconds for bar in [*found.computing, *found.collectives])
    for routing in ROUTINGS:
        rows = [int(rank[routing][0].split()[1]) for rank in computed]
        assert sum(rows) == 2 * 64 * record_layers.TOP_K
        assert (rows[0] > 2 * rows[1]) == (routing == ROUTINGS[1])


def test_overlapping_bars_get_separate_lanes() -> None:
    """Oracle: hand-computed values."""
    bars = [Bar("reduce", "", *span) for span in ((0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 2.6), (3.0, 5.0))]
    assert draw_toys._lanes(bars) == ([0, 1, 0, 2, 1], 3)
