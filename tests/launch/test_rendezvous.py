"""The signed state of a rendezvous, the file of its token, and the server: one address, one
launcher that serves."""

import contextlib
import errno
import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _NodeDesc,
    _RendezvousState,
)

from fsdptoys.errors import ConfigError
from fsdptoys.launch.rendezvous import endpoint as endpoint_module
from fsdptoys.launch.rendezvous.endpoint import RendezvousEndpoint
from fsdptoys.launch.rendezvous.signed_state import (
    KEY,
    ForeignStateError,
    SignedBackend,
    open_state,
    read_token,
)
from tests.harness.launchers import free_port
from tests.launch.stranger import listening_sockets

TOKEN = b"0123456789abcdef"
WITH_AND_WITHOUT = pytest.mark.parametrize(
    "token", [None, TOKEN], ids=["without token", "with token"]
)


def state() -> Any:
    """A state with two nodes; one waits."""
    state = _RendezvousState()
    node = _NodeDesc("node0", 1, 0)
    other = _NodeDesc("node1", 2, 0)
    state.round = 3
    state.complete = True
    state.participants = {node: 0}
    state.wait_list = {other}
    state.last_heartbeats = {node: datetime.fromtimestamp(1.5e9 + 0.25, timezone.utc)}
    return state


STATE = pickle.dumps(state())


@pytest.fixture
def store() -> Any:
    """An empty store of ours."""
    store = HashStore()
    open_state(store)
    return store


def backend(store: Any, token: bytes | None = None) -> SignedBackend:
    return SignedBackend(store, "fsdptoys", token, "node0:29400")


@WITH_AND_WITHOUT
def test_state_round_trips_and_stale_writers_are_fenced(
    store: Any, token: bytes | None
) -> None:
    """Oracle: the state itself; torch's rule that only a machine that knows the latest state can
    replace it."""
    first = backend(store, token)
    other = backend(store, token)
    assert first.get_state() is None
    by_first = first.set_state(STATE)
    assert by_first is not None and by_first[2]
    state_of_first = other.get_state()
    assert state_of_first is not None and vars(pickle.loads(state_of_first[0])) == vars(
        state()
    )
    assert first.most_nodes == other.most_nodes == 1
    late = other.set_state(STATE)  # as if there were none
    assert late is not None and not late[2]
    successor = other.set_state(STATE, state_of_first[1])
    assert successor is not None and successor[2]
    stale = first.set_state(STATE, by_first[1])
    assert stale is not None and not stale[2]


@pytest.mark.parametrize(
    "writes, reads, message",
    [
        (TOKEN, b"another token...", "has another token than this one"),
        (TOKEN, None, "share a token, and this one has none"),
        (None, TOKEN, "has no token, and this one has"),
    ],
)
def test_token_mismatch_is_refused(
    store: Any, writes: Any, reads: Any, message: str
) -> None:
    """Oracle: the expected message."""
    backend(store, writes).set_state(STATE)
    with pytest.raises(ForeignStateError, match=message):
        backend(store, reads).get_state()


FOREIGN_STATES = [
    "",
    "{}",
    "[" * 100_000,
    '{"message": 1, "hmac": null}',
    '{"message": "[]", "hmac": null}',
]
CHANGES = [
    ('1, \\"state', '-1, \\"state'),
    ('round\\": 3', 'round\\": 1e999'),
    ('complete\\": true', 'complete\\": 1'),
    ("1500000000.25", "1e30"),
    ('"node1\\"', '"\\\\u001b[2J\\"'),
    ('pid\\": 2', 'pid\\": -2'),
    ('closed\\"', 'close\\"'),
    ('wait_list\\": [{', 'wait_list\\": [[], {'),
]


@pytest.mark.parametrize("text", FOREIGN_STATES, ids=lambda text: text[:20])
def test_malformed_state_is_refused(store: Any, text: str) -> None:
    """Oracle: one kind of error, which names the endpoint."""
    store.set(KEY, text)
    with pytest.raises(
        ForeignStateError, match=r"launch\.rdzv_endpoint=node0:29400 cannot be trusted"
    ):
        backend(store).get_state()


@pytest.mark.parametrize("part, by", CHANGES)
@WITH_AND_WITHOUT
def test_modified_state_is_refused(
    store: Any, token: bytes | None, part: str, by: str
) -> None:
    """Oracle: values of other kinds are found without a token, and every change with one."""
    backend(store, token).set_state(STATE)
    text = store.get(KEY).decode()
    assert part in text
    store.set(KEY, text.replace(part, by))
    with pytest.raises(ForeignStateError):
        backend(store, token).get_state()


def test_older_or_removed_state_is_refused(store: Any) -> None:
    """Oracle: a machine that has seen the newer one."""
    node = backend(store, TOKEN)
    first = node.set_state(STATE)
    assert first is not None
    node.set_state(STATE, first[1])
    store.set(KEY, first[1].decode())
    with pytest.raises(ForeignStateError, match="replaced by an older one"):
        node.get_state()
    store.set(KEY, "nothing")
    with pytest.raises(ForeignStateError, match="its state was removed"):
        node.get_state()
    # A query of a missing key would wait for the store's timeout, and all others with it
    store.delete_key(KEY)
    with pytest.raises(ForeignStateError, match="its state was removed"):
        node.get_state()


@pytest.mark.parametrize(
    "content, mode, message",
    [
        (TOKEN + b"\n", 0o400, None),
        (None, 0o600, "cannot be read (No such file or directory)"),
        (
            TOKEN,
            0o640,
            "has mode 0640, with which others may read the token; set it to 0600",
        ),
        (b"short\n", 0o600, "holds 5 bytes and must hold 16 to 4096"),
        (b"x" * 5000, 0o600, "and must hold 16 to 4096"),
    ],
)
def test_token_is_the_content_of_a_private_file(
    content: bytes | None, mode: int, message: str | None, tmp_path: Path
) -> None:
    """Oracle: the content without white space, or the expected message."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    if message is None:
        assert (read_token(str(path)), read_token(None)) == (TOKEN, None)
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_token(str(path))


def refuse(*_: Any) -> None:
    raise AssertionError("asked")


def open_store(**options: Any) -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, **options)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_first_launcher_opens_the_store_and_the_others_join(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a value written by one and read by the other; a free address is bound before any
    service is asked."""
    endpoint = f"{host}:{free_port()}"
    first = RendezvousEndpoint(endpoint)
    second = RendezvousEndpoint(endpoint)
    with monkeypatch.context() as patch:
        patch.setattr(endpoint_module, "_is_store", refuse)
        store = first.connect()
    joined = second.connect()
    store.set("key", "value")
    assert joined.get("key") == b"value"
    assert (first._server is None, second._server is None) == (False, True)


@pytest.mark.parametrize("use_libuv", [False, True])
def test_every_server_of_torch_is_recognized(use_libuv: bool) -> None:
    """Oracle: torch's own servers; we speak two messages of their private protocol."""
    store = open_store(use_libuv=use_libuv)
    open_state(store)
    assert RendezvousEndpoint(f"127.0.0.1:{store.port}").connect().num_keys() >= 1


@contextlib.contextmanager
def service(answer: bytes | None) -> Iterator[int]:
    """Port of a service that answers every connection, or stays silent with None, or closes it with
    b""."""
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
    ("answer", "seconds"),
    [(None, 0.2), (b"", 3600.0), (b"HTTP/1.1 400 Bad Request", 3600.0), (b"\0", 0.2)],
)
def test_service_that_is_no_store_is_refused(
    answer: bytes | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the message; only silence and half an answer take until the limit, which may be an
    hour."""
    monkeypatch.setattr(endpoint_module, "ANSWER_SECONDS", seconds)
    # The number that the store returns starts with a zero
    monkeypatch.setattr(os, "getpid", lambda: 256)
    with (
        service(answer) as port,
        pytest.raises(
            RendezvousConnectionError, match=r"^something else has that port$"
        ),
    ):
        RendezvousEndpoint(f"127.0.0.1:{port}").connect()


def test_store_of_another_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the message, for a store without our key, which stays without it."""
    monkeypatch.setattr(endpoint_module, "ANSWER_SECONDS", 0.2)
    store = open_store()
    keys = store.num_keys()
    with pytest.raises(
        RendezvousConnectionError,
        match=r"^a PyTorch store of another program has that port$",
    ):
        RendezvousEndpoint(f"127.0.0.1:{store.port}").connect()
    assert store.num_keys() == keys


def test_unreachable_and_unresolvable_endpoints_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the system's own words for it."""
    with pytest.raises(
        RendezvousConnectionError, match=r"no\.such\.host\.invalid has no address"
    ):
        RendezvousEndpoint("no.such.host.invalid:29500")
    monkeypatch.setattr(endpoint_module, "ANSWER_SECONDS", 0.0)
    endpoint = RendezvousEndpoint(f"127.0.0.1:{free_port()}")
    monkeypatch.setattr(endpoint, "_tried_to_serve", True)
    with pytest.raises(
        RendezvousConnectionError, match=os.strerror(errno.ECONNREFUSED)
    ):
        endpoint.connect()


@pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="sockets are listed by Linux alone"
)
def test_loopback_host_name_listens_on_all_interfaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the kernel's list; Debian gives a machine's own name to 127.0.1.1, which no other
    machine reaches."""
    port = free_port()
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda _, *rest, **more: resolve("127.0.1.1", *rest, **more),
    )
    point = RendezvousEndpoint(f"own:{port}")
    with point._listen(*point._addresses[0]):
        assert ("00000000", port) in listening_sockets(os.getpid())
    assert capsys.readouterr().err.startswith(
        "fsdptoys: own is 127.0.1.1 on this machine, so launch.rdzv_endpoint=own:"
    )


def test_store_is_joined_once_its_node_has_marked_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the key that the serving node sets between two queries of the joining one, which
    never creates it."""
    store = open_store()
    key_counts = []

    def open_later(_: float) -> None:
        key_counts.append(store.num_keys())
        open_state(store)

    monkeypatch.setattr(
        endpoint_module,
        "time",
        SimpleNamespace(monotonic=time.monotonic, sleep=open_later),
    )
    RendezvousEndpoint(f"127.0.0.1:{store.port}").connect()
    assert len(key_counts) == 1


def test_node_without_the_address_waits_for_the_first_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: a store that opens after the first refused connection."""
    endpoint = f"127.0.0.1:{free_port()}"
    first = RendezvousEndpoint(endpoint)
    other = RendezvousEndpoint(endpoint)
    listen = RendezvousEndpoint._listen
    monkeypatch.setattr(
        RendezvousEndpoint, "_listen", lambda self, *where: listen(first, *where)
    )
    # Of no machine
    monkeypatch.setattr(
        other, "_addresses", [(socket.AF_INET, ("192.0.2.1", first.port))]
    )
    assert other._serve() is None
    monkeypatch.setattr(other, "_addresses", first._addresses)
    monkeypatch.setattr(other, "_tried_to_serve", True)
    opened = []
    clock = SimpleNamespace(
        monotonic=time.monotonic, sleep=lambda _: opened.append(first.connect())
    )
    monkeypatch.setattr(endpoint_module, "time", clock)
    assert other.connect().num_keys() >= 1
    assert len(opened) == 1
