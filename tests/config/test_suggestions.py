"""For every key of the configuration: suggested words work when pasted, and never mean the opposite."""

import shlex

import pytest

from fsdptoys.config import overrides
from fsdptoys.config.compose import compose_config
from fsdptoys.config.familiar_names import FAMILIAR
from fsdptoys.config.option_values import SWITCHES
from fsdptoys.config.schema import SCHEMAS
from fsdptoys.errors import ConfigError
from tests.config.test_absurd_values import one_in, schemas
from tests.messages.lines import Row, corrected

UNREAD = (
    *("names a key that does not exist", "is not an option, since", "has no value", "must be one of", "cannot be read"),
    *("must be true or false", "must be an integer", "must be a finite number", "must be a list", "must be text"),
    *("must be a word", "gives several values", "sets a whole section"),
)
"""Errors of words that cannot be parsed; other errors name another setting that a valid word requires."""

OPPOSITES = {"true": ("false", "none", "never", "null"), "false": ("true", "on")}

FIRST_NAMES = {words: name for name, words in reversed(FAMILIAR.items())}.values()
"""One familiar name for each of the words that they stand for, for the short level."""


def list_keys() -> dict[str, str]:
    """Return key → the words that choose its schema."""
    keys: dict[str, str] = {}
    for section, kinds in schemas().items():
        for name, schema in kinds.items():
            choices = overrides.list_choices().get(section, ()) if section in SCHEMAS else ()
            of_schema = [choice for choice in choices if overrides.schema_name(section, choice) == name]
            for key in overrides.list_options(schema, section):
                keys.setdefault(key, f"{section}={of_schema[0]}" if of_schema else "experiment=null")
    return keys


KEYS = list_keys()

pytestmark = pytest.mark.usefixtures("unmeasured")


def error_of(words: list[str]) -> str:
    """Return the error of overrides, "" if they compose and validate."""
    try:
        compose_config(words).validate(2, "cpu")
    except ConfigError as error:
        return str(error)
    return ""


def check(words: list[str]) -> None:
    """Paste each suggestion of an error about words that cannot be parsed."""
    sentence = error_of(words)
    is_unread = any(text in sentence for text in UNREAD)
    if not is_unread or overrides.HELP in sentence or sentence.endswith(", leave it out"):
        return
    lines = corrected(Row("", shlex.join(words), sentence, ranks=2))
    assert lines, sentence
    opposites = OPPOSITES.get(SWITCHES.get(words[-1].partition("=")[2], ""), ())
    for line in lines:
        rest = error_of(line)
        assert not any(text in rest for text in UNREAD), f"{sentence} -> {rest}"
        assert line[-1].partition("=")[2] not in opposites or len(lines) > 1, sentence


@pytest.mark.parametrize("key", one_in(8, KEYS))
def test_suggestions_for_a_key_work_when_pasted(key: str) -> None:
    """Oracle: the suggested words compose and validate, or their error says what else is needed."""
    last, wrong = key.rpartition(".")[2], f"{key[:-2]}{key[-1]}"
    for typed in ("true", "off"):
        check([KEYS[key], f"{key}={typed}"])
    for word in (f"{last}=on", f"--{last}", f"--{key}=1.5", f"{wrong}=true"):
        check([KEYS[key], word])
    check([f"--{last}=no"])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FIRST_NAMES else pytest.mark.extended) for name in FAMILIAR],
)
def test_suggestion_for_a_familiar_flag_works_when_pasted(name: str) -> None:
    """Oracle: as above."""
    check([f"--{name}"])


@pytest.mark.extended
@pytest.mark.parametrize("name", FAMILIAR)
def test_suggestions_for_a_familiar_name_work_when_pasted(name: str) -> None:
    """Oracle: as above."""
    name, _, value = name.partition("=")
    for raw in [value] if value else ["off", "4", "word"]:
        check([f"{name}={raw}"])
