"""A device called ``npu`` with a backend called ``hccl`` on host memory, for tests on machines
without an Ascend NPU.

Real: PyTorch takes the device as it takes one of its own (PrivateUse1), with an allocator that has
a capacity, statistics and a history, streams and events, pinned memory, random numbers, autocast,
and collectives between real processes. Not real: every operator is the CPU's kernel on the same
bytes, and every collective is gloo's. So training here gives a CPU's losses to the last bit, and
failures here would be failures on hardware: tensors on two devices, a CPU tensor in a collective of
``hccl``, memory that runs out, and, in delayed mode, a stream that did not wait for another one. It
does not test speed, Ascend's kernels, or torch_npu's own functions.

With this folder's parent on ``PYTHONPATH``, ``import torch`` loads the device as it loads
torch_npu, by an entry point; variables set it up:

- ``SIMULATED_NPU_DEVICES``: number of devices, 8 by default;
- ``SIMULATED_NPU_MIB``: memory of each, 65536 by default;
- ``SIMULATED_NPU_DELAYED=1``: delayed mode, in which work runs on a wait only (``csrc/streams.h``).

The extension is built by the first process that needs it and kept in ``tests/simulated_npu/build``.
"""

import os
from typing import Any

DEFAULT_DEVICES = 8
DEFAULT_MIB = 64 * 1024

extension: Any = None
"""Functions of ``csrc/module.cpp``, once the device exists."""


def load() -> None:
    """Install the device in this process by the environment's settings: the entry point that
    ``import torch`` calls."""
    install(
        int(os.environ.get("SIMULATED_NPU_DEVICES", DEFAULT_DEVICES)),
        int(os.environ.get("SIMULATED_NPU_MIB", DEFAULT_MIB)) * 2**20,
        os.environ.get("SIMULATED_NPU_DELAYED") == "1",
    )


def install(
    devices: int = DEFAULT_DEVICES,
    capacity_bytes: int = DEFAULT_MIB * 2**20,
    delayed: bool = False,
) -> None:
    """Install the device in this process, for its lifetime.

    Args:
        devices: number of devices.
        capacity_bytes: memory of each device.
        delayed: whether work runs only on a wait.
    """
    global extension
    import torch
    import torch.distributed as dist

    from tests.simulated_npu.site.simulated_npu.build import load_extension
    from tests.simulated_npu.site.simulated_npu.npu import build_module

    if extension is not None:
        raise RuntimeError("the simulated device is there already")
    extension = load_extension()
    torch.utils.rename_privateuse1_backend("npu")
    extension.setup(devices, capacity_bytes)
    extension.register_cpu_kernels(_composed_elsewhere())
    torch._register_device_module("npu", build_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def create_hccl(options: Any, _: Any) -> Any:
        inner = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        return extension.make_hccl(inner)

    dist.Backend.register_backend(
        "hccl", create_hccl, extended_api=True, devices=["npu"]
    )
    extension.set_delayed(delayed)


def _composed_elsewhere() -> list[str]:
    """Operators that have a kernel for CPUs and a composition of others for every other device."""
    import torch

    # Views and queries of a tensor are the same in both forms; these exist already, or must not be
    # replaced.
    own = {
        "record_stream",
        "set_.source_Storage",
        "set_.source_Tensor",
        "set_.source_Storage_storage_offset",
    }
    own |= {
        "empty.memory_format",
        "empty_strided",
        "_copy_from",
        "_copy_from_and_resize",
        "copy_",
    }
    own |= {"_has_compatible_shallow_copy_type"}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = (
        "CompositeImplicitAutograd",
        "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
    )
    return [
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and name.removeprefix("aten::") not in own
        and has(name, "CPU")
        and any(has(name, key) for key in composite)
    ]
