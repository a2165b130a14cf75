"""Atomic replacement of files, and the locks of their writers."""

import os
import resource
from pathlib import Path

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.file_lock import HeldError, hold_lock, is_held, lock_file, lock_folder, unlock_file


@pytest.mark.parametrize("where", ["file", ".file.{pid}.part"])
def test_symbolic_link_is_replaced_and_its_target_kept(where: str, tmp_path: Path) -> None:
    """Oracle: the content of both files, and the names in the folder."""
    target, folder = tmp_path / "target", tmp_path / "folder"
    target.write_text("precious")
    folder.mkdir()
    (folder / where.format(pid=os.getpid())).symlink_to(target)
    write_atomically(folder / "file", "new\n", sync=True)
    assert (folder / "file").read_bytes() == b"new\n" and not (folder / "file").is_symlink()
    assert target.read_text() == "precious"
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    """Oracle: a limit on the size of files, which fails as a full disk does, and text that UTF-8 does not have."""
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
    """Oracle: this process's id in the lock file, and a refused second holder, of a file and of its folder."""
    path = tmp_path / "lock"
    descriptor, folder = lock_file(path), lock_folder(tmp_path)
    assert folder is not None and is_held(path) and is_held(tmp_path)
    with pytest.raises(HeldError) as held:
        lock_file(path)
    assert held.value.holder == str(os.getpid())
    with pytest.raises(HeldError):
        lock_folder(tmp_path)
    unlock_file(path, descriptor)
    os.close(folder)
    assert not path.exists() and not is_held(path) and not is_held(tmp_path)


def test_lock_file_of_prepared_data_must_be_regular(tmp_path: Path) -> None:
    """Oracle: the expected message, and the file that the link leads to."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(ConfigError) as caught, hold_lock(tmp_path / "lock", "data.cache=x", None):
        raise AssertionError
    assert str(caught.value) == (
        f"data.cache=x is locked by a file, and {tmp_path}/lock is a symbolic link and not a regular file; remove it"
    )
    assert (tmp_path / "precious").read_text() == "precious"
