"""The checkpoints of one place: a new one comes in as a whole, old ones go as a whole.

Local: a checkpoint is filled as ``.step-00000120.partial``, handed to the disk, and renamed; a process that is killed,
or a machine that loses power, leaves the one or the other. An old one of the same name is ``.step-00000120.old`` for
the moment between two renames, and comes back if the process dies there. One that is deleted is renamed to
``.step-00000040.deleted`` first.

Object stores cannot rename. There a checkpoint is filled in its place and is incomplete until its manifest is written,
which is the last file; the manifest is the first that is deleted.

Only what this run wrote, or resumed from, is deleted or replaced. Any other folder in the place of a new checkpoint
keeps its content under a name with the reason, such as ``step-00000120.damaged-1``: what is damaged or unreadable at
this moment may be readable tomorrow, or may be mended.

All of this is done by one process, rank 0.
"""

import errno
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from .manifest import (
    MANIFEST_FILE,
    Manifest,
    NotWholeError,
    UnreadableError,
    read_manifest,
    reason_of,
    step_name,
    step_of,
    tried_again,
)
from .storage import Storage

LATEST_FILE = "latest"
PARTIAL, OLD, DELETED = ".partial", ".old", ".deleted"


@dataclass(frozen=True)
class Pruned:
    """What became of old checkpoints."""

    deleted: list[str]
    """Names."""
    problems: list[str]
    """Sentences on what could not be deleted."""


class Series:
    """The checkpoints of one place.

    Args:
        storage: the place.

    Attributes:
        damaged: names of checkpoints that do not count, whatever their sizes say.
        aside: sentences on folders that were renamed to make way for a checkpoint; the caller empties it.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.damaged: set[str] = set()
        self.aside: list[str] = []
        self._written: set[str] = set()
        self._resumed: set[str] = set()
        self._told: set[str] = set()

    def resume_from(self, name: str, names: Iterable[str]) -> None:
        """Take over the series of an earlier start, so that its old checkpoints may be deleted.

        Args:
            name: of the checkpoint that the run resumes from.
            names: of all folders that are here.
        """
        self._resumed = {each for each in names if _step(each) <= _step(name)} - self.damaged

    def names(self) -> list[str]:
        """Names of all folders that may be checkpoints, the newest first.

        Raises:
            OSError: as the system refuses.
        """
        steps = [step for name in self.storage.names() if (step := step_of(name)) is not None]
        return [step_name(step) for step in sorted(steps, reverse=True)]

    def newest_complete(self) -> str | None:
        """Name of the newest that is complete by its manifest and sizes.

        Raises:
            OSError: as the system refuses.
            UnreadableError: if a newer one cannot be read, which may be complete.
        """
        return next((name for name in self.names() if self.is_complete(name)), None)

    def is_complete(self, name: str, patient: bool = True) -> bool:
        """Whether a folder has a manifest, and all files have their sizes.

        Raises:
            UnreadableError: if the system refuses to say.
        """
        try:
            read_manifest(self.storage, name, patient)
        except NotWholeError:
            return False
        return True

    def newest_readable(self) -> str | None:
        """Like ``newest_complete``, for a sentence: without those that cannot be read."""
        with suppress(OSError):
            for name in self.names():
                with suppress(UnreadableError):
                    if self.is_complete(name, patient=False):
                        return name
        return None

    def recover(self) -> None:
        """Take back what a process that died had set aside. What cannot be stays for whoever reads or writes next."""

        def take_back() -> None:
            for entry in self._leftovers():
                name = entry[1:].removesuffix(OLD)
                if entry.endswith(OLD) and not self.storage.exists(name):
                    self.storage.rename(entry, name)
                    self.storage.sync("")

        with suppress(OSError):
            tried_again(take_back)

    def clean(self) -> None:
        """The same, and remove what else processes that died left behind.

        What was set aside as ``.old``, with another in its place, was a checkpoint, and stays under another name.
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
        """Make the folder that a new checkpoint is filled in.

        Returns:
            Its name.

        Raises:
            OSError: as the system refuses.
        """
        working = f".{name}{PARTIAL}" if self.storage.renames else name
        # At a URL an incomplete folder is what a save that was killed left there, and would stay at each such end.
        if self.storage.renames or self._is_incomplete(name):
            self.discard(working)
        else:
            reason = self._reason(name)
            if name in self._written and reason != "unreadable":
                self.discard(working)
            else:
                self._set_aside(name, name, reason)
        if not self.storage.renames:
            self._written.add(name)
        self.storage.make(working)
        return working

    def discard(self, working: str) -> None:
        """Remove a folder that was begun.

        Raises:
            OSError: as the system refuses.
        """
        if not self.storage.renames:
            self.storage.remove(f"{working}/{MANIFEST_FILE}")
        self.storage.remove(working)

    def commit(self, working: str, manifest: Manifest) -> None:
        """Make a filled folder a checkpoint. An older one of its name is deleted if this run wrote it, or renamed.

        Raises:
            OSError: as the system refuses; then the older one is there still, unless the new one is.
        """
        storage, name = self.storage, manifest.name
        for path, said in manifest.files.items():
            if storage.size(f"{working}/{path}") != said.size:
                raise OSError(errno.EIO, "what was written has changed since", f"{working}/{path}")
        write_file(storage, f"{working}/{MANIFEST_FILE}", manifest.to_bytes())
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
        own = name in self._written and reason != "unreadable"
        self._written.add(name)
        storage.sync("")
        with suppress(OSError):
            if reason is not None and own:
                storage.remove(old)
            elif reason is not None:
                self._set_aside(old, name, reason)

    def point_to(self, name: str) -> None:
        """Write the name of the newest checkpoint down, for people and tools.

        Raises:
            OSError: as the system refuses.
        """
        temporary = f".{LATEST_FILE}{PARTIAL}" if self.storage.renames else LATEST_FILE
        write_file(self.storage, temporary, f"{name}\n".encode())
        if self.storage.renames:
            self.storage.rename(temporary, LATEST_FILE)
            self.storage.sync("")

    def prune(self, newest: int, keep: int, keep_every: int) -> Pruned:
        """Delete complete checkpoints of this run that are not to be kept.

        One that cannot be read at this moment is neither counted nor deleted; a later call sees to it.

        Args:
            newest: step of the one that was saved last; newer ones are neither counted nor deleted.
            keep: number of newest ones that are kept, this one among them.
            keep_every: those of every so many steps are kept too; 0 for none.
        """
        kept, name = 0, ""
        deleted: list[str] = []
        problems: list[str] = []
        try:
            for name in self.names():
                step = _step(name)
                if step > newest or name in self.damaged or name not in self._written | self._resumed:
                    continue
                if kept == keep and keep_every and step % keep_every == 0:
                    continue
                try:
                    if not self.is_complete(name, patient=False):
                        continue
                except UnreadableError as problem:
                    if name not in self._told:
                        problems.append(f"{problem}, in {self.storage.where}, and is neither counted nor deleted")
                    self._told.add(name)
                    continue
                if kept < keep:
                    kept += 1
                else:
                    self._delete(name)
                    deleted.append(name)
        except OSError as error:
            problems.append(f"old checkpoints could not be deleted: {reason_of(error)} at {self.storage.where}/{name}")
        return Pruned(deleted, problems)

    def _delete(self, name: str) -> None:
        if not self.storage.renames:
            self.discard(name)
            return
        deleted = f".{name}{DELETED}"
        self.storage.remove(deleted)
        self.storage.rename(name, deleted)
        self.storage.sync("")
        self.storage.remove(deleted)

    def _reason(self, name: str) -> str:
        """Why the folder of this name has to make way for a new checkpoint."""
        if name in self.damaged:
            return "damaged"
        try:
            read_manifest(self.storage, name)
        except NotWholeError:
            return "incomplete" if self._is_incomplete(name) else "damaged"
        except UnreadableError:
            return "unreadable"
        return "replaced"

    def _is_incomplete(self, name: str) -> bool:
        """Whether a folder has no manifest, or is not there, by two looks: one alone may have missed it.

        Raises:
            OSError: as the system refuses.
        """
        return MANIFEST_FILE not in self.storage.names(name) and not self.storage.exists(f"{name}/{MANIFEST_FILE}")

    def _set_aside(self, entry: str, name: str, reason: str) -> None:
        """Rename a folder to the first free name that says what became of the checkpoint of ``name``."""
        taken = set(self.storage.names())
        number = 1
        while f"{name}.{reason}-{number}" in taken or self.storage.exists(f"{name}.{reason}-{number}"):
            number += 1
        self.storage.move(entry, f"{name}.{reason}-{number}")
        self.aside.append(
            f"an earlier {name} in {self.storage.where} gave way to a new one, and is now {name}.{reason}-{number}"
        )

    def _leftovers(self) -> list[str]:
        if not self.storage.renames:
            return []
        found = []
        for entry in self.storage.names():
            stem, dot, ending = entry[1:].rpartition(".")
            ours = step_of(stem) is not None or stem.split("-")[0] == LATEST_FILE
            if entry[0] == "." and ours and dot + ending in (PARTIAL, OLD, DELETED):
                found.append(entry)
        return found


def _step(name: str) -> int:
    step = step_of(name)
    assert step is not None, name
    return step


def write_file(storage: Storage, path: str, content: bytes) -> None:
    """Write a small file."""
    with storage.writing(path) as file:
        written = file.write(content)
    assert written == len(content)
