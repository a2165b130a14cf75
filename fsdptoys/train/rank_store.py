"""Rendezvous store of the ranks: a file on one node, the launcher's TCP store on several, in memory for one rank.

With torch's ``env://``, rank 0 or the launcher listens on all interfaces. The store has no authentication, so anyone
who reaches the port can read and replace the ranks' addresses; our launcher therefore names another store. Under
torchrun, ``env://`` is used.

Source: https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

import json
import os
import socket
from pathlib import Path

import torch.distributed as dist

from fsdptoys.errors import ConfigError

from .heartbeat import START
from .launch_env import LAUNCHED

STORE = "FSDPTOYS_STORE"
"""Location of the store as JSON: ``{"file": path}`` or ``{"host": address, "port": number, "prefix": text}``."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def name_file_store(folder: Path, start: int) -> None:
    """Set the environment so that the ranks rendezvous in a file in the launcher's folder, of mode 0700.

    The number of the start keeps late ranks of an earlier start out of this one's store.
    """
    path = str(folder / f"store-{start}")
    os.environ.update({STORE: json.dumps({"file": path}), START: path})


def name_network_store(host: str, port: int, prefix: str) -> None:
    """Set the environment so that the ranks of a start rendezvous at a running TCP store, with this key prefix."""
    os.environ.update({STORE: json.dumps({"host": host, "port": port, "prefix": prefix}), START: prefix})


def open_rank_store(world_size: int) -> "dist.Store | None":
    """Open the store of this rank; None under another launcher, which uses ``env://``."""
    if world_size == 1:
        return dist.HashStore()
    # The parent must be our launcher: torchrun, if started from one of our ranks, passes on that rank's environment.
    if STORE not in os.environ or os.environ.get(LAUNCHED) != str(os.getppid()):
        return None
    place = json.loads(os.environ[STORE])
    if "file" in place:
        return dist.FileStore(place["file"], world_size)
    store = dist.TCPStore(place["host"], place["port"], is_master=False, wait_for_workers=False)
    return dist.PrefixStore(place["prefix"], store)


def loopback_environment(present: "os._Environ[str] | dict[str, str]") -> dict[str, str]:
    """Variables not in ``present`` that keep gloo's and NCCL's sockets on the loopback interface, for one node.

    By default gloo listens on the address of the host's name, and NCCL's bootstrap on the first network interface.
    NCCL's variable is untested on several GPUs.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if not names:
        return {}
    # NCCL matches names as prefixes unless they follow an equals sign.
    wanted = {GLOO_INTERFACE: names[0], "NCCL_SOCKET_IFNAME": f"={names[0]}"}
    return {name: value for name, value in wanted.items() if name not in present}


def check_interface() -> None:
    """Raise a ConfigError if this machine lacks a network interface named in ``GLOO_SOCKET_IFNAME``."""
    wanted = os.environ.get(GLOO_INTERFACE, "")
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, wanted.split(",")):
        if name not in present:
            raise ConfigError(
                f"{GLOO_INTERFACE}={wanted} names no network interface of this machine; set it to one of "
                f"{', '.join(present)}, or unset it"
            )
