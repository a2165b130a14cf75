"""Files are replaced atomically, locked by their writers, and opened only if they are regular."""

import os
import resource
import socket
from pathlib import Path

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.file_lock import (
    HeldError,
    hold_lock,
    is_held,
    lock_file,
    lock_folder,
    unlock_file,
)
from fsdptoys.utils.regular_file import NotRegularFileError, open_regular, read_regular


@pytest.mark.parametrize("where", ["file", ".file.{pid}.part"])
def test_symbolic_link_is_replaced_and_its_target_kept(
    where: str, tmp_path: Path
) -> None:
    """Oracle: the content of both files, and the names in the folder."""
    target = tmp_path / "target"
    folder = tmp_path / "folder"
    target.write_text("precious")
    folder.mkdir()
    (folder / where.format(pid=os.getpid())).symlink_to(target)
    write_atomically(folder / "file", "new\n", sync=True)
    assert (folder / "file").read_bytes() == b"new\n" and not (
        folder / "file"
    ).is_symlink()
    assert target.read_text() == "precious"
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    """Oracle: a limit on the size of files, which fails as a full disk does, and text that UTF-8
    does not have."""
    path = tmp_path / "file"
    write_atomically(path, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_atomically(path, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\udc80")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_lock_has_one_holder(tmp_path: Path) -> None:
    """Oracle: this process's id in the lock file, and a refused second holder, of a file and of its
    folder."""
    path = tmp_path / "lock"
    descriptor = lock_file(path)
    folder = lock_folder(tmp_path)
    assert folder is not None and is_held(path) and is_held(tmp_path)
    with pytest.raises(HeldError) as error:
        lock_file(path)
    assert error.value.holder == str(os.getpid())
    with pytest.raises(HeldError):
        lock_folder(tmp_path)
    unlock_file(path, descriptor)
    os.close(folder)
    assert not path.exists() and not is_held(path) and not is_held(tmp_path)


def test_lock_file_of_prepared_data_must_be_regular(tmp_path: Path) -> None:
    """Oracle: the expected message, and the file that the link leads to."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "lock").symlink_to("precious")
    with (
        pytest.raises(ConfigError) as caught,
        hold_lock(tmp_path / "lock", "data.cache=x", None),
    ):
        raise AssertionError
    assert str(caught.value) == (
        f"data.cache=x is locked by a file, and {tmp_path}/lock is a symbolic link and not a "
        "regular file; remove it"
    )
    assert (tmp_path / "precious").read_text() == "precious"


def make_entry(path: Path, kind: str) -> None:
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "a symbolic link":
        (path.parent / "precious").write_text("precious")
        path.symlink_to("precious")
    elif kind == "a dangling link":
        path.symlink_to("elsewhere")


@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a device", "a socket"])
def test_irregular_files_are_not_read(kind: str, tmp_path: Path) -> None:
    """Oracle: the kind in the message, without blocking; ``open`` waits forever for a pipe, and a
    device has no end."""
    make_entry(tmp_path / "file", kind)
    with pytest.raises(NotRegularFileError, match=kind):
        read_regular(tmp_path / "file", 100)


@pytest.mark.parametrize("mode", ["wb", "ab", "r+b", "xb"])
@pytest.mark.parametrize(
    "kind",
    [
        "a named pipe",
        "a folder",
        "a device",
        "a socket",
        "a symbolic link",
        "a dangling link",
    ],
)
def test_irregular_files_are_not_written(kind: str, mode: str, tmp_path: Path) -> None:
    """Oracle: an error, and the unchanged target of the link, which is not created."""
    make_entry(tmp_path / "file", kind)
    before = os.listdir(tmp_path)
    with pytest.raises(OSError) as caught:
        open_regular(tmp_path / "file", mode)
    assert isinstance(
        caught.value, FileExistsError if mode == "xb" else NotRegularFileError
    )
    assert os.listdir(tmp_path) == before
    if kind == "a symbolic link":
        assert (tmp_path / "precious").read_text() == "precious"


def test_links_are_followed_for_reading_and_in_folders(tmp_path: Path) -> None:
    """Oracle: the content; a run directory may link to another disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    with open_regular(tmp_path / "runs" / "log", "a", encoding="utf-8") as file:
        file.write("line")
    (tmp_path / "link").symlink_to("disk/log")
    assert read_regular(tmp_path / "link", 4) == b"line"
    with pytest.raises(ValueError, match="longer than 3 bytes"):
        read_regular(tmp_path / "link", 3)
