"""Storages that fail at a chosen operation: by a kill, an OSError or a power loss."""

# ruff: noqa: D102  # the operations are those of Storage
import io
import itertools
import math
import multiprocessing
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, BinaryIO, cast

import pytest

from fsdptoys.checkpoint.storage import Storage

Half = Callable[[], object]
Watch = Callable[[str, str, Half], None]

CHANGING = ("writing", "write", "close", "make", "sync", "rename", "move", "remove")


class PowerLoss(BaseException):
    """Power is lost; later operations have no effect."""


class WatchedStorage:
    """A storage that calls ``watch(operation, path, half)`` before every operation, also of its
    open files.

    ``half`` does half of the operation: writes half of the bytes, or removes half of the files of a
    folder.
    """

    def __init__(self, storage: Storage, watch: Watch) -> None:
        self._storage = storage
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        if name in ("reading", "writing"):
            return partial(self._open, name)

        def operate(path: str = "", *others: str) -> Any:
            try:
                self._watch(name, path, partial(self._do_half, name, path))
            except FileNotFoundError:
                if name != "exists":
                    raise
                return False
            return method(path, *others)

        return operate if callable(method) else method

    @contextmanager
    def _open(self, operation: str, path: str) -> Iterator[BinaryIO]:
        self._watch(operation, path, bool)
        with getattr(self._storage, operation)(path) as file:
            yield cast(BinaryIO, _WatchedFile(file, path, self._watch))
            if operation == "writing":
                self._watch("close", path, bool)

    def _do_half(self, operation: str, path: str) -> None:
        if operation == "remove":
            for name in self._storage.names(path)[::2]:
                self._storage.remove(f"{path}/{name}")


class _WatchedFile:
    def __init__(self, file: BinaryIO, path: str, watch: Watch) -> None:
        self._file = file
        self._path = path
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._file, name)
        operation = {"read": "read", "readinto": "read", "write": "write"}.get(name)

        def operate(data: Any = -1) -> Any:
            self._watch(operation, self._path, partial(self._write_half, data))
            return method(data)

        return operate if operation else method

    def _write_half(self, data: Any) -> None:
        self._file.write(memoryview(data)[: len(data) // 2])
        self._file.flush()


def ending_storage(
    storage: Storage, moment: int, end: Callable[[], object]
) -> WatchedStorage:
    """Return a storage that calls ``end`` halfway through its change number ``moment``, counted
    from 0."""
    moments = itertools.count()

    def watch(operation: str, path: str, half: Half) -> None:
        if operation in CHANGING and next(moments) >= moment:
            half()
            end()

    return WatchedStorage(storage, watch)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyStorage(WatchedStorage):
    """A storage that fails with the error ``code`` in its operation ``moment``, counted from 0.

    If ``lasting``, all later operations on the same path fail too.
    """

    def __init__(self, storage: Storage, code: int, moment: int, lasting: bool) -> None:
        super().__init__(storage, self._fail)
        self.operations: list[str] = []
        """All requested operations."""
        self.refused: str | None = None
        self._code = code
        self._moment = moment
        self._lasting = lasting
        self._path: str | None = None

    def _fail(self, operation: str, path: str, half: Half) -> None:
        is_first = len(self.operations) == self._moment
        self.operations.append(f"{operation} {path}")
        if is_first:
            self._path = path
            self.refused = self.operations[-1]
        if is_first or (self._lasting and self._path == path):
            raise OSError(self._code, os.strerror(self._code), path)


def in_child(function: Callable[..., object], *args: Any) -> int | None:
    """Run in a forked process and return its exit status."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    process.join()
    return process.exitcode


@contextmanager
def refusing(
    owner: Any, operation: str, pattern: str, code: int, times: float = math.inf
) -> Iterator[None]:
    """Let an operation of a storage, or of a class of storages, fail on paths that match, ``times``
    times.

    A file that is refused in ``writing`` has been written; its close fails.
    """
    original = getattr(owner, operation)
    refusals = itertools.count(1)

    @contextmanager
    def fail_at_close(*args: Any) -> Iterator[BinaryIO]:
        with original(*args) as file:
            yield file
            raise OSError(code, os.strerror(code))

    def operate(*args: Any) -> Any:
        if not re.search(pattern, args[-1]) or next(refusals) > times:
            return original(*args)
        if operation == "writing":
            return fail_at_close(*args)
        raise OSError(code, os.strerror(code), args[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, operation, operate)
        yield


class _File:
    def __init__(self, synced: bytes = b"") -> None:
        self.buffer = io.BytesIO(synced)
        self.durable = synced

    @property
    def current(self) -> bytes:
        return self.buffer.getvalue()


class _Folder:
    def __init__(self) -> None:
        self.current: dict[str, Any] = {}
        self.durable: dict[str, Any] = {}
        self.changes: list[tuple[str | None, str | None, Any]] = []
        """Removed name, added name and its node, for each change since the last sync."""

    def change(self, gone: str | None, come: str | None, node: Any) -> None:
        _apply(self.current, gone, come, node)
        self.changes.append((gone, come, node))


class LossyDisk(Storage):
    """An in-memory disk that keeps only synced data on a power loss: bytes of files, entries of
    folders.

    As on file systems, none, all or any unsynced changes of a folder's entries survive, and any
    prefix of unsynced bytes. Renaming is one change.
    """

    renames = True
    where = "disk"

    def __init__(self, root: _Folder | None = None) -> None:
        self.root = root or _Folder()

    def after_power_loss(self, keeps: str, seed: int) -> "LossyDisk":
        """Return the disk after a power loss, which keeps ``none``, ``all`` or ``any`` of the
        unsynced changes."""
        return LossyDisk(_survivor(self.root, keeps, random.Random(seed)))

    def names(self, folder: str = "") -> list[str]:
        node = self._find(folder)
        return sorted(node.current) if isinstance(node, _Folder) else []

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def size(self, path: str) -> int:
        return len(self._find(path, _File).current)

    def reading(self, path: str) -> AbstractContextManager[BinaryIO]:
        return io.BytesIO(self._find(path, _File).current)

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        folder, name = self._parent(path)
        if name not in folder.current:
            folder.change(None, name, _File())
        file = folder.current[name]
        file.buffer = io.BytesIO()
        yield file.buffer
        file.durable = file.current

    def make(self, folder: str) -> None:
        node = self.root
        for part in folder.split("/") if folder else []:
            if part not in node.current:
                node.change(None, part, _Folder())
            node = node.current[part]

    def sync(self, folder: str) -> None:
        node = self._find(folder, _Folder)
        node.durable = dict(node.current)
        node.changes = []

    def rename(self, old: str, new: str) -> None:
        folder, gone = self._parent(old)
        other, come = self._parent(new)
        assert folder is other, "only within a folder"
        present = folder.current.get(come)
        if isinstance(present, _Folder) and present.current:
            raise OSError(39, "Directory not empty")
        folder.change(gone, come, folder.current[gone])

    def remove(self, path: str) -> None:
        node = self._find(path)
        if isinstance(node, _Folder):
            for name in list(node.current):
                self.remove(f"{path}/{name}")
        if node is not None:
            folder, name = self._parent(path)
            folder.change(name, None, None)

    def _find(self, path: str, kind: type | None = None) -> Any:
        """Return the node of a path, or None; a FileNotFoundError if it must be of one kind."""
        node: Any = self.root
        for part in path.split("/") if path else []:
            node = node.current.get(part) if isinstance(node, _Folder) else None
        if kind is not None and not isinstance(node, kind):
            raise FileNotFoundError(2, "No such file or directory", path)
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rpartition("/")
        return self._find(folder, _Folder), name


def _apply(
    entries: dict[str, Any], gone: str | None, come: str | None, node: Any
) -> None:
    if gone is not None:
        entries.pop(gone, None)
    if come is not None:
        entries[come] = node


def _survivor(node: Any, keeps: str, draw: random.Random) -> Any:
    if isinstance(node, _File):
        if (
            keeps == "none"
            or (keeps == "any" and draw.random() < 0.3)
            or node.durable == node.current
        ):
            return _File(node.durable)
        return _File(
            node.current
            if keeps == "all"
            else node.current[: draw.randrange(len(node.current) + 1)]
        )
    entries = dict(node.durable)
    for change in node.changes:
        if keeps == "all" or (keeps == "any" and draw.random() < 0.5):
            _apply(entries, *change)
    folder = _Folder()
    folder.durable = {
        name: _survivor(entry, keeps, draw) for name, entry in entries.items()
    }
    folder.current = dict(folder.durable)
    return folder
