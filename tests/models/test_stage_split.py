"""Stages: blocks split evenly by cost, and models with some of them."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.models.stage_split import balanced_sizes, split_model


def smallest_maximum(costs: list[float], count: int) -> float:
    cuts = [
        (0, *inner, len(costs))
        for inner in combinations(range(1, len(costs)), count - 1)
    ]
    return min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_costs_are_split_as_evenly_as_they_can_be(count: int) -> None:
    """Oracle: all splits."""
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    sizes = balanced_sizes(costs, count)
    assert len(sizes) == count and min(sizes) >= 1 and sum(sizes) == len(costs)
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    largest = max(
        sum(costs[end - size : end]) for end, size in zip(ends, sizes, strict=True)
    )
    assert largest == smallest_maximum(costs, count)


def model_of(preset: str) -> Any:
    with torch.device("meta"):
        return compose_config([f"model={preset}"]).model.build()


def test_embedding_and_head_count() -> None:
    """Oracle: Llama 3 8B, whose head has parameters and FLOPs of 2.4 blocks, and its embedding as
    many parameters."""
    sizes = [
        stage.end - stage.first for stage in split_model(model_of("llama3_8b"), 4, 8192)
    ]
    assert (
        sum(sizes) == 32
        and sizes[1] == sizes[2] == max(sizes)
        and sizes[3] < sizes[0] < sizes[1]
    )
