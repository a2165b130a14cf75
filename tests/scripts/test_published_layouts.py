"""Published rows of several axes: the file, overrides, figures of a row, rank correlation and the page."""

import math
from typing import Any

import numpy as np
import pytest

from scripts.planned_layouts import (
    LayoutResults,
    PlannedLayout,
    count_traces,
    rank_correlation,
    rankings,
    render_layouts,
)
from scripts.published_layouts import MACHINES, PublishedLayout, read_layouts


def planned(name: str, published: float, predicted: float, **values: Any) -> PlannedLayout:
    """A row of eight GPUs and its prediction; rows of several layouts have other numbers of GPUs."""
    values = {"gpus": 8, "tokens_per_second": published, **values}
    row = PublishedLayout(name, "a page", "2025", "h100", "llama3_8b", **values)
    return PlannedLayout(row, memory_gib=50.0, tokens_per_second=predicted, fitted=None)


def test_every_row_has_a_source_and_sizes_and_can_be_planned_or_says_why() -> None:
    """Oracle: validation by ``fsdptoys train`` of each row without an obstacle, and the axes' product."""
    rows = read_layouts()
    for row in rows:
        assert row.source and row.date and row.gpus % (row.fsdp * row.cp * row.tp * row.pp) == 0
        if not row.obstacle:
            axes = (config := row.config()).parallel.axes(row.gpus, config.mesh)
            assert (axes.replicate, axes.shard) == (row.gpus // row.ranks_of_copy, row.fsdp * row.cp)
            assert (axes.cp, axes.tp, axes.ep, axes.pp) == (row.cp, row.tp, row.ep, row.pp)
    assert {row.machine for row in rows} == set(MACHINES) and 0 < count_traces(rows) < len(rows)
    assert {row.pp for row in rows if not row.obstacle} == {1, 8, 16}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 9], [3, 4, 5], 1.0),
        ([1, 2, 9], [5, 4, 3], -1.0),
        ([10, 20, 30, 40], [2, 1, 4, 3], 1 - 6 * 4 / (4 * 15)),
        ([5, 7, 7, 9], [2, 1, 3, 3], np.corrcoef([0, 1.5, 1.5, 3], [1, 0, 2.5, 2.5])[0, 1]),
        ([1, 2, 3], [4, 4, 4], math.nan),
    ],
)
def test_rank_correlation_follows_its_formula(first: list[float], second: list[float], expected: float) -> None:
    """Oracle: 1 - 6·Σd² / (n·(n² - 1)), or Pearson's correlation of averaged ranks where values are equal."""
    assert rank_correlation(first, second) == pytest.approx(expected, nan_ok=True)


def test_rankings_need_three_layouts_and_separate_numerics() -> None:
    """Oracle: the groups by hand; a second row of one layout is no further layout."""
    rows = [planned(str(size), 100 - size, 90 - size, gpus=8 * size, tp=size) for size in (1, 2, 4)]
    found = rankings([*rows, planned("float8", 150, 89, float8=True)])
    titles = [(ranking.title, ranking.rows) for ranking in found]
    assert titles == [("H100, llama3_8b, all rows", 4), ("H100, llama3_8b, eager", 3)]
    assert found[1].value == 1 and found[1].met
    assert not rankings([*rows[:2], planned("float8", 150, 89, float8=True)])


def test_page_has_every_row_with_its_verdict_or_its_obstacle() -> None:
    """Oracle: 50 GiB predicted are within 8% of 52 and not of 60; one row has an obstacle."""
    members = [planned("near", 100, 125, memory_gib=52.0), planned("far", 100, 50, memory_gib=60.0, compile=True)]
    pipeline = planned("deep", 10, 0, pp=8, unplanned="no batch").row
    lines, met = render_layouts([*(each.row for each in members), pipeline], LayoutResults(members, []))
    page = "\n".join(lines)
    assert "| 52.0 | 50.0 | 0.96 | met | 100 | 125 | 1.25 |  |  |" in page
    assert "| 60.0 | 50.0 | 0.83 | **missed** | 100 | 50 | 0.50 |  | compile |" in page
    assert "| deep | H100 | PP 8 | 10 |  | no batch |" in page and "- a page, 2025" in page
    assert not met and "1 of 2 memories" in page
