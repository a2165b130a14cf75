"""What makes a folder a checkpoint: a manifest with size and SHA-256 of every file, written after all of them.

A folder without one is incomplete, and one that differs from it is damaged; neither is ever loaded. The manifest names
its folder too, so that a copied or renamed one does not pass for another step, and there is only one way to write it
down, so that whatever is changed in it is noticed. Files that it does not list are never opened.

A folder that the system refuses to read is neither: a permission, a network disk or a limit on open files says nothing
about its content. Such a read is tried again for about a second, and then raises another error than damage does.

Nothing here or in what it lists is a pickle, so there is nothing in a hostile file that would run. A manifest proves
that files are as they were written, not by whom.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.regular_file import NotRegularFileError
from fsdptoys.utils.text import one_line

from .checksums import FileSum, sum_file, sums_from_json, sums_to_json
from .storage import Storage

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
INDEX_FILE = "tensors.json"
FORMAT = 1
LARGEST_BYTES = 64 * 2**20
"""Of a JSON file; the manifest of 100,000 ranks takes 25 MiB."""

RETRY_PAUSES_SECONDS = (0.1, 0.3, 0.9)
"""Between attempts to read what the system refuses."""

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularFileError)
"""Errors that are facts about the content of a folder."""

T = TypeVar("T")

NAME = re.compile(r"step-([0-9]{8,15})")


class NotWholeError(Exception):
    """Why a folder is no checkpoint that can be loaded, worded to follow its name."""


class UnreadableError(Exception):
    """Why it is unknown whether a folder is a checkpoint that can be loaded.

    Attributes:
        name: of the folder.
        reason: worded to follow it.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name, self.reason = name, reason


def step_name(step: int) -> str:
    """Name of the folder of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The opposite; None for any other name."""
    match = NAME.fullmatch(name)
    step = int(match[1]) if match else -1
    return step if step_name(step) == name else None


def rank_file(rank: int) -> str:
    """Name of the file with the facts of one rank."""
    return f"rank-{rank:05d}.json"


def to_json(facts: Mapping[str, Any]) -> bytes:
    """Facts as they are written: every value is read back as it was, in every bit.

    Raises:
        AssertionError: for a value that JSON does not know, such as a tuple or NaN.
    """
    try:
        text = json.dumps(facts, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise AssertionError(f"facts that JSON does not know: {error}") from error
    assert from_json(text) == facts, "facts that JSON does not give back, such as tuples"
    return text + b"\n"


def from_json(text: bytes) -> dict[str, Any]:
    """A JSON object, as strictly as the standard has it.

    Raises:
        ValueError: if it is none.
    """
    tree = parse_json(text, unique_keys=True)
    if not isinstance(tree, dict):
        raise ValueError("it is not an object")
    return tree


@dataclass(frozen=True)
class Manifest:
    """Which files a checkpoint consists of, and what they have to be."""

    name: str
    """Of the folder."""
    files: dict[str, FileSum]

    def to_bytes(self) -> bytes:
        """The one way to write it down."""
        tree: dict[str, Any] = {"format": FORMAT, "name": self.name, "files": sums_to_json(self.files)}
        tree["sha256"] = hashlib.sha256(json.dumps(tree).encode()).hexdigest()
        return (json.dumps(tree, indent=1) + "\n").encode()


def tried_again(read: Callable[[], T]) -> T:
    """Read, and try again after short pauses where the system refuses.

    Raises:
        OSError: of the last attempt, or at once if it is a fact about what is there.
    """
    for pause in RETRY_PAUSES_SECONDS:
        try:
            return read()
        except ABSENT:
            raise
        except OSError:
            time.sleep(pause)
    return read()


def read_manifest(storage: Storage, name: str, patient: bool = True) -> Manifest:
    """Read a folder's manifest and compare the sizes of its files with it.

    Args:
        storage: where from.
        name: of the folder.
        patient: whether to try again what the system refuses.

    Raises:
        NotWholeError: if the folder is incomplete or damaged.
        UnreadableError: if the system refuses to read it.
    """

    def read() -> Manifest:
        # Before opening: what is no file, but a pipe for example, has no size either.
        if not storage.exists(f"{name}/{MANIFEST_FILE}"):
            raise NotWholeError(f"is incomplete: it has no {MANIFEST_FILE}")
        size = storage.size(f"{name}/{MANIFEST_FILE}")
        if not 0 < size <= LARGEST_BYTES:
            raise NotWholeError(f"is damaged: its {MANIFEST_FILE} holds {size} bytes")
        with storage.reading(f"{name}/{MANIFEST_FILE}") as file:
            text = _read_bytes(file, size)
        manifest = _parse(text, name)
        present = set(storage.names(name))
        for path, said in manifest.files.items():
            if path not in present:
                raise NotWholeError(f"is damaged: {path} is missing")
            size = storage.size(f"{name}/{path}")
            if size != said.size:
                raise NotWholeError(f"is damaged: {path} holds {size} bytes, and {MANIFEST_FILE} says {said.size}")
        return manifest

    return _judged(read, name, MANIFEST_FILE, patient)


def verify_file(storage: Storage, manifest: Manifest, path: str) -> None:
    """Read a file and compare its sum with the manifest.

    Raises:
        NotWholeError: if it differs or is gone.
        UnreadableError: if the system refuses to read it.
    """

    def read() -> FileSum:
        with storage.reading(f"{manifest.name}/{path}") as file:
            return sum_file(file)

    found = _judged(read, manifest.name, path)
    if found != manifest.files[path]:
        raise NotWholeError(f"is damaged: the SHA-256 of {path} is not the one that {MANIFEST_FILE} says")


def read_facts(storage: Storage, manifest: Manifest, path: str) -> dict[str, Any]:
    """Read a JSON file, which is parsed only if it is the one that the manifest speaks of.

    Raises:
        NotWholeError: if it differs, is gone, or is not JSON.
        UnreadableError: if the system refuses to read it.
    """

    def read() -> bytes:
        with storage.reading(f"{manifest.name}/{path}") as file:
            return _read_bytes(file, said.size)

    said = manifest.files[path]
    if said.size > LARGEST_BYTES:
        raise NotWholeError(f"is damaged: {path} holds {said.size} bytes")
    text = _judged(read, manifest.name, path)
    if FileSum(len(text), hashlib.sha256(text).hexdigest()) != said:
        raise NotWholeError(f"is damaged: the SHA-256 of {path} is not the one that {MANIFEST_FILE} says")
    try:
        return from_json(text)
    except ValueError as error:
        raise NotWholeError(f"is damaged: {path} is not JSON ({error})") from error


def world_size_of(manifest: Manifest) -> int:
    """Number of ranks that saved a checkpoint."""
    rank = 0
    while rank_file(rank) in manifest.files:
        rank += 1
    return rank


def reason_of(error: OSError) -> str:
    """What the system said, without the path."""
    return one_line(error.strerror or error) or type(error).__name__


def _read_bytes(file: BinaryIO, size: int) -> bytes:
    """So many bytes, or all there are; one read of an unbuffered file may return fewer."""
    content = b""
    while len(content) < size and (block := file.read(size - len(content))):
        content += block
    return content


def _judged(read: Callable[[], T], name: str, path: str, patient: bool = True) -> T:
    """Read, and tell errors that are facts about a folder from those that leave its content unknown."""
    try:
        return tried_again(read) if patient else read()
    except ABSENT as error:
        raise NotWholeError(f"is damaged: {path} cannot be opened ({reason_of(error)})") from error
    except OSError as error:
        raise UnreadableError(name, f"cannot be read ({path}: {reason_of(error)})") from error


def _parse(text: bytes, name: str) -> Manifest:
    try:
        tree = from_json(text)
        version = tree.get("format")
        if type(version) is int and version > FORMAT:
            raise NotWholeError(f"is of format {version}, which a newer fsdptoys wrote; this one reads {FORMAT}")
        if not isinstance(tree.get("name"), str):
            raise ValueError("it names no folder")
        manifest = Manifest(tree["name"], sums_from_json(tree.get("files")))
        if manifest.to_bytes() != text:
            raise ValueError("it is not as it was written")
    except ValueError as error:
        raise NotWholeError(f"is damaged: its {MANIFEST_FILE} cannot be used ({error})") from error
    if manifest.name != name:
        raise NotWholeError(f"is damaged: its {MANIFEST_FILE} is that of {manifest.name!r:.100}")
    if not {STATE_FILE, INDEX_FILE} <= set(manifest.files) or any(not said.size for said in manifest.files.values()):
        raise NotWholeError(f"is damaged: its {MANIFEST_FILE} lists files that no checkpoint has, or too few")
    return manifest
