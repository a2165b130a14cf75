"""For every key of the configuration: absurd numbers are accepted or refused by one sentence, and
nothing else happens; suggested words work when pasted, and never mean the opposite."""

import dataclasses
import itertools
import shlex
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from fsdptoys.config.choices import list_choices, schema_name
from fsdptoys.config.compose import compose_config
from fsdptoys.config.familiar_names import familiar_names
from fsdptoys.config.fixes import list_options
from fsdptoys.config.option_values import SWITCHES
from fsdptoys.config.overrides import HELP
from fsdptoys.config.schema import SCHEMAS, Config
from fsdptoys.errors import ConfigError
from tests.harness.message_lines import Row, corrected
from tests.harness.run_tables import one_in

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
    plain = {
        name: {"default": kind}
        for name, kind in sections.items()
        if dataclasses.is_dataclass(kind)
    }
    return {name: SCHEMAS.get(name, of_section) for name, of_section in plain.items()}


def values_of(key: str, annotation: Any) -> tuple[str, ...]:
    """Absurd values of a key's type; none for text, switches and choices."""
    kinds = [
        kind
        for kind in (typing.get_args(annotation) or (annotation,))
        if kind is not type(None)
    ]
    values = (
        INTEGERS
        if kinds == [int] or key in INTEGERS_IN_TEXT
        else FLOATS
        if kinds == [float]
        else ()
    )
    return (
        tuple(f"[{value}]" for value in values)
        if typing.get_origin(annotation) is list
        else values
    )


def list_keys() -> Iterator[tuple[list[str], str, Any]]:
    """Yield for every key of every schema: the overrides that choose the schema, the key, and its
    type."""
    choices = list_choices()
    for section, kinds in schemas().items():
        for name, schema in kinds.items():
            chosen = []
            if section in SCHEMAS and name != "default":
                names = [
                    choice
                    for choice in choices[section]
                    if schema_name(section, choice) == name
                ]
                chosen = [
                    f"{section}={min(names, key=lambda choice: 'debug' not in choice)}"
                ]
            for key, option in list_options(schema, section).items():
                yield chosen, key, option.annotation


KEYS = {
    " ".join([*chosen, key]): (chosen, key, values_of(key, annotation))
    for chosen, key, annotation in list_keys()
    if values_of(key, annotation)
}


@pytest.mark.parametrize("name", one_in(8, KEYS))
def test_absurd_numbers_are_accepted_or_refused_in_one_sentence(name: str) -> None:
    """Oracle: ConfigError and one line; integers beyond 64 bits, infinities and nan are never
    accepted."""
    chosen, key, values = KEYS[name]
    used = [
        word
        for start, overrides in USED.items()
        if key.startswith(start)
        for word in overrides
        if f"{key}=" not in word
    ]
    world_size = 1 if "parallel=single" in chosen else 2
    for value in values:
        try:
            compose_config([*chosen, *used, f"{key}={value}"]).validate(
                world_size, "cpu"
            )
        except ConfigError as mistake:
            assert "\n" not in str(mistake)
            assert len(str(mistake)) < 1500
        else:
            assert value.strip("[]") not in (*TOO_LARGE, "nan", "inf", "-inf"), value


CHOSEN = {key: " ".join(chosen) or "experiment=null" for chosen, key, _ in list_keys()}
"""Key → the word that chooses its schema."""

UNREAD = (
    *(
        "names a key that does not exist",
        "is not an option, since",
        "has no value",
        "must be one of",
        "cannot be read",
    ),
    *(
        "must be true or false",
        "must be an integer",
        "must be a finite number",
        "must be a list",
        "must be text",
    ),
    *("must be a word", "gives several values", "sets a whole section"),
)
"""Errors of words that cannot be parsed; other errors name another setting that a valid word
requires."""

OPPOSITES = {"true": ("false", "none", "never", "null"), "false": ("true", "on")}

FIRST_NAMES = {
    override: name for name, override in reversed(familiar_names().items())
}.values()
"""One familiar name for each of the words that they stand for, for the short level."""


def error_of(overrides: list[str]) -> str:
    """Return the error of overrides, "" if they compose and validate."""
    try:
        compose_config(overrides).validate(2, "cpu")
    except ConfigError as error:
        return str(error)
    return ""


def check(overrides: list[str]) -> None:
    """Paste each suggestion of an error about words that cannot be parsed."""
    sentence = error_of(overrides)
    is_unread = any(text in sentence for text in UNREAD)
    if not is_unread or HELP in sentence or sentence.endswith(", leave it out"):
        return
    if "have an option, write --" in sentence:  # of the command, and no setting
        return
    lines = corrected(Row("", shlex.join(overrides), sentence, ranks=2))
    assert lines, sentence
    opposites = OPPOSITES.get(SWITCHES.get(overrides[-1].partition("=")[2], ""), ())
    for line in lines:
        rest = error_of(line)
        assert not any(text in rest for text in UNREAD), f"{sentence} -> {rest}"
        assert line[-1].partition("=")[2] not in opposites or len(lines) > 1, sentence


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("key", one_in(8, CHOSEN))
def test_suggestions_for_a_key_work_when_pasted(key: str) -> None:
    """Oracle: the suggested words compose and validate, or their error says what else is needed."""
    last = key.rpartition(".")[2]
    wrong = f"{key[:-2]}{key[-1]}"
    for value in ("true", "off"):
        check([CHOSEN[key], f"{key}={value}"])
    for word in (f"{last}=on", f"--{last}", f"--{key}=1.5", f"{wrong}=true"):
        check([CHOSEN[key], word])
    check([f"--{last}=no"])


def familiar_lines() -> Iterator[Any]:
    """Yield every familiar name as a flag, and with a value; the short level takes a flag for each
    meaning."""
    names = [
        name
        for name, override in familiar_names().items()
        if ": --" not in override  # an option of the command, and no setting
    ]
    for name, other in zip(names, itertools.cycle(("off", "4", "word")), strict=False):
        yield pytest.param(
            f"--{name}", marks=() if name in FIRST_NAMES else pytest.mark.extended
        )
        key, _, value = name.partition("=")
        yield pytest.param(f"{key}={value or other}", marks=pytest.mark.extended)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("argument", list(familiar_lines()))
def test_suggestion_for_a_familiar_name_works_when_pasted(argument: str) -> None:
    """Oracle: as above."""
    check([argument])
