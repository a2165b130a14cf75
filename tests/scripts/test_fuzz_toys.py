"""The fuzzer of the toys: the toys have the bits of PyTorch's classes, and the fuzzer detects toys that do not."""

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptoys.toys.ddp.core import Bucket
from scripts import fuzz_toys
from scripts.fuzz_toys import EXPLAINED, Crew, check, draw_case, fuzz
from scripts.fuzz_training import difference
from scripts.fuzz_trees import Node, Tree, draw_tree, smaller


@pytest.mark.extended
@pytest.mark.parametrize("toy", fuzz_toys.TOYS)
def test_random_trees_train_in_the_bits_of_pytorch(toy: str) -> None:
    """Oracle: ``fully_shard`` and DDP of PyTorch; 15 trees of a full run of the fuzzer."""
    counts, reports = fuzz(toy, list(range(15)), seed=0, shrinks=False)
    assert not {"different", "died", "hung"} & set(counts), "\n".join(reports)
    assert counts["equal"] >= 10


OFF = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "set_later", "hook", "ignored")
OPTIONS = {"bucket_cap_mb": 25, "sync_buffers": True, **dict.fromkeys(OFF, False)}
PLAIN = Tree(2, Node("chain", 0, [Node("linear", 1), Node("linear", 2)]), options=OPTIONS)


def rounds(bucket: Bucket, slot: int, divisor: float, as_views: bool) -> None:
    param, view = bucket.params[slot], bucket.views[slot]
    assert param.grad is not None
    view.copy_(torch.nextafter(param.grad / divisor, torch.tensor(torch.inf)))


def raises(*_: Any) -> None:
    raise KeyError("x")


def dies(*_: Any) -> None:
    os._exit(7)


def sleeps(*_: Any) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("fill", "outcome", "text"),
    [
        (rounds, "different", "differs by"),
        pytest.param(raises, "different", "KeyError", marks=pytest.mark.extended),
        pytest.param(dies, "died", "7", marks=pytest.mark.extended),
        pytest.param(sleeps, "hung", "no answer", marks=pytest.mark.extended),
        pytest.param(None, "equal", "", marks=pytest.mark.extended),
    ],
)
def test_a_toy_that_differs_is_reported(
    monkeypatch: pytest.MonkeyPatch, fill: Callable[..., None] | None, outcome: str, text: str
) -> None:
    """Oracle: toys with a mistake in the last bit, an exception, a death and a hang; the next tree still runs."""
    crews: dict[int, Crew] = {}
    with monkeypatch.context() as patched:
        if fill is not None:
            patched.setattr(Bucket, "fill", fill)
        hangs = outcome == "hung"  # the others end by themselves, on a busy machine too
        patched.setattr(fuzz_toys, "SECONDS", 1.0 if hangs else fuzz_toys.SECONDS)
        result = Crew(2).run("ddp", PLAIN, 3.0 if hangs else 120.0)
    assert result.outcome == outcome and text in result.text
    assert check(crews, "ddp", PLAIN).outcome == "equal"
    crews[2].stop()


def test_trees_are_drawn_again_from_their_numbers_and_shrink() -> None:
    """Oracle: equality of dataclasses; every simpler tree has fewer nodes or other settings."""
    for toy in fuzz_toys.TOYS:
        trees = [draw_case(toy, number, 3) for number in range(40)]
        assert trees == [draw_case(toy, number, 3) for number in range(40)]
        assert len({repr(tree) for tree in trees}) == 40
        assert all(made != tree for tree in trees for made in smaller(tree))
    assert draw_tree("fsdp", random.Random(1)) != draw_tree("fsdp", random.Random(2))


def test_explanations_apply_only_to_their_trees() -> None:
    """Oracle: a plain tree whose gradients differ has none."""
    assert not any(applies(PLAIN, "step 0 gradient of w: differs by up to 1 of 2") for applies in EXPLAINED.values())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), True),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
    ],
    ids=["zeros", "nan", "dtypes"],
)
def test_values_are_compared_in_every_bit(one: Tensor, other: Tensor, same: bool) -> None:
    """Oracle: zeros of both signs are equal numbers with other bits; NaNs with equal bits are no equal numbers."""
    assert (difference({"x": one}, {"x": other}) is None) is same


def test_a_graph_declared_static_later_keeps_its_first_buckets() -> None:
    """Oracle: PyTorch's class; on three ranks the bits of a sum depend on the buckets."""
    settings = {"find_unused_parameters": True, "static_graph": True, "set_later": True, "bucket_cap_mb": 0.00005}
    root = Node("chain", 0, [Node("mlp", 1), Node("linear", 2), Node("linear", 3)])
    crew = Crew(3)
    result = crew.run("ddp", Tree(3, root, options=OPTIONS | settings))
    crew.stop()
    assert result.outcome == "equal", result.text
