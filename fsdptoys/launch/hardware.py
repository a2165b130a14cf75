"""Devices, cores and limits of this machine, and the environment variables that its hardware
needs."""

import errno
import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass

from fsdptoys import device
from fsdptoys.config.launch_config import DeviceChoice, LaunchConfig
from fsdptoys.device.profile import hardware_for
from fsdptoys.errors import ConfigError
from fsdptoys.utils.causes import with_causes

VISIBLE_NPUS = "ASCEND_RT_VISIBLE_DEVICES"
LEAST_FILES = 32
"""Limit of open files (``ulimit -n``) with which a launcher of two CPU ranks starts; it fails with
24."""
_SPENT = re.compile(r"too many open files|failed to init uv loop", re.I)


@dataclass(frozen=True)
class FoundHardware:
    """Devices and cores of this machine, as used by a run."""

    device_type: str
    devices: int  # Accelerators; 0 if the run uses the CPU
    name: str  # Device name as reported by the driver or the system
    cores: int  # CPU cores that this process may use


def find_hardware(choice: DeviceChoice) -> FoundHardware:
    """Find the devices to run on; ConfigError if the type is missing, or a variable hides it by
    mistake."""
    if choice.value in ("auto", "npu") and VISIBLE_NPUS in os.environ:
        device.check_visible_devices(os.environ[VISIBLE_NPUS])
    device_type = (
        device.available_device_type() if choice is DeviceChoice.auto else choice.value
    )
    device.check_allocator_settings(device_type, os.environ)
    cores = device.available_cores()
    if device_type == "cpu":
        return FoundHardware("cpu", 0, device.device_name("cpu"), cores)
    devices = device.device_count(device_type)
    if devices == 0:
        raise device.missing_device(device_type)
    return FoundHardware(device_type, devices, device.device_name(device_type), cores)


def set_allocator() -> dict[str, str]:
    """Set the allocator's variables in a process without a launcher of ours; return those set.

    Must be called before anything that initializes the device, such as ``find_hardware``.
    """
    environment = device.allocator_environment(
        device.available_device_type(), os.environ
    )
    os.environ.update(environment)
    return environment


def profile_of_this_machine() -> str | None:
    """Return the name of the hardware profile of this machine's accelerator, or None."""
    device_type = device.available_device_type()
    # CPU profiles are not found by name; looking would read every profile.
    return (
        None
        if device_type == "cpu"
        else hardware_for(device.device_name(device_type), device_type)
    )


def hardware_environment(
    device_type: str,
    local_ranks: int,
    cores: int,
    deterministic: bool,
    present: Mapping[str, str],
    timeout_seconds: float = LaunchConfig.timeout_seconds,
) -> dict[str, str]:
    """Return the environment variables, not in ``present``, that must be set before a worker
    starts.

    ``cores`` are shared by the ranks of this machine; ``timeout_seconds`` is that of a collective.
    """
    environment = {"OMP_NUM_THREADS": str(max(1, cores // local_ranks))}
    environment |= device.device_environment(
        device_type, deterministic, timeout_seconds, present
    )
    return {name: value for name, value in environment.items() if name not in present}


def check_open_files() -> None:
    """Raise a ConfigError if this process may not open enough files to start ranks."""
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < LEAST_FILES:
        raise ConfigError(too_few_files())


def is_out_of_files(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, reports that no more files may be opened."""
    return any(
        getattr(cause, "errno", None) in (errno.EMFILE, errno.ENFILE)
        or _SPENT.search(str(cause))
        for cause in with_causes(error)
    )


def too_few_files() -> str:
    """Return one sentence on the limit and how to raise it."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"ulimit -n is {limit}, which is too few open files for a run; set it higher, as with: "
        "ulimit -n 1024"
    )
