"""The signed state of a rendezvous, and the file of its token."""

import pickle
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from fsdptoys.errors import ConfigError
from fsdptoys.launch.rendezvous_state import KEY, ForeignStateError, SignedBackend, open_state, read_token
from tests.launch.stranger import Touches

TOKEN = b"0123456789abcdef"
WITH_AND_WITHOUT = pytest.mark.parametrize("token", [None, TOKEN], ids=["without token", "with token"])


def state() -> Any:
    """A state with two nodes, one of which waits."""
    made = _RendezvousState()
    node, other = _NodeDesc("node0", 1, 0), _NodeDesc("node1", 2, 0)
    made.round, made.complete = 3, True
    made.participants, made.wait_list = {node: 0}, {other}
    made.last_heartbeats = {node: datetime.fromtimestamp(1.5e9 + 0.25, timezone.utc)}
    return made


STATE = pickle.dumps(state())


@pytest.fixture
def store() -> Any:
    """An empty store of ours."""
    made = HashStore()
    open_state(made)
    return made


def backend(store: Any, token: bytes | None = None) -> SignedBackend:
    return SignedBackend(store, "fsdptoys", token, "node0:29400")


@WITH_AND_WITHOUT
def test_state_round_trips_and_stale_writers_are_fenced(store: Any, token: bytes | None) -> None:
    """Oracle: the state itself; torch's rule that only a machine that knows the latest state can replace it."""
    first, other = backend(store, token), backend(store, token)
    assert first.get_state() is None
    by_first = first.set_state(STATE)
    assert by_first is not None and by_first[2]
    seen = other.get_state()
    assert seen is not None and vars(pickle.loads(seen[0])) == vars(state())
    assert first.most_nodes == other.most_nodes == 1
    late = other.set_state(STATE)  # as if there were none
    assert late is not None and not late[2]
    known = other.set_state(STATE, seen[1])
    assert known is not None and known[2]
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
def test_token_mismatch_is_refused(store: Any, writes: Any, reads: Any, message: str) -> None:
    """Oracle: the expected message."""
    backend(store, writes).set_state(STATE)
    with pytest.raises(ForeignStateError, match=message):
        backend(store, reads).get_state()


FOREIGN_STATES = ["", "[]", "{}", "[" * 100_000, '{"message": 1, "hmac": null}', '{"message": "[]", "hmac": null}']
CHANGES = [
    *(('1, \\"state', 'null, \\"state'), ('1, \\"state', '-1, \\"state'), ('round\\": 3', 'round\\": 1e999')),
    *(('round\\": 3', 'round\\": true'), ('complete\\": true', 'complete\\": 1'), ("1500000000.25", "1e30")),
    *(("1500000000.25", "NaN"), ('"node1\\"', '"\\\\u001b[2J\\"'), ('"node1\\", 2, 0', '"node1\\", 2')),
    *(('closed\\"', 'close\\"'), ('wait_list\\": [[', 'wait_list\\": [[[], [')),
]


@pytest.mark.parametrize("text", FOREIGN_STATES, ids=lambda text: text[:20])
def test_malformed_state_is_refused(store: Any, text: str) -> None:
    """Oracle: one kind of error, which names the endpoint."""
    store.set(KEY, text)
    with pytest.raises(ForeignStateError, match=r"launch\.rdzv_endpoint=node0:29400 cannot be trusted"):
        backend(store).get_state()


@pytest.mark.parametrize("part, by", CHANGES)
@WITH_AND_WITHOUT
def test_modified_state_is_refused(store: Any, token: bytes | None, part: str, by: str) -> None:
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


def test_pickle_in_place_of_the_state_is_not_executed(store: Any, tmp_path: Path) -> None:
    """Oracle: a file that the pickle would make, as it does with torch's backend."""
    store.set(KEY, pickle.dumps(Touches(str(tmp_path / "pwned"))).decode("latin-1"))
    with pytest.raises(ForeignStateError):
        backend(store).get_state()
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "content, mode, message",
    [
        (None, 0o600, "cannot be read (No such file or directory)"),
        (TOKEN, 0o640, "has mode 0640, with which others may read the token; set it to 0600"),
        (b"short\n", 0o600, "holds 5 bytes and must hold 16 to 4096"),
        (b"x" * 5000, 0o600, "and must hold 16 to 4096"),
    ],
)
def test_invalid_token_file_is_refused(content: bytes | None, mode: int, message: str, tmp_path: Path) -> None:
    """Oracle: the expected message."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_token(str(path))


def test_token_is_the_file_content_without_whitespace(tmp_path: Path) -> None:
    """Oracle: the content."""
    path = tmp_path / "token"
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o400)
    assert (read_token(str(path)), read_token(None)) == (TOKEN, None)
