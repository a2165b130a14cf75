"""Submit a sweep's jobs to a batch queue through Hydra's submitit launcher: one queue job per
configuration.

The plugin writes the batch scripts, so its options (``hydra.launcher.partition=gpu``) work as
documented. In each job, one task per node starts the same run as a local sweep (``slurm_node``) and
records its outcome in the sweep's folder. The submitting command only watches: interrupting it
leaves SLURM's jobs running, but ends a local one. Jobs with different resources
(``slurm_settings``) are submitted separately.

Not covered: resuming from a checkpoint after the queue's time limit; a sweep's job starts from the
beginning.
"""

import contextlib
import dataclasses
import io
import logging
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
import submitit
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict
from submitit.slurm.slurm import SlurmInfoWatcher

from fsdptoys.config.compose import CONFIG_MODULE
from fsdptoys.errors import ConfigError
from fsdptoys.utils.file_lock import LOCK_FILE, is_locked
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.signal_handlers import handle_signals
from fsdptoys.utils.text import print_status

from .folder import JOBS_FOLDER, RUN_FOLDER, Job, JobStatus, Sweep, read_job, write_job
from .job_list import still_running
from .runner import heeded_signals, print_line, quote, set_aside
from .slurm_node import run_on_node
from .slurm_queue import (
    QUEUE_FOLDER,
    SLURM,
    Submission,
    begin_submission,
    first_line,
    jobs_in_queue,
    still_queued,
    watch_jobs,
)
from .slurm_settings import (
    LOCAL,
    QueueLauncher,
    SlurmNeeds,
    find_needs,
    launching_overrides,
    plugin_options,
    read_launcher,
)

GRACE_SECONDS = 15.0
"""A local job still running so long after SIGTERM gets SIGINT; after three times as long it is left
running."""

POLL_SECONDS = 0.1


class SilentWatcher(SlurmInfoWatcher):
    """Never ask ``sacct`` for states.

    ``slurm_queue`` polls ``squeue``, which needs no accounting database.
    """

    def update(self) -> None:
        """Keep every job's state unknown; submitit's own files say when a job has ended."""


class EndRequest(KeyboardInterrupt):
    """SIGTERM or SIGHUP, handled like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def submit(
    sweep: Sweep,
    jobs: Sequence[Job],
    launcher_overrides: Sequence[str],
    after_job: Callable[[], None] = lambda: None,
) -> None:
    """Submit jobs and watch until all have ended, printing a line when each begins and ends.

    Jobs still in SLURM's queue from an earlier submission are watched, not submitted again.

    Args:
        sweep: its folder must be on a disk shared by all nodes.
        jobs: its jobs to run.
        launcher_overrides: ``hydra/launcher=…`` and ``hydra.launcher.…=…``.
        after_job: called after the end of each job.

    Raises:
        ConfigError: for a mistake, or if the queue rejects the jobs.
        KeyboardInterrupt: for Ctrl-C, or SIGTERM and SIGHUP as EndRequest, after a message about
            SLURM's remaining jobs and ending a local one.
    """
    launcher = read_launcher(tuple(launcher_overrides))
    queued = jobs_in_queue(sweep)
    # Local processes would all start at once and disturb each other's measurements: a group each.
    groups: dict[tuple[SlurmNeeds, str], list[Job]] = {}
    for job in jobs:
        if queued.get(job.name) == "":
            raise still_running(sweep, job)
        if job.name not in queued:
            needs = find_needs(launching_overrides(job.overrides), launcher.name)
            group = "" if launcher.name == SLURM else job.name
            groups.setdefault((needs, group), []).append(job)
    batches = [
        (members, plugin_options(needs, launcher, sweep.time_limit_seconds))
        for (needs, _), members in groups.items()
    ]
    logging.getLogger("submitit").setLevel(logging.CRITICAL)
    submitit.SlurmJob.watcher = SilentWatcher()
    watched = still_queued(sweep, queued)
    try:
        with handle_signals(
            {number: _leave for number in heeded_signals() if number != signal.SIGINT}
        ):
            _print_ids(sweep, watched)
            for members, options in batches:
                submission = _submit_jobs(sweep, members, launcher, options, watched)
                its_jobs = dict.fromkeys(submission.jobs, submission)
                if launcher.name == LOCAL:
                    watch_jobs(sweep, its_jobs, after_job)
                else:
                    _print_ids(sweep, its_jobs)
            watch_jobs(sweep, _on_slurm(watched), after_job)
    except KeyboardInterrupt:
        ids = [
            submission.ids()[name].partition("_")[0]
            for name, submission in _on_slurm(watched).items()
            if name in submission.ids()
        ]
        if numbers := sorted(set(ids)):
            print_status(
                f"the jobs in the queue continue; scancel {' '.join(numbers)} ends them, and "
                f"fsdptoys sweep --resume {shlex.quote(str(sweep.path))} collects finished ones"
            )
        for name, submission in watched.items():
            if submission.launcher == LOCAL:
                _end_local(sweep, name, submission)
        raise


def _on_slurm(watched: Mapping[str, Submission]) -> dict[str, Submission]:
    return {name: one for name, one in watched.items() if one.launcher == SLURM}


def _leave(number: int, frame: FrameType | None) -> None:
    raise EndRequest(number)


def _end_local(sweep: Sweep, name: str, submission: Submission) -> None:
    """End a local launcher's job, and record that it was stopped if its process could not."""
    folder = sweep.path / JOBS_FOLDER / name
    began = time.monotonic()
    last_request = None
    while True:
        locked = is_locked(folder)
        controller = 0 if submission.is_over else int(submission.ids().get(name, 0))
        if (
            not locked
            and not is_locked(folder / RUN_FOLDER)
            and (submission.is_over or _has_ended(controller))
        ):
            break
        waited = time.monotonic() - began
        # SIGTERM has the training finish its step; SIGINT ends it, or the process about to start
        # it, at once.
        process = _holder(folder) if locked else controller
        request = (
            process,
            signal.SIGTERM if locked and waited < GRACE_SECONDS else signal.SIGINT,
        )
        if process and request != last_request:
            last_request = request
            with contextlib.suppress(ProcessLookupError):
                os.kill(*request)
        if waited > 3 * GRACE_SECONDS:
            print_status(
                f"job {name} has not ended"
                + (f"; kill -9 {process} ends it" if process else "")
            )
            return
        time.sleep(POLL_SECONDS)
    job = read_job(folder)
    if job.status is JobStatus.running:
        write_job(
            folder,
            dataclasses.replace(
                job, status=JobStatus.stopped, reason="the sweep was ended"
            ),
        )


def _holder(folder: Path) -> int:
    """Return the id of the process holding a folder's lock; 0 if it was just released."""
    try:
        return int(read_regular(folder / LOCK_FILE, 100))
    except (OSError, ValueError):
        return 0


def _has_ended(process: int) -> bool:
    """Return whether a process has ended; False for an id not known yet (0)."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def _print_ids(sweep: Sweep, watched: Mapping[str, Submission]) -> None:
    """Print the queue's ids of jobs."""
    if watched:
        ids = ", ".join(
            f"{name} as {one.ids().get(name)}" for name, one in watched.items()
        )
        print_line(
            f"fsdptoys: SLURM has the jobs {ids}; their files are in {sweep.path / QUEUE_FOLDER}"
        )


def _submit_jobs(
    sweep: Sweep,
    jobs: Sequence[Job],
    launcher: QueueLauncher,
    options: Mapping[str, Any],
    watched: dict[str, Submission],
) -> Submission:
    """Submit jobs through the plugin; add them to ``watched`` at once, so that an interrupted
    caller knows them.

    Raises:
        ConfigError: if the queue accepts none of them.
    """
    for job in jobs:
        if job.status is not JobStatus.waiting:
            set_aside(sweep.job_folder(job))
            write_job(sweep.job_folder(job), job.restarted())
    submission = begin_submission(sweep, launcher.name, jobs)
    plugin = _make_launcher(
        sweep, launcher, {**options, "submitit_folder": str(submission.folder / "%j")}
    )
    overrides = [[f"hydra.sweep.subdir={JOBS_FOLDER}/{job.name}"] for job in jobs]

    def launch() -> None:
        try:
            plugin.launch(overrides, 0)
        except BaseException as error:
            submission.error = error

    # The plugin blocks until its jobs end, and fails for all of them if one has no result. So it
    # runs in a thread, and the jobs are watched through their folders.
    submission.thread = threading.Thread(target=launch, daemon=True)
    watched |= dict.fromkeys(submission.jobs, submission)
    with contextlib.redirect_stderr(io.StringIO()):  # sbatch's error is reported below
        submission.thread.start()
        while submission.thread.is_alive() and len(submission.ids()) < len(jobs):
            time.sleep(0.05)
    if not submission.ids():
        message = (
            first_line(submission.error)
            if submission.error is not None
            else "it took none of them"
        )
        raise ConfigError(
            f"hydra/launcher={launcher.name} refuses the jobs ({message}); change "
            "hydra.launcher.KEY"
        )
    return submission


def _make_launcher(
    sweep: Sweep, launcher: QueueLauncher, options: Mapping[str, Any]
) -> Any:
    """Instantiate the plugin's launcher through Hydra, with the options derived from a run's
    settings."""
    root = str(Path(__file__).resolve().parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:  # a checkout need not be installed
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, *paths]))
    overrides = [
        *launcher.overrides,
        f"hydra.sweep.dir={quote(str(sweep.path.absolute()))}",
        "hydra.output_subdir=null",
        "hydra.job.chdir=false",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        tree = hydra.compose(None, overrides, return_hydra_config=True)
        loader = GlobalHydra.instance().config_loader()
    title = re.sub(r"[^\w.-]+", "-", sweep.title) or "sweep"
    with open_dict(tree):
        if "name" not in launcher.user_options:
            tree.hydra.launcher.name = f"fsdptoys-{title}"
        tree.hydra.launcher.update(options)
    context = HydraContext(config_loader=loader, callbacks=Callbacks())
    return Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=run_in_job, config=tree
    )


def run_in_job(_: DictConfig) -> None:
    """Run one node's task of a job; called by the plugin on the node."""
    environment = submitit.JobEnvironment()
    run_on_node(
        Path(HydraConfig.get().runtime.output_dir),
        node=environment.node,
        hosts=list(environment.hostnames),
        job_number=int(environment.raw_job_id),
    )
