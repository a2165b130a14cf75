"""The machine of a measurement, in one line."""

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import version

import torch

from fsdptoys.device import Device
from fsdptoys.errors import ConfigError


def machine(device_type: str, packages: Sequence[str] = ()) -> str:
    """Versions of Python, torch and further packages, the system, and the processor or accelerator.

    Raises:
        SystemExit: as :func:`device_name`.
    """
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    versions += [f"{package} {version(package)}" for package in packages]
    name = device_name(device_type)
    if device_type == "cpu":
        name += f", {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    elif device_type == "cuda":
        name = ", ".join(
            filter(None, [name, nvidia_driver(), f"{os.cpu_count()} CPU cores"])
        )
    return ", ".join([*versions, platform.system(), name])


def device_name(device_type: str) -> str:
    """Model of the processor or accelerator.

    Raises:
        SystemExit: if this machine has no such device.
    """
    try:
        return Device(device_type).name
    except ConfigError as error:
        raise SystemExit(
            f"no {device_type} device on this machine; name another with --device"
        ) from error


def nvidia_driver() -> str:
    """Driver, clocks and power limit of the first GPU as ``nvidia-smi`` reports them; empty without
    it."""
    query = [
        "driver_version",
        "clocks.sm",
        "clocks.max.sm",
        "clocks.mem",
        "power.limit",
    ]
    command = [
        "nvidia-smi",
        "--id=0",
        f"--query-gpu={','.join(query)}",
        "--format=csv,noheader",
    ]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30.0)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    fields = (
        [field.strip() for field in process.stdout.splitlines()[0].split(",")]
        if process.stdout
        else []
    )
    if process.returncode or len(fields) != len(query):
        return ""
    driver, sm, most, memory, watts = fields
    return f"driver {driver}, SM clock {sm} of {most}, memory clock {memory}, power limit {watts}"


def without_clocks(line: str) -> str:
    """``machine``'s line without the momentary clocks, to compare two machines."""
    return re.sub(
        r"SM clock \d+ MHz of (\d+ MHz), memory clock \d+ MHz",
        r"SM clock up to \1",
        line,
    )
