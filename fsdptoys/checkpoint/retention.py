"""The checkpoints of one storage: atomic creation, and deletion of old ones. Only rank 0 runs this
code.

Local folders: a checkpoint is filled as ``.step-00000120.partial``, synced to disk, and renamed, so
a crash leaves either the partial folder or the complete checkpoint. An existing checkpoint of the
same name is ``.step-00000120.old`` between the two renames, and is restored after a crash there;
one to delete is first renamed to ``.step-00000040.deleted``. Object stores cannot rename: there the
manifest is written last and deleted first.

Only checkpoints that this run wrote or resumed from are deleted. A folder in the way of a new
checkpoint is renamed with the reason, for example to ``step-00000120.damaged-1``.
"""

import errno
import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress

from .manifest import (
    MANIFEST_FILE,
    InvalidCheckpointError,
    Manifest,
    UnreadableError,
    known_step,
    read_manifest,
    reason_of,
    step_name,
    step_of,
    with_retries,
)
from .storage import Storage, write_file

LATEST_FILE = "latest"
PARTIAL = ".partial"
OLD = ".old"
DELETED = ".deleted"


class Series:
    """The checkpoints of one storage; ``report`` is called with one sentence at a time."""

    def __init__(
        self, storage: Storage, report: Callable[[str], object] = lambda sentence: None
    ) -> None:
        self.storage = storage
        self._report = report
        # Names of checkpoints to ignore even if their file sizes match
        self.damaged: set[str] = set()
        self._saved: set[str] = set()
        self._resumed: set[str] = set()
        self._reported: set[str] = set()

    def resume_from(self, name: str, names: Iterable[str]) -> None:
        """Take over the checkpoints among ``names`` up to ``name``, so that they may be deleted
        when they are old."""
        self._resumed = {
            other for other in names if known_step(other) <= known_step(name)
        } - self.damaged

    def names(self) -> list[str]:
        """Return the names of all possible checkpoints, newest first."""
        steps = [
            step for name in self.storage.names() if (step := step_of(name)) is not None
        ]
        return [step_name(step) for step in sorted(steps, reverse=True)]

    def newest_complete(self) -> str | None:
        """Return the newest checkpoint with a manifest and matching file sizes, if any.

        UnreadableError if a newer folder, possibly complete, cannot be read; OSError if the storage
        cannot be listed.
        """
        return next((name for name in self.names() if self.is_complete(name)), None)

    def is_complete(self, name: str, patient: bool = True) -> bool:
        """Whether a folder has a manifest and matching file sizes; UnreadableError if the system
        refuses to read it."""
        try:
            read_manifest(self.storage, name, patient)
        except InvalidCheckpointError:
            return False
        return True

    def newest_readable(self) -> str | None:
        """Like ``newest_complete``, but skip unreadable folders and never raise; for messages."""
        with suppress(OSError):
            for name in self.names():
                with suppress(UnreadableError):
                    if self.is_complete(name, patient=False):
                        return name
        return None

    def recover(self) -> None:
        """Rename ``.old`` folders of a killed process back; failures are left to the next call."""

        def restore() -> None:
            for entry in self._leftovers():
                name = entry[1:].removesuffix(OLD)
                if entry.endswith(OLD) and not self.storage.exists(name):
                    self.storage.rename(entry, name)
                    self.storage.sync("")

        with suppress(OSError):
            with_retries(restore)

    def clean(self) -> None:
        """Recover, then remove other leftovers of killed processes.

        An ``.old`` folder that has been replaced was a checkpoint, so it is kept under another
        name.
        """
        self.recover()
        with suppress(OSError):
            for entry in self._leftovers():
                name = entry[1:].removesuffix(OLD)
                with suppress(OSError):
                    if not entry.endswith(OLD):
                        self.storage.remove(entry)
                    elif self.storage.exists(name):
                        self._set_aside(entry, name, "replaced")

    def begin(self, name: str) -> str:
        """Make the working folder of a new checkpoint and return its name."""
        working = f".{name}{PARTIAL}" if self.storage.renames else name
        # An incomplete folder at a URL comes from a killed save; if kept, they would accumulate.
        reason = (
            None
            if self.storage.renames or self._is_incomplete(name)
            else self._reason(name)
        )
        if reason is None:
            self.discard(working)
        else:
            self._set_aside(name, name, reason)
        if not self.storage.renames:
            self._saved.add(name)
        self.storage.make(working)
        return working

    def discard(self, working: str) -> None:
        """Remove a working folder."""
        if not self.storage.renames:
            self.storage.remove(f"{working}/{MANIFEST_FILE}")
        self.storage.remove(working)

    def commit(self, working: str, manifest: Manifest) -> None:
        """Turn a filled working folder into a checkpoint, and rename an older one of its name.

        After an OSError either of them exists.
        """
        storage = self.storage
        name = manifest.name
        for path, file_sum in manifest.files.items():
            if storage.size(f"{working}/{path}") != file_sum.size:
                raise OSError(
                    errno.EIO, "a written file has changed since", f"{working}/{path}"
                )
        write_file(storage, f"{working}/{MANIFEST_FILE}", [manifest.to_bytes()])
        storage.sync(working)
        if not storage.renames:
            return
        old = f".{name}{OLD}"
        reason = None
        if storage.exists(name):
            reason = self._reason(name)
            if storage.exists(old):
                self._set_aside(old, name, "replaced")
            storage.rename(name, old)
        try:
            storage.rename(working, name)
        except OSError:
            if reason is not None:
                storage.rename(old, name)
            raise
        self._saved.add(name)
        storage.sync("")
        if reason is not None:
            with suppress(OSError):
                self._set_aside(old, name, reason)

    def point_to(self, name: str) -> None:
        """Write the name of the newest checkpoint to ``latest``, for people and tools."""
        temporary = f".{LATEST_FILE}{PARTIAL}" if self.storage.renames else LATEST_FILE
        write_file(self.storage, temporary, [f"{name}\n".encode()])
        if self.storage.renames:
            self.storage.rename(temporary, LATEST_FILE)
            self.storage.sync("")

    def prune(self, newest: int, keep: int, keep_every: int) -> bool:
        """Delete this run's complete checkpoints beyond those to keep; return whether any was
        deleted.

        Kept are the ``keep`` newest up to step ``newest``, newer ones, and those of steps that are
        multiples of ``keep_every``. Checkpoints that cannot be read now are neither counted nor
        deleted, and are left to a later call.
        """
        count = 0
        name = ""
        where = self.storage.where
        is_freed = False
        deletable = (self._saved | self._resumed) - self.damaged
        try:
            for name in self.names():
                step = known_step(name)
                if step > newest or name not in deletable:
                    continue
                if count == keep and keep_every and step % keep_every == 0:
                    continue
                try:
                    if not self.is_complete(name, patient=False):
                        continue
                except UnreadableError as problem:
                    if name not in self._reported:
                        self._report(
                            f"{name} {problem.reason}, in {where}, and is neither counted nor "
                            "deleted"
                        )
                    self._reported.add(name)
                    continue
                if count < keep:
                    count += 1
                    continue
                if self.storage.renames:
                    self.storage.remove(f".{name}{DELETED}")
                    self.storage.rename(name, f".{name}{DELETED}")
                    self.storage.sync("")
                    self.storage.remove(f".{name}{DELETED}")
                else:
                    self.discard(name)
                is_freed = True
        except OSError as error:
            self._report(
                f"old checkpoints could not be deleted: {reason_of(error)} at {where}/{name}"
            )
        return is_freed

    def _reason(self, name: str) -> str:
        if name in self.damaged:
            return "damaged"
        try:
            read_manifest(self.storage, name)
        except InvalidCheckpointError:
            return "incomplete" if self._is_incomplete(name) else "damaged"
        except UnreadableError:
            return "unreadable"
        return "replaced"

    def _is_incomplete(self, name: str) -> bool:
        """Return whether a folder lacks a manifest, checked in two ways because either may miss
        it."""
        return MANIFEST_FILE not in self.storage.names(
            name
        ) and not self.storage.exists(f"{name}/{MANIFEST_FILE}")

    def _set_aside(self, entry: str, name: str, reason: str) -> None:
        """Rename a folder to the first free ``NAME.REASON-N``."""
        existing = set(self.storage.names())
        names = (f"{name}.{reason}-{number}" for number in itertools.count(1))
        free = next(
            candidate
            for candidate in names
            if candidate not in existing and not self.storage.exists(candidate)
        )
        self.storage.move(entry, free)
        self._report(f"an earlier {name} in {self.storage.where} was renamed to {free}")

    def _leftovers(self) -> list[str]:
        leftovers = []
        for entry in self.storage.names() if self.storage.renames else []:
            stem, dot, ending = entry[1:].rpartition(".")
            is_own = step_of(stem) is not None or stem.split("-")[0] == LATEST_FILE
            if entry[0] == "." and is_own and dot + ending in (PARTIAL, OLD, DELETED):
                leftovers.append(entry)
        return leftovers
