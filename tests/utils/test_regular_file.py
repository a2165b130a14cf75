"""Opening of regular files only."""

import os
import socket
from pathlib import Path

import pytest

from fsdptoys.utils.regular_file import NotRegularFileError, open_regular, read_regular

WRITES = ("wb", "ab", "r+b", "xb")


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


@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a device", "a socket"])
def test_irregular_files_are_not_read(kind: str, tmp_path: Path) -> None:
    """Oracle: the kind in the message, without blocking; ``open`` waits forever for a pipe, and a device has no end."""
    make_entry(tmp_path / "file", kind)
    with pytest.raises(NotRegularFileError, match=kind):
        read_regular(tmp_path / "file", 100)


@pytest.mark.parametrize("mode", WRITES)
@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a device", "a socket", "a symbolic link"])
def test_irregular_files_are_not_written(kind: str, mode: str, tmp_path: Path) -> None:
    """Oracle: an error, and the unchanged target of the link."""
    make_entry(tmp_path / "file", kind)
    with pytest.raises(OSError) as caught:
        open_regular(tmp_path / "file", mode)
    assert isinstance(caught.value, FileExistsError if mode == "xb" else NotRegularFileError)
    if kind == "a symbolic link":
        assert (tmp_path / "precious").read_text() == "precious"


def test_dangling_link_creates_no_file(tmp_path: Path) -> None:
    """Oracle: the folder contains only the link."""
    (tmp_path / "file").symlink_to("elsewhere")
    for mode in WRITES:
        with pytest.raises(OSError):
            open_regular(tmp_path / "file", mode)
    assert os.listdir(tmp_path) == ["file"]


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
