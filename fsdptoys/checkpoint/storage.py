"""Storage of checkpoints: a local folder or an fsspec URL (``s3://bucket/run``) behind one
interface.

A local folder is filled under a temporary name, synced to disk and renamed. Object stores have
neither folders nor renaming: a file appears when it is closed, and the caller's last file must mark
a folder as complete.

fsspec's own configuration sets credentials and endpoints (``FSSPEC_S3_ENDPOINT_URL``,
``~/.config/fsspec``). Listings are not cached. ``file://`` works, but is not synced to disk: use a
plain path instead.

Source: https://filesystem-spec.readthedocs.io
"""

import io
import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import sync_to_disk
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.sealed_folder import FileSum, RunningSum
from fsdptoys.utils.text import one_line

CONNECT_SECONDS = 4.0

PORTS = {"ftp": 21, "sftp": 22, "ssh": 22, "smb": 445}
"""URL scheme → default port, for file systems that connect in their constructor."""


class Storage(ABC):
    """A root folder for files. Paths are relative to it and separated by ``/``; ``""`` is the root
    itself.

    Every failure of the storage is an OSError; callers turn it into a message.
    """

    where: str  # the root's path or URL, for messages
    renames: bool  # whether folders can be renamed atomically

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names of a folder's files and folders; ``[]`` for a missing folder."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether a file or folder exists."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""

    def modified(self, path: str) -> float | None:
        """Return when a file was written, in seconds since 1970; None if the storage does not
        report it."""
        return None

    @abstractmethod
    def reading(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Open a seekable file for reading."""

    @abstractmethod
    def writing(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Create or overwrite a file in an existing folder; durable once the block ends without an
        error."""

    @abstractmethod
    def make(self, folder: str) -> None:
        """Make a folder and its parents, if the storage has folders."""

    @abstractmethod
    def sync(self, folder: str) -> None:
        """Sync a folder's entries to disk after files in it are created, renamed or removed."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder atomically; a file replaces another. Requires ``renames``."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content; no error if it does not exist."""

    def move(self, old: str, new: str) -> None:
        """Move a folder to a free name, by renaming it or by copying and removing its files."""
        self.rename(old, new)
        self.sync("")


def open_storage(where: str) -> Storage:
    """Return the storage of a path or URL, without creating anything; ConfigError if there is no
    way to reach it."""
    if where.startswith("://"):
        raise ConfigError(
            f"{where} is a URL without a kind; name a local folder, or a URL such as "
            "s3://bucket/folder"
        )
    return UrlStorage(where) if "://" in where else LocalStorage(where)


def read_bytes(file: BinaryIO, size: int) -> bytes:
    """Read ``size`` bytes or to the end; a single read of an unbuffered file may return fewer."""
    content = b""
    while len(content) < size and (block := file.read(size - len(content))):
        content += block
    return content


def write_file(storage: Storage, path: str, pieces: Iterable[Any]) -> FileSum:
    """Write a file piece by piece; return its size and SHA-256.

    The sum is of the bytes that were to be written, so it also detects damage on the way to the
    disk.
    """
    total = RunningSum()
    with storage.writing(path) as file:
        for piece in pieces:
            file.write(piece)
            total.update(piece)
    return total.result()


class LocalStorage(Storage):
    """A folder of the local file system, which need not exist yet; ``~`` is the home directory."""

    renames = True

    def __init__(self, where: str) -> None:
        path = Path(where).expanduser()
        self.where = str(path)
        self._root = path.absolute()

    def names(self, folder: str = "") -> list[str]:
        """See Storage."""
        try:
            return sorted(os.listdir(self._resolve(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: str) -> bool:
        """See Storage."""
        try:
            self._resolve(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def size(self, path: str) -> int:
        """See Storage."""
        return self._resolve(path).stat().st_size

    def modified(self, path: str) -> float:
        """See Storage."""
        return self._resolve(path).stat().st_mtime

    def reading(self, path: str) -> AbstractContextManager[BinaryIO]:
        """See Storage. Unbuffered, so that large reads are not copied and small ones read no extra
        bytes."""
        return cast(BinaryIO, open_regular(self._resolve(path), "rb", buffering=0))

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """See Storage."""
        target = self._resolve(path)
        try:
            with open_regular(target, "wb") as file:
                yield cast(BinaryIO, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # Only errors of open() include the file name.
            if error.errno is not None and error.filename is None:
                error.filename = str(target)
            raise

    def make(self, folder: str) -> None:
        """See Storage."""
        target = self._resolve(folder)
        missing = [
            path for path in (target, *target.absolute().parents) if not path.exists()
        ]
        target.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_to_disk(path.absolute().parent)

    def sync(self, folder: str) -> None:
        """See Storage."""
        sync_to_disk(self._resolve(folder))

    def rename(self, old: str, new: str) -> None:
        """See Storage."""
        os.replace(self._resolve(old), self._resolve(new))

    def remove(self, path: str) -> None:
        """See Storage. Removes a symbolic link, not its target."""
        target = self._resolve(path)
        with suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()

    def _resolve(self, path: str) -> Path:
        return self._root / _checked(path)


class UrlStorage(Storage):
    """A folder, or a prefix of object names, at an fsspec URL as ``s3://bucket/folder``; errors as
    ``open_storage``."""

    renames = False

    def __init__(self, where: str) -> None:
        # A slow import, unnecessary for local folders.
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.where = where.rstrip("/")
        try:
            parts = urlsplit(where)
            # These constructors would wait much longer for a server
            if parts.scheme in PORTS and parts.hostname:
                address = parts.hostname, parts.port or PORTS[parts.scheme]
                socket.create_connection(address, CONNECT_SECONDS).close()
            self._files, self._root = url_to_fs(where, use_listings_cache=False)
        except ImportError as error:
            raise ConfigError(
                f"{where} needs a Python package that is not installed ({error}); install it, or "
                "set checkpoint.folder and checkpoint.resume to local folders"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"{where} is of a kind unknown to fsspec ({error}); name a local folder, or a "
                "URL such as s3://bucket/folder"
            ) from error
        except Exception as error:
            # Some file systems connect in their constructor and raise their own errors
            reason = (
                error.strerror
                if isinstance(error, OSError) and error.strerror
                else error
            )
            raise ConfigError(
                f"{where} cannot be reached ({one_line(reason) or type(error).__name__}); start "
                "its server, or set checkpoint.folder and checkpoint.resume to places that can be"
            ) from error

    def names(self, folder: str = "") -> list[str]:
        """See Storage."""
        target = self._resolve(folder)
        with _os_errors():
            try:
                paths = self._files.ls(target, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        # Object stores may keep an empty object under the folder's name, and list a file as its own
        # content.
        inner = [
            path.rstrip("/") for path in paths if path.strip("/") != target.strip("/")
        ]
        return sorted({path.rsplit("/", 1)[-1] for path in inner})

    def exists(self, path: str) -> bool:
        """See Storage."""
        # fsspec's exists() returns False for an unreachable server.
        try:
            with _os_errors():
                self._files.info(self._resolve(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def size(self, path: str) -> int:
        """See Storage."""
        with _os_errors():
            return int(self._files.info(self._resolve(path))["size"])

    def modified(self, path: str) -> float | None:
        """See Storage."""
        with suppress(OSError), _os_errors():
            return float(self._files.modified(self._resolve(path)).timestamp())
        return None

    def reading(self, path: str) -> AbstractContextManager[BinaryIO]:
        """See Storage."""
        with _os_errors():
            return cast(BinaryIO, _UrlFile(self._files.open(self._resolve(path), "rb")))

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """See Storage. After an error a partial upload may remain; the caller removes it."""
        with _os_errors():
            file: Any = _UrlFile(self._files.open(self._resolve(path), "wb"))
        try:
            yield file
        except BaseException:
            with suppress(Exception):
                file.close()
            raise
        file.close()

    def make(self, folder: str) -> None:
        """See Storage."""
        with _os_errors():
            self._files.makedirs(self._resolve(folder), exist_ok=True)

    def sync(self, folder: str) -> None:
        """See Storage. Does nothing: closed files are assumed durable."""

    def rename(self, old: str, new: str) -> None:
        """Not supported."""
        raise AssertionError(f"{self.where} renames nothing")

    def remove(self, path: str) -> None:
        """See Storage."""
        with _os_errors(), suppress(FileNotFoundError):
            self._files.rm(self._resolve(path), recursive=True)

    def move(self, old: str, new: str) -> None:
        """See Storage."""
        source = self._resolve(old)
        target = self._resolve(new)
        with _os_errors():
            try:
                for path in self._files.find(source):
                    copy = target + path[len(source) :]
                    self._files.makedirs(copy.rpartition("/")[0], exist_ok=True)
                    self._files.cp_file(path, copy)
                    if self._files.info(copy)["size"] != self._files.info(path)["size"]:
                        raise OSError(f"{copy} differs in length from its source")
            except Exception:
                with suppress(Exception):
                    self._files.rm(target, recursive=True)
                raise
            self._files.rm(source, recursive=True)

    def _resolve(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{_checked(path)}".rstrip("/") or "/"


class _UrlFile(io.RawIOBase):
    """Wraps an fsspec file; every failure is an OSError."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        with _os_errors():
            return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any, /) -> int:
        with _os_errors():
            return int(self._file.readinto(buffer))

    def write(self, data: Any, /) -> int:
        with _os_errors():
            self._file.write(data)
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            try:
                with _os_errors():
                    self._file.close()
            finally:
                super().close()


@contextmanager
def _os_errors() -> Iterator[None]:
    """Convert errors to OSError: services raise classes of their own, from optional packages."""
    try:
        yield
    except (OSError, AssertionError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _checked(path: str) -> str:
    parts = path.split("/") if path else []
    assert not {"", ".", ".."} & set(parts), f"{path!r} is no path within a place"
    return path
