"""The table of a step's collectives."""

from fsdptoys.profiler.collective_table import block_of, describe, fold, render
from fsdptoys.profiler.collectives import Call


def call_of(number: int, collective: str, name: str, ranks: int = 2) -> Call:
    return Call(
        number,
        "backward",
        1,
        collective,
        "float32",
        8,
        4,
        8,
        4.0,
        ranks,
        "",
        "f",
        [name],
    )


def test_repeated_collectives_are_folded_without_loss() -> None:
    """Oracle: a sequence with a run, a pattern of two and a single call, written by hand."""
    kinds = ["all_gather"] * 3 + ["broadcast"] + ["all_gather", "reduce_scatter"] * 4
    calls = [
        call_of(number, kind, f"layers.{number}.w")
        for number, kind in enumerate(kinds, 1)
    ]
    folds = fold(calls)
    assert [(part.period, part.times) for part in folds] == [(1, 3), (1, 1), (2, 4)]
    assert [call.number for part in folds for call in part.calls] == list(range(1, 13))
    page = render(calls, "collectives")
    assert "1-3  backward  all-gather × 3" in page and "layers.1 … layers.3" in page
    assert "5-12  backward  all-gather × 4" in page and "layers.6 … layers.12" in page
    assert page.splitlines()[-1].split() == [
        "together",
        "12",
        "96",
        "bytes",
        "48",
        "bytes",
    ]


def test_partially_moved_blocks_are_marked() -> None:
    """Oracle: hand-computed values."""
    names = [
        "embed_tokens.weight",
        "layers.0.a.weight",
        "layers.0.b.weight",
        "norm.weight",
    ]
    assert describe(names[:2], names) == "embed_tokens, layers.0~"
    assert describe(names[1:3], names) == block_of(names[1]) == "layers.0"
    assert describe([], names) == "-"
    assert describe([*names, "lm_head.weight"]) == "embed_tokens … lm_head (5 tensors)"
