"""State of a multi-node rendezvous, stored as JSON and signed if the nodes share a token.

torch's own backend stores a pickle. The store has no authentication, so anyone who reaches its port
could make every launcher run code from a pickle. ``SignedBackend`` stores JSON text instead, checks
each value it reads, and builds torch's object from it.

With a token, a message is the text and its HMAC-SHA256 over the run's name, the key and the text,
which includes a sequence number. Messages with another signature, or older than the newest this
connection has seen, are rejected.

Not covered, so the network must be trusted: deleting keys, flooding the store, or replaying
messages of an earlier run with the same token to a new node, which all prevent a rendezvous; and
the unsigned addresses of the ranks.

Source: https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
"""

import dataclasses
import hashlib
import hmac
import json
import os
import pickle
import secrets
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousStateError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import at_least, between, max_length
from fsdptoys.utils.foreign import ForeignError, parse_json
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.text import one_line, printable

KEY = "fsdptoys.rendezvous"
# placeholder before the first state, since reading a missing key blocks
NOTHING = "nothing"
MOST_BYTES = 2**20  # of a message; a thousand nodes take 200 KB
LAST_SECOND = 2.0**32
"""Upper bound of times; dates beyond Python's range would raise an OverflowError."""
LEAST_TOKEN_BYTES = 16  # shorter tokens can be guessed from one message
MOST_TOKEN_BYTES = 4096


def read_token(path: str | None) -> bytes | None:
    """Read the secret in ``launch.rdzv_token_file``, stripped of white space; None without a path.

    ConfigError if the file cannot be read, is readable by others, or holds less than 16 bytes.
    """
    if path is None:
        return None
    key = f"launch.rdzv_token_file={one_line(path)}"
    make = "make one with: (umask 077; openssl rand -hex 32 > FILE)"
    try:
        with open_regular(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            token: bytes = file.read(MOST_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"{key} cannot be read ({error.strerror}); {make}") from None
    if mode & 0o077:
        raise ConfigError(
            f"{key} has mode {mode:04o}, with which others may read the token; set it to 0600 "
            "with chmod 600"
        )
    if not LEAST_TOKEN_BYTES <= len(token) <= MOST_TOKEN_BYTES:
        limits = f"{LEAST_TOKEN_BYTES} to {MOST_TOKEN_BYTES}"
        raise ConfigError(
            f"{key} holds {len(token)} bytes and must hold {limits}; {make}"
        )
    return token


def open_state(store: Store) -> None:
    """Mark a store as one of ours; only the node that serves it does this."""
    store.compare_set(KEY, "", NOTHING)


def has_state(store: Store) -> bool:
    """Return whether a node has marked the store as one of ours."""
    return bool(store.check([KEY]))


class ForeignStateError(RendezvousStateError):
    """The store holds a state that this node must reject; the message says why in one sentence."""


class SignedBackend(RendezvousBackend):
    """Rendezvous backend with its state as JSON, in a store that ``open_state`` has marked.

    RendezvousConnectionError if the store at ``endpoint`` is silent.
    """

    def __init__(
        self, store: Store, run_id: str, token: bytes | None, endpoint: str
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._token = token
        self._endpoint = endpoint
        self._sequence = 0  # newest seen
        self.most_nodes = 0
        """Largest number of participants in any state so far."""

    @property
    def name(self) -> str:
        """See RendezvousBackend."""
        return "fsdptoys"

    def get_state(self) -> tuple[bytes, Any] | None:
        """See RendezvousBackend; the pickle is built here from checked values."""
        # A missing key would block all queries of this process for a minute.
        return self._decode(
            self._ask("get", KEY) if self._ask("check", [KEY]) else NOTHING.encode()
        )

    def set_state(
        self, state: bytes, token: Any | None = None
    ) -> tuple[bytes, Any, bool] | None:
        """See RendezvousBackend; the pickle comes from this process."""
        message = self._encode(pickle.loads(state))
        before = token.decode() if isinstance(token, bytes) else NOTHING
        stored = self._ask("compare_set", KEY, before, message)
        decoded = self._decode(stored)
        return None if decoded is None else (*decoded, stored == message.encode())

    def _ask(self, operation: str, *args: Any) -> Any:
        try:
            return getattr(self._store, operation)(*args)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(
                "the connection to the store has failed"
            ) from error

    def _encode(self, state: Any) -> str:
        self.most_nodes = max(self.most_nodes, len(state.participants))
        # The nonce makes equal states of two nodes different messages, so that each knows whose was
        # set.
        facts = {"nonce": secrets.token_hex(8), "sequence": self._sequence + 1}
        text = json.dumps(facts | {"state": _plain_state(state)}, sort_keys=True)
        return json.dumps({"message": text, "hmac": self._sign(text)}, sort_keys=True)

    def _decode(self, stored: bytes) -> tuple[bytes, Any] | None:
        if stored == NOTHING.encode():
            if self._sequence:
                raise self._foreign("its state was removed")
            return None
        if len(stored) > MOST_BYTES:
            raise self._foreign("its state is too long")
        try:
            envelope = build(_Envelope, parse_json(stored))
            self._check_signature(envelope.message, envelope.hmac)
            message = build(_Message, parse_json(envelope.message))
        except ForeignError as error:
            raise self._foreign(f"its state is none of fsdptoys ({error})") from None
        if message.sequence < self._sequence:
            raise self._foreign("its state was replaced by an older one")
        self._sequence = message.sequence
        self.most_nodes = max(self.most_nodes, len(message.state.participants))
        return pickle.dumps(_torch_state(message.state)), stored

    def _sign(self, text: str) -> str | None:
        if self._token is None:
            return None
        facts = json.dumps([self._run_id, KEY, text]).encode()
        return hmac.new(self._token, facts, hashlib.sha256).hexdigest()

    def _check_signature(self, text: str, signature: str | None) -> None:
        if self._token is None and signature is None:
            return
        if self._token is None:
            raise ForeignStateError(
                f"the machines at launch.rdzv_endpoint={self._endpoint} share a token, and this "
                "one has none; set launch.rdzv_token_file to a file with the same token"
            )
        if signature is None:
            raise ForeignStateError(
                f"another machine at launch.rdzv_endpoint={self._endpoint} has no token, and "
                "this one has; set launch.rdzv_token_file on each machine"
            )
        expected = self._sign(text)
        if expected is None or not hmac.compare_digest(
            expected.encode(), signature.encode()
        ):
            raise ForeignStateError(
                f"another machine at launch.rdzv_endpoint={self._endpoint} has another token "
                "than this one; give launch.rdzv_token_file the same content on each machine"
            )

    def _foreign(self, why: str) -> ForeignStateError:
        return ForeignStateError(
            f"launch.rdzv_endpoint={self._endpoint} cannot be trusted: {printable(why)}; "
            "something else than this run writes there, so use another port and a network that "
            "is trusted"
        )


# torch's classes are private. Tested with 2.13; their attributes are the same in 2.7.


@dataclass(frozen=True)
class _Node:
    addr: str = field(metadata=max_length(255))
    pid: int = field(metadata=at_least(0))
    local_id: int = field(metadata=at_least(0))

    def for_torch(self) -> Any:
        return dynamic_rendezvous._NodeDesc(self.addr, self.pid, self.local_id)


@dataclass(frozen=True)
class _Participant:
    node: _Node
    rank: int = field(metadata=at_least(0))


@dataclass(frozen=True)
class _Heartbeat:
    node: _Node
    seconds: float = field(metadata=between(0, LAST_SECOND))


@dataclass(frozen=True)
class _State:
    round: int = field(metadata=at_least(0))
    complete: bool
    deadline: float | None = field(metadata=between(0, LAST_SECOND))
    closed: bool
    participants: list[_Participant]
    wait_list: list[_Node]
    redundancy_list: list[_Node]
    last_heartbeats: list[_Heartbeat]


@dataclass(frozen=True)
class _Message:
    nonce: str
    sequence: int = field(metadata=at_least(0))
    state: _State


@dataclass(frozen=True)
class _Envelope:
    message: str
    hmac: str | None


def _plain_state(state: Any) -> dict[str, Any]:
    """Convert torch's state to JSON values, which ``build`` reads as a ``_State``."""
    fields = {field.name for field in dataclasses.fields(_State)}
    assert set(vars(state)) == fields, (
        f"this torch has another state: {sorted(vars(state))}"
    )
    ranks = state.participants.items()
    beats = state.last_heartbeats.items()
    return vars(state) | {
        "deadline": None if state.deadline is None else _seconds(state.deadline),
        "participants": [{"node": asdict(node), "rank": rank} for node, rank in ranks],
        "wait_list": list(map(asdict, state.wait_list)),
        "redundancy_list": list(map(asdict, state.redundancy_list)),
        "last_heartbeats": [
            {"node": asdict(node), "seconds": _seconds(at)} for node, at in beats
        ],
    }


def _torch_state(plain: _State) -> Any:
    state = dynamic_rendezvous._RendezvousState()
    state.round = plain.round
    state.complete = plain.complete
    state.closed = plain.closed
    state.deadline = None if plain.deadline is None else _moment(plain.deadline)
    state.participants = {
        entry.node.for_torch(): entry.rank for entry in plain.participants
    }
    state.wait_list = {node.for_torch() for node in plain.wait_list}
    state.redundancy_list = {node.for_torch() for node in plain.redundancy_list}
    beats = plain.last_heartbeats
    state.last_heartbeats = {
        beat.node.for_torch(): _moment(beat.seconds) for beat in beats
    }
    return state


# Older versions of torch use times without a zone.


def _seconds(moment: datetime) -> float:
    with_zone = (
        moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
    )
    return with_zone.timestamp()


def _moment(seconds: float) -> datetime:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return (
        moment
        if hasattr(dynamic_rendezvous, "timezone")
        else moment.replace(tzinfo=None)
    )
