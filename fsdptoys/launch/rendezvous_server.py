"""The store at ``launch.rdzv_endpoint``: the node with that address opens it, the others connect.

torch's store server listens on all interfaces unless it gets a socket; here it gets one bound to the endpoint's
address.
"""

import errno
import ipaddress
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from fsdptoys.utils.text import print_status

DEFAULT_PORT = 29400  # torch's default port, for an endpoint without one
ANSWER_SECONDS = 3  # timeout of the check that the listener is a store; a store answers from its own thread
RESOLVE_SECONDS = 4.5  # timeout of resolving the endpoint's name
CONNECT_TIMEOUT = timedelta(seconds=60)  # of connecting to the store, and of each answer


class RendezvousEndpoint:
    """Address of the store (host:port), and its server on the node with that address.

    RendezvousConnectionError if the host has no address or another service its port, ValueError for a wrong endpoint.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.host, self.port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        self._addresses = _resolve(self.host, self.port)
        self._server: TCPStore | None = None
        self._tried_to_serve = False
        _check_answer(self.host, self.port)

    def connect(self) -> TCPStore:
        """Return the store, over a new connection; RendezvousConnectionError without an answer."""
        try:
            if not self._tried_to_serve:
                self._tried_to_serve = True
                self._server = self._serve()
                if self._server is not None:
                    return self._server
            return TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the connection to the store has failed") from error

    def _serve(self) -> TCPStore | None:
        """Open the server; None if this node does not have the address or another process serves it."""
        for family, address in self._addresses:
            if (listening := self._listen(family, address)) is not None:
                with listening:
                    return _open_server(self.host, self.port, listening)
        return None

    def _listen(self, family: int, address: Any) -> socket.socket | None:
        if self._is_loopback_by_accident(address[0]):
            # Debian's /etc/hosts maps the machine's own name to 127.0.1.1, which no other machine can reach.
            print_status(
                f"{self.host} is {address[0]} on this machine, so launch.rdzv_endpoint={self.endpoint} is open on all "
                "its interfaces; name the address that the other machines use to open that one alone"
            )
            address = ("::" if family == socket.AF_INET6 else "0.0.0.0", *address[1:])
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(128)
        except OSError as error:
            listening.close()
            if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                return None
            raise RendezvousConnectionError(error.strerror) from None
        return listening

    def _is_loopback_by_accident(self, address: str) -> bool:
        if self.host.startswith("localhost"):
            return False
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return ipaddress.ip_address(address.partition("%")[0]).is_loopback
        return False


def _open_server(host: str, port: int, listening: socket.socket) -> TCPStore:
    """Open a server on a socket that listens already.

    Tested with torch 2.13; older versions whose libuv server accepts no socket fall back to the other server.
    """
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": CONNECT_TIMEOUT}
    try:
        return TCPStore(host, port, master_listen_fd=os.dup(listening.fileno()), **options)
    except (NotImplementedError, RuntimeError) as error:
        if "listen fd" not in str(error):
            raise
    return TCPStore(host, port, master_listen_fd=os.dup(listening.fileno()), use_libuv=False, **options)


def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    """Return families and socket addresses; in a thread, since a silent name server blocks for 30 seconds."""
    found: list[tuple[int, Any]] = []
    problem = [f"{host} was not resolved within {RESOLVE_SECONDS} s"]

    def look() -> None:
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.extend((int(family), address) for family, _, _, _, address in answers)
        except (OSError, UnicodeError) as error:
            problem[0] = f"{host} has no address: {getattr(error, 'strerror', None) or error}"

    thread = threading.Thread(target=look, name="resolve", daemon=True)
    thread.start()
    thread.join(RESOLVE_SECONDS)
    if not found:
        raise RendezvousConnectionError(problem[0])
    # IPv4 first: the other nodes may have no IPv6; if they do, a refused IPv6 connection fails fast.
    return sorted(found, key=lambda place: place[0] != socket.AF_INET)


def _check_answer(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), 5.0).close()
    except OSError:
        return  # no listener yet
    ask = "from torch.distributed import TCPStore; print(flush=True); "
    ask += f"TCPStore({host!r}, {port}, is_master=False, wait_for_workers=False)"
    with subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the import takes long on a busy machine
        try:
            is_store = process.wait(ANSWER_SECONDS) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            is_store = False
    if not is_store:
        raise RendezvousConnectionError("something else has that port")
