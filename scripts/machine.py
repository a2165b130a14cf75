"""The machine of a measurement, in one line."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version

import torch

from fsdptoys.device import Device


def machine(device_type: str, packages: Sequence[str] = ()) -> str:
    """Versions of Python, torch and further packages, the system, and the processor or accelerator."""
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    versions += [f"{package} {version(package)}" for package in packages]
    name = Device(device_type).name
    if device_type == "cpu":
        name += f", {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    return ", ".join([*versions, platform.system(), name])
