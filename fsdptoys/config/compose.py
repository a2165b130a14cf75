"""Compose a ``Config`` from command line overrides: Hydra merges YAML groups into the dataclasses.

Every YAML file of a group starts from a ``base_<name>`` schema registered here, so unknown keys are
refused. The group ``experiment`` has no schema, since it overrides other groups.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fsdptoys.checkpoint.safetensors_io import read_json
from fsdptoys.errors import ConfigError
from fsdptoys.loss import LossConfig
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import MODELS, ModelConfig
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.register import live_cache, registered
from fsdptoys.utils.bounds import check_home, check_text

from .choices import list_choices, schema_name
from .compose_named import compose_named
from .group_files import EXPERIMENT, GroupFile, find_own_files
from .named_lists import is_named_option
from .option_values import SWITCHED_CHOICES, read_value
from .overrides import check_groups, check_names, check_values, parse_overrides
from .schema import SCHEMAS, Config
from .train_config import TrainConfig

CONFIG_MODULE = "fsdptoys.configs"
SEQ_LEN = 4096  # default length of a sequence, where the model's maximum is longer
STEPS = 10  # default length of a run, except where a model is tuned

PATHS = (
    *("metrics.run_dir", "checkpoint.folder", "checkpoint.resume", "model.init_from"),
    "model.path",
    *("plan.hardware", "tune.adapter", "data.files", "data.eval_files", "data.folder"),
    *("data.sources", "data.cache", "data.tokenizer", "writers.trackio.folder"),
)
"""Keys that name files or folders, in which ``~`` is the home directory."""


@dataclass
class _YAMLMemory(MemoryConfig):
    """Schema of YAML files: takes their booleans, which OmegaConf refuses for an enum."""

    gradient_checkpointing: Any = GradientCheckpointing.none


@dataclass
class _YAMLTrain(TrainConfig):
    """Likewise."""

    deterministic: Any = Deterministic.false


@dataclass
class _YAMLConfig(Config):
    """As ``Config``, with these schemas."""

    memory: Any
    train: _YAMLTrain
    loss: LossConfig = MISSING


@dataclass(frozen=True)
class Composition:
    """A configuration and the choices from which it was composed."""

    config: Config
    # Group → name of the chosen YAML file; ``experiment`` may be None
    choices: dict[str, str | None]


def compose_config(overrides: Sequence[str]) -> Config:
    """Compose ``key=value`` and ``group=choice`` overrides; values are checked, but not across
    sections.

    ConfigError for the first mistake, in one sentence that names key, value and fix.
    """
    return compose(overrides).config


def compose(overrides: Sequence[str]) -> Composition:
    """Compose a configuration, and return it with its choices; see :func:`compose_config`."""
    choices = list_choices()
    check_names(overrides)
    parsed = parse_overrides(overrides, choices)
    check_groups(parsed)
    groups = [
        str(override.input_line)
        for override in parsed
        if override.key_or_group in choices
    ]
    composed, chosen = _compose_groups(tuple(groups))
    tree = copy.deepcopy(composed)
    check_values(parsed, chosen)
    named_options: dict[str, Any] = {}
    try:
        for override in parsed:
            key = override.key_or_group
            if is_named_option(key):
                named_options[key] = override.value()
            elif key not in choices:
                # As Hydra does
                OmegaConf.update(
                    tree, key, read_value(key, override.value()), merge=True
                )
        compose_named(tree, named_options)
    except OmegaConfBaseException as error:
        raise _not_composed(overrides, error) from error
    if chosen["model"] in registered("model") and not tree.model.name:
        tree.model.name = chosen["model"]
    _choose_lengths(tree)
    config = _to_config(tree)
    _read_model(config)
    return Composition(config, dict(chosen))


def _choose_lengths(tree: DictConfig) -> None:
    """Replace each -1 of ``train`` that model and kind of data decide.

    In a run that tunes a model, the prepared data decide the others (``Config.count_steps``).
    """
    # An invalid reference, which ``_to_config`` reports
    with contextlib.suppress(OmegaConfBaseException):
        if tree.train.seq_len == -1 and "max_seq_len" in tree.model:
            tree.train.seq_len = min(tree.model.max_seq_len, SEQ_LEN)
        tune, data = (OmegaConf.get_type(tree, section) for section in ("tune", "data"))
        continues = tree.model.init_from is not None or getattr(tune, "freezes", False)
        tunes = continues and getattr(data, "reads_files", False)
        for key, value in () if tunes else (("steps", STEPS), ("eval_every", 0)):
            if tree.train[key] == -1:
                tree.train[key] = value


def _read_model(config: Config) -> None:
    """Read the files that the model's settings name, and choose the length of sequences by them if
    it is not chosen."""
    try:
        config.model.read_files(read_json)
        if config.train.seq_len == -1:
            config.train.seq_len = min(config.model.max_seq_len, SEQ_LEN)
    except ConfigError:
        raise
    except ValueError as error:
        # models do not import ConfigError, but word their messages alike
        raise ConfigError(str(error)) from error


def list_presets() -> list[str]:
    """Names of the choices of ``model`` that describe a model without further settings."""
    return [
        name
        for name in list_choices()["model"]
        if MODELS[schema_name("model", name)].has_presets
    ]


def compose_presets(names: Sequence[str]) -> list[ModelConfig]:
    """Compose the configurations of model presets, without the other sections; ConfigError if one
    is invalid.

    All presets are composed in one tree, because Hydra is slow to start.
    """
    _register_schemas()
    overrides = [f"+model@preset{index}={name}" for index, name in enumerate(names)]
    _store_files(find_own_files(overrides))
    try:
        with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            tree = hydra.compose(overrides=overrides)
        configs = [
            OmegaConf.to_object(tree[f"preset{index}"]) for index in range(len(names))
        ]
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(
            f"configs/model cannot be composed: {_one_line(error)}"
        ) from error
    return [
        config if config.name else dataclasses.replace(config, name=name)
        for name, config in zip(names, configs, strict=True)
        if isinstance(config, ModelConfig)
    ]


def _compose_groups(
    groups: tuple[str, ...],
) -> tuple[DictConfig, dict[str, str | None]]:
    """Return the tree of the given choices (cached: copy before writing), and all choices. Takes
    about 0.5 s."""
    files = find_own_files(groups)
    _register_schemas()
    _store_files(files)
    return _compose_stored(groups, repr(files))


@live_cache
def _compose_stored(
    groups: tuple[str, ...], own_files: str
) -> tuple[DictConfig, dict[str, str | None]]:
    """Compose choices; ``own_files`` are the contents of own ones, so that a change is seen."""
    # Hydra refuses null for a group whose default is null already.
    overrides = [override for override in groups if override != "experiment=null"]
    try:
        with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            tree = hydra.compose("config", overrides, return_hydra_config=True)
        chosen = {group: tree.hydra.runtime.choices[group] for group in list_choices()}
        with open_dict(tree):
            del tree["hydra"]
        return _read_booleans(tree), chosen
    except (HydraException, OmegaConfBaseException) as error:
        raise _not_composed(groups, error) from error


def _read_booleans(tree: DictConfig) -> DictConfig:
    """Return the tree of a ``_YAMLConfig`` as that of a ``Config``."""
    sections: dict[Any, Any] = dict(tree.items())
    for section, kind in (("memory", MemoryConfig), ("train", TrainConfig)):
        values: Any = OmegaConf.to_container(tree[section])
        for key in SWITCHED_CHOICES:
            if key.startswith(f"{section}."):
                name = key.removeprefix(f"{section}.")
                values[name] = read_value(key, values[name])
        sections[section] = OmegaConf.merge(kind, values)
    schema = OmegaConf.structured(Config)
    schema.loss = MISSING  # its default would only take values of the same class
    config = OmegaConf.merge(schema, sections)
    assert isinstance(config, DictConfig)
    return config


def _not_composed(overrides: Sequence[str], error: Exception) -> ConfigError:
    return ConfigError(f"{' '.join(overrides)} cannot be composed: {_one_line(error)}")


def _to_config(tree: DictConfig) -> Config:
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        key = error.full_key
        raw = OmegaConf.to_container(tree, resolve=False)
        for part in (key or "").split("."):
            raw = raw.get(part, raw) if isinstance(raw, dict) else raw
        raise ConfigError(
            f"{key}={raw} cannot be resolved ({_one_line(error)}); write the value itself"
        ) from error
    except ConfigError:
        raise
    except ValueError as error:
        # models do not import ConfigError, but word their messages alike
        raise ConfigError(str(error)) from error
    assert isinstance(config, Config)
    for section in dataclasses.fields(config):
        _check_texts(section.name, getattr(config, section.name))
    return config


def _check_texts(key: str, value: Any) -> None:
    """Refuse text and paths that files and system calls cannot take."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _check_texts(f"{key}.{field.name}", getattr(value, field.name))
    elif isinstance(value, list):
        for item in value:
            _check_texts(key, item)
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_texts(f"{key}.{name}", item)
    elif isinstance(value, str):
        check_text(key, value)
        if key in PATHS:
            check_home(key, value)


@live_cache  # Hydra reads every dataclass
def _register_schemas() -> None:
    store = ConfigStore.instance()
    store.store(name="base_config", node=_YAMLConfig, provider="fsdptoys")
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            node = _YAMLMemory if schema is MemoryConfig else schema
            store.store(
                group=group, name=f"base_{name}", node=node, provider="fsdptoys"
            )
        for name, schema in registered(group).items():
            # A choice without a YAML file
            store.store(group=group, name=name, node=schema, provider="fsdptoys")


def _store_files(files: Sequence[GroupFile]) -> None:
    """Store own files where Hydra finds them."""
    store = ConfigStore.instance()
    for file in files:
        store.store(
            group=file.group,
            name=file.name,
            node=OmegaConf.create(file.node),
            package="_global_" if file.group == EXPERIMENT else None,
            provider="own files",
        )


def _one_line(error: Any) -> str:
    """Message of a Hydra or OmegaConf error, without the lines on its location."""
    lines = [line.strip() for line in str(error).splitlines()]
    message_lines = [
        line
        for line in lines
        if line
        and not line.startswith(("full_key:", "reference_type=", "object_type="))
    ]
    return " ".join(message_lines).rstrip(".")
