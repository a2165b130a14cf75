"""Presence of devices on this node, and the reason for a missing one.

A device's package, such as ``torch_npu``, is imported only if the device is requested and PyTorch
has not loaded the package (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re

import torch

from fsdptoys.errors import ConfigError

from .kinds import DEVICE_TYPES, KINDS


def available_device_type() -> str:
    """Return the type of this node's accelerator, without initializing it; ``cpu`` if it has
    none."""
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


def missing_device(device_type: str) -> ConfigError:
    """Return the error for a ``launch.device`` without a device here."""
    setting = f"launch.device={device_type}"
    present_type = available_device_type()
    package = KINDS[device_type].package
    if package is None:
        return ConfigError(
            f"{setting} finds no such device on this machine; set launch.device={present_type}"
        )
    if not hasattr(torch, device_type):
        problem = _load_module(device_type)
        if problem is None or importlib.util.find_spec(package) is None:
            # without the build suffix
            release = re.split(r"[+a-z]", str(torch.__version__))[0].rstrip(".")
            return ConfigError(
                f"{setting} needs {package}, which is not installed; pip install "
                f"'{package}=={release}.*', whose versions are PyTorch's, and CANN; or set "
                f"launch.device={present_type}"
            )
        return ConfigError(
            f"{setting} needs {package}, which is installed but cannot be imported "
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
        f"{setting} finds no device, although {package} is loaded: does npu-smi info list "
        f"one, was CANN's set_env.sh sourced{question}? Or set launch.device={present_type}"
    )


def check_visible_devices(present: str) -> None:
    """Check ``ASCEND_RT_VISIBLE_DEVICES``; CANN silently ignores its invalid parts.

    CANN reads up to the first character that is neither digit nor comma, and expects ascending
    numbers (hiascend.com, CANN's environment variables, ASCEND_RT_VISIBLE_DEVICES).
    """
    valid = ",".join(map(str, sorted(set(map(int, re.findall(r"\d+", present))))))
    if present != valid:
        raise ConfigError(
            f"ASCEND_RT_VISIBLE_DEVICES={present!r} must be device numbers in ascending order "
            "with nothing but commas between them, or CANN reads a part of it; set "
            f"ASCEND_RT_VISIBLE_DEVICES={valid}"
        )


def _load_module(device_type: str) -> str | None:
    """Import the package of a device type, if needed; return the failure."""
    package = KINDS[device_type].package
    if package is None or hasattr(torch, device_type):
        return None
    try:
        importlib.import_module(package)
    except Exception as error:  # native libraries raise anything without CANN
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
