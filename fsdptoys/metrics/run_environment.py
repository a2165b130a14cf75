"""Environment of a run: versions, hardware and command line, without host or user names."""

import contextlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import fsdptoys
from fsdptoys.device import GIB, KINDS, Device, device_count
from fsdptoys.utils.text import counted

PACKAGES = ("numpy", "hydra_core", "omegaconf", "torchao", "tokenizers")
"""Packages with recorded versions, in addition to Python, PyTorch and those of devices."""


def environment(
    device: Device, world_size: int, command: Sequence[str]
) -> dict[str, Any]:
    """Describe the environment of a run as plain values, with the device of rank 0; absent ones are
    None."""
    host = Device("cpu")
    kinds = KINDS.values()
    packages = [*PACKAGES, *(kind.package for kind in kinds if kind.package)]
    variables = ["OMP_NUM_THREADS"]
    for kind in kinds:
        variables += [*kind.allocator_variables, *kind.recorded_variables]
    own_cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    return {
        "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "world_size": world_size,
        "device": {
            "type": device.type,
            "name": device.name,
            "count_on_this_machine": device_count(device.type),
            "memory_gib": round(device.total_memory_bytes / GIB, 2),
        },
        "versions": {
            "fsdptoys": fsdptoys.__version__,
            "fsdptoys_commit": checkout_commit(
                Path(fsdptoys.__file__).resolve().parent.parent
            ),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cudnn": torch.backends.cudnn.version(),
            # torch_npu adds CANN's to torch.version
            **{
                name: getattr(torch.version, name, None)
                for kind in kinds
                for name in kind.recorded_versions
            },
            **{name: _package_version(name) for name in packages},
        },
        "machine": {
            "platform": platform.platform(),
            "cpu": host.name,
            "cpu_cores": os.cpu_count(),
            "cpu_cores_of_this_process": own_cores,
            "torch_threads": torch.get_num_threads(),
            "memory_gib": round(host.total_memory_bytes / GIB, 2),
        },
        "environment_variables": {name: os.environ.get(name) for name in variables},
    }


def hardware_line(environment: dict[str, Any]) -> str:
    """One line on ranks and devices of an ``environment``; one read from a file may lack
    versions."""
    device = environment["device"]
    versions = environment.get("versions")
    ranks = int(environment["world_size"])
    torch_version = versions.get("torch") if isinstance(versions, dict) else None
    where = f"{counted(ranks, 'rank')} on {device['name']} ({device['type']})"
    backend = environment.get("attention_backend") if device["type"] != "cpu" else None
    parts = (
        where,
        torch_version and f"torch {torch_version}",
        backend and f"attention by {backend}",
    )
    return ", ".join(part for part in parts if part)


def checkout_commit(root: Path) -> str | None:
    """Commit of a git checkout, with ``-dirty`` for changed tracked files; None if ``root`` is no
    checkout."""
    # An install inside another project's checkout must not report that
    if not (root / ".git").exists():
        return None
    command = [
        "git",
        "--no-optional-locks",
        "-C",
        str(root),
        "describe",
        "--always",
        "--abbrev=40",
        "--dirty",
    ]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        description = subprocess.run(
            [*command, "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return description.stdout.strip() or None
    return None


def _package_version(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None
