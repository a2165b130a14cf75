"""The settings of a command: those of its files in order, then those of the command line.

Files become overrides, so that everything after the command line works as without files: sweeps
record the overrides of their jobs, and each rank under torchrun reads the same files.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import counted, print_status, value_text

from .choices import BASE, list_choices
from .fixes import all_options, list_options
from .option_values import Option
from .yaml_settings import Setting, YAMLFile, override_text, read_sections

CONFIG_FILE = "config.yaml"
RUN_FILE = "environment.json"
"""File beside ``config.yaml`` that every run has."""
JOB_RUN = "run"
"""Folder of a run within that of a sweep's job."""

OF_ITS_FOLDER = (
    *("metrics.run_dir", "checkpoint.folder", "checkpoint.resume"),
    *("launch.device", "launch.rdzv_endpoint", "launch.rdzv_token_file"),
)
"""Keys of a run that name its own folder and machine, which another run does not share."""

FOLLOWING_SEEDS = ("train.init_seed", "train.data_seed", "train.sample_seed")
"""Seeds that a run records as ``train.seed`` if they follow it."""


@dataclass(frozen=True)
class Settings:
    """Overrides of files and of the command line, the latter last."""

    settings: list[Setting]
    replaced: list[str] = field(default_factory=list)
    """Sentences on sections that a later choice has replaced."""

    @property
    def overrides(self) -> list[str]:
        """The overrides."""
        return [setting.word for setting in self.settings]

    @property
    def origins(self) -> dict[str, str]:
        """Map each key to the file and line that set it last; "" for the command line."""
        return {setting.key: setting.origin for setting in self.settings}

    def without(self, *keys: str) -> "Settings":
        """Return the settings without those of files for some keys, which a command does not
        read."""
        settings = [
            setting
            for setting in self.settings
            if not setting.origin or setting.key not in keys
        ]
        return Settings(settings, self.replaced)

    def without_defaults(self, *keys: str) -> "Settings":
        """Return the settings without those of files that set one of some keys to its default, as a
        printed configuration does."""
        options, _ = all_options(())
        settings = [
            setting
            for setting in self.settings
            if not setting.origin
            or setting.key not in keys
            or setting.word != f"{setting.key}={_default_text(options[setting.key])}"
        ]
        return Settings(settings, self.replaced)

    def tell(self) -> None:
        """Print what a later choice has replaced, once for all ranks."""
        if os.environ.get("RANK", "0") == "0":
            for sentence in self.replaced:
                print_status(sentence)

    @contextlib.contextmanager
    def name_origin(self) -> Iterator[None]:
        """Put file and line before a mistake in a setting of a file."""
        try:
            yield
        except ConfigError as error:
            match = re.search(r"(?:^|: )'?([A-Za-z_][\w./]*)=", str(error))
            origin = self.origins.get(match[1], "") if match is not None else ""
            if not origin:
                raise
            raise ConfigError(f"{origin}: {error}") from error


def read_settings(files: Sequence[str], overrides: Sequence[str]) -> Settings:
    """Read files of settings or the folders of runs, and add the overrides of the command line.

    A later value replaces an earlier one. A later choice of a group replaces what earlier files
    set in its section.

    Raises:
        ConfigError: for the first mistake in the form of a file.
    """
    if not files:
        return Settings([Setting(word, "") for word in overrides])
    return _merge([read_file(file) for file in files], overrides)


def read_mapping(tree: Mapping[str, Any], overrides: Sequence[str]) -> Settings:
    """Read a mapping of the form of a file, and add overrides; see :func:`read_settings`."""
    return _merge([read_sections(YAMLFile.of_mapping(tree))], overrides)


def _merge(files: Sequence[list[Setting]], overrides: Sequence[str]) -> Settings:
    """Join the settings of files in order, and overrides."""
    groups = list_choices()
    sources = [*files, [Setting(word, "") for word in overrides]]
    merged: list[Setting] = []
    replaced = []
    for source in sources:
        keys = {setting.key: setting.word for setting in source}
        sections = tuple(f"{key}." for key in keys if key in groups)
        lost = [
            setting
            for setting in merged
            if setting.key.startswith(sections) and setting.key not in keys
        ]
        for prefix in sections:
            lost_overrides = [item.word for item in lost if item.key.startswith(prefix)]
            if lost_overrides:
                more = len(lost_overrides) - 1
                others = f" and {counted(more, 'more setting')}" if more else ""
                replaced.append(
                    f"{keys[prefix[:-1]]} replaces {lost_overrides[0]}{others} of the files before "
                    "it"
                )
        merged = [
            setting
            for setting in merged
            if setting.key not in keys and setting not in lost
        ]
        merged += source
    return Settings(merged, replaced)


def _default_text(option: Option) -> str:
    return value_text(option.default, quote=True)


def read_file(name: str) -> list[Setting]:
    """Return the overrides of a file, or of the folder of a run.

    Raises:
        ConfigError: for the first mistake of its form.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        folders = [path, path / JOB_RUN]
        path = next(
            (
                folder / CONFIG_FILE
                for folder in folders
                if (folder / CONFIG_FILE).is_file()
            ),
            path,
        )
        if path.is_dir():
            raise ConfigError(
                f"--config {name} is a folder without a run's {CONFIG_FILE}; name a file of "
                "settings, or the folder of a run"
            )
    elif not path.exists():
        raise ConfigError(
            f"--config {name} does not exist; name a YAML file of settings, or the folder of a "
            "run"
        )
    file = YAMLFile.read(path)
    is_run = path.name == CONFIG_FILE and (path.parent / RUN_FILE).is_file()
    return _read_run(file) if is_run else read_sections(file)


def _read_run(file: YAMLFile) -> list[Setting]:
    """Return the settings of a run, without those that only this run can have."""
    train: Any = file.tree.get("train")
    seed = train.get("seed") if isinstance(train, dict) else None
    left_out = [*OF_ITS_FOLDER]
    left_out += [
        key
        for key in FOLLOWING_SEEDS
        if seed is not None and train.get(key.partition(".")[2]) == seed
    ]
    settings = [
        setting for setting in read_sections(file) if setting.key not in left_out
    ]
    return [*settings, *_newer_options(file, settings)]


def _newer_options(file: YAMLFile, settings: Sequence[Setting]) -> list[Setting]:
    """Return the defaults of model options that are newer than a run: its preset may set them
    otherwise."""
    from .choices import schema_name
    from .schema import SCHEMAS

    chosen = next((item.word for item in settings if item.key == "model"), "")
    preset = chosen.partition("=")[2]
    if not preset or preset.startswith(BASE):
        return []
    keys = {setting.key for setting in settings} | {"model.name"}
    options = list_options(SCHEMAS["model"][schema_name("model", preset)], "model")
    return [
        Setting(f"{key}={override_text(key, option.default)}", file.origin("model"))
        for key, option in options.items()
        if key not in keys
    ]
