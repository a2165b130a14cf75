"""Ranks on simulated NPUs: forks that install the device, which the process of the tests does not
have.

PyTorch's autograd counts devices once, and in a fork of a process that has run a backward there
would be none. So the test modules of this folder run backwards in ranks only.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.config.schema import Config, SumDType
from fsdptoys.optim import AdamWConfig, Implementation, WeightDecayOn
from fsdptoys.parallel import ParallelConfig
from tests.harness.levels import extended
from tests.harness.ranks import run_ranks
from tests.harness.tiny import PLAIN_KERNELS, make_config

SITE = Path(__file__).parent / "site"
"""On ``PYTHONPATH``, it installs the device in every process."""

sys.path.append(str(SITE))

import simulated_npu as simulated_npu  # noqa: E402
from simulated_npu.build import build_extension as build_extension  # noqa: E402

MODES = ("immediate", "delayed")
"""Whether streams work immediately or only on a wait."""

BOTH_MODES = pytest.mark.parametrize("mode", [extended("immediate"), "delayed"])


def run_npu_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    mode: str = "immediate",
    capacity_mib: int = 4096,
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh process group of NPUs.

    Args:
        world_size: ranks, each with a device.
        function: called in each rank; its result must be picklable.
        args: of the function.
        mode: one of ``MODES``.
        capacity_mib: memory of each device.

    Returns:
        The results in order of rank.
    """
    prepare = functools.partial(
        simulated_npu.install, world_size, capacity_mib * 2**20, mode == "delayed"
    )
    return run_ranks(world_size, function, *args, device="npu", prepare=prepare)


def run_on_npu(
    function: Callable[..., Any],
    *args: Any,
    mode: str = "immediate",
    capacity_mib: int = 4096,
) -> Any:
    """Call ``function(*args)`` in a process with one simulated NPU."""
    return run_npu_ranks(1, function, *args, mode=mode, capacity_mib=capacity_mib)[0]


def config_for(
    device: str, parallel: ParallelConfig, ranks: int, **options: Any
) -> Config:
    """Return the same training for a device: HCCL reduces no float64, and a CPU's own AdamW rounds
    otherwise."""
    settings: dict[str, Any] = {
        "kernels": PLAIN_KERNELS,
        "deterministic": False,
        "sum_dtype": SumDType.float32,
    }
    settings["optim"] = AdamWConfig(
        1e-2, weight_decay_on=WeightDecayOn.all, implementation=Implementation.foreach
    )
    return make_config(
        parallel, ranks, device=device, **{**settings, "steps": 2, **options}
    )
