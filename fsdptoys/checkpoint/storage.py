"""Where checkpoints lie: a local folder, or a URL that fsspec knows (``s3://bucket/run``), behind a few operations.

The two differ in how something comes into being as a whole. A local folder is filled under another name, handed to the
disk and renamed. Object stores have neither folders nor renaming; a file is there as a whole once it is closed, and the
caller's own last file has to say that a folder is complete. ``Storage.renames`` tells which of the two holds.

Credentials, endpoints and other options of a URL are those of fsspec's own configuration: environment variables such as
``FSSPEC_S3_ENDPOINT_URL``, or ``~/.config/fsspec``. Listings are never taken from a cache, since other processes write
at the same place. ``file://`` works, but closing a file there does not hand it to the disk: name a plain path instead.

Source: https://filesystem-spec.readthedocs.io
"""

import io
import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from fsdptoys.errors import ConfigError
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.text import one_line

CONNECT_SECONDS = 4.0

PORTS = {"ftp": 21, "sftp": 22, "ssh": 22, "smb": 445}
"""Scheme of a URL whose file system connects as soon as fsspec constructs it → the server's usual port."""


class Storage(ABC):
    """A place for files. All paths are relative to it, with ``/`` between their parts; ``""`` is the place itself.

    Every failure of the place itself is an OSError; the caller puts it into a sentence.

    Attributes:
        where: the place, for messages.
        renames: whether folders can be renamed, and are there as a whole or not at all for it.
    """

    where: str
    renames: bool

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Names of a folder's files and folders, sorted; none where there is no such folder."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file."""

    @abstractmethod
    def reading(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Open a file that can be read from any place of it."""

    @abstractmethod
    def writing(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file, in a folder that was made, or one to write over; it lasts once the block has ended well."""

    @abstractmethod
    def make(self, folder: str) -> None:
        """Make a folder and those above it, where there are folders."""

    @abstractmethod
    def sync(self, folder: str) -> None:
        """Hand a folder's own entries to the disk, after files in it were made, renamed or removed."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder in one go; a file takes the place of another. Only where ``renames`` holds."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing happens if it is gone already."""

    def move(self, old: str, new: str) -> None:
        """Give a folder a name that is free: by renaming, or else by copying its files before they are removed."""
        self.rename(old, new)
        self.sync("")


def open_storage(where: str) -> Storage:
    """The place that a path or a URL names. Nothing is made there yet.

    Raises:
        ConfigError: if the URL is of a kind that is unknown, needs a package that is not installed, or names a server
            that does not answer.
    """
    if where.startswith("://"):
        raise ConfigError(f"{where} is a URL without a kind; name a local folder, or a URL such as s3://bucket/folder")
    return UrlStorage(where) if "://" in where else LocalStorage(where)


def hand_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Some network file systems refuse this for folders.
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


class LocalStorage(Storage):
    """A folder of this machine's file system; it need not be there yet.

    Args:
        where: its path; ``~`` stands for the home folder.
    """

    renames = True

    def __init__(self, where: str) -> None:
        path = Path(where).expanduser()
        self.where = str(path)
        self._root = path.absolute()

    def names(self, folder: str = "") -> list[str]:
        """See Storage."""
        try:
            return sorted(os.listdir(self._place(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: str) -> bool:
        """See Storage."""
        try:
            self._place(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def size(self, path: str) -> int:
        """See Storage."""
        return self._place(path).stat().st_size

    def reading(self, path: str) -> AbstractContextManager[BinaryIO]:
        """See Storage. Unbuffered, so that large reads are not copied and small ones read no more than asked for."""
        file: Any = open_regular(self._place(path), "rb", buffering=0)
        return file

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """See Storage."""
        place = self._place(path)
        try:
            with open_regular(place, "wb") as file:
                yield cast(BinaryIO, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # Only opening names the file of itself.
            if error.errno is not None and error.filename is None:
                error.filename = str(place)
            raise

    def make(self, folder: str) -> None:
        """See Storage."""
        place = self._place(folder)
        made = [path for path in (place, *place.absolute().parents) if not path.exists()]
        place.mkdir(parents=True, exist_ok=True)
        for path in made:
            hand_to_disk(path.absolute().parent)

    def sync(self, folder: str) -> None:
        """See Storage."""
        hand_to_disk(self._place(folder))

    def rename(self, old: str, new: str) -> None:
        """See Storage."""
        os.replace(self._place(old), self._place(new))

    def remove(self, path: str) -> None:
        """See Storage. Of a symbolic link the link alone is removed."""
        place = self._place(path)
        with suppress(FileNotFoundError):
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink()

    def _place(self, path: str) -> Path:
        return self._root / _checked(path)


class UrlStorage(Storage):
    """A folder, or the common beginning of objects' names, at a URL that fsspec knows.

    Args:
        where: the URL, such as ``s3://bucket/folder``.

    Raises:
        ConfigError: as ``open_storage``.
    """

    renames = False

    def __init__(self, where: str) -> None:
        # A slow import that a local folder does without.
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self.where = where.rstrip("/")
        try:
            _check_answer(where)
            self._files, self._root = url_to_fs(where, use_listings_cache=False)
        except ImportError as error:
            raise ConfigError(
                f"{where} needs a Python package that is not there ({error}); install it, or set "
                "checkpoint.folder and checkpoint.resume to local folders"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"{where} is of no kind that fsspec knows ({error}); name a local folder, or a URL such as "
                "s3://bucket/folder"
            ) from error
        except Exception as error:  # some file systems connect when they are constructed, with errors of their own
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ConfigError(
                f"{where} cannot be reached ({one_line(reason) or type(error).__name__}); start its server, or set "
                "checkpoint.folder and checkpoint.resume to places that can be"
            ) from error

    def names(self, folder: str = "") -> list[str]:
        """See Storage."""
        place = self._place(folder)
        with _os_errors():
            try:
                paths = self._files.ls(place, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        # Object stores may keep an empty object in the folder's own name, and list a file as its own content.
        inner = [path.rstrip("/") for path in paths if path.strip("/") != place.strip("/")]
        return sorted({path.rsplit("/", 1)[-1] for path in inner})

    def exists(self, path: str) -> bool:
        """See Storage."""
        with _os_errors():
            # fsspec's own exists() takes a place that cannot be reached for one that is empty.
            try:
                self._files.info(self._place(path))
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def size(self, path: str) -> int:
        """See Storage."""
        with _os_errors():
            return int(self._files.info(self._place(path))["size"])

    def reading(self, path: str) -> AbstractContextManager[BinaryIO]:
        """See Storage."""
        with _os_errors():
            file: Any = _UrlFile(self._files.open(self._place(path), "rb"))
        return file

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """See Storage. What was uploaded before an error may stay, under this name, for the caller to remove."""
        with _os_errors():
            file: Any = _UrlFile(self._files.open(self._place(path), "wb"))
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
            self._files.makedirs(self._place(folder), exist_ok=True)

    def sync(self, folder: str) -> None:
        """See Storage. A file that was closed is there; nothing else is known."""

    def rename(self, old: str, new: str) -> None:
        """Not here."""
        raise AssertionError(f"{self.where} renames nothing")

    def remove(self, path: str) -> None:
        """See Storage."""
        with _os_errors(), suppress(FileNotFoundError):
            self._files.rm(self._place(path), recursive=True)

    def move(self, old: str, new: str) -> None:
        """See Storage."""
        source, target = self._place(old), self._place(new)
        with _os_errors():
            try:
                for path in self._files.find(source):
                    copy = target + path[len(source) :]
                    self._files.makedirs(copy.rpartition("/")[0], exist_ok=True)
                    self._files.cp_file(path, copy)
                    if self._files.info(copy)["size"] != self._files.info(path)["size"]:
                        raise OSError(f"{copy} is not as long as what it was copied from")
            except Exception:
                with suppress(Exception):
                    self._files.rm(target, recursive=True)
                raise
            self._files.rm(source, recursive=True)

    def _place(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{_checked(path)}".rstrip("/") or "/"


class _UrlFile(io.RawIOBase):
    """A service's file, whose every failure is an OSError."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return bool(self._file.readable())

    def writable(self) -> bool:
        return bool(self._file.writable())

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        with _os_errors():
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        with _os_errors():
            return int(self._file.tell())

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


def _check_answer(where: str) -> None:
    """Connect to the server of a URL, if its file system would connect in its constructor and wait there for long.

    Raises:
        OSError: if the server does not accept the connection within ``CONNECT_SECONDS``.
        ValueError: for a port that is none.
    """
    parts = urlsplit(where)
    if parts.scheme in PORTS and parts.hostname:
        socket.create_connection((parts.hostname, parts.port or PORTS[parts.scheme]), CONNECT_SECONDS).close()


@contextmanager
def _os_errors() -> Iterator[None]:
    """Services have error classes of their own, of packages that need not be here."""
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
