"""Switches that trade memory for time, changed on a composed configuration.

Composing takes a quarter of a second, and a search tries thousands of combinations. So one configuration is composed,
its dataclasses are replaced, and the overrides that would compose to the same are derived.
"""

import copy
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from fsdptoys.config.schema import Config
from fsdptoys.data import SyntheticConfig
from fsdptoys.device.profile import Hardware
from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.utils.text import value_text

Changes = Mapping[str, Any]  # Key → value, as typed except for the value's type; ``parallel`` names the strategy
STRATEGIES: dict[str, type[ParallelConfig]] = {
    strategy.name: strategy for strategy in (FSDP2Config, FSDP1Config, DDPConfig, SingleConfig)
}

SECTIONS = ("parallel", "mesh", "train", "memory")
OWNED = {
    "chunk_loss": ("chunk_tokens", "chunk_grad_dtype"),
    "gradient_checkpointing": ("checkpointing_start_index", "checkpointing_every", "activation_offload"),
    "optimizer_offload": ("offload_schedule", "offload_fraction", "offload_bucket_mib", "offload_state_dtype"),
    "cpu_offload": ("cpu_offload_executor", "cpu_threads"),
}
"""Switch of ``memory`` → settings without effect if it is off."""


def vary(config: Config, changes: Changes, fixed: Collection[str] = ()) -> Config:
    """A composed configuration with changed switches; settings that lose their effect return to their defaults.

    Keys in ``fixed`` keep their values even without effect. A validated configuration would keep replaced values.
    A section that refuses its new values raises a ConfigError.
    """
    # ``validate`` replaces values in place in these sections, and in the optimizer's and the kernels'.
    sections: dict[str, Any] = {"optim": copy.copy(config.optim), "kernels": copy.copy(config.kernels)}
    for section in SECTIONS:
        old = getattr(config, section)
        mine = {key.partition(".")[2]: value for key, value in changes.items() if key.startswith(f"{section}.")}
        kind: type[Any] = type(old)
        if section == "parallel" and "parallel" in changes:
            kind = STRATEGIES[changes["parallel"]]
        missing = [f"parallel.{name}" for name in mine if name not in _names(kind)]
        if missing:
            raise ConfigError(f"{missing[0]} is not an option of parallel={changes.get('parallel')}; leave it out")
        values = _shared(old, kind) | mine
        if section == "memory":
            values |= _idle(values, {key.partition(".")[2] for key in fixed})
        sections[section] = kind(**values)
    varied: Config = dataclasses.replace(config, **sections)
    return varied


def overrides_between(base: Config, config: Config) -> list[str]:
    """Overrides that, appended to those of ``base``, compose ``config``; both as composed."""
    words = []
    for section in SECTIONS:
        old, new = getattr(base, section), getattr(config, section)
        if section == "parallel" and type(old) is not type(new):
            words.append(f"parallel={new.name}")
        expected = type(new)(**_shared(old, type(new)))
        words += [
            f"{section}.{name}={value_text(getattr(new, name))}"
            for name in _names(type(new))
            if getattr(new, name) != getattr(expected, name)
        ]
    return words


def check_strategy(config: Config) -> None:
    """Raise a ConfigError for a strategy without a step model, which names the closest one."""
    parallel = config.parallel
    if parallel.name not in STRATEGIES:
        like = FSDP2Config if parallel.shards_parameters or not parallel.keeps_full_states else DDPConfig
        raise ConfigError(f"parallel={parallel.name} cannot be predicted; set parallel={like.name}, which is closest")


def node_ranks_of(config: Config, hardware: Hardware, world_size: int) -> int:
    """Ranks of one node: as set by the launch, or of the fewest nodes that divide the ranks evenly."""
    if config.launch.nproc_per_node != -1:
        return min(config.launch.nproc_per_node, world_size)
    devices = round(hardware.devices_per_node.value)
    nodes = next(nodes for nodes in range(-(-world_size // devices), world_size + 1) if world_size % nodes == 0)
    return world_size // nodes


def validate_switches(config: Config, world_size: int, device_type: str, node_ranks: int | None = None) -> None:
    """Validate a composed configuration in place, without checks of the training machine's files."""
    check_strategy(config)
    data, model, eval_every = config.data, config.model, config.train.eval_every
    config.data, config.train.eval_every = SyntheticConfig(branching=1, mask_documents=data.mask_documents), 0
    config.model = dataclasses.replace(model, init_from=None) if model.init_from else model
    try:
        config.validate(world_size, device_type, node_ranks)
    finally:
        config.data, config.model, config.train.eval_every = data, model, eval_every


def read(config: Config, key: str) -> Any:
    """Value of a key, or None if the strategy lacks it; ``parallel`` is the strategy's name."""
    if key == "parallel":
        return config.parallel.name
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name, None)


def count_switches(config: Config) -> int:
    """Number of sharding and memory settings that differ from their defaults, without the strategy and dtypes."""
    formats = ("param_dtype", "buffer_dtype", "reduce_dtype")
    return sum(
        getattr(section, name) != getattr(default, name)
        for section, default in ((each, type(each)()) for each in (config.mesh, config.parallel, config.memory))
        for name in _names(type(section))
        if name not in formats
    )


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _shared(section: Any, kind: type[Any]) -> dict[str, Any]:
    """Values of the fields that the section's new class has too."""
    return {name: getattr(section, name) for name in _names(kind) if name in _names(type(section))}


def _idle(memory: dict[str, Any], fixed: Collection[str]) -> dict[str, Any]:
    defaults = MemoryConfig()
    idle = [name for switch, owned in OWNED.items() if memory[switch] == getattr(defaults, switch) for name in owned]
    if memory["gradient_checkpointing"] is not GradientCheckpointing.selective:
        idle.append("checkpointing_save")
    return {name: getattr(defaults, name) for name in idle if name not in fixed}
