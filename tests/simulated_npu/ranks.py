"""Ranks on simulated NPUs: forks that install the device, which the process of the tests does not have.

They are forks of a server that has imported their modules and used none: PyTorch's autograd counts devices
once, and in a fork of a process that has run a backward there would be none.
"""

import functools
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.ranks import run_ranks

SITE = Path(__file__).parent / "site"
"""On ``PYTHONPATH``, it installs the device in every process."""

sys.path.append(str(SITE))

import simulated_npu as simulated_npu  # noqa: E402
from simulated_npu.build import build_extension as build_extension  # noqa: E402

PRELOADED = ["scripts.parity", "tests.memory.offloaded", "tests.parallel.runs", "simulated_npu"]
PRELOADED += ["fsdptoys.parallel.fsdp1", "fsdptoys.parallel.fsdp2", "fsdptoys.checkpoint.dcp_io"]

MODES = ("immediate", "delayed")
"""Whether streams work immediately or only on a wait."""


def run_npu_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, mode: str = "immediate", capacity_mib: int = 4096
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh process group of NPUs.

    Args:
        world_size: ranks, each with a device.
        function: called in each rank; its result must be picklable.
        args: picklable, as the function.
        mode: one of ``MODES``.
        capacity_mib: memory of each device.

    Returns:
        The results in order of rank.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    prepare = functools.partial(simulated_npu.install, world_size, capacity_mib * 2**20, mode == "delayed")
    return run_ranks(world_size, function, *args, device="npu", start="forkserver", prepare=prepare)


def run_on_npu(function: Callable[..., Any], *args: Any, mode: str = "immediate", capacity_mib: int = 4096) -> Any:
    """Call ``function(*args)`` in a process with one simulated NPU."""
    return run_npu_ranks(1, function, *args, mode=mode, capacity_mib=capacity_mib)[0]
