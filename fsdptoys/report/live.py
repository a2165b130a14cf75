"""Follow a run or sweep from another terminal by polling its files until it ends.

A terminal gets a live display; other outputs get the lines that the plain console of the run would
print. A sweep is followed job by job. Where locks are not visible, as on another node's file
system, a run counts as running while the heartbeats of its ranks are fresh.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fsdptoys.errors import ConfigError
from fsdptoys.metrics.config import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from fsdptoys.metrics.console import PlainReporter
from fsdptoys.sweep.folder import (
    JOB_FILE,
    RUN_FOLDER,
    Job,
    JobStatus,
    is_sweep_dir,
    read_job,
    read_sweep,
)
from fsdptoys.utils.file_lock import is_locked
from fsdptoys.utils.text import printable, wrapped

from .live_reader import FollowedRun, State
from .live_view import draw_run
from .result_file import read_ending

POLL_SECONDS = 1.0
GRACE_SECONDS = 60.0
"""Longest time without ranks for a job of a sweep: during its start, and until its status is
written."""


def follow(run_dir: Path, console: Console, poll_seconds: float = POLL_SECONDS) -> int:
    """Follow a run, a job of a sweep, or a sweep until it ends or Ctrl-C is pressed.

    Returns:
        Exit status: 0 after the planned end or Ctrl-C; 1 if the run was killed, stopped by a
        signal, or failed. A sweep returns 0 once every job has ended.

    Raises:
        ConfigError: if ``run_dir`` is missing or is none of these.
    """
    follower = _Follower(console, poll_seconds)
    try:
        if is_sweep_dir(run_dir):
            return follower.follow_sweep(run_dir)
        if (run_dir / JOB_FILE).is_file():
            return follower.follow_job(run_dir)
        if not run_dir.is_dir():
            raise ConfigError(
                f"{run_dir} does not exist; start the run first, with metrics.run_dir={run_dir}, "
                "or give the directory of a started run"
            )
        if not (
            (run_dir / CONFIG_FILE).is_file()
            or (run_dir / METRICS_FILE).is_file()
            or is_locked(run_dir)
        ):
            raise ConfigError(
                f"{run_dir} holds neither a run nor a sweep; give a folder that fsdptoys train "
                "or fsdptoys sweep is writing, as runs/NAME"
            )
        return follower.follow_run(run_dir)
    except KeyboardInterrupt:
        return 0


@dataclass
class _Follower:
    console: Console
    poll_seconds: float

    def print_line(self, text: str) -> None:
        """Print one line."""
        self.console.print(
            Text(wrapped(printable(text, self.console.file), self.console.file)),
            soft_wrap=True,
        )

    def follow_sweep(self, path: Path) -> int:
        """Follow the jobs one after another until all have ended."""
        printed = None
        idle_since = time.monotonic()
        while True:
            sweep = read_sweep(path)
            statuses = [job.status for job in sweep.jobs]
            running = next(
                (job for job in sweep.jobs if job.status is JobStatus.running), None
            )
            counts = ", ".join(
                f"{statuses.count(status)} {status.value}"
                for status in JobStatus
                if status in statuses
            )
            if running is not None:
                heading = f"job {running.name} of {len(sweep.jobs)}, {running.label}: "
                if (
                    self._follow_job(sweep.job_folder(running), heading).status
                    is JobStatus.running
                ):
                    self.print_line(
                        f"job {running.name} ended without a status; resume with fsdptoys sweep "
                        f"--resume {path}"
                    )
                    return 1
                printed = None
                idle_since = time.monotonic()
                continue
            if all(status.ended for status in statuses):
                self.print_line(f"the sweep has ended: {counts}; {path}")
                return 0
            if (
                JobStatus.stopped in statuses
                and time.monotonic() - idle_since > GRACE_SECONDS
            ):
                self.print_line(
                    f"the sweep was stopped: {counts}; resume with fsdptoys sweep --resume {path}"
                )
                return 1
            if counts != printed:
                self.print_line(f"no job is running: {counts}")
                printed = counts
            time.sleep(self.poll_seconds)

    def follow_job(self, folder: Path) -> int:
        """Wait for a job of a sweep to start, and follow it."""
        if read_job(folder).status is JobStatus.waiting:
            self.print_line(f"{folder} waits to start")
        while read_job(folder).status is JobStatus.waiting:
            time.sleep(self.poll_seconds)
        return 0 if self._follow_job(folder, "").status is JobStatus.completed else 1

    def _follow_job(self, folder: Path, heading: str) -> Job:
        """Follow the run of a started job; return the job's final state."""
        if read_job(folder).status is JobStatus.running:
            self.follow_run(folder / RUN_FOLDER, heading, folder)
        job = read_job(folder)
        self.print_line(
            f"{heading}{job.status.value}" + (f": {job.reason}" if job.reason else "")
        )
        return job

    def follow_run(
        self, path: Path, heading: str = "", job_folder: Path | None = None
    ) -> int:
        """Follow one run; return 0 after the planned end, else 1. Lines begin with ``heading``.

        While the job of a sweep is running, its ranks may start again.
        """
        run = FollowedRun(path)
        run.poll()
        if self.console.is_terminal and os.environ.get("TERM") not in (
            "dumb",
            "unknown",
        ):
            with Live(
                console=self.console, auto_refresh=False, vertical_overflow="crop"
            ) as live:
                for state in self._polls(run, job_folder):
                    live.update(
                        draw_run(run, state, self.console, heading), refresh=True
                    )
        else:
            self._print_lines(run, heading, job_folder)
        if run.state() is State.ended:
            ending = read_ending(path)
            texts = filter(None, [ending.text, str(path / SUMMARY_FILE)])
            self.print_line(f"the run has ended: {'; '.join(texts)}")
            return 0 if ending.status is JobStatus.completed else 1
        last_step = run.steps[-1].step if run.steps else 0
        self.print_line(
            f"the run ended without a summary after step {last_step}, since it was killed or "
            "failed; resume from its checkpoints, if any, with the same command and "
            "checkpoint.resume=auto"
        )
        return 1

    def _polls(self, run: FollowedRun, job_folder: Path | None) -> Iterator[State]:
        """Poll a run until it has ended."""
        alive = time.monotonic()
        while True:
            # Read before the steps, so that no step is missed once the end is seen
            state = run.state()
            run.poll()
            yield state
            now = time.monotonic()
            if state in (State.running, State.starting) or (
                job_folder and is_locked(job_folder)
            ):
                alive = now
            elif (
                job_folder is None
                or read_job(job_folder).status is not JobStatus.running
                or now - alive > GRACE_SECONDS
            ):
                return
            time.sleep(self.poll_seconds)

    def _print_lines(
        self, run: FollowedRun, heading: str, job_folder: Path | None
    ) -> None:
        """Print the lines of the plain console, starting at the latest step."""
        self.print_line(f"{heading}{run.settings.title} in {run.path}")
        printed_step = run.steps[-1].step - 1 if run.steps else 0
        reporter: PlainReporter | None = None
        reported: set[object] = set()
        for state in self._polls(run, job_folder):
            for metrics in run.steps:
                if metrics.step > printed_step:
                    settings = run.settings
                    reporter = reporter or PlainReporter(
                        settings.planned_steps or 0,
                        settings.log_every,
                        self.console.file,
                    )
                    reporter.step(metrics)
                    printed_step = metrics.step
            late = (
                run.late_ranks(run.signs(), time.time())
                if state is State.running
                else {}
            )
            for event, text in late.items():
                if event not in reported:
                    self.print_line(text)
                reported.add(event)
        if reporter is not None:
            reporter.close()
