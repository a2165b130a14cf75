"""The folder of one run: written by one process at a time, and valid on disk at every moment."""

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import sync_to_disk, write_atomically
from fsdptoys.utils.file_lock import FolderLock
from fsdptoys.utils.regular_file import (
    NotRegularFileError,
    open_descriptor,
    open_regular,
)

from .config import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    RESULT_FILE,
    RESUMES_FILE,
    RUNS_FOLDER,
    SUMMARY_FILE,
    MetricsConfig,
    run_dir_path,
)
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
from .writer import WriterConfig

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk or quota, which may be temporary."""


class RunDirectory:
    """Creates the folder, writes ``config.yaml`` and ``environment.json``, and opens
    ``metrics.jsonl``.

    ConfigError if the folder cannot be created, is being written by another process, or has a run
    that is not resumed.

    Args:
        title: part of the folder's name if the config does not name it.
        resumed: the state from which the run resumes; None for a new run; its folder must not
            contain another.
        lock: of the folder, if already held; released by ``close``.
        make_room: called if the disk is full; returns whether it may have room now.
        writers: name → settings of writers, which are checked.
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
        writers: Mapping[str, WriterConfig] = {},
    ) -> None:
        self._make_room = make_room
        self._is_full = False
        check_run_dir(config, resumed is not None, writers)
        self.path = (
            RUNS_FOLDER if config.run_dir is None else run_dir_path(config.run_dir)
        )
        self.notes: list[str] = []
        """Messages for the user about the files of earlier starts."""
        self.earlier_steps: list[StepMetrics] = []
        """Steps of earlier starts, without token counts per expert."""
        with writing(self.path):
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
                    raise ConfigError(
                        already_holds(config.run_dir, METRICS_FILE)
                    ) from error
                self.write(ENVIRONMENT_FILE, json.dumps(environment, indent=2) + "\n")
                # Last, since readers take a folder with settings for a run directory.
                self.write(
                    CONFIG_FILE,
                    yaml.safe_dump(config_tree, sort_keys=False, allow_unicode=True),
                )
            except BaseException:
                self._lock.release()
                raise
        self.resumes = read_resumes(self.path / RESUMES_FILE)
        """Resumes of the run, including this start."""

    def _resume(
        self,
        resumed: ResumePoint,
        config_tree: dict[str, Any],
        environment: dict[str, Any],
    ) -> None:
        """Truncate or move the files of an earlier start, and record this resume."""
        resume = describe_resume(self.path, resumed, config_tree, environment)
        moved_to, notes = truncate_or_move(self.path, resumed)
        for name in (SUMMARY_FILE, RESULT_FILE):  # describe the end of an earlier start
            (self.path / name).unlink(missing_ok=True)
        self.earlier_steps, unread = read_steps(self.path / METRICS_FILE)
        self.notes += [*notes, *unread]
        if resume is not None:
            append_resume(
                self.path / RESUMES_FILE, dataclasses.replace(resume, moved_to=moved_to)
            )

    def append(self, name: str, line: str) -> list[str]:
        """Append a line to a JSON Lines file, created if missing, unbuffered; ConfigError if it
        cannot be written.

        A full disk is no error: the line is written once there is room, and a message is returned
        at first.
        """
        if name not in self._lines:
            with writing(self.path):
                self._lines[name] = LineFile(self.path / name)
        self._lines[name].add(line)
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
            return (
                [f"steps wait in memory until {self.path} has free space ({why})"]
                if first
                else []
            )
        self._is_full = False
        return []

    def flush(self) -> None:
        """Write the queued lines; ConfigError if they cannot be written."""
        with writing(self.path):
            for file in self._lines.values():
                file.write()

    def write(self, name: str, text: str) -> None:
        """Write a text file atomically."""
        with writing(self.path):
            write_atomically(self.path / name, text)

    def restore(self) -> list[str]:
        """Write removed or replaced JSON Lines files again, and return a message for each; may
        raise ConfigError."""
        with writing(self.path):
            return [
                sentence
                for file in self._lines.values()
                if (sentence := file.restore()) is not None
            ]

    def offsets(self) -> dict[str, int]:
        """JSON Lines file → its bytes, flushed to the disk; call ``restore`` before."""
        sizes = dict.fromkeys(LINE_FILES, 0)
        with writing(self.path):
            for name in filter(lambda name: (self.path / name).exists(), LINE_FILES):
                # Follows no link
                with open(open_descriptor(self.path / name, os.O_RDONLY), "rb") as file:
                    os.fsync(file.fileno())
                    sizes[name] = os.fstat(file.fileno()).st_size
            sync_to_disk(self.path)
        return sizes

    def close(self) -> None:
        """Close the files and release the lock; lines that still wait for room are lost."""
        for file in self._lines.values():
            file.close()
        self._lock.release()


def lock_run_dir(path: Path) -> FolderLock:
    """Create a run directory if missing, and lock it; ConfigError if it cannot be created, or
    another run holds it."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        return FolderLock(path)


def new_run_dir(title: str) -> Path:
    """Create ``runs/<date>-<time>-<title>``, with a number appended if taken; ConfigError if it
    cannot be created."""
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", title).strip("-.")[:80] or "run"
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{slug}"
    number = 1
    with writing(RUNS_FOLDER):
        RUNS_FOLDER.mkdir(parents=True, exist_ok=True)
        while True:
            path = RUNS_FOLDER / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
            number += 1


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError (disk full, folder removed) to a ``ConfigError``."""
    try:
        yield
    except NotRegularFileError as error:
        raise ConfigError(f"{error.sentence}; {REMOVE_IT}") from error
    except OSError as error:
        raise ConfigError(
            f"metrics.run_dir={path} cannot be written ({error.strerror or error}); "
            "set metrics.run_dir to a folder that can be written, on a disk with room"
        ) from error


class LineFile:
    """Appends lines to a file, created if missing; all methods raise OSError, also if the path is
    no regular file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_regular(path, "ab+", buffering=0)
        self._waiting: deque[bytes] = deque()

    def add(self, line: str) -> None:
        """Queue a line, given without its newline."""
        self._waiting.append(f"{line}\n".encode())

    def write(self) -> None:
        """Write all queued lines to the system, each completely or not at all."""
        while self._waiting:
            before = os.fstat(self._file.fileno()).st_size
            left = self._waiting[0]
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), before)
                raise
            self._waiting.popleft()

    def restore(self) -> str | None:
        """Write the lines again if the file was removed, moved or replaced, and return a message.

        The open file still has them; a replacement is renamed to ``<name>.replaced-<n>``, not
        overwritten.
        """
        try:
            status = os.lstat(self._path)
        except FileNotFoundError:
            status = None
        if status is not None and os.path.samestat(
            status, os.fstat(self._file.fileno())
        ):
            return None
        sentence = f"{self._path} was removed during the run; its lines have been written again"
        if status is not None:
            names = (
                self._path.with_name(f"{self._path.name}.replaced-{number}")
                for number in itertools.count(1)
            )
            aside = next(name for name in names if not os.path.lexists(name))
            os.rename(self._path, aside)
            sentence = (
                f"{self._path} was replaced during the run; the other file is now {aside.name}, "
                "and the lines of the run have been written again"
            )
        self._file.seek(0)
        write_atomically(self._path, self._file.read())
        renewed = open_regular(self._path, "ab+", buffering=0)
        self._file.close()
        self._file = renewed
        return sentence

    def close(self) -> None:
        """Close the file without its queued lines; may be called twice."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self.restore()
            with contextlib.suppress(OSError):
                self._file.close()
