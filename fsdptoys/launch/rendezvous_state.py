"""State of a multi-node rendezvous, stored as JSON and signed if the nodes share a token.

torch's own backend stores a pickle. The store has no authentication, so anyone who reaches its port could make every
launcher run code from a pickle. ``SignedBackend`` stores JSON text instead, checks each value it reads, and builds
torch's object from it.

With a token, a message is the text and its HMAC-SHA256 over the run's name, the key and the text, which includes a
sequence number. Messages with another signature, or older than the newest this connection has seen, are rejected.

Not covered, so the network must be trusted: deleting keys, flooding the store, or replaying messages of an earlier run
with the same token to a new node, all of which prevent a rendezvous; and the unsigned addresses of the ranks.

Source: https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
"""

import hashlib
import hmac
import json
import math
import os
import pickle
import secrets
from datetime import datetime, timezone
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import ForeignError, parse_json
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.text import one_line, printable

KEY = "fsdptoys.rendezvous"
NOTHING = "nothing"  # placeholder before the first state, since reading a missing key blocks
MOST_BYTES = 2**20  # of a message; a thousand nodes take 200 KB
LAST_SECOND = 2.0**32  # upper bound of times; dates beyond Python's range would raise an OverflowError
LEAST_TOKEN_BYTES = 16  # shorter tokens can be guessed from one message
MOST_TOKEN_BYTES = 4096


def read_token(path: str | None) -> bytes | None:
    """Read the secret in ``launch.rdzv_token_file``, stripped of white space; None without a path.

    ConfigError if the file cannot be read, is readable by others, or holds less than 16 bytes.
    """
    if path is None:
        return None
    key, make = f"launch.rdzv_token_file={one_line(path)}", "make one with: (umask 077; openssl rand -hex 32 > FILE)"
    try:
        with open_regular(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            token: bytes = file.read(MOST_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"{key} cannot be read ({error.strerror}); {make}") from None
    if mode & 0o077:
        raise ConfigError(
            f"{key} has mode {mode:04o}, with which others may read the token; set it to 0600 with chmod 600"
        )
    if not LEAST_TOKEN_BYTES <= len(token) <= MOST_TOKEN_BYTES:
        limits = f"{LEAST_TOKEN_BYTES} to {MOST_TOKEN_BYTES}"
        raise ConfigError(f"{key} holds {len(token)} bytes and must hold {limits}; {make}")
    return token


def open_state(store: Store) -> None:
    """Mark a store as one of ours; only the node that serves it does this."""
    store.compare_set(KEY, "", NOTHING)


def has_state(store: Store) -> bool:
    """Whether a node has marked the store as one of ours."""
    return bool(store.check([KEY]))


class ForeignStateError(RendezvousStateError):
    """The store holds a state that this node must reject; the message says why in one sentence."""


class SignedBackend(RendezvousBackend):
    """Rendezvous backend with its state as JSON, in a store that ``open_state`` has marked.

    RendezvousConnectionError if the store at ``endpoint`` is silent.
    """

    def __init__(self, store: Store, run_id: str, token: bytes | None, endpoint: str) -> None:
        self._store, self._run_id, self._token, self._endpoint = store, run_id, token, endpoint
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
        return self._decode(self._ask("get", KEY) if self._ask("check", [KEY]) else NOTHING.encode())

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """See RendezvousBackend; the pickle comes from this process."""
        message = self._encode(pickle.loads(state))
        before = token.decode() if isinstance(token, bytes) else NOTHING
        stored = self._ask("compare_set", KEY, before, message)
        decoded = self._decode(stored)
        return None if decoded is None else (*decoded, stored == message.encode())

    def _ask(self, operation: str, *words: Any) -> Any:
        try:
            return getattr(self._store, operation)(*words)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the connection to the store has failed") from error

    def _encode(self, state: Any) -> str:
        assert set(vars(state)) == _FIELDS, f"this torch has other fields in a rendezvous state: {sorted(vars(state))}"
        self.most_nodes = max(self.most_nodes, len(state.participants))
        plain = {name: _plain(value) for name, value in vars(state).items()}
        # The nonce makes equal states of two nodes different messages, so that each knows whose was set.
        facts = {"nonce": secrets.token_hex(8), "sequence": self._sequence + 1, "state": plain}
        text = json.dumps(facts, sort_keys=True)
        return json.dumps({"message": text, "hmac": self._sign(text)}, sort_keys=True)

    def _decode(self, stored: bytes) -> tuple[bytes, Any] | None:
        if stored == NOTHING.encode():
            if self._sequence:
                raise self._foreign("its state was removed")
            return None
        if len(stored) > MOST_BYTES:
            raise self._foreign("its state is too long")
        try:
            envelope = parse_json(stored)
            _check(isinstance(envelope, dict) and set(envelope) == {"message", "hmac"})
            text, signature = envelope["message"], envelope["hmac"]
            _check(isinstance(text, str) and isinstance(signature, str | None))
            self._check_signature(text, signature)
            message = parse_json(text)
            _check(isinstance(message, dict) and set(message) == {"nonce", "sequence", "state"})
            sequence = _count(message["sequence"])
            state = _state_of(message["state"])
        except ForeignError as error:
            raise self._foreign(f"its state is none of fsdptoys ({error})") from None
        if sequence < self._sequence:
            raise self._foreign("its state was replaced by an older one")
        self._sequence = sequence
        self.most_nodes = max(self.most_nodes, len(state.participants))
        return pickle.dumps(state), stored

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
                f"the machines at launch.rdzv_endpoint={self._endpoint} share a token, and this one has none; set "
                "launch.rdzv_token_file to a file with the same token"
            )
        if signature is None:
            raise ForeignStateError(
                f"another machine at launch.rdzv_endpoint={self._endpoint} has no token, and this one has; set "
                "launch.rdzv_token_file on each machine"
            )
        expected = self._sign(text)
        if expected is None or not hmac.compare_digest(expected.encode(), signature.encode()):
            raise ForeignStateError(
                f"another machine at launch.rdzv_endpoint={self._endpoint} has another token than this one; give "
                "launch.rdzv_token_file the same content on each machine"
            )

    def _foreign(self, why: str) -> ForeignStateError:
        return ForeignStateError(
            f"launch.rdzv_endpoint={self._endpoint} cannot be trusted: {printable(why)}; something else than this run "
            "writes there, so use another port and a network that is trusted"
        )


# torch's classes are private. Tested with 2.13; their attributes are the same in 2.7.
_FIELDS = {"round", "complete", "deadline", "closed", "participants", "wait_list", "redundancy_list", "last_heartbeats"}


def _plain(value: Any) -> Any:
    """Convert a value of torch's state to a JSON value."""
    if isinstance(value, datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)).timestamp()
    if isinstance(value, dynamic_rendezvous._NodeDesc):
        return [value.addr, value.pid, value.local_id]
    if isinstance(value, dict):
        return sorted([_plain(node), _plain(of_node)] for node, of_node in value.items())
    return sorted(map(_plain, value)) if isinstance(value, set) else value


def _state_of(plain: Any) -> Any:
    """Convert JSON values back to torch's state; ForeignError for any other value."""
    _check(isinstance(plain, dict) and set(plain) == _FIELDS)
    state = dynamic_rendezvous._RendezvousState()
    state.round = _count(plain["round"])
    _check(isinstance(plain["complete"], bool) and isinstance(plain["closed"], bool))
    state.complete, state.closed = plain["complete"], plain["closed"]
    state.deadline = None if plain["deadline"] is None else _time(plain["deadline"])
    state.participants = {_node(node): _count(rank) for node, rank in _pairs(plain["participants"])}
    state.wait_list = {_node(node) for node in _list(plain["wait_list"])}
    state.redundancy_list = {_node(node) for node in _list(plain["redundancy_list"])}
    state.last_heartbeats = {_node(node): _time(when) for node, when in _pairs(plain["last_heartbeats"])}
    return state


def _node(plain: Any) -> Any:
    _check(isinstance(plain, list) and len(plain) == 3)
    address, pid, local_id = plain
    _check(isinstance(address, str) and 0 < len(address) <= 255 and address.isprintable())
    return dynamic_rendezvous._NodeDesc(address, _count(pid), _count(local_id))


def _time(seconds: Any) -> datetime:
    _check(isinstance(seconds, int | float) and math.isfinite(seconds) and 0 <= seconds < LAST_SECOND)
    when = datetime.fromtimestamp(seconds, timezone.utc)
    # Older versions of torch use times without a zone.
    return when if hasattr(dynamic_rendezvous, "timezone") else when.replace(tzinfo=None)


def _count(number: Any) -> Any:
    return _check(type(number) is int and 0 <= number < 2**62, number)


def _list(plain: Any) -> Any:
    return _check(isinstance(plain, list), plain)


def _pairs(plain: Any) -> Any:
    return _check(all(isinstance(pair, list) and len(pair) == 2 for pair in _list(plain)), plain)


def _check(right: bool, value: Any = None) -> Any:
    if not right:
        raise ForeignError("a value is missing or of another kind")
    return value
