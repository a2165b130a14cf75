"""The fuzzer of the toys: the toys have the bits of PyTorch's classes, and the fuzzer detects toys that do not."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdptoys.toys.ddp.core import Bucket
from scripts import fuzz_toys
from scripts.fuzz_toys import Crew, fuzz
from scripts.fuzz_trees import Node, Tree


@pytest.mark.extended
@pytest.mark.parametrize("toy", fuzz_toys.TOYS)
def test_random_trees_train_in_the_bits_of_pytorch(toy: str) -> None:
    """Oracle: ``fully_shard`` and DDP of PyTorch; 15 trees of a full run of the fuzzer."""
    counts, reports = fuzz(toy, list(range(15)), seed=0, shrinks=False)
    assert not {"different", "died", "hung"} & set(counts), "\n".join(reports)
    assert counts["equal"] >= 10


OFF = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "set_later", "hook", "ignored")
OPTIONS = {"bucket_cap_mb": 25, "sync_buffers": True, **dict.fromkeys(OFF, False)}


def rounds(bucket: Bucket, slot: int, divisor: float, as_views: bool) -> None:
    param, view = bucket.params[slot], bucket.views[slot]
    assert param.grad is not None
    view.copy_(torch.nextafter(param.grad / divisor, torch.tensor(torch.inf)))


def dies(*_: Any) -> None:
    os._exit(7)


def sleeps(*_: Any) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("fill", "outcome", "text"),
    [
        (rounds, "different", "differs by"),
        pytest.param(dies, "died", "7", marks=pytest.mark.extended),
        pytest.param(sleeps, "hung", "no answer", marks=pytest.mark.extended),
    ],
)
def test_a_toy_that_differs_is_reported(
    monkeypatch: pytest.MonkeyPatch, fill: Callable[..., None], outcome: str, text: str
) -> None:
    """Oracle: toys with a mistake in the last bit, a death and a hang."""
    monkeypatch.setattr(Bucket, "fill", fill)
    seconds = 120.0
    if outcome == "hung":  # the others end by themselves, on a busy machine too
        monkeypatch.setattr(fuzz_toys, "SECONDS", 1.0)
        seconds = 3.0
    plain = Tree(2, Node("chain", 0, [Node("linear", 1), Node("linear", 2)]), options=OPTIONS)
    crew = Crew(2)
    result = crew.run("ddp", plain, seconds)
    crew.stop()
    assert result.outcome == outcome and text in result.text


def test_a_graph_declared_static_later_keeps_its_first_buckets() -> None:
    """Oracle: PyTorch's class; on three ranks the bits of a sum depend on the buckets."""
    settings = {"find_unused_parameters": True, "static_graph": True, "set_later": True, "bucket_cap_mb": 0.00005}
    root = Node("chain", 0, [Node("mlp", 1), Node("linear", 2), Node("linear", 3)])
    crew = Crew(3)
    result = crew.run("ddp", Tree(3, root, options=OPTIONS | settings))
    crew.stop()
    assert result.outcome == "equal", result.text
