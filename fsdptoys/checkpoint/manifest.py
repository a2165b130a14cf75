"""The manifest of a checkpoint (size and SHA-256 of every file, written last), and its state
besides tensors ("facts").

A folder without a manifest is incomplete, and one that differs from its manifest is damaged;
neither is loaded. The manifest includes the folder's name, so a copied or renamed folder cannot
pass for another step, and has one canonical encoding. Unlisted files are never opened. It proves
that files are unchanged, not who wrote them; no file is a pickle.

A refused read (permissions, network disk, limit on open files) does not mean damage. It is retried
for about a second, then raises ``UnreadableError`` rather than ``InvalidCheckpointError``.

Facts are in ``state.json`` for all ranks and ``rank-00000.json`` for one; the caller's dataclass
checks types and ranges.
"""

import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import ForeignError, parse_json
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import NotRegularFileError
from fsdptoys.utils.sealed_folder import (
    FileSum,
    RunningSum,
    sum_bytes,
    sums_from_json,
    sums_to_json,
)
from fsdptoys.utils.text import one_line

from .storage import Storage, read_bytes

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
INDEX_FILE = "tensors.json"
FORMAT = 1
# limit for a JSON file; the manifest of 100,000 ranks takes 25 MiB
LARGEST_BYTES = 64 * 2**20
# pauses between attempts of a read that the system refuses
RETRY_PAUSES_SECONDS = (
    0.1,
    0.3,
    0.9,
)

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularFileError)
"""Errors caused by a folder's content; retries cannot help."""

T = TypeVar("T")

Facts = dict[str, Any]

NAME = re.compile(r"step-([0-9]{8,15})")


@dataclass(frozen=True)
class Schema:
    """Dataclasses with the types and ranges of facts (``utils.from_tree``); None accepts any
    facts."""

    state: type | None = None  # common facts, without ``step`` and ``world_size``
    own: type | None = None  # facts of one rank


ANY = Schema()


class InvalidCheckpointError(Exception):
    """A folder is an incomplete or damaged checkpoint; the message continues a sentence that starts
    with its name."""


class UnreadableError(ConfigError):
    """A folder cannot be read, so it must not be skipped; ``reason`` continues a sentence that
    starts with its name."""

    def __init__(self, where: str, name: str, reason: str) -> None:
        super().__init__(
            f"{name} in {where} {reason}, and may be a complete checkpoint; make it readable, or "
            "move it out of that folder"
        )
        self.reason = reason


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder name; None for any other name."""
    match = NAME.fullmatch(name)
    step = int(match[1]) if match else -1
    return step if step_name(step) == name else None


def known_step(name: str) -> int:
    """Return the step of the folder name of a checkpoint."""
    step = step_of(name)
    assert step is not None, name
    return step


def rank_file(rank: int) -> str:
    """Return the name of the file with one rank's facts."""
    return f"rank-{rank:05d}.json"


def to_json(facts: Mapping[str, Any]) -> bytes:
    """Encode facts so that every value is read back bit for bit; an assertion fails for tuples, NaN
    and the like."""
    try:
        text = json.dumps(facts, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise AssertionError(f"facts that JSON does not know: {error}") from error
    assert from_json(text) == facts, (
        "facts that JSON does not give back, such as tuples"
    )
    return text + b"\n"


def from_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly by the standard; ValueError for anything else."""
    tree = parse_json(text, unique_keys=True)
    if not isinstance(tree, dict):
        raise ValueError("it is not an object")
    return tree


@dataclass(frozen=True)
class Manifest:
    """Name of a checkpoint's folder, and size and SHA-256 of its files."""

    name: str
    files: dict[str, FileSum]

    def to_bytes(self) -> bytes:
        """Return the canonical encoding."""
        tree: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "files": sums_to_json(self.files),
        }
        tree["sha256"] = sum_bytes(json.dumps(tree).encode()).sha256
        return (json.dumps(tree, indent=1) + "\n").encode()


def with_retries(read: Callable[[], T]) -> T:
    """Call ``read``, with retries after short pauses on an OSError that is not in ``ABSENT``."""
    for pause in RETRY_PAUSES_SECONDS:
        try:
            return read()
        except ABSENT:
            raise
        except OSError:
            time.sleep(pause)
    return read()


def read_manifest(storage: Storage, name: str, patient: bool = True) -> Manifest:
    """Read a folder's manifest and check file sizes against it; retry refused reads if ``patient``.

    InvalidCheckpointError if the folder is incomplete or damaged, UnreadableError if the system
    refuses to read it.
    """

    def read() -> Manifest:
        # Checked before opening: a pipe, for example, has no size.
        if not storage.exists(f"{name}/{MANIFEST_FILE}"):
            raise InvalidCheckpointError(f"is incomplete: it has no {MANIFEST_FILE}")
        size = storage.size(f"{name}/{MANIFEST_FILE}")
        if not 0 < size <= LARGEST_BYTES:
            raise InvalidCheckpointError(
                f"is damaged: its {MANIFEST_FILE} holds {size} bytes"
            )
        with storage.reading(f"{name}/{MANIFEST_FILE}") as file:
            text = read_bytes(file, size)
        manifest = _parse(text, name)
        present = set(storage.names(name))
        for path, file_sum in manifest.files.items():
            if path not in present:
                raise InvalidCheckpointError(f"is damaged: {path} is missing")
            size = storage.size(f"{name}/{path}")
            if size != file_sum.size:
                raise InvalidCheckpointError(
                    f"is damaged: {path} holds {size} bytes, and {MANIFEST_FILE} says "
                    f"{file_sum.size}"
                )
        return manifest

    return _judged(storage, name, MANIFEST_FILE, read, patient)


def verify_file(
    storage: Storage,
    manifest: Manifest,
    path: str,
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Compare a file's size and SHA-256 with the manifest; errors as ``read_manifest``.

    ``advance`` is called with the bytes of each block.
    """

    def read() -> FileSum:
        with storage.reading(f"{manifest.name}/{path}") as file:
            return RunningSum().read(file, lambda block: advance(len(block)))

    _check_sum(manifest, path, _judged(storage, manifest.name, path, read))


def _check_sum(manifest: Manifest, path: str, actual: FileSum) -> None:
    if actual != manifest.files[path]:
        raise InvalidCheckpointError(
            f"is damaged: the SHA-256 of {path} is not the one that {MANIFEST_FILE} says"
        )


def _read_facts(storage: Storage, manifest: Manifest, path: str) -> dict[str, Any]:
    """Read a JSON file, parsing it only if it matches the manifest; errors as ``read_manifest``."""

    def read() -> bytes:
        with storage.reading(f"{manifest.name}/{path}") as file:
            return read_bytes(file, size)

    size = manifest.files[path].size
    if size > LARGEST_BYTES:
        raise InvalidCheckpointError(f"is damaged: {path} holds {size} bytes")
    text = _judged(storage, manifest.name, path, read)
    _check_sum(manifest, path, sum_bytes(text))
    try:
        return from_json(text)
    except ValueError as error:
        raise InvalidCheckpointError(
            f"is damaged: {path} is not JSON ({error})"
        ) from error


def read_state(storage: Storage, manifest: Manifest, schema: Schema) -> Facts:
    """Read the facts common to all ranks; InvalidCheckpointError if they do not fit the schema,
    too."""
    facts = _read_facts(storage, manifest, STATE_FILE)
    step = facts.get("step")
    ranks = facts.get("world_size")
    if type(step) is not int or step != step_of(manifest.name):
        raise InvalidCheckpointError(
            f"is damaged: {STATE_FILE} is that of step {step!r:.100}"
        )
    if type(ranks) is not int or ranks != world_size_of(manifest):
        raise InvalidCheckpointError(
            f"is damaged: {STATE_FILE} is that of {ranks!r:.100} ranks, and {MANIFEST_FILE} "
            f"lists files of {world_size_of(manifest)}"
        )
    return _checked(facts, STATE_FILE, schema.state)


def read_own(storage: Storage, manifest: Manifest, path: str, schema: Schema) -> Facts:
    """Read the facts of one rank; errors as ``read_state``."""
    return _checked(_read_facts(storage, manifest, path), path, schema.own)


def _checked(facts: Facts, path: str, schema: type | None) -> Facts:
    try:
        if schema is not None:
            build(schema, facts, skip_unknown=True)
    except ForeignError as error:
        raise InvalidCheckpointError(
            f"holds facts that this version does not read ({path}: {error})"
        ) from error
    return facts


def world_size_of(manifest: Manifest) -> int:
    """Return the number of ranks that saved a checkpoint."""
    return next(
        rank for rank in itertools.count() if rank_file(rank) not in manifest.files
    )


def reason_of(error: OSError) -> str:
    """Return the system's error message without the path."""
    return one_line(error.strerror or error) or type(error).__name__


def _judged(
    storage: Storage, name: str, path: str, read: Callable[[], T], patient: bool = True
) -> T:
    """Call ``read``; convert errors to InvalidCheckpointError if retries cannot help, else
    UnreadableError."""
    try:
        return with_retries(read) if patient else read()
    except ABSENT as error:
        raise InvalidCheckpointError(
            f"is damaged: {path} cannot be opened ({reason_of(error)})"
        ) from error
    except OSError as error:
        raise UnreadableError(
            storage.where, name, f"cannot be read ({path}: {reason_of(error)})"
        ) from error


def _parse(text: bytes, name: str) -> Manifest:
    try:
        tree = from_json(text)
        version = tree.get("format")
        if type(version) is int and version > FORMAT:
            raise InvalidCheckpointError(
                f"is of format {version}, which a newer fsdptoys wrote; this one reads {FORMAT}"
            )
        if not isinstance(tree.get("name"), str):
            raise ValueError("it names no folder")
        manifest = Manifest(tree["name"], sums_from_json(tree.get("files")))
        if manifest.to_bytes() != text:
            raise ValueError("it differs from its canonical form")
    except ValueError as error:
        raise InvalidCheckpointError(
            f"is damaged: its {MANIFEST_FILE} cannot be used ({error})"
        ) from error
    if manifest.name != name:
        raise InvalidCheckpointError(
            f"is damaged: its {MANIFEST_FILE} is that of {manifest.name!r:.100}"
        )
    if not {STATE_FILE, INDEX_FILE} <= set(manifest.files) or any(
        not file_sum.size for file_sum in manifest.files.values()
    ):
        raise InvalidCheckpointError(
            f"is damaged: its {MANIFEST_FILE} lists files that no checkpoint has, or too few"
        )
    return manifest
