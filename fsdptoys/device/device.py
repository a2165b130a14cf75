"""The device of this process.

``torch.accelerator`` serves CUDA and NPU alike; what it lacks, and what a plain CPU has not, is answered here, so that
no other room asks which hardware it runs on. On a CPU the process's resident set, read from ``/proc``, stands for its
memory.
"""

from dataclasses import dataclass
from typing import Any

import torch

from fsdptoys.errors import ConfigError

from .host import cpu_name, host_memory_bytes
from .kinds import KINDS, device_count, missing_device
from .peaks import peak_flops
from .streams import Streams


@dataclass(frozen=True)
class MemoryStats:
    """Bytes on an accelerator."""

    allocated_bytes: int
    peak_bytes: int
    """Highest allocated since the last ``reset_peak_memory``."""
    reserved_bytes: int


class Device:
    """The device of this process.

    Args:
        device_type: ``cuda``, ``npu`` or ``cpu``.
        local_rank: index of the device on this machine.

    Raises:
        ConfigError: if this machine has no such device.
    """

    def __init__(self, device_type: str, local_rank: int = 0) -> None:
        self.type = device_type
        if device_type != "cpu":
            devices = device_count(device_type)
            if devices == 0:
                raise missing_device(device_type)
            if local_rank >= devices:
                raise ConfigError(
                    f"local rank {local_rank} needs its own {device_type} device, this machine has {devices}; "
                    f"set launch.nproc_per_node={devices}"
                )
        self.torch_device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, local_rank)
        self.backend = KINDS[device_type].backend
        self.make_current()

    @property
    def is_accelerator(self) -> bool:
        """Whether the device has streams and memory of its own."""
        return self.type != "cpu"

    @property
    def _module(self) -> Any:
        # torch.accelerator has memory statistics from torch 2.9 on only; torch.cuda and torch.npu always had them.
        return torch.get_device_module(self.type)

    @property
    def name(self) -> str:
        """The name that its maker gave it."""
        return device_name(self.type, self.torch_device.index or 0)

    @property
    def peak_flops(self) -> float | None:
        """Peak dense bf16 FLOP/s, or None where it is not known."""
        return peak_flops(self.name) if self.is_accelerator else None

    def supports_bfloat16(self) -> bool:
        """Whether the device computes in bfloat16, be it slowly."""
        asked = getattr(self._module, "is_bf16_supported", None)
        return asked is None or bool(asked())

    @property
    def bound_device(self) -> torch.device | None:
        """The device that a process group is bound to, so that it connects at once and can be split.

        NCCL's can, HCCL's cannot: there PyTorch 2.13 would refuse a mesh of two axes, and gloo's group for checkpoints.
        """
        return self.torch_device if KINDS[self.type].splits_groups else None

    @property
    def barrier_devices(self) -> list[int] | None:
        """What ``dist.barrier`` is told, which would guess the device where the group is not bound to one."""
        return [self.torch_device.index] if self.is_accelerator else None

    # Streams and host memory.

    @property
    def streams(self) -> Streams:
        """Streams and events of an accelerator."""
        return Streams(self.torch_device)

    @property
    def pins_memory(self) -> bool:
        """Whether copies from and to the host want pinned memory, to go on beside what the device computes."""
        return self.is_accelerator

    def make_current(self) -> None:
        """Let this thread work on this device; a thread starts with device 0, which may be another rank's."""
        if self.is_accelerator:
            torch.accelerator.set_device_index(self.torch_device.index)

    def synchronize(self) -> None:
        """Wait for what was given to the computing stream; a CPU has nothing to wait for.

        Copies on other streams that nothing on it waits for yet go on: they belong to what comes next.
        """
        if self.is_accelerator:
            self.streams.current().synchronize()

    # Memory.

    @property
    def total_memory_bytes(self) -> int:
        """Memory of the device, or of the machine for a CPU."""
        if self.is_accelerator:
            return int(self._module.get_device_properties(self.torch_device).total_memory)
        return host_memory_bytes()

    @property
    def memory_history(self) -> Any:
        """The module that records every allocation: ``torch.cuda.memory``, ``torch.npu.memory``."""
        return self._module.memory

    def reset_peak_memory(self) -> None:
        """Start a new peak."""
        if self.is_accelerator:
            self._module.reset_peak_memory_stats()

    def memory(self) -> MemoryStats:
        """Memory of an accelerator in use now, at its peak, and reserved by the allocator."""
        assert self.is_accelerator
        module = self._module
        return MemoryStats(module.memory_allocated(), module.max_memory_allocated(), module.memory_reserved())

    # Random numbers; ``torch.manual_seed`` seeds the generators of all devices.

    def rng_state(self) -> torch.Tensor | None:
        """State of the device's own generator, in host memory; None for a CPU, whose generator is PyTorch's."""
        state: torch.Tensor | None = self._module.get_rng_state() if self.is_accelerator else None
        return state

    def restore_rng_state(self, state: torch.Tensor | None) -> None:
        """Put the device's own generator back; a state of another kind of device is left alone."""
        if self.is_accelerator and state is not None:
            self._module.set_rng_state(state)


def device_name(device_type: str, index: int = 0) -> str:
    """The name that its maker gave a device, without becoming one that works on it."""
    if device_type == "cpu":
        return cpu_name()
    return str(torch.get_device_module(device_type).get_device_name(index))
