"""Run directories written step by step, and ``follow`` running in a thread."""

import io
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import yaml
from rich.console import Console

from fsdptoys.metrics import StepMetrics
from fsdptoys.report.live import follow
from fsdptoys.train.heartbeat import HEARTBEATS_FOLDER, HeartbeatWriter
from fsdptoys.utils.file_lock import LOCK_FILE, FolderLock
from tests.harness import recording
from tests.harness.processes import wait_until

STEP = replace(recording.STEP, step_time_seconds=0.5, tokens_per_second=1024.0)
POLL = 0.02


def step_of(number: int, **changes: float) -> StepMetrics:
    """A step with a lower loss than the step before."""
    return replace(STEP, **({"step": number, "loss": 6.0 - number / 100} | changes))


class WrittenRun:
    """A run directory written by the test and locked as by a real run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.lock: FolderLock | None = FolderLock(path)
        tree = {
            "model": {"name": "tiny"},
            "parallel": {"name": "fsdp2"},
            "train": {"steps": 20},
            "metrics": {"warmup_steps": 2, "log_every": 1},
        }
        (path / "config.yaml").write_text(yaml.safe_dump(tree))
        (path / "environment.json").write_text(
            json.dumps({"world_size": 2, "device": {"name": "a CPU"}})
        )
        (path / "metrics.jsonl").touch()

    def add(self, *steps: StepMetrics) -> None:
        """Write complete lines."""
        with open(self.path / "metrics.jsonl", "a") as file:
            file.writelines(f"{metrics.to_json()}\n" for metrics in steps)

    def finish(self, steps: str = "20 of 20; all steps done") -> None:
        """End with a summary, as a completed run does."""
        rows = ["| result | value |", "| --- | --- |", f"| steps | {steps} |"]
        (self.path / "summary.md").write_text(
            "\n".join(["# t", "", "## What came out", "", *rows, ""])
        )
        self.release()

    def die(self) -> None:
        """End like a killed process: the lock's file stays."""
        self.release()
        (self.path / LOCK_FILE).write_text("1\n")

    def release(self) -> None:
        """Release the folder; may be called twice."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None


def beat(path: Path, rank: int, step: int, phase: str) -> None:
    """Leave the last heartbeat of a rank of this process in a run directory."""
    heartbeat = HeartbeatWriter(path / HEARTBEATS_FOLDER, rank)
    heartbeat.beat(step, phase)
    heartbeat.close()


def console_of(stream: io.StringIO, terminal: bool) -> Console:
    """Return a console of 80 columns."""
    return Console(
        file=stream, width=80, height=40, force_terminal=terminal, highlight=False
    )


class Watching:
    """``follow`` in a thread, and its output."""

    def __init__(self, path: Path, terminal: bool = False) -> None:
        self.stream = io.StringIO()
        console = console_of(self.stream, terminal)
        self.status: list[int] = []
        self._thread = threading.Thread(
            target=lambda: self.status.append(follow(path, console, POLL)), daemon=True
        )
        self._thread.start()

    def lines(self) -> list[str]:
        """The output so far."""
        return self.stream.getvalue().splitlines()

    def wait_for(self, holds: Callable[[list[str]], bool]) -> None:
        """Wait until the lines fulfill a condition."""
        wait_until(lambda: holds(self.lines()), "the expected lines", [os.getpid()])

    def wait_for_text(self, text: str) -> None:
        """Wait for a line with some text."""
        wait_until(
            lambda: text in self.stream.getvalue(),
            f"{text!r} in the output",
            [os.getpid()],
        )

    def end(self) -> int:
        """Wait for the end; the exit status."""
        wait_until(lambda: self.status, "the end of watching", [os.getpid()])
        return self.status[0]


def step_numbers(lines: list[str]) -> list[int]:
    """Step numbers of the step lines in the plain console."""
    return [
        int(line.split()[1].split("/")[0])
        for line in lines
        if line.startswith("step ") and "/20 " in line
    ]
