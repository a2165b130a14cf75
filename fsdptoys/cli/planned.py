"""Model and memory switches that the planner chooses for a run on accelerators with a hardware
profile.

A command line without overrides trains the largest preset that fits. One with ``memory=auto`` takes
the fastest switches of ``memory`` that fit. A margin stays free: ``MARGIN`` of the device's memory,
or ``MEASURED_MARGIN`` once the profile's ``outside_allocator_bytes`` is measured.
"""

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdptoys.config.compose import compose_config, compose_presets, list_presets
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.device.free_memory import least_free_bytes
from fsdptoys.device.profile import Hardware, load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.launch.hardware import profile_of_this_machine
from fsdptoys.launch.launch import AUTO
from fsdptoys.utils.text import print_status, value_text

AUTO_MEMORY = f"memory={AUTO}"
MARGIN = 0.08  # cuBLAS's, cuDNN's and NCCL's memory is assumed in a profile
MEASURED_MARGIN = 0.02  # growth of reserved memory after the two steps of a prediction


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of each device for a run."""

    hardware: Hardware
    available_bytes: float
    """To PyTorch's allocator: free at the start, and at most as in the profile."""
    margin: float  # share of the device's memory to be left free

    @property
    def limit_bytes(self) -> float:
        """Memory that a prediction may reserve."""
        return self.available_bytes - self.margin * self.hardware.memory_bytes.value

    def describe(self, reserved_bytes: float) -> str:
        """Describe the memory needed, memory available and margin."""
        margin_gib = self.margin * self.hardware.memory_bytes.value / GIB
        reason = (
            f" until outside_allocator_bytes of {self.hardware.name} is measured"
            if self.margin == MARGIN
            else ""
        )
        return (
            f"predicted to need {reserved_bytes / GIB:.1f} GiB of "
            f"{self.available_bytes / GIB:.1f} GiB available on each device, with a margin of "
            f"{margin_gib:.1f} GiB ({self.margin:.0%} of its memory{reason})"
        )


def device_memory(
    device_type: str, devices: int, profile: str = "auto"
) -> DeviceMemory | None:
    """Return the memory of this machine's first devices; None without a hardware profile, which
    ``profile`` can name.

    Under another launcher every rank asks, and all must agree: they take the profile's memory, not
    the free one.
    """
    if device_type == "cpu":
        return None
    name = profile_of_this_machine() if profile == "auto" else profile
    if name is None:
        return None
    hardware = load_hardware(name)
    free_bytes = (
        None if "RANK" in os.environ else least_free_bytes(device_type, devices)
    )
    return with_margin(
        hardware, hardware.usable_bytes if free_bytes is None else free_bytes
    )


def with_margin(hardware: Hardware, available_bytes: float) -> DeviceMemory:
    """Return the memory for a run on devices with ``available_bytes`` free, and the share of it
    that stays free."""
    is_assumed = hardware.outside_allocator_bytes.source.startswith("assumed")
    available_bytes = min(hardware.usable_bytes, available_bytes)
    return DeviceMemory(
        hardware, available_bytes, MARGIN if is_assumed else MEASURED_MARGIN
    )


def choose_largest(experiment: str, device_type: str, world_size: int) -> list[str]:
    """Return the overrides of the largest preset predicted to fit, on an accelerator with a known
    profile.

    Args:
        experiment: the override returned alone on other devices.
        device_type: the run's device type.
        world_size: number of ranks, all on this machine.
    """
    memory = device_memory(device_type, world_size)
    if memory is None:
        return [experiment]
    # Importing the planner takes a while, and a run on a CPU does not need it.
    from fsdptoys.plan.estimate.estimate import fast_estimate
    from fsdptoys.plan.search.search import largest_preset

    presets = [
        preset
        for preset in compose_presets(list_presets())
        if not preset.name.endswith("_debug")
    ]
    base = compose_config([experiment])
    limit = memory.limit_bytes
    best = largest_preset(
        presets, base, [experiment], memory.hardware, world_size, limit, fast_estimate
    )
    _say(f"{' '.join(best.overrides)} is {memory.describe(best.reserved_bytes)}")
    return list(best.overrides)


def choose_switches(
    overrides: Sequence[str],
    base: Config,
    device_type: str,
    world_size: int,
    local_ranks: int,
) -> list[str]:
    """Return overrides of ``memory``, to append to those with ``memory=auto``, with which a run is
    fastest and fits.

    Empty if nothing fits or the run has no prediction, which a printed sentence explains.

    Args:
        overrides: the run's.
        base: composed from them, not validated.
        device_type: the run's device type.
        world_size: number of ranks.
        local_ranks: those on this machine.
    """
    memory = device_memory(device_type, local_ranks, base.plan.hardware)
    if memory is None:
        reason = (
            "a CPU"
            if device_type == "cpu"
            else "this device, which has no hardware profile,"
        )
        _say(f"memory=auto chooses nothing on {reason} and leaves the switches off")
        return []
    return fastest_switches(overrides, base, memory, world_size)


def fastest_switches(
    run_overrides: Sequence[str],
    base: Config,
    memory: DeviceMemory,
    world_size: int,
) -> list[str]:
    """Return the overrides of :func:`choose_switches` for devices with the given memory."""
    from fsdptoys.plan.estimate.estimate import fast_estimate
    from fsdptoys.plan.search.combinations import SENSIBLE
    from fsdptoys.plan.search.search import search
    from fsdptoys.plan.search.switches import check_strategy

    started = time.perf_counter()
    strategy_values: dict[str, Any] = {
        name: (getattr(base.parallel, key),)
        for name, key in OWN
        if hasattr(base.parallel, key)
    }
    space = dataclasses.replace(
        SENSIBLE, strategies=(base.parallel.name,), **strategy_values
    )
    # Batch and mesh stay as the files have them.
    overrides = [word for word in run_overrides if word != AUTO_MEMORY]
    overrides += [f"train.batch_size={base.train.batch_size}"]
    overrides += [
        f"mesh.{name}={value_text(value)}" for name, value in vars(base.mesh).items()
    ]
    try:
        check_strategy(base)
        best = search(
            base,
            overrides,
            memory.hardware,
            world_size,
            memory.limit_bytes,
            fast_estimate,
            space=space,
        ).best
    except ConfigError as error:
        _say(f"memory=auto leaves the switches off: {error}")
        return []
    changed = [word for word in best.overrides if word not in overrides]
    seconds = time.perf_counter() - started
    _say(
        f"memory=auto: {' '.join(changed) or 'the switches as they are'}, the fastest of those "
        f"that fit, {memory.describe(best.reserved_bytes)}; {best.tokens_per_second:,.0f} "
        f"tokens/s predicted, chosen in {seconds:.1f} s"
    )
    return changed


OWN = (("wraps", "wrap"), ("reshards", "reshard_after_forward"))
"""Field of a search's space → the strategy's setting that a choice of memory switches keeps."""


def _say(sentence: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print_status(sentence)
