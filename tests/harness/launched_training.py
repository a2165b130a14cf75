"""Runs as processes, with their output in a file."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.harness.processes import kill_tree, wait_until


class Training:
    """``python -m WORDS`` in a session of its own."""

    def __init__(self, argv: Sequence[str], output: Path, **options: Any) -> None:
        self._output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *argv],
                stdout=file,
                stderr=file,
                start_new_session=True,
                **options,
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text()

    def ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    def result(self) -> tuple[int, str]:
        """Wait for the end; return status and output."""
        wait_until(self.ended, "the end of the run", [self.process.pid])
        return self.process.returncode, self.output


@contextlib.contextmanager
def training(argv: Sequence[str], output: Path, **options: Any) -> Iterator[Training]:
    """Start a run, which is killed in the end."""
    run = Training(argv, output, **options)
    try:
        yield run
    finally:
        if not run.ended():
            kill_tree(run.process.pid)
            run.process.wait()


def wait_while_running(
    runs: Sequence[Training], condition: Callable[[], bool], what: str
) -> None:
    """Wait for a condition; AssertionError if one of the runs ends before."""
    wait_until(
        lambda: condition() or any(run.ended() for run in runs),
        what,
        [run.process.pid for run in runs],
    )
    assert condition() or not any(run.ended() for run in runs), [
        run.output for run in runs
    ]
