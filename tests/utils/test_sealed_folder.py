"""A folder is complete or absent after a kill at any instant of its making."""

import itertools
import os
import signal
from pathlib import Path

import pytest

from fsdptoys.checkpoint import verify_checksums
from fsdptoys.utils.sealed_folder import new_folder
from tests.harness.disks import in_child, kill_self

CHANGES = ("open", "mkdir", "fsync", "replace", "rename", "unlink")
"""Functions of ``os`` through which a folder is made; ``pathlib`` and ``open_regular`` call
them."""

FILES = {"a": b"first", "b": b"", "c": b"x" * 3_000_000}


def make_until(moment: int, folder: Path) -> None:
    """Make a folder, and send SIGKILL before change number ``moment``."""
    moments = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            original = getattr(os, name)

            def change(*args, original=original, **options):
                if next(moments) == moment:
                    kill_self()
                return original(*args, **options)

            patch.setattr(os, name, change)
        with new_folder(folder, "checksums.json") as working:
            for name, content in FILES.items():
                (working / name).write_bytes(content)


def test_killed_writer_leaves_a_complete_folder_or_none(tmp_path: Path) -> None:
    """Oracle: the sums and bytes of the files; the writer is killed before each of its changes in
    turn."""
    outcomes = []
    for moment in itertools.count():
        folder = tmp_path / str(moment) / "folder"
        status = in_child(make_until, moment, folder)
        assert status in (0, -signal.SIGKILL)
        outcomes.append(folder.exists())
        if folder.exists():
            assert verify_checksums(folder) == len(FILES)
            assert {name: (folder / name).read_bytes() for name in FILES} == FILES
        if status == 0:
            break
    assert sorted(outcomes) == outcomes and outcomes.count(False) > 10 and outcomes[-1]
