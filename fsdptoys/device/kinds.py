"""Device types, their presence on this node, and the reason for a missing one.

``torch_npu`` is imported only if an NPU is requested and PyTorch has not loaded it
(``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re
from typing import NamedTuple

import torch

from fsdptoys.errors import ConfigError

NPU_PACKAGE = "torch_npu"


class Kind(NamedTuple):
    """Properties of a device type."""

    backend: str  # Of collectives on device tensors
    float64_collectives: bool = (
        True  # Whether collectives reduce float64; not with HCCL
    )
    splits_groups: bool = False
    """Whether communicators can be split; not with HCCL in torch_npu 2.13.0."""


KINDS = {
    "cuda": Kind("nccl", splits_groups=True),
    "npu": Kind("hccl", float64_collectives=False),
    "cpu": Kind("gloo"),
}

DEVICE_TYPES = tuple(KINDS)


def available_device_type() -> str:
    """Return the first of ``cuda``, ``npu`` and ``cpu`` with a device here, without initializing
    it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return (
        accelerator.type
        if accelerator is not None and accelerator.type in DEVICE_TYPES
        else "cpu"
    )


def device_count(device_type: str) -> int:
    """Return the number of devices of a type on this node; 1 for a CPU."""
    if device_type == "cpu":
        return 1
    _load_module(device_type)
    return (
        torch.accelerator.device_count()
        if available_device_type() == device_type
        else 0
    )


def float64_collectives(device_type: str) -> bool:
    """Return whether the device's collectives reduce float64."""
    return KINDS[device_type].float64_collectives


def missing_device(device_type: str) -> ConfigError:
    """Return the error for a ``launch.device`` without a device here."""
    setting = f"launch.device={device_type}"
    present_type = available_device_type()
    if device_type != "npu":
        return ConfigError(
            f"{setting} finds no such device on this machine; set launch.device={present_type}"
        )
    if not hasattr(torch, "npu"):
        problem = _load_module(device_type)
        if problem is None or importlib.util.find_spec(NPU_PACKAGE) is None:
            # without the build suffix
            release = re.split(r"[+a-z]", str(torch.__version__))[0].rstrip(".")
            return ConfigError(
                f"{setting} needs {NPU_PACKAGE}, which is not installed; pip install "
                f"'{NPU_PACKAGE}=={release}.*', whose versions are PyTorch's, and CANN; or set "
                f"launch.device={present_type}"
            )
        return ConfigError(
            f"{setting} needs {NPU_PACKAGE}, which is installed but cannot be imported "
            f"[{problem}]; install CANN and source its set_env.sh, or set "
            f"launch.device={present_type}"
        )
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    question = (
        ""
        if visible is None
        else f", does ASCEND_RT_VISIBLE_DEVICES={visible} name an existing device"
    )
    return ConfigError(
        f"{setting} finds no device, although {NPU_PACKAGE} is loaded: does npu-smi info list "
        f"one, was CANN's set_env.sh sourced{question}? Or set launch.device={present_type}"
    )


def check_visible_devices(present: str) -> None:
    """Check ``ASCEND_RT_VISIBLE_DEVICES``, of which CANN silently ignores invalid parts.

    CANN reads up to the first character that is neither digit nor comma, and expects ascending
    numbers (hiascend.com, CANN's environment variables, ASCEND_RT_VISIBLE_DEVICES).
    """
    meant = ",".join(map(str, sorted(set(map(int, re.findall(r"\d+", present))))))
    if present != meant:
        raise ConfigError(
            f"ASCEND_RT_VISIBLE_DEVICES={present!r} must be device numbers in ascending order "
            "with nothing but commas between them, or CANN reads a part of it; set "
            f"ASCEND_RT_VISIBLE_DEVICES={meant}"
        )


def _load_module(device_type: str) -> str | None:
    """Import the package of a device type, if needed; return the failure."""
    if device_type != "npu" or hasattr(torch, "npu"):
        return None
    try:
        importlib.import_module(NPU_PACKAGE)
    except Exception as error:  # native libraries raise anything without CANN
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
