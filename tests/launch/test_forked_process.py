"""Forks in place of new interpreters."""

import gc
import os
from pathlib import Path

from fsdptoys.launch.forked_process import ForkedProcess

MODULE = """
import gc, os, sys

number = int(sys.argv[1])
os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT), number)
gc.collect()
os.write(number, b"still open")
"""


class Endless:
    """A reference cycle with an open file, freed only by garbage collection."""

    def __init__(self, path: Path) -> None:
        self.itself, self.file = self, path.open("w")


def test_garbage_of_the_parent_closes_no_file_of_the_fork(tmp_path: Path) -> None:
    """Oracle: the fork's output after a collection, to a file with the descriptor number of the parent's file."""
    (tmp_path / "writes.py").write_text(MODULE)
    gc.disable()
    try:
        number = Endless(tmp_path / "parents").file.fileno()
        forked = ForkedProcess(
            "writes", [str(number), str(tmp_path / "own")], {**os.environ, "PYTHONPATH": str(tmp_path)}
        )
        assert forked.wait() == 0
    finally:
        gc.enable()
    assert (tmp_path / "own").read_text() == "still open"
