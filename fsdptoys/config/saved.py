"""Read the YAML and JSON files of a run directory, and the run's configuration."""

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from fsdptoys.checkpoint import CheckpointConfig, run_model_config
from fsdptoys.data import DATASETS, DataConfig
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.errors import ConfigError
from fsdptoys.imports import explain_missing
from fsdptoys.loss import LOSSES
from fsdptoys.optim import OPTIMIZERS
from fsdptoys.parallel import STRATEGIES
from fsdptoys.tune import TUNINGS
from fsdptoys.utils.foreign import ForeignError, parse_json, parse_yaml
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line, short_text

from .named_lists import NAMED_LISTS
from .plan_config import PlanConfig
from .schema import Config

LARGEST_FILE_BYTES = 2**20

T = TypeVar("T")


def read_tree(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file of a run; ConfigError if it cannot be read, or is not a mapping with
    string keys."""
    try:
        text = read_regular(path, LARGEST_FILE_BYTES)
        tree = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
        _check_keys(tree)
    except OSError as mistake:
        raise ConfigError(
            f"{path} cannot be read ({mistake.strerror or mistake}); give a directory that "
            "fsdptoys train has written"
        ) from mistake
    except ValueError as mistake:
        raise ConfigError(
            f"{path} cannot be read ({one_line(mistake)}); use the file that the run wrote"
        ) from mistake
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings; use the file that the run wrote")
    return tree


def _check_keys(tree: Any) -> None:
    """Refuse non-string keys, which YAML allows but ``section.key`` names do not."""
    for key in tree if isinstance(tree, dict) else ():
        if not isinstance(key, str):
            raise ForeignError(f"it has the key {key}, which is not text")
    for value in (
        tree.values()
        if isinstance(tree, dict)
        else tree
        if isinstance(tree, list)
        else ()
    ):
        _check_keys(value)


def read_config(tree: dict[str, Any], where: str) -> Config:
    """Build the configuration of a run, as far as it affects the time of a step.

    ``tree`` holds the contents of ``config.yaml``, and ``where`` names it in messages. Missing keys
    are newer than the run and get their defaults. ConfigError for an unknown key or a value of the
    wrong type.
    """
    sections: dict[str, Any] = {
        "model": run_model_config(tree, where, "leave the run out").with_settings(
            init_from=None
        ),
        "parallel": _build_named(STRATEGIES, tree, "parallel", where),
        "optim": _build_named(OPTIMIZERS, tree, "optim", where),
        "tune": _build_named(TUNINGS, {"tune": {"name": "full"}} | tree, "tune", where),
        "loss": _build_named(
            LOSSES, {"loss": {"name": "cross_entropy"}} | tree, "loss", where
        ),
        "data": SyntheticConfig(),
        "checkpoint": CheckpointConfig(),
        "plan": PlanConfig(),  # of the planner that ran then, which may have had other settings
        # Their code may not be loaded, and they do not change the time of a step
        "writers": {},
        "callbacks": {},
        "patches": tree.get("patches", "auto"),
    }
    tree = _without_unknown_names(tree)
    for name, kind in typing.get_type_hints(Config).items():
        if name not in sections:
            sections[name] = _build(kind, tree.get(name, {}), where, name)
    config = Config(**sections)
    # The run is not repeated here, and this node may not meet the requirements of these settings.
    config.train.eval_every = 0
    config.memory.cpu_threads = None
    config.launch.max_restarts = 0
    config.profile.enabled = False
    return config


def _without_unknown_names(tree: dict[str, Any]) -> dict[str, Any]:
    """Leave out writers and callbacks that are not registered here."""
    for name_list in NAMED_LISTS:
        section, _, key = name_list.key.partition(".")
        values = tree.get(section)
        names = values.get(key) if isinstance(values, dict) else None
        if isinstance(values, dict) and isinstance(names, list):
            registered_names = [name for name in names if name in name_list.classes]
            tree = tree | {section: values | {key: registered_names}}
    return tree


def read_data_config(tree: Mapping[str, Any], where: str) -> DataConfig:
    """Build the ``data`` section of a run's configuration; arguments and errors as in
    :func:`read_config`."""
    return _build_named(
        DATASETS, tree, "data", where, fix="use the file that the run wrote"
    )


def _build_named(
    kinds: Mapping[str, type[T]],
    tree: Mapping[str, Any],
    section: str,
    where: str,
    fix: str = "leave the run out",
) -> T:
    """Build a section; its ``name`` selects the dataclass."""
    values = tree.get(section)
    name = values.get("name") if isinstance(values, dict) else None
    missing = explain_missing(tree)
    if missing is not None and isinstance(name, str) and name not in kinds:
        raise ConfigError(f"{where} says {section}.name={short_text(name)}; {missing}")
    if not isinstance(values, dict) or not isinstance(name, str) or name not in kinds:
        raise ConfigError(
            f"{where} says {section}.name={name}, which this version does not have; {fix}"
        )
    return _build(
        kinds[name],
        {key: value for key, value in values.items() if key != "name"},
        where,
        section,
    )


def _build(kind: type[T], values: Any, where: str, section: str) -> T:
    try:
        return build(kind, values, section)
    except ForeignError as mistake:
        raise ConfigError(
            f"{where} cannot be read ({mistake}); correct it, or leave the run out"
        ) from mistake
