"""The store at ``launch.rdzv_endpoint``: who opens it, who joins it, and what is refused there."""

import contextlib
import errno
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from fsdptoys.launch import rendezvous_server
from fsdptoys.launch.rendezvous_server import RendezvousEndpoint
from fsdptoys.launch.rendezvous_state import open_state
from tests.launch.launchers import free_port
from tests.launch.stranger import listening_sockets


def refuse(*_: Any) -> None:
    raise AssertionError("asked")


def open_store(**options: Any) -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, **options)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_first_launcher_opens_the_store_and_the_others_join(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a value written by one and read by the other; a free address is bound before any service is asked."""
    endpoint = f"{host}:{free_port()}"
    first, second = RendezvousEndpoint(endpoint), RendezvousEndpoint(endpoint)
    with monkeypatch.context() as patch:
        patch.setattr(rendezvous_server, "_is_store", refuse)
        store = first.connect()
    joined = second.connect()
    store.set("key", "value")
    assert joined.get("key") == b"value"
    assert (first._server is None, second._server is None) == (False, True)


@pytest.mark.parametrize("use_libuv", [False, True])
def test_every_server_of_torch_is_recognized(use_libuv: bool) -> None:
    """Oracle: torch's own servers, of whose private protocol we speak two messages."""
    store = open_store(use_libuv=use_libuv)
    open_state(store)
    assert RendezvousEndpoint(f"127.0.0.1:{store.port}").connect().num_keys() >= 1


def test_store_is_joined_once_its_node_has_marked_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the key that the serving node sets between two queries of the joining one, which never creates it."""
    store = open_store()
    seen = []

    def open_later(_: float) -> None:
        seen.append(store.num_keys())
        open_state(store)

    monkeypatch.setattr(rendezvous_server, "time", SimpleNamespace(monotonic=time.monotonic, sleep=open_later))
    RendezvousEndpoint(f"127.0.0.1:{store.port}").connect()
    assert len(seen) == 1


def test_node_without_the_address_waits_for_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a store that opens after the first refused connection."""
    endpoint = f"127.0.0.1:{free_port()}"
    first, other = RendezvousEndpoint(endpoint), RendezvousEndpoint(endpoint)
    listen = RendezvousEndpoint._listen
    monkeypatch.setattr(RendezvousEndpoint, "_listen", lambda self, *where: listen(first, *where))
    monkeypatch.setattr(other, "_addresses", [(socket.AF_INET, ("192.0.2.1", first.port))])  # of no machine
    assert other._serve() is None
    monkeypatch.setattr(other, "_addresses", first._addresses)
    monkeypatch.setattr(other, "_tried_to_serve", True)
    opened = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: opened.append(first.connect()))
    monkeypatch.setattr(rendezvous_server, "time", clock)
    assert other.connect().num_keys() >= 1
    assert len(opened) == 1


@contextlib.contextmanager
def service(answer: bytes | None) -> Iterator[int]:
    """Port of a service that answers every connection, or stays silent with None, or closes it with b""."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connections = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while answer is not None:
                    connections.append(listening.accept()[0])
                    connections[-1].sendall(answer)
                    if not answer:
                        connections[-1].close()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "seconds"), [(None, 0.2), (b"", 3600.0), (b"HTTP/1.1 400 Bad Request", 3600.0), (b"\0", 0.2)]
)
def test_service_that_is_no_store_is_refused(
    answer: bytes | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the message; only silence and half an answer take until the limit, which may be an hour."""
    monkeypatch.setattr(rendezvous_server, "ANSWER_SECONDS", seconds)
    monkeypatch.setattr(os, "getpid", lambda: 256)  # the number that the store returns starts with a zero
    with service(answer) as port, pytest.raises(RendezvousConnectionError, match=r"^something else has that port$"):
        RendezvousEndpoint(f"127.0.0.1:{port}").connect()


def test_store_of_another_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the message, for a store without our key, which stays without it."""
    monkeypatch.setattr(rendezvous_server, "ANSWER_SECONDS", 0.2)
    store = open_store()
    keys = store.num_keys()
    with pytest.raises(RendezvousConnectionError, match=r"^a PyTorch store of another program has that port$"):
        RendezvousEndpoint(f"127.0.0.1:{store.port}").connect()
    assert store.num_keys() == keys


def test_unreachable_and_unresolvable_endpoints_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the system's own words for it."""
    with pytest.raises(RendezvousConnectionError, match=r"no\.such\.host\.invalid has no address"):
        RendezvousEndpoint("no.such.host.invalid:29500")
    monkeypatch.setattr(rendezvous_server, "ANSWER_SECONDS", 0.0)
    endpoint = RendezvousEndpoint(f"127.0.0.1:{free_port()}")
    monkeypatch.setattr(endpoint, "_tried_to_serve", True)
    with pytest.raises(RendezvousConnectionError, match=os.strerror(errno.ECONNREFUSED)):
        endpoint.connect()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed by Linux alone")
def test_loopback_host_name_listens_on_all_interfaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the kernel's list; Debian gives a machine's own name to 127.0.1.1, where no other machine comes."""
    port = free_port()
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **more: resolve("127.0.1.1", *rest, **more))
    point = RendezvousEndpoint(f"own:{port}")
    with point._listen(*point._addresses[0]):
        assert ("00000000", port) in listening_sockets(os.getpid())
    assert capsys.readouterr().err.startswith(
        "fsdptoys: own is 127.0.1.1 on this machine, so launch.rdzv_endpoint=own:"
    )


def spin() -> None:
    while True:
        pass


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Six processes that compute without end."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=spin, daemon=True) for _ in range(6)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.extended
@pytest.mark.limit(900)
def test_launchers_started_together_on_a_busy_machine_meet(launched: Callable[..., Any], busy_machine: None) -> None:
    """Oracle: the status and sentences of both, six times; the port of a rendezvous was free before it."""
    sentence = "fsdptoys: no launch.rdzv_token_file is set, so any machine of this network can join or stop the run"
    for _ in range(6):
        options = {"ranks": 1, "nnodes": 2, "rdzv_endpoint": f"127.0.0.1:{free_port()}", "forks": True}
        runs = [launched("nothing", **options) for _ in range(2)]
        for status, stderr in [run.result() for run in runs]:
            # PyTorch's store warns where the other launcher has left first.
            sentences = [line for line in stderr.splitlines() if line.startswith("fsdptoys: ")]
            assert (status, sentences) == (0, [sentence]), stderr
