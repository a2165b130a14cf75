"""The folder of one run: made once, never shared, and valid on disk at every moment of the run."""

import contextlib
import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import yaml

from fsdptoys.errors import ConfigError

from .config import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    ROUTING_FILE,
    RUNS_FOLDER,
    MetricsConfig,
    already_holds,
    check_run_dir,
    run_dir_path,
)
from .step import StepMetrics


class RunDirectory:
    """Makes the folder, writes ``config.yaml`` and ``environment.json``, and opens ``metrics.jsonl``.

    Args:
        config: says which folder.
        title: part of the folder's name where the config does not name it.
        config_tree: every setting of the run, as plain dicts, lists, strings and numbers.
        environment: where and with what the run takes place.

    Raises:
        ConfigError: if the folder cannot be made or already holds a run.
    """

    def __init__(
        self, config: MetricsConfig, title: str, config_tree: dict[str, Any], environment: dict[str, Any]
    ) -> None:
        check_run_dir(config)
        self.path = RUNS_FOLDER if config.run_dir is None else run_dir_path(config.run_dir)
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            if config.run_dir is None:
                self.path = _new_folder(title)
            try:
                # "x": of two runs that start into one folder at once, the second must not write over the first.
                self._metrics: TextIO = open(self.path / METRICS_FILE, "x", encoding="utf-8")  # noqa: SIM115
            except FileExistsError as error:
                raise ConfigError(already_holds(config.run_dir, METRICS_FILE)) from error
            self.write(CONFIG_FILE, yaml.safe_dump(config_tree, sort_keys=False, allow_unicode=True))
            self.write(ENVIRONMENT_FILE, json.dumps(environment, indent=2) + "\n")

    def append(self, metrics: StepMetrics) -> None:
        """Add a step to ``metrics.jsonl`` and hand the line to the system at once."""
        with self.writing():
            self._metrics.write(metrics.to_json() + "\n")
            self._metrics.flush()

    def append_counts(self, step: int, counts: list[list[int]]) -> None:
        """Add a step to ``routing.jsonl``, which the first of them makes."""
        with self.writing(), open(self.path / ROUTING_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "expert_tokens": counts}) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a whole file of text."""
        with self.writing():
            (self.path / name).write_text(text, encoding="utf-8")

    def close(self) -> None:
        """Close ``metrics.jsonl``; every step is in it already, so there is nothing that could fail to be written."""
        with contextlib.suppress(OSError):
            self._metrics.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what the system refuses (disk full, folder gone) into the one sentence for the user."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"metrics.run_dir={self.path} cannot be written ({error.strerror or error}); "
                "set metrics.run_dir to a folder that can be written, on a disk with room"
            ) from error


def _new_folder(title: str) -> Path:
    """Make ``runs/<date>-<time>-<title>``, numbered where another run has taken the name."""
    words = re.sub(r"[^A-Za-z0-9._]+", "-", title).strip("-.")[:80] or "run"
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{words}"
    number = 1
    while True:
        path = RUNS_FOLDER / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
