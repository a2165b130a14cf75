"""One training run watched from outside, the same way for whoever trains: a clock at its lines, and /proc for the rest.

- A step is the time from one step's line to the next; the tokens of a step over it are the speed.
- Start-up is the time from the start of the command to the line of step 1: launcher, imports, weights, and the step.
- Memory is the highest resident set (``VmHWM``) of any process below the launcher, when the last step's line comes.
- CPU seconds are those of all processes below the launcher; other load on the machine hardly changes them.

Needs Linux. Output that is no step's line is kept for the message that tells of a failure.
"""

import itertools
import os
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STEP_LINE = re.compile(r"step +(\d+)[/ ]")
LOSS = re.compile(r"loss (\S+)")
POLL_SECONDS = 0.25
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Measured:
    """What one run took."""

    started: float = 0.0
    lines_at: list[float] = field(default_factory=list)
    """When each step's line came."""
    losses: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Of all ranks, so far, at each step's line."""
    peak_bytes: int = 0
    note: str = ""
    """What the run said of itself."""
    failure: str | None = None

    @property
    def startup_seconds(self) -> float:
        """From the start of the command to the end of step 1."""
        return self.lines_at[0] - self.started

    def step_seconds(self, warmup: int) -> float:
        """Median of the steps after the first ``warmup``."""
        return statistics.median(_differences(self.lines_at)[max(0, warmup - 1) :])

    def step_cpu_seconds(self, warmup: int) -> float:
        """The same of the CPU seconds of all ranks together."""
        return statistics.median(_differences(self.cpu_seconds)[max(0, warmup - 1) :])


def _differences(values: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(values)]


def watch(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, steps: int, limit_seconds: float
) -> Measured:
    """Run a command to its end and measure it.

    Args:
        command: what starts the ranks.
        environment: all of it.
        folder: where it runs.
        steps: lines that have to come.
        limit_seconds: after which it is killed.
    """
    result = Measured(started=time.perf_counter())
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    told: list[str] = []
    peaks: dict[int, int] = {}
    done = threading.Event()

    def poll() -> None:
        while not done.wait(POLL_SECONDS):
            _update_peaks(process.pid, peaks)

    def kill() -> None:
        told.append(f"killed after {limit_seconds:g} s")
        os.killpg(process.pid, signal.SIGKILL)

    watcher, killer = threading.Thread(target=poll), threading.Timer(limit_seconds, kill)
    watcher.start()
    killer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.perf_counter()
            if line.startswith("note "):
                result.note = line.removeprefix("note ").strip()
            elif found := STEP_LINE.match(line):
                result.lines_at.append(now)
                result.losses.append(float(LOSS.search(line)[1]))  # type: ignore[index]
                result.cpu_seconds.append(sum(map(_cpu_seconds, _descendants(process.pid))))
                if int(found[1]) == steps:
                    done.set()
                    _update_peaks(process.pid, peaks)
            else:
                told.append(line)
        status = process.wait()
    finally:
        killer.cancel()
        done.set()
        watcher.join()
    result.peak_bytes = max(peaks.values(), default=0)
    if status or len(result.lines_at) != steps:
        result.failure = f"status {status} after {len(result.lines_at)} of {steps} steps\n{''.join(told[:40])}"
    return result


def _descendants(root: int) -> list[int]:
    """Processes below a process, itself not among them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    below = {root}
    while found := {pid for pid, parent in parents.items() if parent in below and pid not in below}:
        below |= found
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


def _update_peaks(root: int, peaks: dict[int, int]) -> None:
    for pid in _descendants(root):
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if found := re.search(r"VmHWM:\s+(\d+)", text):
            peaks[pid] = max(peaks.get(pid, 0), int(found[1]) * 1024)
