"""Storages that fail at a chosen operation: by a kill, an OSError or a power loss."""

import copy
import io
import os
import random
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsdptoys.checkpoint.storage import LocalStorage, Storage


class PowerLoss(BaseException):
    """Power is lost; later operations have no effect."""


class KillingStorage(LocalStorage):
    """A local folder; the process sends itself SIGKILL within operation number ``moment``, counted from 0.

    The operation stays half done: half of the bytes of a write, half of the files of a removed folder.
    """

    def __init__(self, where: str, moment: int) -> None:
        super().__init__(where)
        self.left = moment

    def tick(self, half: Any = None) -> None:
        """Count an operation, and fail if it is its turn."""
        self.left -= 1
        if self.left < 0:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """See Storage."""
        self.tick()
        with super().writing(path) as file:
            yield cast(BinaryIO, _KillingFile(file, self))
            self.tick()

    def make(self, folder: str) -> None:
        """See Storage."""
        self.tick()
        super().make(folder)

    def sync(self, folder: str) -> None:
        """See Storage."""
        self.tick()
        super().sync(folder)

    def rename(self, old: str, new: str) -> None:
        """See Storage."""
        self.tick()
        super().rename(old, new)

    def remove(self, path: str) -> None:
        """See Storage."""
        names = self.names(path)

        def half() -> None:
            for name in names[::2]:
                LocalStorage.remove(self, f"{path}/{name}")

        self.tick(half)
        super().remove(path)


class _KillingFile:
    def __init__(self, file: BinaryIO, storage: KillingStorage) -> None:
        self._file, self._storage = file, storage

    def write(self, data: Any) -> int:
        """See Storage."""

        def half() -> None:
            self._file.write(memoryview(data)[: len(data) // 2])
            self._file.flush()

        self._storage.tick(half)
        return self._file.write(data)


class FaultyStorage(Storage):
    """Wraps a storage; one operation fails with an OSError.

    Args:
        storage: carries out the other operations.
        code: ``errno`` of the failure.
        moment: number of the failing operation, counted from 0.
        lasting: whether all later operations on the same path fail too.
    """

    def __init__(self, storage: Storage, code: int, moment: int, lasting: bool) -> None:
        self.where, self.renames = storage.where, storage.renames
        self.operations: list[str] = []
        """All requested operations."""
        self.refused: str | None = None
        self._storage, self._code, self._moment, self._lasting = storage, code, moment, lasting
        self._path: str | None = None

    def committed(self) -> list[str]:
        """Names of folders with a manifest, not counted as operations."""
        return [name for name in self._storage.names() if self._storage.exists(f"{name}/manifest.json")]

    def tick(self, operation: str, path: str) -> None:
        """Count an operation, and raise the error if it must fail."""
        is_first = len(self.operations) == self._moment
        self.operations.append(f"{operation} {path}")
        if is_first:
            self._path, self.refused = path, self.operations[-1]
        if is_first or (self._lasting and self._path == path):
            raise OSError(self._code, os.strerror(self._code), path)

    def names(self, folder: str = "") -> list[str]:
        """See Storage."""
        self.tick("names", folder)
        return self._storage.names(folder)

    def exists(self, path: str) -> bool:
        """See Storage."""
        try:
            self.tick("exists", path)
        except FileNotFoundError:
            return False
        return self._storage.exists(path)

    def size(self, path: str) -> int:
        """See Storage."""
        self.tick("size", path)
        return self._storage.size(path)

    @contextmanager
    def reading(self, path: str) -> Iterator[BinaryIO]:
        """See Storage."""
        self.tick("open", path)
        with self._storage.reading(path) as file:
            yield cast(BinaryIO, _FaultyFile(file, path, self))

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """See Storage."""
        self.tick("create", path)
        with self._storage.writing(path) as file:
            yield cast(BinaryIO, _FaultyFile(file, path, self))
            self.tick("close", path)

    def make(self, folder: str) -> None:
        """See Storage."""
        self.tick("make", folder)
        self._storage.make(folder)

    def sync(self, folder: str) -> None:
        """See Storage."""
        self.tick("sync", folder)
        self._storage.sync(folder)

    def rename(self, old: str, new: str) -> None:
        """See Storage."""
        self.tick("rename", old)
        self._storage.rename(old, new)

    def move(self, old: str, new: str) -> None:
        """See Storage."""
        self.tick("move", old)
        self._storage.move(old, new)

    def remove(self, path: str) -> None:
        """See Storage."""
        self.tick("remove", path)
        self._storage.remove(path)


class _FaultyFile:
    def __init__(self, file: BinaryIO, path: str, storage: FaultyStorage) -> None:
        self._file, self._path, self._storage = file, path, storage

    def read(self, size: int = -1) -> bytes:
        """See Storage."""
        self._storage.tick("read", self._path)
        return self._file.read(size)

    def readinto(self, buffer: Any) -> int:
        """See Storage."""
        self._storage.tick("read", self._path)
        return int(self._file.readinto(buffer))  # type: ignore[attr-defined]

    def seek(self, offset: int) -> int:
        """See Storage."""
        return self._file.seek(offset)

    def write(self, data: Any) -> int:
        """See Storage."""
        self._storage.tick("write", self._path)
        return self._file.write(data)


class _File:
    def __init__(self) -> None:
        self.seen = b""
        self.kept = b""


class _Folder:
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        self.changes: list[tuple[str | None, str | None, Any]] = []
        """Removed name, added name and its node, for each change since the last sync."""

    def change(self, gone: str | None, come: str | None, node: Any) -> None:
        _apply(self.seen, gone, come, node)
        self.changes.append((gone, come, node))


class LossyDisk(Storage):
    """An in-memory disk that keeps only synced data on a power loss: bytes of files, entries of folders.

    As on file systems, none, all or any unsynced changes of a folder's entries survive ``lose_power``, and any prefix
    of unsynced bytes. Renaming is one change. Removing a folder removes its files one by one.

    Attributes:
        moment: number of the operation during which power is lost, counted from 0; None for never.
    """

    renames = True

    def __init__(self) -> None:
        self.where = "disk"
        self.root = _Folder()
        self.moment: int | None = None
        self.operations = 0

    def tick(self) -> None:
        """Count an operation, and fail if it is its turn."""
        if self.moment is not None and self.operations >= self.moment:
            raise PowerLoss
        self.operations += 1

    def lose_power(self, keeps: str, seed: int) -> "LossyDisk":
        """Return the disk after a power loss.

        Args:
            keeps: surviving part of the unsynced changes: ``none``, ``all`` or ``any``.
            seed: seed of the random choice.
        """
        draw = random.Random(seed)
        fresh = LossyDisk()
        fresh.root = _survivor(self.root, keeps, draw)
        return fresh

    def copy(self) -> "LossyDisk":
        """The same disk again."""
        return copy.deepcopy(self)

    def names(self, folder: str = "") -> list[str]:
        """See Storage."""
        node = self._find(folder)
        return sorted(node.seen) if isinstance(node, _Folder) else []

    def exists(self, path: str) -> bool:
        """See Storage."""
        return self._find(path) is not None

    def size(self, path: str) -> int:
        """See Storage."""
        return len(self._file(path).seen)

    def reading(self, path: str) -> AbstractContextManager[BinaryIO]:
        """See Storage."""
        return io.BytesIO(self._file(path).seen)

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """See Storage."""
        self.tick()
        folder, name = self._parent(path)
        file = folder.seen.get(name)
        if file is None:
            file = _File()
            folder.change(None, name, file)
        file.seen = b""
        yield cast(BinaryIO, _LossyWriter(file, self))
        self.tick()
        file.kept = file.seen

    def make(self, folder: str) -> None:
        """See Storage."""
        self.tick()
        node = self.root
        for part in folder.split("/") if folder else []:
            if part not in node.seen:
                node.change(None, part, _Folder())
            node = node.seen[part]

    def sync(self, folder: str) -> None:
        """See Storage."""
        self.tick()
        node = self._find(folder)
        assert isinstance(node, _Folder)
        node.kept = dict(node.seen)
        node.changes = []

    def rename(self, old: str, new: str) -> None:
        """See Storage."""
        self.tick()
        folder, gone = self._parent(old)
        other, come = self._parent(new)
        assert folder is other, "only within a folder"
        present = folder.seen.get(come)
        if isinstance(present, _Folder) and present.seen:
            raise OSError(39, "Directory not empty")
        folder.change(gone, come, folder.seen[gone])

    def remove(self, path: str) -> None:
        """See Storage."""
        node = self._find(path)
        if isinstance(node, _Folder):
            for name in list(node.seen):
                self.remove(f"{path}/{name}")
        self.tick()
        if node is not None:
            folder, name = self._parent(path)
            folder.change(name, None, None)

    def _find(self, path: str) -> Any:
        node: Any = self.root
        for part in path.split("/") if path else []:
            node = node.seen.get(part) if isinstance(node, _Folder) else None
        return node

    def _file(self, path: str) -> _File:
        node = self._find(path)
        if not isinstance(node, _File):
            raise FileNotFoundError(2, "No such file or directory", path)
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rpartition("/")
        node = self._find(folder)
        if not isinstance(node, _Folder):
            raise FileNotFoundError(2, "No such file or directory", path)
        return node, name


class _LossyWriter:
    def __init__(self, file: _File, disk: LossyDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> int:
        """See Storage."""
        self._disk.tick()
        self._file.seen += bytes(data)
        return len(data)


def _apply(entries: dict[str, Any], gone: str | None, come: str | None, node: Any) -> None:
    if gone is not None:
        entries.pop(gone, None)
    if come is not None:
        entries[come] = node


def _survivor(node: Any, keeps: str, draw: random.Random) -> Any:
    if isinstance(node, _File):
        file = _File()
        unsynced = node.seen if keeps == "all" else node.seen[: draw.randrange(len(node.seen) + 1)]
        file.kept = file.seen = node.kept if keeps == "none" or draw.random() < 0.3 else unsynced
        if node.kept == node.seen:
            file.kept = file.seen = node.kept
        return file
    folder = _Folder()
    entries = dict(node.kept)
    for change in node.changes:
        if keeps == "all" or (keeps == "any" and draw.random() < 0.5):
            _apply(entries, *change)
    folder.kept = {name: _survivor(entry, keeps, draw) for name, entry in entries.items()}
    folder.seen = dict(folder.kept)
    return folder


def tree(folder: Path) -> list[str]:
    """Paths of all files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
