"""Selection of the checkpoint to resume from, before any worker starts.

``peek`` checks manifests and file sizes, which is fast; workers read all files and may fall back to
an older checkpoint. Both reject settings after which ``auto`` would resume from an unintended
checkpoint:

- ``never`` with a folder that holds checkpoints: ``auto`` could not distinguish the two runs;
- resuming from a checkpoint older than others in its folder: ``auto`` would take the newer ones;
- resuming from another folder while the run's own folder holds checkpoints: likewise.
"""

import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fsdptoys.errors import ConfigError

from .config import RESUME_WORDS, CheckpointConfig
from .manifest import (
    ANY,
    MANIFEST_FILE,
    Facts,
    InvalidCheckpointError,
    Schema,
    UnreadableError,
    known_step,
    read_manifest,
    read_state,
    reason_of,
    step_of,
    with_retries,
)
from .ranks import Ranks
from .retention import LATEST_FILE, PARTIAL, Series
from .storage import LocalStorage, Storage, open_storage, write_file

RUN_FOLDER = "checkpoints"  # default checkpoint folder within a run directory

T = TypeVar("T")


@dataclass(frozen=True)
class NamedCheckpoint:
    """The checkpoint to resume from."""

    where: str  # path or URL of the folder that holds it
    name: str
    own: bool  # whether it is in the folder this run saves to


def peek(
    config: CheckpointConfig,
    folder: str | None,
    restarted: bool = False,
    schema: Schema = ANY,
) -> Facts | None:
    """Find the checkpoint that a run would resume from, in one process; return its facts, None to
    start from scratch.

    ``folder`` is the path or URL of the run's checkpoints; None if it is yet to be created. At a
    restart of the run (``restarted``) its own newest checkpoint precedes ``config.resume``.
    ConfigError if a required checkpoint is missing, incomplete, damaged or unreadable, if existing
    checkpoints would be mixed with this run's, or if the folder cannot be written.
    """
    storage = None if folder is None else open_storage(folder)
    if storage is not None:
        if config.every or config.on_signal:
            check_writable(storage)
        # Otherwise another run may be saving right now
        if listing(Series(storage).newest_complete, storage) is None:
            Series(storage).recover()

    def read(storage: Storage, name: str) -> Facts:
        return read_state(storage, read_manifest(storage, name), schema)

    selected = select(Ranks(None), config, storage, restarted, read, {})
    return None if selected is None else selected[1]


def select(
    ranks: Ranks,
    config: CheckpointConfig,
    storage: Storage | None,
    restarted: bool,
    read: Callable[[Storage, str], T],
    invalid: dict[str, str],
) -> tuple[NamedCheckpoint, T] | None:
    """Find the checkpoint to resume from, and read it; None to start from scratch. Collective.

    Args:
        storage: holds the run's checkpoints; None if it is yet to be created.
        restarted: as for ``peek``.
        read: reads a checkpoint; InvalidCheckpointError on all ranks if it is incomplete or
            damaged.
        invalid: filled with the names of newer ones that are not valid, and the reasons.
    """
    if storage is not None and (restarted or config.resume in ("auto", "must")):
        for name in ranks.ask_first(lambda: listing(Series(storage).names, storage)):
            try:
                return NamedCheckpoint(storage.where, name, own=True), read(
                    storage, name
                )
            except InvalidCheckpointError as problem:
                invalid[name] = str(problem)
    if config.resume not in RESUME_WORDS:
        location = ranks.ask_first(lambda: locate(config, storage))
        try:
            return location, read(open_storage(location.where), location.name)
        except InvalidCheckpointError as problem:
            sentence = invalid_checkpoint(config, location, str(problem))
            raise ConfigError(ranks.broadcast(sentence)) from problem
    if not restarted:
        ranks.ask_first(lambda: check_not_taken(config, storage))
    if config.resume == "must":
        raise ConfigError(no_checkpoint(storage, invalid))
    return None


def check_not_taken(config: CheckpointConfig, storage: Storage | None) -> None:
    """Reject ``never`` if the folder already holds checkpoints."""
    if config.resumes or storage is None:
        return
    newest = listing(Series(storage).newest_complete, storage)
    if newest is not None:
        raise ConfigError(
            f"checkpoint.resume=never starts from scratch, and {storage.where} already holds "
            f"{newest}; set checkpoint.resume=auto to resume from it, or another folder"
        )


def locate(config: CheckpointConfig, storage: Storage | None) -> NamedCheckpoint:
    """Find the checkpoint that ``checkpoint.resume`` names: a checkpoint, or the newest one of a
    folder or run.

    ``storage`` holds the run's own checkpoints, if any. ConfigError if there is none, or if
    ``auto`` would later resume from another checkpoint than this run's last.
    """
    checkpoint = find_checkpoint(config.resume)
    if checkpoint is None:
        raise ConfigError(
            f"checkpoint.resume={config.resume} holds no checkpoint; set it to never, auto or "
            "must, or to the folder of a checkpoint, of several, or of a run"
        )
    folder, name = checkpoint
    if storage is None:
        return NamedCheckpoint(folder.where, name, own=False)
    if isinstance(folder, LocalStorage) and isinstance(storage, LocalStorage):
        own = os.path.realpath(folder.where) == os.path.realpath(storage.where)
    else:
        own = folder.where.rstrip("/") == storage.where.rstrip("/")
    newest = listing(Series(storage).newest_complete, storage)
    if newest is not None and not own:
        raise ConfigError(
            f"checkpoint.resume={config.resume} starts a run in {storage.where}, which already "
            f"holds {newest} of another one; set checkpoint.resume=auto to resume from that, or "
            "another folder"
        )
    if newest is not None and newest != name and known_step(newest) > known_step(name):
        raise ConfigError(
            f"checkpoint.resume={config.resume} goes back to before {newest}, which the next "
            f"checkpoint.resume=auto would take; move the newer ones out of {storage.where}, or "
            "set metrics.run_dir or checkpoint.folder to another folder"
        )
    return NamedCheckpoint(folder.where, name, own)


def invalid_checkpoint(
    config: CheckpointConfig, location: NamedCheckpoint, problem: str
) -> str:
    """Return the message that rejects an incomplete or damaged checkpoint named by the user."""
    series = Series(open_storage(location.where))
    older = None
    with suppress(OSError, UnreadableError):
        before = (
            name
            for name in series.names()
            if known_step(name) < known_step(location.name)
        )
        older = next(filter(series.is_complete, before), None)
    fix = (
        f"set checkpoint.resume={location.where}/{older}"
        if older
        else "name another one"
    )
    if older and location.own:
        fix = f"move it away and {fix}"
    return (
        f"checkpoint.resume={config.resume} is refused: {location.name} in {location.where} "
        f"{problem}; {fix}"
    )


def no_checkpoint(storage: Storage | None, invalid: dict[str, str]) -> str:
    """Return the message that rejects ``must`` without a complete checkpoint."""
    where = "the run's new directory" if storage is None else storage.where
    reasons = "; ".join(f"{name} {problem}" for name, problem in invalid.items())
    details = f" ({reasons})" if invalid else ""
    return (
        f"checkpoint.resume=must finds no complete checkpoint in {where}{details}; set "
        "checkpoint.resume=auto to start from scratch, or checkpoint.folder or metrics.run_dir "
        "to where they are"
    )


def _unwritable(storage: Storage, error: OSError) -> ConfigError:
    """Return the error for a folder that refuses checkpoints."""
    return ConfigError(
        f"checkpoints go to {storage.where}, which cannot be written ({reason_of(error)}); set "
        "checkpoint.folder to a place that can be"
    )


def check_writable(storage: Storage) -> None:
    """Write and remove a small file; for a missing local folder, in its nearest existing parent."""
    try:
        if isinstance(storage, LocalStorage):
            path = Path(storage.where).absolute()
            with suppress(FileNotFoundError, NotADirectoryError):
                path.lstat()  # raises if a name of a missing folder is too long
            nearest = next(
                parent for parent in (path, *path.parents) if os.path.lexists(parent)
            )
            with tempfile.TemporaryFile(dir=nearest) as local:
                local.write(b"x")
        else:
            storage.remove(write_probe(storage))
    except OSError as error:
        raise _unwritable(storage, error) from error


def write_probe(storage: Storage) -> str:
    """Write a small file and return its path; ConfigError if the folder cannot be written."""
    # A new name each time, because network file systems cache failed lookups.
    probe = f".{LATEST_FILE}-{secrets.token_hex(4)}{PARTIAL}"
    try:
        storage.make("")
        write_file(storage, probe, [b"x"])
    except OSError as error:
        raise _unwritable(storage, error) from error
    return probe


def listing(look: Callable[[], T], storage: Storage) -> T:
    """Call ``look``, which reads a storage, with retries; ConfigError if the system still
    refuses."""
    try:
        return with_retries(look)
    except OSError as error:
        raise ConfigError(
            f"{storage.where} cannot be read ({reason_of(error)}), and may hold checkpoints; "
            "make it readable, or set checkpoint.folder to another place"
        ) from error


def find_checkpoint(where: str) -> tuple[Storage, str] | None:
    """Return storage and name of the checkpoint that a path or URL refers to."""
    path = where.rstrip("/")
    parent, _, last = path.rpartition("/")
    here = open_storage(path or "/")

    def look() -> tuple[Storage, str] | None:
        if step_of(last) is not None and (here.names() or here.exists("")):
            return open_storage(parent or ("." if path == last else "/")), last
        if MANIFEST_FILE in here.names():
            raise ConfigError(
                f"checkpoint.resume={where} holds a checkpoint under another name than its own, "
                f"step-…; give it the name that its {MANIFEST_FILE} says"
            )
        for storage in (here, open_storage(f"{path}/{RUN_FOLDER}")):
            names = Series(storage).names()
            if names:
                return storage, names[0]
        return None

    return listing(look, here)
