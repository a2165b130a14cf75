"""The store at ``launch.rdzv_endpoint``: the node with that address opens it, the others connect.

Every node tries to bind the address first, so of several launchers on one machine exactly one opens
the store. A node that cannot bind it joins, once the service there has proved to be a store with
the state of a rendezvous of ours.

torch's store server listens on all interfaces unless it gets a socket; here it gets one bound to
the endpoint's address.
"""

import errno
import ipaddress
import os
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from fsdptoys.utils.text import print_status

from .signed_state import has_state, open_state

DEFAULT_PORT = 29400  # torch's default port, for an endpoint without one
ANSWER_SECONDS = 60.0
"""Timeout of the proof that the listener is a store of ours; a busy machine may take long."""
RETRY_SECONDS = 0.1  # between attempts to connect to a node that does not listen yet
RESOLVE_SECONDS = 4.5  # timeout of resolving the endpoint's name
# of connecting to the store, and of each answer
CONNECT_TIMEOUT = timedelta(seconds=60)


class RendezvousEndpoint:
    """Address of the store (host:port), and its server on the node with that address.

    RendezvousConnectionError if the host has no address or another service its port, ValueError for
    a wrong endpoint.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.host, self.port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        self._addresses = _resolve(self.host, self.port)
        self._server: TCPStore | None = None
        self._tried_to_serve = False

    def connect(self, wait_seconds: float | None = None) -> TCPStore:
        """Return the store, over a new connection; RendezvousConnectionError without an answer.

        Args:
            wait_seconds: how long the node that serves the store may take until it listens; None
                for a minute.
        """
        try:
            if not self._tried_to_serve:
                self._tried_to_serve = True
                self._server = self._serve()
                if self._server is not None:
                    return self._server
            return self._join(ANSWER_SECONDS if wait_seconds is None else wait_seconds)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(
                "the connection to the store has failed"
            ) from error

    def _serve(self) -> TCPStore | None:
        """Open the server; None if this node does not have the address or another process serves
        it."""
        for family, address in self._addresses:
            try:
                listening = self._listen(family, address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return None  # the next address of the same name would be a second store
                if error.errno == errno.EADDRNOTAVAIL:
                    continue
                raise RendezvousConnectionError(error.strerror) from None
            with listening:
                server = _open_server(self.host, self.port, listening)
            open_state(server)
            return server
        return None

    def _join(self, wait_seconds: float) -> TCPStore:
        """Connect to the store that another process serves, once it is known to be ours."""
        connection = _connect(self._addresses, time.monotonic() + wait_seconds)
        deadline = time.monotonic() + ANSWER_SECONDS
        if not _is_store(connection, deadline):
            raise RendezvousConnectionError("something else has that port")
        store = TCPStore(
            self.host,
            self.port,
            is_master=False,
            wait_for_workers=False,
            timeout=CONNECT_TIMEOUT,
        )
        while not has_state(store):
            if time.monotonic() > deadline:
                raise RendezvousConnectionError(
                    "a PyTorch store of another program has that port"
                )
            time.sleep(RETRY_SECONDS)
        return store

    def _listen(self, family: int, address: Any) -> socket.socket:
        if self._is_loopback_by_accident(address[0]):
            # Debian's /etc/hosts maps the machine's own name to 127.0.1.1, which no other machine
            # can reach.
            print_status(
                f"{self.host} is {address[0]} on this machine, so "
                f"launch.rdzv_endpoint={self.endpoint} is open on all its interfaces; name the "
                "address that the other machines use to open that one alone"
            )
            address = ("::" if family == socket.AF_INET6 else "0.0.0.0", *address[1:])
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(128)
        except OSError:
            listening.close()
            raise
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

    Tested with torch 2.13; older versions fall back to the other server if libuv's accepts no
    socket.
    """
    options: dict[str, Any] = {
        "is_master": True,
        "wait_for_workers": False,
        "timeout": CONNECT_TIMEOUT,
    }
    try:
        return TCPStore(
            host, port, master_listen_fd=os.dup(listening.fileno()), **options
        )
    except (NotImplementedError, RuntimeError) as error:
        if "listen fd" not in str(error):
            raise
    return TCPStore(
        host,
        port,
        master_listen_fd=os.dup(listening.fileno()),
        use_libuv=False,
        **options,
    )


def _resolve(host: str, port: int) -> list[tuple[int, Any]]:
    """Return families and socket addresses; in a thread, since a silent name server blocks for 30
    seconds."""
    addresses: list[tuple[int, Any]] = []
    problem = [f"{host} was not resolved within {RESOLVE_SECONDS} s"]

    def look() -> None:
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses.extend(
                (int(family), address) for family, _, _, _, address in answers
            )
        except (OSError, UnicodeError) as error:
            problem[0] = (
                f"{host} has no address: {getattr(error, 'strerror', None) or error}"
            )

    thread = threading.Thread(target=look, name="resolve", daemon=True)
    thread.start()
    thread.join(RESOLVE_SECONDS)
    if not addresses:
        raise RendezvousConnectionError(problem[0])
    # IPv4 first: the other nodes may have no IPv6; if they do, a refused IPv6 connection fails
    # fast.
    return sorted(addresses, key=lambda pair: pair[0] != socket.AF_INET)


def _connect(addresses: list[tuple[int, Any]], deadline: float) -> socket.socket:
    """Connect to the first address that accepts; RendezvousConnectionError if none does before the
    deadline."""
    while True:
        for family, address in addresses:
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.settimeout(max(deadline - time.monotonic(), RETRY_SECONDS))
            try:
                connection.connect(address)
                return connection
            except OSError as error:
                connection.close()
                problem = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise RendezvousConnectionError(problem)
        time.sleep(RETRY_SECONDS)


def _is_store(connection: socket.socket, deadline: float) -> bool:
    """Return whether a store of torch answers; closes the connection.

    torch's own client would wait forever for a service that accepts the connection and stays
    silent. So this speaks the first two messages of its private protocol: VALIDATE with a magic
    number, and PING with a number that the server returns. Both servers of torch 2.7 to 2.15 know
    them.
    """
    number = struct.pack("=I", os.getpid())
    answer = b""
    with connection:
        try:
            connection.sendall(struct.pack("=BIB", 0, 0x3C85F7CE, 13) + number)
            while number != answer and number.startswith(answer):
                connection.settimeout(max(deadline - time.monotonic(), RETRY_SECONDS))
                received = connection.recv(len(number) - len(answer))
                if not received:
                    return False
                answer += received
        except OSError:
            return False
    return answer == number
