"""For every key of the configuration: suggested words work when pasted, and never mean the opposite."""

import re

import pytest

from fsdptoys.config import overrides
from fsdptoys.config.compose import compose_config
from fsdptoys.config.familiar_names import FAMILIAR
from fsdptoys.config.option_values import SWITCHES
from fsdptoys.config.schema import SCHEMAS
from fsdptoys.errors import ConfigError
from tests.config.test_absurd_values import schemas

UNREAD = (
    *("names a key that does not exist", "is not an option, since", "has no value", "must be one of", "cannot be read"),
    *("must be true or false", "must be an integer", "must be a finite number", "must be a list", "must be text"),
    *("must be a word", "gives several values", "sets a whole section"),
)
"""Errors of words that cannot be parsed; other errors name another setting that a valid word requires."""


def keys() -> dict[str, str]:
    """Key → the words that choose its schema."""
    found: dict[str, str] = {}
    for section, kinds in schemas().items():
        for name, schema in kinds.items():
            names = [each for each in overrides.list_choices().get(section, ()) if section in SCHEMAS]
            of_schema = [each for each in names if overrides.schema_name(section, each) == name]
            for key in overrides.list_options(schema, section):
                found.setdefault(key, f"{section}={of_schema[0]}" if of_schema else "experiment=null")
    return found


KEYS = keys()

pytestmark = pytest.mark.usefixtures("unmeasured")


def error_of(words: list[str]) -> str:
    """Return the error of overrides, "" if they compose and validate."""
    try:
        compose_config(words).validate(2, "cpu")
    except ConfigError as error:
        return str(error)
    return ""


def suggested(sentence: str) -> list[list[str]]:
    """Return the alternative lines that an error suggests."""
    fix = re.split("(?:write|did you mean|set for example|set) ", sentence)[-1]
    fix = re.split(r"\?$| without |, for example|, a folder| for fsdptoys| or leave", fix)[0]
    return [line.split() for line in re.split(", or | or ", fix) if "=" in line]


def check(words: list[str]) -> None:
    """Paste the suggestions of an error, if any, until nothing is left to correct."""
    sentence = error_of(words)
    if not any(text in sentence for text in UNREAD):
        return
    group, typed = words[:-1], words[-1]
    if overrides.HELP in sentence or sentence.endswith(", leave it out"):
        return
    lines = suggested(sentence)
    assert lines, sentence
    state = SWITCHES.get(typed.partition("=")[2])
    for line in lines:
        section = {word.partition("=")[0] for word in line}
        pasted = [*(word for word in group if word.partition("=")[0] not in section), *line]
        rest = error_of(pasted)
        assert not any(text in rest for text in UNREAD), f"{sentence} -> {rest}"
        value = line[-1].partition("=")[2]
        opposite = {"true": ("false", "none", "never", "null"), "false": ("true", "on")}.get(state or "", ())
        assert value not in opposite or len(lines) > 1, sentence


@pytest.mark.parametrize("key", KEYS)
def test_suggestions_for_a_key_work_when_pasted(key: str) -> None:
    """Oracle: the suggested words compose and validate, or their error says what else is needed."""
    last, wrong = key.rpartition(".")[2], f"{key[:-2]}{key[-1]}"
    for typed in ("true", "off"):
        check([KEYS[key], f"{key}={typed}"])
    for word in (f"{last}=on", f"--{last}", f"--{key}=1.5", f"{wrong}=true"):
        check([KEYS[key], word])
    check([f"--{last}=no"])


@pytest.mark.parametrize("name", FAMILIAR)
def test_suggestions_for_a_familiar_name_work_when_pasted(name: str) -> None:
    """Oracle: as above."""
    name, _, value = name.partition("=")
    for raw in [value] if value else ["off", "4", "word"]:
        check([f"{name}={raw}"])
    check([f"--{name}"])
