"""Machines made of Linux namespaces: each has its own name, address and network card, all on one switch.

A host is a network namespace whose card ends in a bridge in another namespace, so that the network of
the machine that this runs on is not touched. Processes enter a host after the fork, with its name (UTS namespace) and
its /etc/hosts (mount namespace). Hosts share memory, cores, process numbers and disks, which is a shared file
system of the best kind; different clocks and late packets are not simulated.

Needs root; ``missing_requirement`` names the missing part.
"""

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000

CARD = "card0"
"""Each host's network interface."""


@dataclass(frozen=True)
class Host:
    """One machine."""

    name: str
    address: str
    network: str
    """Its network namespace."""
    switch: str
    port: str
    """Where its cable ends, in the namespace of the switch."""
    names: Path
    """Its /etc/hosts."""

    def enter(self) -> None:
        """Move this process, which has one thread, onto the host; for ``preexec_fn``."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.network}") as network:
            _succeed(libc.setns(network.fileno(), CLONE_NEWNET))
        _succeed(libc.unshare(CLONE_NEWUTS | CLONE_NEWNS))
        socket.sethostname(self.name)
        _succeed(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
        _succeed(libc.mount(os.fsencode(self.names), b"/etc/hosts", None, MS_BIND, None))

    def cut_off(self) -> None:
        """Drop every packet from and to this host; its network card stays up."""
        _ip("-n", self.switch, "link", "set", self.port, "nomaster")

    def join(self) -> None:
        """Restore the network."""
        _ip("-n", self.switch, "link", "set", self.port, "master", "bridge")


def missing_requirement() -> str | None:
    """The reason why this machine cannot create hosts, or None."""
    if shutil.which("ip", path=_PATH) is None:
        return "there is no ip command (iproute2)"
    if os.geteuid() != 0:
        return "namespaces are made by root alone"
    try:
        with _namespace(f"fsdptoys-{os.getpid()}-try") as network:
            _ip("-n", network, "link", "add", "bridge", "type", "bridge")
            _ip("-n", network, "link", "add", "one", "type", "veth", "peer", "name", "other")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this system makes no networks ({getattr(error, 'stderr', '') or error})"
    return None


@contextmanager
def connected_hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """N hosts on one switch; programs still running on them keep their network until it ends.

    Args:
        count: of hosts, named node0, node1, …
        folder: for their /etc/hosts.
    """
    switch = f"fsdptoys-{os.getpid()}-switch"
    addresses = {f"node{index}": f"10.77.0.{index + 1}" for index in range(count)}
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{each} {name}\n" for name, each in addresses.items()))
    hosts = [
        Host(name, address, f"fsdptoys-{os.getpid()}-{name}", switch, f"port{index}", names)
        for index, (name, address) in enumerate(addresses.items())
    ]
    with _namespaces([switch, *(host.network for host in hosts)]):
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in hosts:
            _ip("-n", host.network, "link", "add", CARD, "type", "veth", "peer", "name", host.port, "netns", switch)
            _ip("-n", switch, "link", "set", host.port, "master", "bridge", "up")
            _ip("-n", host.network, "address", "add", f"{host.address}/24", "dev", CARD)
            _ip("-n", host.network, "link", "set", CARD, "up")
            _ip("-n", host.network, "link", "set", "lo", "up")
        yield hosts


@contextmanager
def _namespaces(names: Sequence[str]) -> Iterator[None]:
    if not names:
        yield
        return
    with _namespace(names[0]), _namespaces(names[1:]):
        yield


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        yield name
    finally:
        _ip("netns", "delete", name)


_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _ip(*words: str) -> None:
    ip = shutil.which("ip", path=_PATH)
    assert ip is not None
    subprocess.run([ip, *words], check=True, capture_output=True, text=True)


def _succeed(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
