"""Local folders and fsspec URLs behave the same."""

import builtins
import importlib
import os
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.checkpoint import storage as storage_module
from fsdptoys.checkpoint.storage import Storage, open_storage
from fsdptoys.errors import ConfigError

KINDS = ("path", "file", "memory")


def make_storage(kind: str, folder: Path) -> Storage:
    where = {
        "path": f"{folder}/a/b",
        "file": f"file://{folder}/a/b",
        "memory": f"memory:/{folder}/a/b",
    }
    return open_storage(where[kind])


def write(storage: Storage, path: str, content: bytes = b"0123456789") -> None:
    with storage.writing(path) as file:
        file.write(content)


@pytest.mark.parametrize("kind", KINDS)
def test_operations_follow_the_storage_interface(kind: str, tmp_path: Path) -> None:
    """Oracle: a table of created, overwritten and removed files."""
    storage = make_storage(kind, tmp_path)
    assert (
        storage.names() == []
        and storage.names("gone/deep") == []
        and not storage.exists("gone")
    )
    storage.remove("gone/deep")
    storage.make("step-1/inner")
    storage.make("step-1/inner")
    write(storage, "step-1/b", b"older and longer")
    write(storage, "step-1/b")
    write(storage, "step-1/inner/a")
    write(storage, "step-10", b"")
    storage.sync("")
    storage.sync("step-1")
    assert storage.names() == ["step-1", "step-10"] and storage.names("step-1") == [
        "b",
        "inner",
    ]
    assert storage.names("step-1/b") == []
    assert (
        storage.exists("step-1")
        and storage.exists("step-1/b")
        and not storage.exists("step-1/b/c")
    )
    assert (storage.size("step-1/b"), storage.size("step-10")) == (10, 0)
    with storage.reading("step-1/b") as file:
        file.seek(7)
        buffer = bytearray(5)
        assert file.readinto(buffer) == 3 and buffer == b"789\0\0"  # type: ignore[attr-defined]
        file.seek(0)
        assert file.read() == b"0123456789"
    with pytest.raises(FileNotFoundError):
        storage.reading("step-1/c")
    with pytest.raises(FileNotFoundError):
        storage.size("step-1/c")
    storage.remove("step-1")
    storage.remove("step-1")
    assert storage.names() == ["step-10"] and not storage.exists("step-1/inner/a")
    assert open_storage(storage.where).names() == ["step-10"]


def test_local_rename_replaces_files_and_remove_does_not_follow_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the file system; ``~`` as in a shell."""
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    storage = open_storage(f"~/{tmp_path.name}")
    (tmp_path / "aim").mkdir()
    (tmp_path / "aim" / "kept").touch()
    (tmp_path / "link").symlink_to("aim")
    storage.make("new")
    write(storage, "new/a")
    storage.rename("new", "old")
    write(storage, "latest", b"1")
    write(storage, "latest.new", b"2")
    storage.rename("latest.new", "latest")
    storage.remove("link")
    assert storage.renames and storage.names() == ["aim", "latest", "old"]
    assert (tmp_path / "old" / "a").read_bytes() == b"0123456789" and (
        tmp_path / "latest"
    ).read_bytes() == b"2"
    assert (tmp_path / "aim" / "kept").exists()


def test_local_files_are_synced_unless_the_write_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the calls of fsync and the file's size at each."""
    synced: list[int] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size)
    )
    storage = open_storage(str(tmp_path))
    with storage.writing("a") as file:
        file.write(b"abc")
        assert synced == []
    assert synced == [3]
    with pytest.raises(KeyError), storage.writing("b") as file:
        raise KeyError
    assert synced == [3]


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "link to a file": lambda planted, precious: planted.symlink_to(precious),
    "link to nothing": lambda planted, precious: planted.symlink_to(
        precious.with_name("nothing")
    ),
    "pipe": lambda planted, precious: os.mkfifo(planted),
    "folder": lambda planted, precious: planted.mkdir(),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_only_regular_files_are_written(kind: str, tmp_path: Path) -> None:
    """Oracle: the error, which names the path and survives pickling; the target of a link is
    unchanged."""
    (tmp_path / "precious").write_bytes(b"own")
    PLANTED[kind](tmp_path / "planted", tmp_path / "precious")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="not a regular file") as caught:
        write(open_storage(str(tmp_path)), "planted")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert (
        sorted(tmp_path.iterdir()) == before
        and (tmp_path / "precious").read_bytes() == b"own"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_moved_folder_keeps_every_byte(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the written bytes; if copying fails, all stay in their old place."""
    storage = make_storage(kind, tmp_path)
    storage.make("old/inner")
    write(storage, "old/a")
    write(storage, "old/inner/b", b"inner")
    if kind != "path":
        files: Any = storage._files  # type: ignore[attr-defined]
        original = files.cp_file
        copies = []

        def fail(source: str, target: str, **options: Any) -> None:
            if copies:
                raise ServiceError("503")
            copies.append(original(source, target, **options))

        with monkeypatch.context() as patched:
            patched.setattr(files, "cp_file", fail)
            with pytest.raises(OSError, match="503"):
                storage.move("old", "new")
        assert storage.names() == ["old"] and storage.names("old") == ["a", "inner"]
    storage.move("old", "new")
    assert storage.names() == ["new"] and storage.names("new") == ["a", "inner"]
    for path, content in (("new/a", b"0123456789"), ("new/inner/b", b"inner")):
        with storage.reading(path) as file:
            assert file.read() == content


def test_unreachable_server_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the message, for a port without a listener and for one with a full queue, which drops
    all packets."""
    monkeypatch.setattr(storage_module, "CONNECT_SECONDS", 0.3)
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        where = f"ftp://127.0.0.1:{server.getsockname()[1]}/x"
        with pytest.raises(
            ConfigError,
            match=f"^{where} cannot be reached \\(Connection refused\\); start its server",
        ):
            open_storage(where)
        server.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        with pytest.raises(
            ConfigError,
            match=r"cannot be reached \(timed out\); start its server, or set",
        ):
            open_storage(where)


@pytest.mark.parametrize("where", ["://", "://x", "ftp://host:port/x"])
def test_invalid_url_is_refused(where: str) -> None:
    """Oracle: the message quotes it and gives an example."""
    with pytest.raises(
        ConfigError, match=f"^{where} is .* such as s3://bucket/folder$"
    ):
        open_storage(where)


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b", "a//b", "."])
@pytest.mark.parametrize("kind", KINDS)
def test_paths_outside_the_storage_are_rejected(
    kind: str, path: str, tmp_path: Path
) -> None:
    """Oracle: an AssertionError from every operation."""
    storage = make_storage(kind, tmp_path)
    for operation in (
        storage.names,
        storage.exists,
        storage.size,
        storage.reading,
        storage.remove,
        storage.make,
    ):
        with pytest.raises(AssertionError):
            operation(path)


def test_unknown_url_scheme_or_missing_package_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """s3fs is hidden, whether or not it is installed here."""
    with pytest.raises(ConfigError, match=r"nonsense://x .*nonsense"):
        open_storage("nonsense://x")
    real = importlib.import_module

    def hide(name: str, *args: Any) -> Any:
        if name.split(".")[0] == "s3fs":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.delitem(sys.modules, "s3fs", raising=False)
    monkeypatch.setattr(importlib, "import_module", hide)
    registry = real("fsspec.registry")
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    with pytest.raises(ConfigError, match=r"s3://bucket/x needs .*s3fs.*install it"):
        open_storage("s3://bucket/x")


class ServiceError(Exception):
    """Error of an optional package."""


@pytest.mark.parametrize("when", ["open", "write", "close", "ls", "info"])
def test_service_errors_become_os_errors(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers need one except clause only; an unreachable place does not count as empty."""
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

    storage = make_storage("memory", tmp_path)
    storage.make("")

    def fail(*_: Any, **__: Any) -> None:
        raise ServiceError("403")

    owner: Any = MemoryFile if when in ("write", "close") else MemoryFileSystem
    monkeypatch.setattr(owner, when, fail)
    with pytest.raises(OSError, match="ServiceError: 403"):
        if when == "ls":
            storage.names()
        elif when == "info":
            storage.exists("a")
        else:
            write(storage, "a")


def test_directory_listings_bypass_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a file system that caches listings in fsspec's own cache, as cloud file systems
    do."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Remembering(MemoryFileSystem):  # type: ignore[misc]
        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(
                super()._strip_protocol(path.replace("remembering://", "memory://"))
            )

        def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
            entries = (
                self.dircache[path]
                if path in self.dircache
                else super().ls(path, detail=True)
            )
            self.dircache[path] = entries
            return entries if detail else [entry["name"] for entry in entries]

    monkeypatch.setitem(
        importlib.import_module("fsspec.registry")._registry, "remembering", Remembering
    )
    root = str(tmp_path)
    storage = open_storage(f"remembering:/{root}")
    other = open_storage(f"memory:/{root}")
    other.make("")
    assert storage.names() == []
    write(other, "a")
    assert storage.names() == ["a"]


def test_local_folder_does_not_import_fsspec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import of fsspec is slow and unnecessary for local runs."""
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        assert not name.startswith("fsspec")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    storage = open_storage(str(tmp_path))
    write(storage, "a")
    assert (tmp_path / "a").read_bytes() == b"0123456789"
