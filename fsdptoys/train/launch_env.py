"""Environment variables and files that the launcher shares with the ranks it starts, and their
rendezvous store.

The store is a file on one node, the launcher's TCP store on several, and in memory for one rank.
With torch's ``env://``, rank 0 or the launcher listens on all interfaces. The store has no
authentication, so anyone who reaches the port can read and replace the ranks' addresses; our
launcher therefore names another store. Under torchrun, ``env://`` is used.

Source: https://docs.pytorch.org/docs/stable/distributed.html#distributed-key-value-store
"""

import json
import os
import socket
from pathlib import Path

import torch.distributed as dist

from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import write_atomically

from .heartbeat import START

LAUNCHED = "FSDPTOYS_LAUNCHED"
"""The launcher's process id, set for the workers it starts."""

LAUNCH_FOLDER = "FSDPTOYS_LAUNCH_FOLDER"
"""The launcher's folder on this machine, removed when the launcher ends."""

RESTARTS = "FSDPTOYS_RESTARTS"
"""How many times the launcher has restarted the workers."""

STORE = "FSDPTOYS_STORE"
"""Location of the store as JSON: ``{"file": path}`` or ``{"host": address, "port": number,
"prefix": text}``."""

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def launch_folder() -> Path | None:
    """The launcher's folder on this machine; None under another launcher or without one."""
    path = os.environ.get(LAUNCH_FOLDER)
    return Path(path) if path else None


def restart_count() -> int:
    """How many times the ranks have been restarted, by our launcher or by torchrun."""
    # torchrun counts only failures on this machine, although a failure on another node restarts all
    # workers too.
    count = os.environ.get(RESTARTS) or os.environ.get(
        "TORCHELASTIC_RESTART_COUNT", "0"
    )
    return int(count) if count.isdecimal() else 0


def remember_run_dir(path: Path) -> None:
    """Record the run directory for the launcher and restarted workers; at least one rank per node
    must call it."""
    folder = launch_folder()
    if folder is not None:
        write_atomically(folder / "run_dir", str(path.absolute()))


def remembered_run_dir(folder: Path | None = None) -> Path | None:
    """The run directory recorded in the launcher's folder, by default that of this worker; None if
    there is none."""
    folder = folder or launch_folder()
    try:
        return Path((folder / "run_dir").read_text()) if folder is not None else None
    except FileNotFoundError:
        return None


def name_file_store(folder: Path, start: int) -> None:
    """Set the environment so that the ranks rendezvous in a file in the launcher's folder, of mode
    0700.

    The number of the start keeps late ranks of an earlier start out of this one's store.
    """
    path = str(folder / f"store-{start}")
    os.environ.update({STORE: json.dumps({"file": path}), START: path})


def name_network_store(host: str, port: int, prefix: str) -> None:
    """Set the environment so that the ranks of a start rendezvous at a running TCP store, with this
    key prefix."""
    os.environ.update(
        {
            STORE: json.dumps({"host": host, "port": port, "prefix": prefix}),
            START: prefix,
        }
    )


def open_rank_store(world_size: int) -> "dist.Store | None":
    """Open the store of this rank; None under another launcher, which uses ``env://``."""
    if world_size == 1:
        return dist.HashStore()
    # The parent must be our launcher: torchrun, if started from one of our ranks, passes on that
    # rank's environment.
    if STORE not in os.environ or os.environ.get(LAUNCHED) != str(os.getppid()):
        return None
    address = json.loads(os.environ[STORE])
    if "file" in address:
        return dist.FileStore(address["file"], world_size)
    store = dist.TCPStore(
        address["host"], address["port"], is_master=False, wait_for_workers=False
    )
    return dist.PrefixStore(address["prefix"], store)


def loopback_environment(
    present: "os._Environ[str] | dict[str, str]",
) -> dict[str, str]:
    """Variables not in ``present`` that keep gloo's and NCCL's sockets on the loopback interface,
    for one node.

    By default gloo listens on the address of the host's name, and NCCL's bootstrap on the first
    network interface. NCCL's variable is untested on several GPUs.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if not names:
        return {}
    # NCCL matches names as prefixes unless they follow an equals sign.
    variables = {GLOO_INTERFACE: names[0], "NCCL_SOCKET_IFNAME": f"={names[0]}"}
    return {name: value for name, value in variables.items() if name not in present}


def check_interface() -> None:
    """Raise a ConfigError if this machine lacks a network interface named in
    ``GLOO_SOCKET_IFNAME``."""
    interfaces = os.environ.get(GLOO_INTERFACE, "")
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, interfaces.split(",")):
        if name not in present:
            raise ConfigError(
                f"{GLOO_INTERFACE}={interfaces} names no network interface of this machine; set it "
                f"to one of {', '.join(present)}, or unset it"
            )
