"""Ranks on simulated NPUs: forks that get the device for themselves, so that the process of the tests stays without."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.ranks import run_ranks

SITE = Path(__file__).parent / "site"
"""On ``PYTHONPATH``, it gives every process the device."""

sys.path.append(str(SITE))

import simulated_npu as simulated_npu  # noqa: E402
from simulated_npu.build import build_extension as build_extension  # noqa: E402

MODES = ("immediate", "delayed")
"""Whether streams do their work at once, or when somebody waits for it."""


def run_npu_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, mode: str = "immediate", capacity_mib: int = 4096
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh process group of NPUs.

    Args:
        world_size: ranks, each with a device.
        function: called in each rank; its result must be picklable.
        args: need not be picklable.
        mode: one of ``MODES``.
        capacity_mib: memory of each device.

    Returns:
        The results in order of rank.
    """

    def prepare() -> None:
        simulated_npu.install(world_size, capacity_mib * 2**20, delayed=mode == "delayed")

    return run_ranks(world_size, function, *args, device="npu", prepare=prepare)


def run_on_npu(function: Callable[..., Any], *args: Any, mode: str = "immediate", capacity_mib: int = 4096) -> Any:
    """Call ``function(*args)`` in a process with one simulated NPU."""
    return run_npu_ranks(1, function, *args, mode=mode, capacity_mib=capacity_mib)[0]
