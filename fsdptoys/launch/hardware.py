"""What this machine has for a run, and the environment variables that it wants before a worker starts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fsdptoys.config.schema import DeviceChoice, LaunchConfig
from fsdptoys.device import (
    Device,
    available_cores,
    available_device_type,
    check_allocator_settings,
    check_visible_devices,
    device_count,
    device_environment,
    device_name,
    missing_device,
)
from fsdptoys.device.profile import hardware_for

VISIBLE_NPUS = "ASCEND_RT_VISIBLE_DEVICES"


@dataclass(frozen=True)
class FoundHardware:
    """What this machine has for this run."""

    device_type: str
    devices: int
    """Accelerators; 0 where the run uses the CPU."""
    name: str
    """Name of the device as its maker gave it."""
    cores: int
    """CPU cores that this process may use."""


def find_hardware(choice: DeviceChoice) -> FoundHardware:
    """Find the devices to run on.

    Raises:
        ConfigError: if the chosen kind is not there, or the environment hides it by mistake.
    """
    if choice in (DeviceChoice.auto, DeviceChoice.npu) and VISIBLE_NPUS in os.environ:
        check_visible_devices(os.environ[VISIBLE_NPUS])
    device_type = available_device_type() if choice is DeviceChoice.auto else choice.value
    check_allocator_settings(device_type, os.environ)
    cores = available_cores()
    if device_type == "cpu":
        return FoundHardware("cpu", 0, Device("cpu").name, cores)
    devices = device_count(device_type)
    if devices == 0:
        raise missing_device(device_type)
    return FoundHardware(device_type, devices, device_name(device_type), cores)


def profile_of_this_machine() -> str | None:
    """Name of the profile of the device that this machine has."""
    device_type = available_device_type()
    # No CPU has one that is found by its name, and all of them would be read to say so.
    return None if device_type == "cpu" else hardware_for(device_name(device_type), device_type)


def hardware_environment(
    device_type: str,
    local_ranks: int,
    cores: int,
    deterministic: bool,
    present: Mapping[str, str],
    timeout_seconds: float = LaunchConfig.timeout_seconds,
) -> dict[str, str]:
    """Environment variables that the hardware wants and that must stand before a worker starts.

    Args:
        device_type: ``cuda``, ``npu`` or ``cpu``.
        local_ranks: ranks on this machine.
        cores: CPU cores for all of them.
        deterministic: whether the same bits are asked for.
        present: the environment so far; what it sets is left as it is.
        timeout_seconds: after which a collective ends the run.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // local_ranks))}
    wanted |= device_environment(device_type, deterministic, timeout_seconds, present)
    return {name: value for name, value in wanted.items() if name not in present}
