"""Training runs measured from outside, the same way for every trainer: a clock at their output
lines, and /proc.

A run goes one step at a time and is stopped in between (SIGSTOP), so that several can take turns: a
machine that others share may be a third slower a minute later, and then it is so for all of them.

- A step is the time from when the run is continued to the step's line; the tokens of a step over it
  are the speed. A device continues with queued work while its process is stopped, so a run that has
  the machine to itself is not stopped (``stops=False``), nor is /proc read between its steps; a
  step lasts from one line to the next.
- Start-up is the time from the start of the command to the line of step 1: launcher, imports,
  weights, and the step.
- Memory is the highest resident set (``VmHWM``) of any process below the launcher, when a step's
  line comes.
- CPU seconds are those of all processes below the launcher.

Needs Linux. Other output than step lines is kept for the message of a failure.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from scripts.common.progress import unit

STEP_LINE = re.compile(r"step +(\d+)[/ ]")
LOSS = re.compile(r"loss (\S+)")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Measured:
    """Measurements of one run."""

    seconds: list[float] = field(default_factory=list)
    """Of each step, the first from the start of the command."""
    losses: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Of all ranks, in the same spans."""
    peak_bytes: int = 0
    device_peak_bytes: int | None = None
    """Highest sum of tensors on the device, if the run reported it."""
    note: str = ""
    """A note that the run printed."""
    failure: str | None = None

    @property
    def startup_seconds(self) -> float:
        """From the start of the command to the end of step 1."""
        return self.seconds[0]

    def step_seconds(self, warmup: int) -> float:
        """Median of the steps after the first ``warmup``."""
        return statistics.median(self.seconds[max(1, warmup) :])

    def step_cpu_seconds(self, warmup: int) -> float:
        """The same of the CPU seconds of all ranks together."""
        return statistics.median(self.cpu_seconds[max(1, warmup) :])


class Run:
    """A command that trains, begun by its first step.

    Args:
        command: starts the ranks.
        environment: all of it.
        folder: where it runs.
        steps: lines that have to come.
        limit_seconds: a step that takes longer is killed.
        metrics: a file that has a JSON object a step, with its loss in full, when the run has
            ended.
        stops: whether it is stopped between steps, for others to take theirs.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        steps: int,
        limit_seconds: float,
        metrics: Path | None = None,
        stops: bool = True,
    ) -> None:
        self.result = Measured()
        self._stops = stops
        self._last_line = 0.0
        self.steps = steps
        self.limit_seconds = limit_seconds
        self.metrics = metrics
        self._command = list(command)
        self._environment = dict(environment)
        self._folder = folder
        self._output: list[str] = []
        self._process: subprocess.Popen[str] | None = None

    def take_step(self) -> None:
        """Go on to the end of the next step, or after the last one to the end of the run."""
        if self.result.failure is not None:
            return
        process = self._process
        began = time.perf_counter()
        cpu_before = 0.0
        if process is None:
            process = self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        elif self._stops:
            cpu_before = self._cpu_seconds()
            self._send(signal.SIGCONT)
        else:
            began = self._last_line
        assert process.stdout is not None
        result = self.result
        with self._limited():
            for line in process.stdout:
                if line.startswith("note "):
                    result.note = line.removeprefix("note ").strip()
                elif line.startswith("peak "):
                    result.device_peak_bytes = int(line.split()[1])
                elif STEP_LINE.match(line):
                    self._last_line = time.perf_counter()
                    result.seconds.append(self._last_line - began)
                    result.losses.append(float(LOSS.search(line)[1]))  # type: ignore[index]
                    if not self._stops:
                        return
                    self._send(signal.SIGSTOP)
                    result.cpu_seconds.append(self._cpu_seconds() - cpu_before)
                    result.peak_bytes = max(
                        [
                            result.peak_bytes,
                            *map(_peak_bytes, _descendants(process.pid)),
                        ]
                    )
                    return
                else:
                    self._output.append(line)
            status = process.wait()
        if status or len(result.seconds) != self.steps:
            output = "".join(
                self._output
                if len(self._output) <= 40
                else self._output[:10] + self._output[-30:]
            )
            result.failure = (
                f"status {status} after {len(result.seconds)} of {self.steps} "
                f"steps\n{output}"
            )
        elif self.metrics is not None:
            result.losses = [
                json.loads(line)["loss"]
                for line in self.metrics.read_text().splitlines()
            ]

    def kill(self) -> None:
        """End everything that still runs of it."""
        if self._process is not None:
            self._send(signal.SIGKILL)
            self._process.wait()

    @contextmanager
    def _limited(self) -> Iterator[None]:
        def kill() -> None:
            self._output.append(f"killed after {self.limit_seconds:g} s")
            self._send(signal.SIGKILL)

        killer = threading.Timer(self.limit_seconds, kill)
        killer.start()
        try:
            yield
        finally:
            killer.cancel()

    def _cpu_seconds(self) -> float:
        assert self._process is not None
        return sum(map(_cpu_seconds, _descendants(self._process.pid)))

    def _send(self, number: int) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            # The launcher first, that it sees none of its ranks stopped.
            for pid in [self._process.pid, *_descendants(self._process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)


def take_within(run: Run, seconds: float) -> None:
    """Take one run to its end, or kill it when the time is over."""
    end = time.monotonic() + seconds
    try:
        for _ in range(run.steps + 1):
            run.limit_seconds = max(0.1, end - time.monotonic())
            run.take_step()
    finally:
        run.kill()


def take_turns(runs: Sequence[Run], name: str = "peers") -> None:
    """Take every run to its end, step by step, one run at a time.

    Args:
        runs: of as many steps each.
        name: of all of them, for the progress. Every turn is a unit: as many as steps, and one
            more.
    """
    try:
        turns = max(run.steps for run in runs) + 1
        for turn in range(turns):
            with unit(f"{name}, turn {turn + 1} of {turns}"):
                for run in runs:
                    run.take_step()
    finally:
        for run in runs:
            run.kill()


def _descendants(root: int) -> list[int]:
    """Processes below a process, itself not among them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    below = {root}
    while children := {
        pid for pid, parent in parents.items() if parent in below and pid not in below
    }:
        below |= children
    return sorted(below - {root})


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` after the name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def _peak_bytes(pid: int) -> int:
    try:
        peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(peak[1]) * 1024 if peak else 0
