"""What a run directory's files say, read back: trees of plain values, and the configuration that wrote them."""

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from fsdptoys.checkpoint import CheckpointConfig, model_config_of
from fsdptoys.data import DataConfig, SyntheticConfig
from fsdptoys.errors import ConfigError
from fsdptoys.optim import OptimConfig
from fsdptoys.parallel import ParallelConfig
from fsdptoys.utils.foreign import ForeignError, parse_json, parse_yaml
from fsdptoys.utils.from_tree import typed
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line

from .schema import Config

LARGEST_FILE_BYTES = 2**20

T = TypeVar("T")


def read_tree(path: Path) -> dict[str, Any]:
    """A YAML or JSON file that a run wrote.

    Raises:
        ConfigError: if it cannot be read, or holds no mapping.
    """
    try:
        text = read_regular(path, LARGEST_FILE_BYTES)
        tree = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
        _check_keys(tree)
    except OSError as mistake:
        raise ConfigError(
            f"{path} cannot be read ({mistake.strerror or mistake}); give a directory that fsdptoys train has written"
        ) from mistake
    except ValueError as mistake:
        raise ConfigError(f"{path} cannot be read ({one_line(mistake)}); use the file that the run wrote") from mistake
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings; use the file that the run wrote")
    return tree


def _check_keys(tree: Any) -> None:
    """Refuse keys that are not text, which YAML has, since settings are named ``section.key``."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if not isinstance(key, str):
                raise ForeignError(f"it has the key {key}, which is not text")
            _check_keys(value)
    elif isinstance(tree, list):
        for value in tree:
            _check_keys(value)


def read_config(tree: dict[str, Any], where: str) -> Config:
    """The configuration that a run wrote, as far as it decides how long a step takes.

    Keys that are missing have been added since, and get what they stand at when nothing is said.

    Args:
        tree: of its ``config.yaml``.
        where: the file, for sentences.

    Raises:
        ConfigError: for a key that nothing here reads, and for a value that cannot be.
    """
    kinds = typing.get_type_hints(Config)
    sections: dict[str, Any] = {
        "model": dataclasses.replace(model_config_of(tree.get("model"), where, "leave the run out"), init_from=None),
        "parallel": _build(_kind(ParallelConfig, tree, "parallel", where), tree["parallel"], where, "parallel"),
        "optim": _build(_kind(OptimConfig, tree, "optim", where), tree["optim"], where, "optim"),
        "data": SyntheticConfig(),
        "checkpoint": CheckpointConfig(),
        "patches": tree.get("patches", "auto"),
    }
    for name, kind in kinds.items():
        if name not in sections:
            values = tree.get(name, {})
            if not isinstance(values, dict):
                raise ConfigError(f"{where} says {name}={values}, which must be a mapping; correct it")
            sections[name] = _build(kind, values, where, name)
    config = Config(**sections)
    # What this machine may not have, and the run is not asked for again.
    config.train.eval_every = 0
    config.memory.cpu_threads = None
    config.launch.max_restarts = 0
    config.profile.enabled = False
    return config


def read_data_config(tree: Mapping[str, Any], where: str) -> DataConfig:
    """The part of a run's configuration that says what it was trained on; otherwise as :func:`read_config`."""
    kind = _kind(DataConfig, tree, "data", where, fix="use the file that the run wrote")
    config: DataConfig = _build(kind, tree["data"], where, "data")
    return config


def _kind(base: type, tree: Mapping[str, Any], section: str, where: str, fix: str = "leave the run out") -> type:
    """The class that a section names."""
    values = tree.get(section)
    name = values.get("name") if isinstance(values, dict) else None
    kinds = {getattr(kind, "name", None): kind for kind in _subclasses(base)}
    if name is None or name not in kinds:
        raise ConfigError(f"{where} says {section}.name={name}, which nothing here knows; {fix}")
    return kinds[name]


def _subclasses(base: type) -> Iterable[type]:
    children: list[type] = base.__subclasses__()
    for kind in children:
        yield kind
        yield from _subclasses(kind)


def _build(kind: type[T], values: Mapping[str, Any], where: str, key: str) -> T:
    """A dataclass out of plain values; ``name`` has said which."""
    hints = typing.get_type_hints(kind)
    fields = {field.name for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    built = {}
    for name, value in values.items():
        if name == "name" and name not in fields:
            continue
        if name not in fields:
            raise ConfigError(f"{where} says {key}.{name}={value}, which nothing here reads; remove it")
        built[name] = _typed(hints[name], value, where, f"{key}.{name}")
    try:
        return kind(**built)
    except TypeError as mistake:
        raise ConfigError(f"{where} lacks a setting of {key} ({mistake}); leave the run out") from mistake


def _typed(annotation: Any, value: Any, where: str, key: str) -> Any:
    kinds = [kind for kind in (typing.get_args(annotation) or (annotation,)) if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, Enum):
            try:
                return kind(value)
            except (ValueError, TypeError):  # TypeError: of a list, which has no hash
                continue
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            return _build(kind, value, where, key)
    enums = [kind for kind in kinds if issubclass(kind, Enum)]
    if value is not None and enums:
        choices = " | ".join(str(choice.value) for choice in enums[0])
        raise ConfigError(f"{where} says {key}={value}, which must be {choices}; correct it")
    try:
        return typed(annotation, value, key)
    except ForeignError as mistake:
        raise ConfigError(f"{where} cannot be read ({mistake}); correct it") from mistake
