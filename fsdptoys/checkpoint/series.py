"""The checkpoints of one place: a new one comes in as a whole, old ones go as a whole.

Local: a checkpoint is filled as ``.step-00000120.partial``, handed to the disk, and renamed; a process that is killed,
or a machine that loses power, leaves the one or the other. An old one of the same name is ``.step-00000120.old`` for
the moment between two renames, and comes back if the process dies there. One that is deleted is renamed to
``.step-00000040.deleted`` first.

Object stores cannot rename. There a checkpoint is filled in its place and is incomplete until its manifest is written,
which is the last file; the manifest is the first that is deleted. A damaged one of the same name is given up when the
new one begins.

All of this is done by one process, rank 0.
"""

import errno
from contextlib import suppress

from .manifest import MANIFEST_FILE, Manifest, NotWholeError, read_manifest, reason_of, step_name, step_of
from .storage import Storage

LATEST_FILE = "latest"
PARTIAL, OLD, DELETED = ".partial", ".old", ".deleted"


class Series:
    """The checkpoints of one place.

    Args:
        storage: the place.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

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
        """
        return next((name for name in self.names() if self.is_complete(name)), None)

    def is_complete(self, name: str) -> bool:
        """Whether a folder has a manifest, and all files have their sizes."""
        try:
            read_manifest(self.storage, name)
        except NotWholeError:
            return False
        return True

    def recover(self) -> None:
        """Take back what a process that died had set aside. What cannot be stays for whoever reads or writes next."""
        with suppress(OSError):
            for entry in self._leftovers():
                name = entry[1:].removesuffix(OLD)
                if entry.endswith(OLD) and not self.storage.exists(name):
                    self.storage.rename(entry, name)
                    self.storage.sync("")

    def clean(self) -> None:
        """The same, and remove what else processes that died left behind."""
        self.recover()
        with suppress(OSError):
            for entry in self._leftovers():
                with suppress(OSError):
                    self.storage.remove(entry)

    def begin(self, name: str) -> str:
        """Make the folder that a new checkpoint is filled in.

        Returns:
            Its name.

        Raises:
            OSError: as the system refuses.
        """
        working = f".{name}{PARTIAL}" if self.storage.renames else name
        self.discard(working)
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
        """Make a filled folder a checkpoint, in the place of an older one of its name.

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
        if storage.exists(name):
            storage.remove(old)
            storage.rename(name, old)
        try:
            storage.rename(working, name)
        except OSError:
            if storage.exists(old):
                storage.rename(old, name)
            raise
        storage.sync("")
        with suppress(OSError):
            storage.remove(old)

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

    def prune(self, newest: int, keep: int, keep_every: int, damaged: set[str]) -> str | None:
        """Delete complete checkpoints that are not to be kept.

        Args:
            newest: step of the one that was saved last; newer ones are neither counted nor deleted.
            keep: number of newest ones that are kept, this one among them.
            keep_every: those of every so many steps are kept too; 0 for none.
            damaged: names that count as damaged though their sizes are right; these stay.

        Returns:
            A sentence on what could not be deleted.
        """
        kept, name = 0, ""
        try:
            for name in self.names():
                step = step_of(name)
                assert step is not None
                if step > newest or name in damaged:
                    continue
                if kept == keep and keep_every and step % keep_every == 0:
                    continue
                if not self.is_complete(name):
                    continue
                if kept < keep:
                    kept += 1
                else:
                    self._delete(name)
        except OSError as error:
            return f"old checkpoints could not be deleted: {reason_of(error)} at {self.storage.where}/{name}"
        return None

    def _delete(self, name: str) -> None:
        if not self.storage.renames:
            self.discard(name)
            return
        deleted = f".{name}{DELETED}"
        self.storage.remove(deleted)
        self.storage.rename(name, deleted)
        self.storage.sync("")
        self.storage.remove(deleted)

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


def write_file(storage: Storage, path: str, content: bytes) -> None:
    """Write a small file."""
    with storage.writing(path) as file:
        written = file.write(content)
    assert written == len(content)
