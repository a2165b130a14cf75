"""Fingerprint of a run: a hash of everything that decides its results and speed, equal for identical jobs.

Excluded: settings for output paths, printing and rendezvous. Not covered: environment variables and machine load.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

import fsdptoys
from fsdptoys.config.schema import Config
from fsdptoys.metrics.run_environment import checkout_commit

WITHOUT_EFFECT = {
    "metrics": ("run_dir", "console"),
    "launch": ("device", "nproc_per_node", "rdzv_endpoint", "rdzv_token_file"),
}
"""Section → keys without effect, or covered by another part of the hash."""


def fingerprint(config: Config, world_size: int, device_name: str) -> str:
    """Return the run's SHA-256 fingerprint in hexadecimal.

    Args:
        config: validated, with every ``auto`` replaced.
        world_size: ranks on all nodes.
        device_name: name of the devices.
    """
    tree: dict[str, Any] = config.to_dict()
    for section, keys in WITHOUT_EFFECT.items():
        tree[section] = {key: value for key, value in tree[section].items() if key not in keys}
    tree["mesh"] = {**tree["mesh"], "fsdp_size": config.mesh.shard_ranks(world_size)}
    content = {
        "config": tree,
        "world_size": world_size,
        "device": device_name,
        "torch": str(torch.__version__),
        "fsdptoys": code_version(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


@functools.cache
def code_version() -> str:
    """Return the package's version, the commit of a checkout, and for a modified one a hash of its files."""
    package = Path(fsdptoys.__file__).resolve().parent
    commit = checkout_commit(package.parent)
    version = f"{fsdptoys.__version__} {commit or ''}".strip()
    if commit is None or not commit.endswith("-dirty"):
        return version
    sums = hashlib.sha256()
    for pattern in ("*.py", "*/*.py"):
        for path in sorted(package.glob(pattern)):
            sums.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{version} {sums.hexdigest()}"
