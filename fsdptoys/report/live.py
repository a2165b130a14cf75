"""Follow a run or sweep from another terminal by polling its files until it ends.

A terminal gets a live display; other outputs get the lines that the plain console of the run would print. A sweep is
followed job by job. Where locks are not visible, as on another node's file system, a run counts as running while the
heartbeats of its ranks are fresh.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fsdptoys.errors import ConfigError
from fsdptoys.metrics.config import SUMMARY_FILE
from fsdptoys.metrics.console import PlainReporter
from fsdptoys.sweep.folder import JOB_FILE, RUN_FOLDER, Job, JobStatus, is_sweep_dir, read_job, read_sweep
from fsdptoys.utils.file_lock import is_locked
from fsdptoys.utils.text import printable

from .live_reader import FollowedRun, State, is_startable
from .live_view import draw_run
from .result_file import read_ending

POLL_SECONDS = 1.0

GRACE_SECONDS = 60.0
"""Longest time without ranks for a job of a sweep: during its start, and until its status is written."""


def follow(run_dir: Path, console: Console, poll_seconds: float = POLL_SECONDS) -> int:
    """Follow a run, a job of a sweep, or a sweep until it ends or Ctrl-C is pressed.

    Args:
        run_dir: run directory, job folder or sweep folder.
        console: output.
        poll_seconds: time between two polls.

    Returns:
        Exit status: 0 after the planned end or Ctrl-C; 1 if the run was killed, stopped by a signal, or failed. A sweep
        returns 0 once every job has ended.

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
                f"{run_dir} is not there; start the run first, with metrics.run_dir={run_dir}, or give the directory "
                "of one that has started"
            )
        if not is_startable(run_dir):
            raise ConfigError(
                f"{run_dir} holds neither a run nor a sweep; give a folder that fsdptoys train or fsdptoys sweep is "
                "writing, as runs/NAME"
            )
        return follower.follow_run(run_dir)
    except KeyboardInterrupt:
        return 0


@dataclass
class _Follower:
    console: Console
    poll_seconds: float

    @property
    def draws(self) -> bool:
        """Whether the console can redraw lines."""
        return self.console.is_terminal and os.environ.get("TERM") not in ("dumb", "unknown")

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(Text(printable(text, self.console.file)), soft_wrap=True)

    def follow_sweep(self, path: Path) -> int:
        """Follow the jobs one after another until all have ended."""
        told, idle_since = None, time.monotonic()
        while True:
            sweep = read_sweep(path)
            statuses = [job.status for job in sweep.jobs]
            running = next((job for job in sweep.jobs if job.status is JobStatus.running), None)
            counts = ", ".join(f"{statuses.count(status)} {status.value}" for status in JobStatus if status in statuses)
            if running is not None:
                place = f"job {running.name} of {len(sweep.jobs)}, {running.label}: "
                if self._follow_job(sweep.job_folder(running), place).status is JobStatus.running:
                    self.say(f"job {running.name} has ended without a word; fsdptoys sweep --resume {path} goes on")
                    return 1
                told, idle_since = None, time.monotonic()
                continue
            if all(status.ended for status in statuses):
                self.say(f"the sweep has ended: {counts}; {path}")
                return 0
            if JobStatus.stopped in statuses and time.monotonic() - idle_since > GRACE_SECONDS:
                self.say(f"the sweep was stopped: {counts}; fsdptoys sweep --resume {path} goes on")
                return 1
            if counts != told:
                self.say(f"no job runs at the moment: {counts}")
                told = counts
            time.sleep(self.poll_seconds)

    def follow_job(self, folder: Path) -> int:
        """Wait for a job of a sweep to start, and follow it."""
        if read_job(folder).status is JobStatus.waiting:
            self.say(f"{folder} waits for its turn")
        while read_job(folder).status is JobStatus.waiting:
            time.sleep(self.poll_seconds)
        return 0 if self._follow_job(folder, "").status is JobStatus.done else 1

    def _follow_job(self, folder: Path, heading: str) -> Job:
        """Follow the run of a started job; return the job's final state."""
        alive = time.monotonic()

        def may_go_on(run: FollowedRun) -> bool:
            nonlocal alive
            if run.state() in (State.running, State.starting) or is_locked(folder):
                alive = time.monotonic()
            return read_job(folder).status is JobStatus.running and time.monotonic() - alive < GRACE_SECONDS

        if read_job(folder).status is JobStatus.running:
            self.follow_run(folder / RUN_FOLDER, heading, may_go_on)
        job = read_job(folder)
        self.say(f"{heading}{job.status.value}" + (f": {job.reason}" if job.reason else ""))
        return job

    def follow_run(
        self, path: Path, heading: str = "", may_go_on: Callable[[FollowedRun], bool] = lambda run: False
    ) -> int:
        """Follow one run.

        Args:
            path: run directory.
            heading: prefix of the run's name.
            may_go_on: whether ranks may still (re)start, called once no rank is running.

        Returns:
            0 after the planned end, else 1.
        """
        run = FollowedRun(path)
        run.poll()
        state = (self._draw if self.draws else self._print_lines)(run, heading, may_go_on)
        if state is State.ended:
            ending = read_ending(path)
            self.say(f"the run has ended: {'; '.join([*filter(None, [ending.text]), str(path / SUMMARY_FILE)])}")
            return 0 if ending.status is JobStatus.done else 1
        done = run.steps[-1].step if run.steps else 0
        self.say(
            f"the run ended without a summary after step {done}, since it was killed or failed; where it has "
            "checkpoints, the same command with checkpoint.resume=auto goes on"
        )
        return 1

    def _draw(self, run: FollowedRun, heading: str, may_go_on: Callable[[FollowedRun], bool]) -> State:
        with Live(console=self.console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                state = run.state()  # read before the steps, so that no step is missed once the end is seen
                run.poll()
                live.update(draw_run(run, state, self.console, heading), refresh=True)
                if state in (State.ended, State.gone) and not may_go_on(run):
                    return state
                time.sleep(self.poll_seconds)

    def _print_lines(self, run: FollowedRun, heading: str, may_go_on: Callable[[FollowedRun], bool]) -> State:
        """Print the lines of the plain console, starting at the latest step."""
        self.say(f"{heading}{run.settings.title} in {run.path}")
        if len(run.steps) > 1:
            self.say(f"steps up to {run.steps[-1].step} are done; from here on there is a line as the console has it")
        shown = max(0, len(run.steps) - 1)
        reporter: PlainReporter | None = None
        told: set[object] = set()
        while True:
            state = run.state()
            shown = self._print_way_back(shown, run.poll(), run)
            for metrics in run.steps[shown:]:
                if reporter is None:
                    settings = run.settings
                    reporter = PlainReporter(settings.planned_steps or 0, settings.log_every, self.console.file)
                reporter.step(metrics)
            shown = len(run.steps)
            for sight, text in run.late_ranks(run.signs(), time.time()).items() if state is State.running else ():
                if sight not in told:
                    self.say(text)
                told.add(sight)
            if state in (State.ended, State.gone) and not may_go_on(run):
                if reporter is not None:
                    reporter.close()
                return state
            time.sleep(self.poll_seconds)

    def _print_way_back(self, shown: int, stands: int, run: FollowedRun) -> int:
        """Report a return to an earlier step; return how many of the shown steps remain valid."""
        if stands < shown:
            after = run.steps[stands - 1].step if stands else 0
            self.say(f"the run was taken up again after step {after}; later steps are done again")
        return min(shown, stands)
