"""Contestants that take turns on a device, so that other load on the machine affects all alike."""

import statistics
import time
from collections.abc import Callable, Mapping

from fsdptoys.device import Device
from scripts.common.progress import unit

Seconds = dict[str, list[float]]
"""Contestant → seconds of each turn."""


def take_turns(
    title: str,
    steps: Mapping[str, Callable[[int], object]],
    turns: int,
    warmup: int,
    device: Device,
) -> Seconds:
    """Measure each contestant in each turn, one after another.

    Args:
        title: of the turns, for the progress.
        steps: contestant → its step; called with the number of the turn.
        turns: that are measured.
        warmup: turns before these.
        device: that the steps run on.
    """
    seconds: Seconds = {name: [] for name in steps}
    for turn in range(warmup + turns):
        with unit(f"{title}, turn {turn + 1} of {warmup + turns}"):
            for name, step in steps.items():
                device.synchronize()
                start = time.perf_counter()
                step(turn)
                device.synchronize()
                if turn >= warmup:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(seconds: Seconds, name: str, base: str) -> float:
    """Return the median of the ratios of two contestants within a turn."""
    return statistics.median(
        a / b for a, b in zip(seconds[name], seconds[base], strict=True)
    )
