"""The folder of one run: written by one process at a time, and valid on disk at every moment."""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.file_lock import FolderLock
from fsdptoys.utils.regular_file import NotRegularFileError, open_descriptor, open_regular

from .config import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    RESULT_FILE,
    RESUMES_FILE,
    ROUTING_FILE,
    RUNS_FOLDER,
    SUMMARY_FILE,
    MetricsConfig,
    run_dir_path,
)
from .line_file import NO_ROOM, LineFile
from .preflight import REMOVE_IT, already_holds, check_run_dir
from .resume_log import (
    LINE_FILES,
    ResumePoint,
    append_resume,
    describe_resume,
    read_resumes,
    read_steps,
    truncate_or_move,
)
from .step import StepMetrics


class RunDirectory:
    """Creates the folder, writes ``config.yaml`` and ``environment.json``, and opens ``metrics.jsonl``.

    Args:
        title: part of the folder's name if the config does not name it.
        resumed: the state from which the run resumes; None for a new run, whose folder must not contain another.
        lock: of the folder, if already held; released by ``close``.
        make_room: called if the disk is full; returns whether it may have room now.

    Raises:
        ConfigError: if the folder cannot be created, is being written by another process, or contains a run and
            ``resumed`` is None.
    """

    def __init__(
        self,
        config: MetricsConfig,
        title: str,
        config_tree: dict[str, Any],
        environment: dict[str, Any],
        resumed: ResumePoint | None = None,
        lock: FolderLock | None = None,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self._make_room = make_room
        self._is_full = False
        check_run_dir(config, resumes=resumed is not None)
        self.path = RUNS_FOLDER if config.run_dir is None else run_dir_path(config.run_dir)
        self.notes: list[str] = []
        """Messages for the user about the files of earlier starts."""
        self.earlier_steps: list[StepMetrics] = []
        """Steps of earlier starts, without token counts per expert."""
        with self.writing():
            if config.run_dir is None:
                self.path = new_run_dir(title)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock or FolderLock(self.path)
            try:
                if resumed is not None:
                    self._resume(resumed, config_tree, environment)
                try:
                    if resumed is None:
                        # "x": another process may have created the file since the check above.
                        open_regular(self.path / METRICS_FILE, "xb").close()
                    self._lines = {METRICS_FILE: LineFile(self.path / METRICS_FILE)}
                except FileExistsError as error:
                    raise ConfigError(already_holds(config.run_dir, METRICS_FILE)) from error
                self.write(ENVIRONMENT_FILE, json.dumps(environment, indent=2) + "\n")
                # Last, since readers take a folder with settings for a run directory.
                self.write(CONFIG_FILE, yaml.safe_dump(config_tree, sort_keys=False, allow_unicode=True))
            except BaseException:
                self._lock.release()
                raise
        self.resumes = read_resumes(self.path / RESUMES_FILE)
        """Resumes of the run, including this start."""

    def _resume(self, resumed: ResumePoint, config_tree: dict[str, Any], environment: dict[str, Any]) -> None:
        """Truncate or move the files of an earlier start, and record this resume."""
        resume = describe_resume(self.path, resumed, config_tree, environment)
        files = truncate_or_move(self.path, resumed)
        for name in (SUMMARY_FILE, RESULT_FILE):  # describe the end of an earlier start
            (self.path / name).unlink(missing_ok=True)
        self.earlier_steps, unread = read_steps(self.path / METRICS_FILE)
        self.notes += [*files.notes, *unread]
        if resume is not None:
            append_resume(self.path / RESUMES_FILE, dataclasses.replace(resume, moved_to=files.moved_to))

    def append(self, metrics: StepMetrics) -> str | None:
        """Append a step to ``metrics.jsonl``, unbuffered.

        Returns:
            A message when the disk becomes full; the line is written once there is room.

        Raises:
            ConfigError: for any other failure to write.
        """
        self._lines[METRICS_FILE].add(metrics.to_json())
        return self._write_lines()

    def append_counts(self, step: int, counts: list[list[int]]) -> str | None:
        """Append a step to ``routing.jsonl``, created by the first call; otherwise like ``append``."""
        if ROUTING_FILE not in self._lines:
            with self.writing():
                self._lines[ROUTING_FILE] = LineFile(self.path / ROUTING_FILE)
        self._lines[ROUTING_FILE].add(json.dumps({"step": step, "expert_tokens": counts}))
        return self._write_lines()

    def flush(self) -> None:
        """Write the queued lines.

        Raises:
            ConfigError: if they cannot be written.
        """
        with self.writing():
            for file in self._lines.values():
                file.write()

    def _write_lines(self) -> str | None:
        try:
            try:
                self.flush()
            except ConfigError:
                if not self._make_room():
                    raise
                self.flush()
        except ConfigError as error:
            if getattr(error.__cause__, "errno", None) not in NO_ROOM:
                raise
            first, self._is_full = not self._is_full, True
            why = os.strerror(error.__cause__.errno)  # type: ignore[union-attr]
            return f"steps wait in memory until {self.path} has free space ({why})" if first else None
        self._is_full = False
        return None

    def write(self, name: str, text: str) -> None:
        """Write a text file atomically."""
        with self.writing():
            write_atomically(self.path / name, text)

    def restore(self) -> list[str]:
        """Write removed or replaced JSON Lines files again.

        Returns:
            A message for each.

        Raises:
            ConfigError: if they cannot be written.
        """
        with self.writing():
            return [sentence for file in self._lines.values() if (sentence := file.restore()) is not None]

    def offsets(self) -> dict[str, int]:
        """JSON Lines file → its bytes, flushed to the disk; call ``restore`` before."""
        sizes = {}
        with self.writing():
            for name in LINE_FILES:
                path = self.path / name
                sizes[name] = _size_on_disk(open_descriptor(path, os.O_RDONLY)) if path.exists() else 0
            _size_on_disk(os.open(self.path, os.O_RDONLY))
        return sizes

    def close(self) -> None:
        """Close the files and release the lock; lines that still wait for room are lost."""
        for file in self._lines.values():
            file.close()
        self._lock.release()

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Convert an OSError (disk full, folder removed) to a ``ConfigError``."""
        return _writing(self.path)


def lock_run_dir(path: Path) -> FolderLock:
    """Create a run directory if missing, and lock it against other processes.

    Raises:
        ConfigError: if it cannot be created, or is locked by another run.
    """
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        return FolderLock(path)


def new_run_dir(title: str) -> Path:
    """Create ``runs/<date>-<time>-<title>``, with a number appended if the name is taken.

    Raises:
        ConfigError: if it cannot be created.
    """
    words = re.sub(r"[^A-Za-z0-9._]+", "-", title).strip("-.")[:80] or "run"
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{words}"
    number = 1
    with _writing(RUNS_FOLDER):
        RUNS_FOLDER.mkdir(parents=True, exist_ok=True)
        while True:
            path = RUNS_FOLDER / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except NotRegularFileError as error:
        raise ConfigError(f"{error.sentence}; {REMOVE_IT}") from error
    except OSError as error:
        raise ConfigError(
            f"metrics.run_dir={path} cannot be written ({error.strerror or error}); "
            "set metrics.run_dir to a folder that can be written, on a disk with room"
        ) from error


def _size_on_disk(descriptor: int) -> int:
    """Flush a file or folder to the disk, close it, and return its size in bytes."""
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
