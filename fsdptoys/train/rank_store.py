"""The store at which ranks find each other: a file on one machine, the launcher's on several, none for a single rank.

torch's ``env://`` has rank 0, or the launcher, listen on all interfaces for the others. Anybody who reaches that port
can read and replace the addresses of the ranks, since the store has no authentication, so our launcher names another
place. Under torchrun, ``env://`` it stays.

Source: https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

import json
import os
import socket
from pathlib import Path

import torch.distributed as dist

from fsdptoys.errors import ConfigError

from .heartbeat import START
from .launch_env import (
    LAUNCHED,
)

STORE = "FSDPTOYS_STORE"
"""The place, as JSON: ``{"file": path}`` or ``{"host": address, "port": number, "prefix": text}``."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def name_file_store(folder: Path, start: int) -> None:
    """Have the ranks of one start meet at a file, which no other user can write; sets the environment.

    Args:
        folder: the launcher's, of mode 0700.
        start: the number of the start; a late rank of an earlier one must not read the addresses of this one.
    """
    path = str(folder / f"store-{start}")
    os.environ.update({STORE: json.dumps({"file": path}), START: path})


def name_network_store(host: str, port: int, prefix: str) -> None:
    """Have the ranks of one start meet at a store that listens already; sets the environment.

    Args:
        host: name or address.
        port: its port.
        prefix: of all keys of this start.
    """
    os.environ.update({STORE: json.dumps({"host": host, "port": port, "prefix": prefix}), START: prefix})


def open_rank_store(world_size: int) -> "dist.Store | None":
    """The store of this rank; None where another launcher decides (``env://``).

    Args:
        world_size: ranks over all machines.
    """
    if world_size == 1:
        return dist.HashStore()
    # A rank of ours that starts torchrun hands its environment on.
    if STORE not in os.environ or os.environ.get(LAUNCHED) != str(os.getppid()):
        return None
    place = json.loads(os.environ[STORE])
    if "file" in place:
        return dist.FileStore(place["file"], world_size)
    store = dist.TCPStore(place["host"], place["port"], is_master=False, wait_for_workers=False)
    return dist.PrefixStore(place["prefix"], store)


def loopback_environment(present: "os._Environ[str] | dict[str, str]") -> dict[str, str]:
    """Variables that keep the sockets of gloo and NCCL on the loopback interface, for the ranks of one machine.

    Without them gloo listens on the address that the host's name resolves to, and NCCL's bootstrap on the first
    network card. NCCL's was not tried on several GPUs.

    Args:
        present: the environment; what a user has set stays.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if not names:
        return {}
    # NCCL reads a name as a prefix of several, unless it follows an equals sign.
    wanted = {GLOO_INTERFACE: names[0], "NCCL_SOCKET_IFNAME": f"={names[0]}"}
    return {name: value for name, value in wanted.items() if name not in present}


def check_interface() -> None:
    """Check the interfaces that gloo is to use.

    Raises:
        ConfigError: if this machine has none of that name.
    """
    wanted = os.environ.get(GLOO_INTERFACE, "")
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, wanted.split(",")):
        if name not in present:
            raise ConfigError(
                f"{GLOO_INTERFACE}={wanted} names no network interface of this machine; set it to one of "
                f"{', '.join(present)}, or unset it"
            )
