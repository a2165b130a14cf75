"""Garbage collection between steps."""

import gc
import sys
import weakref

import pytest

from fsdptoys.parallel import SingleConfig
from fsdptoys.train.garbage import FULL, collection_between_steps
from fsdptoys.train.trainer import Trainer
from scripts.ranks import run_ranks
from tests.parallel.runs import make_config


class Node:
    """A reference cycle of one object."""

    def __init__(self) -> None:
        self.itself = self


def train_and_watch(every: int, failing_step: int | None) -> tuple[list[bool], list[int], bool]:
    """Of each step, whether the collector was on and how many cycles were alive; and whether it is on at the end.

    Each step makes a cycle; ``failing_step`` raises.
    """
    config = make_config(SingleConfig(), 1, steps=6, gc_every=every)
    trainer = Trainer(config)
    enabled, alive, nodes = [], [], []

    def on_phase(step: int, phase: str) -> None:
        if phase == "optimizer":
            enabled.append(gc.isenabled())
            alive.append(sum(node() is not None for node in nodes))
            nodes.append(weakref.ref(Node()))
            if step == failing_step:
                raise ZeroDivisionError

    trainer.on_phase = on_phase
    try:
        trainer.train()
    except ZeroDivisionError:
        assert failing_step is not None
    return enabled, alive, gc.isenabled()


@pytest.mark.parametrize("failing_step", [None, 3])
def test_collector_is_off_in_steps_and_on_again_after_training_or_an_error(failing_step: int | None) -> None:
    """Oracle: ``gc.isenabled()`` in every step and at the end; a cycle lives until the next multiple of 2 steps."""
    [(enabled, alive, after)] = run_ranks(1, train_and_watch, 2, failing_step)
    steps = failing_step or 6
    assert enabled == [False] * steps and after
    assert alive == [0, 1, 0, 1, 0, 1][:steps]


def test_zero_leaves_the_collector_on() -> None:
    """Oracle: ``gc.isenabled()`` in every step."""
    [(enabled, _, after)] = run_ranks(1, train_and_watch, 0, None)
    assert enabled == [True] * 6 and after


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="its passes visit a part of the old objects each")
def test_cycles_of_old_objects_are_collected_by_the_full_passes() -> None:
    """Oracle: an object of the oldest generation lives until step FULL, in which all generations are collected."""
    node = Node()
    reference = weakref.ref(node)
    with collection_between_steps(1) as collect:
        del node  # the context's first pass has moved it to the oldest generation
        lived = []
        for step in range(1, FULL + 1):
            collect(step)
            lived.append(reference() is not None)
    assert gc.isenabled() and lived == [True] * (FULL - 1) + [False]
