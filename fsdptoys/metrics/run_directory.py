"""The folder of one run: never written by two at once, and valid on disk at every moment of the run."""

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
    Resumed,
    append_resume,
    describe_resume,
    put_in_place,
    read_resumes,
    read_steps,
)
from .step import StepMetrics


class RunDirectory:
    """Makes the folder, writes ``config.yaml`` and ``environment.json``, and opens ``metrics.jsonl``.

    Args:
        config: says which folder.
        title: part of the folder's name where the config does not name it.
        config_tree: every setting of the run, as plain dicts, lists, strings and numbers.
        environment: where and with what the run takes place.
        resumed: what the run goes on from; None for a run of its own, whose folder must not hold another.
        lock: of the folder, where it is held already; released by ``close``.
        make_room: called where a step finds no room; says whether there may be some now.

    Raises:
        ConfigError: if the folder cannot be made, is being written by another process, or already holds a run that is
            not to be gone on with.
    """

    def __init__(
        self,
        config: MetricsConfig,
        title: str,
        config_tree: dict[str, Any],
        environment: dict[str, Any],
        resumed: Resumed | None = None,
        lock: FolderLock | None = None,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self._make_room = make_room
        self._is_full = False
        check_run_dir(config, resumes=resumed is not None)
        self.path = RUNS_FOLDER if config.run_dir is None else run_dir_path(config.run_dir)
        self.notes: list[str] = []
        """Sentences for the user on what was found."""
        self.earlier_steps: list[StepMetrics] = []
        """What ``metrics.jsonl`` holds already, without the tokens of each expert."""
        with self.writing():
            if config.run_dir is None:
                self.path = new_run_dir(title)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock or FolderLock(self.path)
            try:
                if resumed is not None:
                    self._go_on(resumed, config_tree, environment)
                try:
                    if resumed is None:
                        # Whatever the check above has seen: what is there must not be written over.
                        open_regular(self.path / METRICS_FILE, "xb").close()
                    self._lines = {METRICS_FILE: LineFile(self.path / METRICS_FILE)}
                except FileExistsError as error:
                    raise ConfigError(already_holds(config.run_dir, METRICS_FILE)) from error
                self.write(ENVIRONMENT_FILE, json.dumps(environment, indent=2) + "\n")
                # Last, since a folder with settings is taken for that of a run, and read.
                self.write(CONFIG_FILE, yaml.safe_dump(config_tree, sort_keys=False, allow_unicode=True))
            except BaseException:
                self._lock.release()
                raise
        self.resumes = read_resumes(self.path / RESUMES_FILE)
        """How the run went on, this start included."""

    def _go_on(self, resumed: Resumed, config_tree: dict[str, Any], environment: dict[str, Any]) -> None:
        """Put what an earlier start has left in its place, and write down that this one goes on."""
        resume = describe_resume(self.path, resumed, config_tree, environment)
        cut = put_in_place(self.path, resumed)
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)  # of a start that came to an end, which this one has not
        self.earlier_steps, unread = read_steps(self.path / METRICS_FILE)
        self.notes += [*cut.notes, *unread]
        if resume is not None:
            append_resume(self.path / RESUMES_FILE, dataclasses.replace(resume, moved_to=cut.moved_to))

    def append(self, metrics: StepMetrics) -> str | None:
        """Add a step to ``metrics.jsonl`` and hand the line to the system at once.

        Returns:
            A sentence if the disk is full, once: the line is written as soon as there is room.
        """
        self._lines[METRICS_FILE].add(metrics.to_json())
        return self._write_lines()

    def append_counts(self, step: int, counts: list[list[int]]) -> str | None:
        """Add a step to ``routing.jsonl``, which the first of them makes; like ``append``."""
        if ROUTING_FILE not in self._lines:
            with self.writing():
                self._lines[ROUTING_FILE] = LineFile(self.path / ROUTING_FILE)
        self._lines[ROUTING_FILE].add(json.dumps({"step": step, "expert_tokens": counts}))
        return self._write_lines()

    def flush(self) -> None:
        """Write what still waits for room.

        Raises:
            ConfigError: if there is none.
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
            return f"steps wait in memory until there is room in {self.path} ({why})" if first else None
        self._is_full = False
        return None

    def write(self, name: str, text: str) -> None:
        """Write a whole file of text, or leave what was there as it was."""
        with self.writing():
            write_atomically(self.path / name, text)

    def restore(self) -> list[str]:
        """Write the files of lines again that were removed or replaced under the run.

        Returns:
            A sentence for each.

        Raises:
            ConfigError: if that is not possible.
        """
        with self.writing():
            return [sentence for file in self._lines.values() if (sentence := file.restore()) is not None]

    def offsets(self) -> dict[str, int]:
        """File of lines → its bytes, all of which outlive a loss of power from here on; after ``restore``."""
        sizes = {}
        with self.writing():
            for name in LINE_FILES:
                path = self.path / name
                sizes[name] = _size_on_disk(open_descriptor(path, os.O_RDONLY)) if path.exists() else 0
            _size_on_disk(os.open(self.path, os.O_RDONLY))
        return sizes

    def close(self) -> None:
        """Close the files; every step for which there was room is in them already."""
        for file in self._lines.values():
            file.close()
        self._lock.release()

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Turn what the system refuses (disk full, folder gone) into the one sentence for the user."""
        return _writing(self.path)


def lock_run_dir(path: Path) -> FolderLock:
    """Make a run's directory if it is missing, and hold it against every other process.

    Raises:
        ConfigError: if it cannot be made, or is another run's at the moment.
    """
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        return FolderLock(path)


def new_run_dir(title: str) -> Path:
    """Make ``runs/<date>-<time>-<title>``, numbered where another run has taken the name.

    Raises:
        ConfigError: if it cannot be made.
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
    """Turn what the system refuses (disk full, folder gone) into the one sentence for the user."""
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
    """Bytes of a file or folder after the system has put all of it on the disk; closes it."""
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
