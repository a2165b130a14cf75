"""Published rows of several axes: the file, overrides, figures of a row, rank correlation and the page."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fsdptoys.config.compose import compose_config
from fsdptoys.loss.objective import Objective
from fsdptoys.loss.vocabulary import Vocabulary
from scripts.loss_parallel import LossParallel
from scripts.planned_layouts import (
    LayoutResults,
    PlannedLayout,
    count_traces,
    rank_correlation,
    rankings,
    render_layouts,
)
from scripts.published_layouts import MACHINES, PublishedLayout, parse_tables, read_layouts

ROW: dict[str, Any] = {"name": "one", "gpus": 32, "fsdp": 4, "cp": 2, "tp": 4, "tokens_per_second": 100}
TABLE: dict[str, Any] = {
    "source": "a page",
    "date": 2025,
    "machine": "h100",
    "common": {"model": "llama3_8b", "seq_len": 1024, "batch_size": 4, "words": ["optim=sgd"]},
    "rows": [ROW],
}


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


def test_a_row_adds_its_settings_to_those_of_its_table() -> None:
    """Oracle: the table."""
    row = parse_tables([TABLE])[0]
    assert (row.source, row.machine, row.seq_len, row.words) == ("a page", "h100", 1024, ("optim=sgd",))
    assert row.layout == "FSDP 4 CP 2 TP 4" and row.tokens == 4 * 1024 / 8
    config = compose_config(row.overrides())
    assert (config.mesh.fsdp_size, config.mesh.tp_size, config.mesh.cp_size) == (32, 4, 2)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([ROW | {"gpus": 24}], ValueError, "no multiple of 32"),
        ([ROW | {"machine": "abacus"}], ValueError, "unknown machine"),
        ([ROW | {"tokens_per_second": None}], ValueError, "no published speed"),
        ([ROW, ROW], ValueError, "name one more than once"),
        ([ROW | {"tensor": 4}], TypeError, "tensor"),
    ],
    ids=["gpus", "machine", "speed", "twice", "key"],
)
def test_rows_that_contradict_themselves_are_rejected(
    rows: list[dict[str, Any]], error: type[Exception], message: str
) -> None:
    """Oracle: the rule that the rows break."""
    with pytest.raises(error, match=message):
        parse_tables([TABLE | {"rows": rows}])


def test_rows_share_a_trace_if_they_differ_in_untraced_settings_only() -> None:
    """Oracle: float8 and asynchronous tensor parallelism are untraced; the batch is not."""
    others = [{"name": "two", "float8": True, "async_tp": True}, {"name": "three", "batch_size": 8}]
    rows = parse_tables([TABLE | {"rows": [ROW, *(ROW | other for other in others)]}])
    assert rows[0].trace_key == rows[1].trace_key != rows[2].trace_key
    assert rows[1].missing == ["float8", "async TP"] and count_traces(rows) == 2


def test_rank_correlation_without_ties_follows_the_formula() -> None:
    """Oracle: 1 - 6·Σd² / (n·(n² - 1)) over permutations; 1 and -1 for equal and opposite orders."""
    drawn = np.random.default_rng(0)
    for count in (3, 5, 12):
        first, second = drawn.permutation(count), drawn.permutation(count)
        formula = 1 - 6 * float(((first - second) ** 2).sum()) / (count * (count**2 - 1))
        assert rank_correlation([10.0**each for each in first], second.tolist()) == pytest.approx(formula)
    assert rank_correlation([1, 2, 9], [3, 4, 5]) == 1 and rank_correlation([1, 2, 9], [5, 4, 3]) == -1


def test_rank_correlation_gives_equal_values_their_mean_rank() -> None:
    """Oracle: Pearson's correlation by numpy of ranks that were averaged by hand."""
    value = rank_correlation([5, 7, 7, 9], [2, 1, 3, 3])
    assert value == pytest.approx(np.corrcoef([0, 1.5, 1.5, 3], [1, 0, 2.5, 2.5])[0, 1])
    assert math.isnan(rank_correlation([1, 2, 3], [4, 4, 4]))


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


def test_loss_parallel_has_the_loss_and_gradients_of_cross_entropy() -> None:
    """Oracle: PyTorch's cross entropy, with an ignored label."""
    values = torch.randn(6, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 2, -100, 4, 10, 0])
    found, expected = (values.clone().requires_grad_() for _ in range(2))
    loss = LossParallel.apply(found, labels, Objective(), Vocabulary())
    oracle = F.cross_entropy(expected, labels, reduction="sum")
    for each in (loss, oracle):
        (3 * each).backward()
    torch.testing.assert_close(loss, oracle)
    torch.testing.assert_close(found.grad, expected.grad)
