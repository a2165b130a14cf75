"""Answers to typed lines, as the command line gives them, and the fixes that they suggest."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdptoys.cli.commands import command_names, parse
from fsdptoys.cli.main import main
from fsdptoys.cli.plan import compose_hypothetical
from fsdptoys.cli.train import _check_places
from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError

FILE = Path(__file__).parents[1] / "messages" / "messages.yaml"

SETTING = re.compile(r"[\w.+/-]+=(?:'[^']*'|\"[^\"]*\"|\[[^\]]*\]|[^\s,;?]+)")
OPTION = re.compile(r"--[a-z-]+(?:[= ][^\s,;?]+)?")


@dataclass
class Row:
    """A typed line and the sentence that answers it."""

    topic: str
    line: str
    says: str
    ranks: int | None = None
    """Ranks for which settings are validated; None: the line is a whole command."""
    device: str = "cpu"
    prefix: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
    """``fix``: words that the sentence describes; ``unfixed``, ``unnamed``: why the property does
    not apply."""

    @property
    def argv(self) -> list[str]:
        """The words of the line, as a shell splits them."""
        return shlex.split(f"{self.prefix} {self.line}")

    @property
    def settings(self) -> list[str]:
        """The typed words, without those of a command."""
        argv = shlex.split(self.line)
        return argv[argv[0] in command_names() :]


def read_rows() -> list[Row]:
    """Return the rows of the file."""
    rows = []
    for topic in yaml.safe_load(FILE.read_text(encoding="utf-8")):
        shared = {name: value for name, value in topic.items() if name != "rows"}
        for entry in topic["rows"]:
            notes = {
                name: note
                for name, note in entry.items()
                if name not in ("typed", "says")
            }
            rows.append(
                Row(line=entry["typed"], says=entry["says"], notes=notes, **shared)
            )
    return rows


def dump_rows(rows: Sequence[Row]) -> str:
    """Return the text of the file with the sentences of ``rows``."""
    text = FILE.read_text(encoding="utf-8")
    topics = yaml.safe_load(text)
    sentences = iter(rows)
    for topic in topics:
        for entry in topic["rows"]:
            entry["says"] = next(sentences).says
    comment = text[: text.index("- topic")]
    return comment + yaml.safe_dump(
        topics, width=10**6, sort_keys=False, allow_unicode=True
    )


def answer(argv: Sequence[str], row: Row, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence that answers the words, "" if they are accepted."""
    if row.ranks is None:
        capsys.readouterr()
        status = main(argv)
        printed = capsys.readouterr()
        assert status != 2 or printed.out == ""
        return (
            printed.err.removeprefix("fsdptoys: ").removesuffix("\n")
            if status == 2
            else ""
        )
    try:
        config = compose_config(parse("train", argv).arguments)
        launch = config.launch
        ranks = (
            row.ranks
            if launch.nproc_per_node == -1
            else launch.nproc_per_node * launch.nnodes
        )
        config.validate(ranks, row.device)
        _check_places(config)
    except ConfigError as error:
        return str(error)
    return ""


def answer_without_start(
    argv: Sequence[str], row: Row, capsys: pytest.CaptureFixture[str]
) -> str:
    """Return the answer to a corrected line, before a run or a trace would start."""
    if row.ranks is not None or argv[0] not in ("train", "sweep", "plan"):
        return answer(argv, row, capsys)
    command = argv[0]
    rest = list(argv[1:])
    if command == "train" and "-m" not in rest:
        return answer(["train", *rest, "--cfg", "job"], row, capsys)
    if command != "plan":
        return answer(
            ["sweep", "--dry-run", *(word for word in rest if word != "-m")],
            row,
            capsys,
        )
    searches = rest[:1] == ["search"]
    try:
        run = compose_hypothetical(
            [word for word in rest if "=" in word], searches=searches
        )
        run.config.validate(run.world_size, run.hardware.device_type)
    except ConfigError as error:
        return str(error)
    return ""


def corrected(row: Row) -> list[list[str]]:
    """Return the lines that the sentence of a row suggests, one for each alternative."""
    clause = row.says.rpartition("; ")[2]
    verbs = re.findall(r"\b(?:write|did you mean|set for example|set|add)\b", clause)
    verb = verbs[-1] if verbs else ""
    command = re.search(r"(?:write|did you mean) fsdptoys (.+?)\??$", clause)
    if "fix" in row.notes:
        return [_apply(row, shlex.split(row.notes["fix"]), verb)]
    if command:
        argv = shlex.split(command.group(1))
        return [argv + row.argv[len(argv) :] if verb == "did you mean" else argv]
    if clause.startswith("leave out "):
        return [
            [word for word in row.argv if _key(word) != clause.split()[2].strip(",")]
        ]
    lines = []
    for part in re.split(r",? or ", clause):
        fix = SETTING.findall(part) or [
            word for option in OPTION.findall(part) for word in option.split()
        ]
        if fix or "leave it out" in part:
            lines.append(_apply(row, fix, verb))
    return lines


def _apply(row: Row, fix: list[str], verb: str) -> list[str]:
    """Return the words of a row with a fix; without one, leave out the word that the sentence
    begins with."""
    argv = row.argv
    first = row.says.split()[0].strip("'")
    wrong = next(
        (index for index, word in enumerate(argv) if _key(word) == _key(first)),
        len(argv),
    )
    if not fix or fix[0].startswith("--"):
        is_same = (
            not fix
            or _key(first) == _key(fix[0])
            or verb == "did you mean"
            or "=" in first
        )
        if not is_same:
            return [*argv, *fix]
        pair = argv[wrong : wrong + 2]
        has_value = row.says.startswith(" ".join(pair)) or first == "=".join(pair)
        return [*argv[:wrong], *fix, *argv[wrong + 1 + has_value :]]
    keys = {_key(word) for word in fix}
    several, separator, _ = row.says.partition(" are not settings; ")
    keys |= (
        {_key(word) for word in re.split(", | and ", several)} if separator else set()
    )
    rest = [word for word in argv if _key(word) not in keys]
    if verb in ("write", "did you mean", "set for example"):
        rest = [
            word
            for word in rest
            if word not in row.settings
            or (_key(word) != _key(first) and re.match(r"\w.*=.", word))
        ]
    return [*rest, *fix]


def names_word(word: str, sentence: str) -> bool:
    """Return whether a sentence has the key and the value of a typed word, or an equal number."""
    key, _, value = word.partition("=")
    values = [text.strip("[]'\"") for text in [value, *value.split(",")]]
    values_in_sentence = re.findall(rf"{re.escape(key)}=([^\s,;]+)", sentence)
    same = any(
        _number(text) == _number(number)
        for text in values_in_sentence
        for number in values
    )
    return _has(key, sentence) and (
        not value or same or any(_has(text, sentence) for text in values)
    )


def _has(text: str, sentence: str) -> bool:
    return bool(re.search(rf"(?<![\w.-]){re.escape(text)}(?![\w.-]*\w)", sentence))


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
