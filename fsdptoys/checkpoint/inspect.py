"""Checkpoints as people look at them: the state of every one in a folder, and the contents of one.

Nothing is loaded, written or unpickled: manifests, facts and indexes are JSON, compared with their
SHA-256 before they are parsed, and tensor files are only summed. One process reads, with the same
readers as a resume.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fsdptoys.errors import ConfigError

from .manifest import (
    ANY,
    INDEX_FILE,
    MANIFEST_FILE,
    Facts,
    InvalidCheckpointError,
    Manifest,
    Schema,
    UnreadableError,
    known_step,
    read_manifest,
    read_state,
    reason_of,
    step_of,
    verify_file,
)
from .retention import Series
from .select import find_checkpoint, listing
from .shard_format import StoredTensor, read_index
from .sharded_io import parameter_of
from .storage import LocalStorage, Storage

CHEAP_BYTES = 2**30
"""Local checkpoints of this size together are verified without being asked: about two seconds on
one core."""


class Condition(Enum):
    """Whether a checkpoint can be loaded."""

    complete = "complete"
    incomplete = "incomplete"
    """Being written, or left by a killed save."""
    damaged = "damaged"
    unreadable = "unreadable"
    """The system refuses to read it."""


@dataclass
class Description:
    """One checkpoint of a folder."""

    name: str
    condition: Condition = Condition.complete
    problem: str | None = None
    """Continues a sentence that starts with the name."""
    saved_at: float | None = None
    """Seconds since 1970; None if the storage has no time of modification."""
    manifest: Manifest | None = None
    facts: Facts = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    verified: bool | None = None
    """Whether the checksums of all files hold; None if they have not been read."""

    @property
    def step(self) -> int:
        """Optimizer steps taken when it was saved."""
        return known_step(self.name)

    @property
    def bytes(self) -> int:
        """Size of all files, of a checkpoint with a manifest."""
        return (
            sum(file.size for file in self.manifest.files.values())
            if self.manifest is not None
            else 0
        )

    @property
    def layout(self) -> str:
        """Strategy and ranks that saved it, from settings of any version."""
        config = self.facts.get("config")
        tree: dict[str, Any] = config if isinstance(config, dict) else {}
        parallel, mesh = (tree.get(section) for section in ("parallel", "mesh"))
        ranks = self.facts.get("world_size", 0)
        size = mesh.get("fsdp_size") if isinstance(mesh, dict) else None
        copies = ranks // size if type(size) is int and 0 < size < ranks else 1
        name = str(parallel.get("name")) if isinstance(parallel, dict) else "unknown"
        return f"{name}, {ranks} rank{'s' * (ranks != 1)}" + f" in {copies} copies" * (
            copies > 1
        )


def open_series(where: str) -> tuple[Storage, list[str], bool]:
    """Return the storage of the checkpoints at a path or URL, their names, newest first, and
    whether it is only one.

    ``where`` is a run directory, a folder of checkpoints, or one checkpoint. ConfigError if there
    is none.
    """
    try:
        location = find_checkpoint(where)
    except ConfigError as mistake:
        raise ConfigError(str(mistake).removeprefix("checkpoint.resume=")) from mistake
    if location is None:
        raise ConfigError(
            f"{where} holds no checkpoint; name the directory of a run, its folder of "
            "checkpoints, or one of them"
        )
    storage, name = location
    is_one = where.rstrip("/").rpartition("/")[2] == name
    return (
        storage,
        [name] if is_one else listing(Series(storage).names, storage),
        is_one,
    )


def describe(storage: Storage, name: str, schema: Schema = ANY) -> Description:
    """Read a checkpoint's manifest, facts and index, and check the sizes of its files."""
    description = Description(name)

    def read() -> None:
        if not storage.exists(f"{name}/{MANIFEST_FILE}"):
            description.condition = Condition.incomplete
        description.manifest = read_manifest(storage, name, patient=False)
        description.saved_at = storage.modified(f"{name}/{MANIFEST_FILE}")
        description.facts = read_state(storage, description.manifest, schema)
        verify_file(storage, description.manifest, INDEX_FILE)
        description.tensors = read_index(storage, name)

    _judge(description, read)
    return description


def verify(
    storage: Storage,
    description: Description,
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Compare all files of a complete checkpoint with their checksums; ``advance`` is called with
    bytes read."""
    assert description.manifest is not None
    manifest = description.manifest

    def read() -> None:
        for path in manifest.files:
            verify_file(storage, manifest, path, advance)

    _judge(description, read)
    description.verified = (
        None
        if description.condition is Condition.unreadable
        else description.condition is Condition.complete
    )


def is_cheap(storage: Storage, size: int) -> bool:
    """Whether a checkpoint of ``size`` bytes is verified by default."""
    return isinstance(storage, LocalStorage) and size <= CHEAP_BYTES


def resumed_by_auto(descriptions: list[Description]) -> Description | None:
    """The checkpoint, of all in a folder, from which ``checkpoint.resume=auto`` resumes, or at
    which it stops."""
    loadable = (Condition.complete, Condition.unreadable)
    return next(
        (
            description
            for description in descriptions
            if description.condition in loadable
        ),
        None,
    )


def other_folders(storage: Storage) -> list[str]:
    """Names of folders that belong to checkpoints and are never loaded: being written, or set
    aside."""
    names = listing(storage.names, storage)
    return [
        name
        for name in names
        if "." in name[1:] and step_of(name.lstrip(".").partition(".")[0]) is not None
    ]


def states_by_kind(
    tensors: Mapping[str, StoredTensor],
) -> dict[str, list[StoredTensor]]:
    """Kind of optimizer state → its tensors; ``optim.<parameter>.<kind>`` are the names."""
    kinds: dict[str, list[StoredTensor]] = {}
    for name, tensor in tensors.items():
        param = parameter_of(name, tensors)
        if param is not None:
            kind = name.removeprefix(f"optim.{param}.")
        elif name.startswith("optim."):
            kind = name.rpartition(".")[2]
        else:
            continue
        kinds.setdefault(kind, []).append(tensor)
    return kinds


def _judge(description: Description, read: Callable[[], None]) -> None:
    """Call ``read``, and keep the problem that it raises."""
    try:
        read()
    except InvalidCheckpointError as problem:
        description.problem = str(problem)
        if description.condition is Condition.complete:
            description.condition = Condition.damaged
    except UnreadableError as problem:
        description.condition = Condition.unreadable
        description.problem = problem.reason
    except ConfigError as problem:
        description.condition = Condition.damaged
        description.problem = f"is damaged: {problem}"
    except OSError as problem:
        description.condition = Condition.unreadable
        description.problem = f"cannot be read ({reason_of(problem)})"
