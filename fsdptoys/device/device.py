"""The device of this process.

Extends ``torch.accelerator``, which serves CUDA and NPU, so that no other package asks for the type of hardware. On a
CPU the process's resident set, read from ``/proc``, stands for device memory.
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
    peak_bytes: int  # Highest allocated since the last ``reset_peak_memory``
    reserved_bytes: int


class Device:
    """The device of this process, with ``local_rank`` as index; a ConfigError if this node has none."""

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
        """The maker's name."""
        return device_name(self.type, self.torch_device.index or 0)

    @property
    def peak_flops(self) -> float | None:
        """Peak dense bf16 FLOP/s; None if unknown."""
        return peak_flops(self.name) if self.is_accelerator else None

    def supports_bfloat16(self) -> bool:
        """Whether the device computes in bfloat16, even if slowly."""
        asked = getattr(self._module, "is_bf16_supported", None)
        return asked is None or bool(asked())

    @property
    def bound_device(self) -> torch.device | None:
        """The device for ``init_process_group``, so that the group connects at once and can be split.

        None for HCCL, which cannot split: PyTorch 2.13 would refuse a mesh of two axes, and gloo's checkpoint group.
        """
        return self.torch_device if KINDS[self.type].splits_groups else None

    @property
    def barrier_devices(self) -> list[int] | None:
        """``device_ids`` of ``dist.barrier``, which guesses the device of an unbound group."""
        return [self.torch_device.index] if self.is_accelerator else None

    # Streams and host memory.

    @property
    def streams(self) -> Streams:
        """Streams and events of an accelerator."""
        return Streams(self.torch_device)

    pins_memory = is_accelerator  # pinned memory lets copies from and to the host overlap with computation

    def make_current(self) -> None:
        """Make this the thread's current device; a thread starts with device 0, maybe another rank's."""
        if self.is_accelerator:
            torch.accelerator.set_device_index(self.torch_device.index)

    def synchronize(self) -> None:
        """Wait for the compute stream; does nothing on a CPU.

        Copies on other streams continue, unless the compute stream waits for them.
        """
        if self.is_accelerator:
            self.streams.current().synchronize()

    # Memory.

    @property
    def total_memory_bytes(self) -> int:
        """Memory of the device, or of the node for a CPU."""
        if self.is_accelerator:
            return int(self._module.get_device_properties(self.torch_device).total_memory)
        return host_memory_bytes()

    @property
    def memory_history(self) -> Any:
        """The module of the allocator's history: ``torch.cuda.memory`` or ``torch.npu.memory``."""
        return self._module.memory

    def reset_peak_memory(self) -> None:
        """Reset the peak to the memory in use."""
        if self.is_accelerator:
            self._module.reset_peak_memory_stats()

    def memory(self) -> MemoryStats:
        """Memory of an accelerator: allocated, at its peak, and reserved."""
        assert self.is_accelerator
        module = self._module
        return MemoryStats(module.memory_allocated(), module.max_memory_allocated(), module.memory_reserved())

    # Random numbers; ``torch.manual_seed`` seeds the generators of all devices.

    def rng_state(self) -> torch.Tensor | None:
        """State of the device's generator, in host memory; None for a CPU, which has PyTorch's default one."""
        state: torch.Tensor | None = self._module.get_rng_state() if self.is_accelerator else None
        return state

    def restore_rng_state(self, state: torch.Tensor | None) -> None:
        """Restore the device's generator, if both device and state have one."""
        if self.is_accelerator and state is not None:
            self._module.set_rng_state(state)


def device_name(device_type: str, index: int = 0) -> str:
    """The maker's name of a device, without making it current."""
    if device_type == "cpu":
        return cpu_name()
    return str(torch.get_device_module(device_type).get_device_name(index))
