"""Switches that trade memory for time, changed on a composed configuration.

Composing takes a quarter of a second, and a search tries thousands of combinations. So one
configuration is composed, its dataclasses are replaced, and the overrides that would compose to the
same are derived.
"""

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fsdptoys.config.declared_options import without_switched_off
from fsdptoys.config.schema import Config
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.device.profile import Hardware
from fsdptoys.errors import ConfigError
from fsdptoys.memory import MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.parallel.mesh import MeshConfig
from fsdptoys.utils.text import value_text

Changes = Mapping[str, Any]
"""Key → value, as typed except for the value's type; ``parallel`` names the strategy."""

STRATEGIES: dict[str, type[ParallelConfig]] = {
    strategy.name: strategy
    for strategy in (FSDP2Config, FSDP1Config, DDPConfig, SingleConfig)
}

SECTIONS = ("parallel", "mesh", "train", "memory")


def vary(config: Config, changes: Changes, fixed: Collection[str] = ()) -> Config:
    """A composed configuration with changed switches; settings that lose their effect return to
    their defaults.

    Keys in ``fixed`` keep their values even without effect, and must exist. A validated
    configuration would keep replaced values. A section that refuses its new values raises a
    ConfigError.
    """
    # ``validate`` replaces values in place in these sections, and in the optimizer's and the
    # kernels'.
    sections: dict[str, Any] = {
        "optim": copy.copy(config.optim),
        "kernels": copy.copy(config.kernels),
    }
    for section in SECTIONS:
        old = getattr(config, section)
        mine = {
            key.partition(".")[2]: value
            for key, value in changes.items()
            if key.startswith(f"{section}.")
        }
        kind: type[Any] = type(old)
        if section == "parallel":
            if "parallel" in changes:
                kind = STRATEGIES[changes["parallel"]]
            for key in (*changes, *fixed):
                if key.startswith("parallel.") and key.partition(".")[2] not in _names(
                    kind
                ):
                    raise ConfigError(
                        f"{key} is not an option of parallel={kind.name}; leave it out"
                    )
        values = _shared(old, kind) | mine
        if section == "memory":
            values |= _idle(values, {key.partition(".")[2] for key in fixed})
        sections[section] = kind(**values)
    varied: Config = dataclasses.replace(config, **sections)
    return varied


def overrides_between(base: Config, config: Config) -> list[str]:
    """Overrides that, appended to those of ``base``, compose ``config``; both as composed."""
    overrides = []
    for section in SECTIONS:
        old = getattr(base, section)
        new = getattr(config, section)
        if section == "parallel" and type(old) is not type(new):
            overrides.append(f"parallel={new.name}")
        expected = type(new)(**_shared(old, type(new)))
        overrides += [
            f"{section}.{name}={value_text(getattr(new, name))}"
            for name in _names(type(new))
            if getattr(new, name) != getattr(expected, name)
        ]
    return overrides


def check_strategy(config: Config) -> None:
    """Raise a ConfigError for a strategy without a step model, which names the closest one."""
    parallel = config.parallel
    if parallel.name not in STRATEGIES:
        can = parallel.capabilities
        like = (
            FSDP2Config
            if can.shards_parameters or not can.optimizer_offload
            else DDPConfig
        )
        raise ConfigError(
            f"parallel={parallel.name} cannot be predicted; set parallel={like.name}, which is "
            "closest"
        )


def node_ranks_of(config: Config, hardware: Hardware, world_size: int) -> int:
    """Ranks of one node: as set by the launch, or of the fewest nodes that divide the ranks
    evenly."""
    if config.launch.nproc_per_node != -1:
        return min(config.launch.nproc_per_node, world_size)
    devices = round(hardware.devices_per_node.value)
    nodes = next(
        nodes
        for nodes in range(-(-world_size // devices), world_size + 1)
        if world_size % nodes == 0
    )
    return world_size // nodes


def validate_switches(
    config: Config, world_size: int, device_type: str, node_ranks: int | None = None
) -> None:
    """Validate a composed configuration in place, without checks of the training machine's
    files."""
    check_strategy(config)
    data = config.data
    model = config.model
    eval_every = config.train.eval_every
    config.data = SyntheticConfig(branching=1, mask_documents=data.mask_documents)
    config.train.eval_every = 0
    config.model = model.with_settings(init_from=None) if model.init_from else model
    try:
        config.validate(world_size, device_type, node_ranks)
    finally:
        config.data = data
        config.model = model
        config.train.eval_every = eval_every


def count_parameters(model: ModelConfig) -> int:
    """Parameters of a model."""
    with torch.device("meta"):
        return int(model.build().parameter_counts().total)


def read(config: Config, key: str) -> Any:
    """Value of a key, or None if the strategy lacks it; ``parallel`` is the strategy's name."""
    if key == "parallel":
        return config.parallel.name
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name, None)


def count_switches(config: Config) -> int:
    """Number of sharding and memory settings that differ from their defaults, without the strategy
    and dtypes."""
    formats = ("param_dtype", "buffer_dtype", "reduce_dtype")
    return sum(
        getattr(section, name) != getattr(default, name)
        for section, default in (
            (section, type(section)())
            for section in (config.mesh, config.parallel, config.memory)
        )
        for name in _names(type(section))
        if name not in formats
    )


def fixed_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Keys of the command line, and every key of ``mesh`` and ``memory`` if it chooses their file
    (``memory=lean``)."""
    keys = {override.partition("=")[0] for override in overrides}
    files = {"mesh": MeshConfig, "memory": MemoryConfig}
    return frozenset(
        keys
        | {
            f"{group}.{name}"
            for group in keys & files.keys()
            for name in _names(files[group])
        }
    )


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _shared(section: Any, kind: type[Any]) -> dict[str, Any]:
    """Values of the fields that the section's new class has too."""
    return {
        name: getattr(section, name)
        for name in _names(kind)
        if name in _names(type(section))
    }


def _idle(memory: dict[str, Any], fixed: Collection[str]) -> dict[str, Any]:
    """Return defaults of settings without effect, as their switch is off."""
    values = {f"memory.{name}": value for name, value in memory.items()}
    off = set(without_switched_off(values)) ^ set(values)
    defaults = MemoryConfig()
    return {
        name: getattr(defaults, name)
        for name in memory
        if f"memory.{name}" in off and name not in fixed
    }
