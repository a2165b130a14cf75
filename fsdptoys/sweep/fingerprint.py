"""When two jobs are the same run: everything that decides what it computes and how fast, in one number.

Left out is what only says where a run writes and prints, and how its machines find each other. What it shares with
no configuration, load of the machine and environment variables, is not seen.
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
"""Section → keys that change nothing, or that are told otherwise here."""


def fingerprint(config: Config, world_size: int, device_name: str) -> str:
    """A number in hexadecimal that only the same run has.

    Args:
        config: validated, with every ``auto`` replaced.
        world_size: ranks over all machines.
        device_name: the name that the devices' maker gave them.
    """
    tree: dict[str, Any] = config.to_dict()
    for section, keys in WITHOUT_EFFECT.items():
        tree[section] = {key: value for key, value in tree[section].items() if key not in keys}
    tree["mesh"] = {**tree["mesh"], "fsdp_size": config.mesh.shard_ranks(world_size)}
    told = {
        "config": tree,
        "world_size": world_size,
        "device": device_name,
        "torch": str(torch.__version__),
        "fsdptoys": code_version(),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


@functools.cache
def code_version() -> str:
    """Version of this package, the commit of a checkout, and where that was changed, what its files say."""
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
