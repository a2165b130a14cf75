"""From words on the command line to one ``Config``: Hydra composes YAML groups over the dataclasses, then it is gone.

Every group's YAML starts from a ``base_<name>`` schema that is registered here, so a key that no dataclass has cannot
get in. ``experiment`` is the one group without a schema: it overrides the others.
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fsdptoys.checkpoint import CheckpointConfig
from fsdptoys.data import DATASETS
from fsdptoys.errors import ConfigError
from fsdptoys.memory import MemoryConfig
from fsdptoys.metrics import MetricsConfig
from fsdptoys.models import MODELS, ModelConfig
from fsdptoys.optim import OPTIMIZERS
from fsdptoys.parallel import STRATEGIES
from fsdptoys.parallel.mesh import MeshConfig
from fsdptoys.utils.paths import check_home, check_text

from .overrides import (
    Option,
    check_groups,
    check_values,
    list_choices,
    list_defaults,
    parse_overrides,
    schema_name,
)
from .schema import Config

CONFIG_MODULE = "fsdptoys.configs"

SCHEMAS: dict[str, dict[str, type]] = {
    "model": dict(MODELS),
    "parallel": dict(STRATEGIES),
    "mesh": {"default": MeshConfig},
    "memory": {"default": MemoryConfig},
    "data": dict(DATASETS),
    "optim": dict(OPTIMIZERS),
    "checkpoint": {"default": CheckpointConfig},
    "metrics": {"default": MetricsConfig},
}
"""Group → ``base_<name>`` that its YAML files start from → dataclass."""

ROOT_OPTIONS = {
    field.name: Option(Any, field.default)
    for field in dataclasses.fields(Config)
    if field.default is not dataclasses.MISSING
}
"""Keys that stand in no section."""


PATHS = (
    *("metrics.run_dir", "checkpoint.folder", "checkpoint.resume", "model.init_from", "plan.hardware"),
    *("data.files", "data.eval_files", "data.folder", "data.sources", "data.cache", "data.tokenizer"),
)
"""Keys that name files or folders, in which ``~`` is a home folder."""


@dataclass(frozen=True)
class Composition:
    """A configuration and what it was put together from."""

    config: Config
    choices: dict[str, str | None]
    """Group → name of the chosen YAML file; ``experiment`` may be None."""


def compose_config(overrides: Sequence[str]) -> Config:
    """Compose a configuration.

    Args:
        overrides: ``key=value`` and ``group=choice`` words, as on the command line.

    Returns:
        The configuration, each value checked by itself but not yet validated as a whole.

    Raises:
        ConfigError: for the first mistake, in one sentence naming key, value and fix.
    """
    return compose(overrides).config


def compose(overrides: Sequence[str]) -> Composition:
    """Compose a configuration and tell what was chosen; see :func:`compose_config`."""
    choices = list_choices()
    parsed = parse_overrides(overrides, choices)
    check_groups(parsed, choices, list_defaults())
    groups = [str(override.input_line) for override in parsed if override.key_or_group in choices]
    composed, chosen = _compose_groups(tuple(groups))
    tree = copy.deepcopy(composed)
    sections = {str(key): _schema(tree, str(key)) for key in tree if key not in ROOT_OPTIONS}

    def others(group: str) -> tuple[str, dict[str, type]]:
        of_names = SCHEMAS.get(group, {})  # an experiment has none: it overrides other groups
        schemas = {name: of_names[schema_name(group, name)] for name in choices[group]} if of_names else {}
        return str(chosen[group]), schemas

    check_values(parsed, sections, ROOT_OPTIONS, list(choices), others)
    try:
        for override in parsed:
            if override.key_or_group not in choices:
                OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)  # as Hydra does
    except OmegaConfBaseException as error:
        raise _not_composed(overrides, error) from error
    return Composition(_to_config(tree), dict(chosen))


def compose_presets(names: Sequence[str]) -> list[ModelConfig]:
    """The configurations of presets of ``model``, as their YAML files say, and nothing but them.

    Hydra is slow to start, so it composes all of them side by side in one tree.

    Raises:
        ConfigError: if one of them cannot be composed.
    """
    _register_schemas()
    overrides = [f"+model@preset{index}={name}" for index, name in enumerate(names)]
    try:
        with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            tree = hydra.compose(overrides=overrides)
        configs = [OmegaConf.to_object(tree[f"preset{index}"]) for index in range(len(names))]
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"configs/model cannot be composed: {_one_line(error)}") from error
    return [config for config in configs if isinstance(config, ModelConfig)]


@functools.cache
def _compose_groups(groups: tuple[str, ...]) -> tuple[DictConfig, dict[str, str | None]]:
    """The tree of some groups' choices, to be copied and not written to, and all choices: half a second of Hydra's."""
    _register_schemas()
    # Hydra knows no null for a group whose default is null already.
    words = [word for word in groups if word != "experiment=null"]
    try:
        with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            tree = hydra.compose("config", words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise _not_composed(groups, error) from error
    chosen = {group: tree.hydra.runtime.choices[group] for group in list_choices()}
    with open_dict(tree):
        del tree["hydra"]
    return tree, chosen


def _not_composed(words: Sequence[str], error: Exception) -> ConfigError:
    return ConfigError(f"{' '.join(words)} cannot be composed: {_one_line(error)}")


def _to_config(tree: DictConfig) -> Config:
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        key = error.full_key
        raw = OmegaConf.to_container(tree, resolve=False)
        for part in (key or "").split("."):
            raw = raw.get(part, raw) if isinstance(raw, dict) else raw
        raise ConfigError(f"{key}={raw} cannot be resolved ({_one_line(error)}); write the value itself") from error
    except ConfigError:
        raise
    except ValueError as error:  # models know no ConfigError, but their sentences are made the same way
        raise ConfigError(str(error)) from error
    assert isinstance(config, Config)
    for section in dataclasses.fields(config):
        _check_texts(section.name, getattr(config, section.name))
    return config


def _check_texts(key: str, value: Any) -> None:
    """Refuse text and paths that no file and no system call takes."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _check_texts(f"{key}.{field.name}", getattr(value, field.name))
    elif isinstance(value, list):
        for item in value:
            _check_texts(key, item)
    elif isinstance(value, str):
        check_text(key, value)
        if key in PATHS:
            check_home(key, value)


def _schema(tree: DictConfig, section: str) -> type:
    schema = OmegaConf.get_type(tree, section)
    assert isinstance(schema, type)
    return schema


@functools.cache  # Hydra reads every dataclass for it
def _register_schemas() -> None:
    store = ConfigStore.instance()
    store.store(name="base_config", node=Config, provider="fsdptoys")
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            store.store(group=group, name=f"base_{name}", node=schema, provider="fsdptoys")


def _one_line(error: Any) -> str:
    """Hydra's and OmegaConf's own words, without the lines that locate them."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("full_key:", "reference_type=", "object_type="))]
    return " ".join(told).rstrip(".")
