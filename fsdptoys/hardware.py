"""What this machine has for a run, and the environment variables that it wants before a worker starts."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .config import DeviceChoice
from .device import Device, available_cores, available_device_type, device_count
from .errors import ConfigError
from .simulator.hardware import hardware_for


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
        ConfigError: if the chosen kind is not there.
    """
    found = available_device_type()
    device_type = found if choice is DeviceChoice.auto else choice.value
    cores = available_cores()
    if device_type == "cpu":
        return FoundHardware("cpu", 0, Device("cpu").name, cores)
    devices = device_count(device_type)
    if devices == 0:
        raise ConfigError(
            f"launch.device={device_type} finds no such device on this machine; set launch.device={found}"
        )
    return FoundHardware(device_type, devices, str(torch.get_device_module(device_type).get_device_name(0)), cores)


def profile_of_this_machine() -> str | None:
    """Name of the profile of the device that this machine has."""
    device_type = available_device_type()
    # No CPU has one that is found by its name, and all of them would be read to say so.
    return None if device_type == "cpu" else hardware_for(Device(device_type).name, device_type)


def hardware_environment(
    device_type: str, local_ranks: int, cores: int, deterministic: bool, present: Mapping[str, str]
) -> dict[str, str]:
    """Environment variables that the hardware wants and that must stand before a worker starts.

    Args:
        device_type: ``cuda``, ``npu`` or ``cpu``.
        local_ranks: ranks on this machine.
        cores: CPU cores for all of them.
        deterministic: whether the same bits are asked for.
        present: the environment so far; what it sets is left as it is.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // local_ranks))}
    # Segments that grow keep a sharded model's ever-changing sizes from fragmenting the reserved memory. The name for
    # all devices, PYTORCH_ALLOC_CONF, is unknown to torch 2.7 and ignored by 2.9.1 on CUDA
    # (https://github.com/pytorch/pytorch/issues/183387); torch_npu refuses both names at once.
    if device_type in ("cuda", "npu") and "PYTORCH_ALLOC_CONF" not in present:
        wanted[f"PYTORCH_{device_type.upper()}_ALLOC_CONF"] = "expandable_segments:True"
    if device_type == "cuda" and deterministic:
        # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if device_type == "cuda":
        # A collective that hangs leaves behind what each rank's last collectives were (NCCL's flight recorder,
        # https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html). 2.13 warns of the old name.
        new_name = torch.__version__ >= "2.10"
        wanted["TORCH_FR_BUFFER_SIZE" if new_name else "TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"
        wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    return {name: value for name, value in wanted.items() if name not in present}
