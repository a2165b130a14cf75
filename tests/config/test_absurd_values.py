"""Absurd numbers for every numeric key are accepted or refused by one sentence, and nothing else happens."""

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.config.overrides import list_choices, list_options, schema_name
from fsdptoys.config.schema import SCHEMAS, Config
from fsdptoys.errors import ConfigError

TOO_LARGE = (str(10**400), str(10**30), str(2**63))
INTEGERS = (*TOO_LARGE, "-1", "0")
FLOATS = ("nan", "inf", "-inf", "-1", "0", "1e308", str(10**400))

INTEGERS_IN_TEXT = ("mesh.fsdp_size", "memory.chunk_tokens")

USED = {
    "memory.chunk_tokens": ["memory.chunk_loss=true"],
    "memory.checkpointing_budget": ["train.compile=true"],
    "memory.checkpointing_": ["memory.gradient_checkpointing=full"],
    "memory.offload_": ["memory.optimizer_offload=true"],
    "memory.cpu_threads": ["memory.cpu_offload=true"],
    "checkpoint.keep_every": ["checkpoint.every=1"],
    "launch.nnodes": ["launch.rdzv_endpoint=localhost:29400"],
    "launch.max_restarts": ["checkpoint.every=1"],
    "profile.": ["profile.enabled=true"],
    "train.eval_": ["data.eval_samples=1"],
    "model.rope_scaling": ["model.rope_scaling.factor=2"],
}
"""Prefix of a key → settings without which the key has no effect and is refused."""


def schemas() -> dict[str, dict[str, type]]:
    """Return group or section → schema → dataclass."""
    hints = typing.get_type_hints(Config)
    sections = {field.name: hints[field.name] for field in dataclasses.fields(Config)}
    plain = {name: {"default": kind} for name, kind in sections.items() if dataclasses.is_dataclass(kind)}
    return {name: SCHEMAS.get(name, of_section) for name, of_section in plain.items()}


def one_in(share: int, names: Iterable[str]) -> list[Any]:
    """Return all names as parameters, of which the short level runs one in ``share``."""
    return [pytest.param(name, marks=pytest.mark.extended if index % share else ()) for index, name in enumerate(names)]


def values_of(key: str, annotation: Any) -> tuple[str, ...]:
    """Absurd values of a key's type; none for text, switches and choices."""
    kinds = [kind for kind in (typing.get_args(annotation) or (annotation,)) if kind is not type(None)]
    values = INTEGERS if kinds == [int] or key in INTEGERS_IN_TEXT else FLOATS if kinds == [float] else ()
    return tuple(f"[{value}]" for value in values) if typing.get_origin(annotation) is list else values


def numeric_keys() -> dict[str, tuple[list[str], str, tuple[str, ...]]]:
    """Choice and key → the overrides that choose its schema, the key, and its absurd values."""
    choices, keys = list_choices(), {}
    for section, kinds in schemas().items():
        for name, schema in kinds.items():
            chosen = []
            if section in SCHEMAS and name != "default":
                named = [choice for choice in choices[section] if schema_name(section, choice) == name]
                chosen = [f"{section}={min(named, key=lambda choice: 'debug' not in choice)}"]
            for key, option in list_options(schema, section).items():
                values = values_of(key, option.annotation)
                if values:
                    keys[" ".join([*chosen, key])] = chosen, key, values
    return keys


KEYS = numeric_keys()


def test_numeric_keys_are_found_in_every_section() -> None:
    """Oracle: three keys of different kinds, by name."""
    assert {"train.steps", "model=llama_debug model.n_layers", "optim=sgd optim.momentum"} <= set(KEYS)


@pytest.mark.parametrize("named", one_in(8, KEYS))
def test_absurd_numbers_are_accepted_or_refused_in_one_sentence(named: str) -> None:
    """Oracle: ConfigError and one line; integers beyond 64 bits, infinities and nan are never accepted."""
    chosen, key, values = KEYS[named]
    used = [word for start, words in USED.items() if key.startswith(start) for word in words if f"{key}=" not in word]
    world_size = 1 if "parallel=single" in chosen else 2
    for value in values:
        try:
            compose_config([*chosen, *used, f"{key}={value}"]).validate(world_size, "cpu")
        except ConfigError as mistake:
            assert "\n" not in str(mistake)
            assert len(str(mistake)) < 1500
        else:
            assert value.strip("[]") not in (*TOO_LARGE, "nan", "inf", "-inf"), value
