"""Count the work of one rank of a large world without the other ranks: our lines, Python calls,
collectives.

The process group is PyTorch's ``fake`` one: collectives do nothing (a gather copies the rank's own
part), so one process takes the steps of rank 0 among thousands, with real tensors and the real
trainer. The values are meaningless; the operations are those of every rank.

``settrace`` counts each executed line of this package, so that any loop shows, and each call of a
Python function, PyTorch's included, except comparisons.
"""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from fsdptoys.profiler.collectives import Call, CollectiveTrace
from fsdptoys.train.trainer import Trainer
from scripts.common.configured import configured

OURS = tuple(
    str(Path(__file__).resolve().parents[2] / name) + os.sep
    for name in ("fsdptoys", "models", "patches")
)


@dataclass
class Counted:
    """Counts within a block."""

    lines: Counter[str]
    """Function of ours → lines of it that ran."""
    calls: Counter[str]
    """Function of anybody's → how often it was called."""

    @property
    def all_lines(self) -> int:
        """Of ours, in all."""
        return sum(self.lines.values())


def name_of(frame: FrameType) -> str:
    """Name of the running function, with its class where Python has it."""
    return (
        frame.f_code.co_qualname
        if sys.version_info >= (3, 11)
        else frame.f_code.co_name
    )


def compares(frame: FrameType | None) -> bool:
    """Whether two objects are being compared: tables of hashes do so as often as the memory's
    addresses have it."""
    while frame is not None and frame.f_code.co_name != "__eq__":
        frame = frame.f_back
    return frame is not None


@contextmanager
def counting() -> Iterator[Counted]:
    """Count this thread's lines and calls."""
    counted = Counted(Counter(), Counter())
    is_own_file: dict[str, bool] = {}

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        if compares(frame):
            return None
        name = frame.f_code.co_filename
        counted.calls[f"{name}:{name_of(frame)}"] += 1
        if name not in is_own_file:
            is_own_file[name] = os.path.realpath(name).startswith(OURS)
        return on_line if is_own_file[name] else None

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            counted.lines[name_of(frame)] += 1
        return on_line

    before = sys.gettrace()
    gc.collect()
    gc.disable()  # finalizers belong to no step
    sys.settrace(on_call)
    try:
        yield counted
    finally:
        sys.settrace(before)
        gc.enable()


def pretend(world_size: int, rank: int = 0) -> None:
    """Join a fake process group of so many ranks; its collectives do nothing."""
    # Registers the backend: PyTorch's own test helper, which stands in torch 2.7 to 2.13.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def count_step(
    overrides: Sequence[str], world_size: int, node_ranks: int = 8
) -> tuple[Counted, list[Call], Trainer]:
    """Train three steps as rank 0 of an imagined world.

    Args:
        overrides: of the run; three steps, without evaluation.
        world_size: ranks.
        node_ranks: of one machine.

    Returns:
        Counts of the second step, when caches are warm; the collectives of the third; the trainer.
    """
    pretend(world_size)
    trainer = Trainer(
        configured(
            [*overrides, "train.steps=3", "train.eval_every=0"], world_size, node_ranks
        )
    )
    # Of a CPU alone, in few steps, and with as many calls as there are objects
    trainer.memory.enabled = False
    counts: list[Counted] = []
    collectives: list[Call] = []
    watched = CollectiveTrace(3, trainer.strategy.model, {}, collectives.extend)
    trainer.on_phase = watched.enter

    @contextmanager
    def around(step: int) -> Iterator[None]:
        with watched.around(step):
            if step == 2:
                with counting() as counted:
                    yield
                counts.append(counted)
            else:
                yield

    trainer.around_step = around
    trainer.train()
    return counts[0], collectives, trainer
