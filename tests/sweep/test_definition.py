"""Validation of a sweep's YAML file against its schema."""

from pathlib import Path

import pytest

from fsdptoys.cli.commands import help_page
from fsdptoys.config.overrides import list_choices
from fsdptoys.errors import ConfigError
from fsdptoys.sweep.axes import read_base
from fsdptoys.sweep.definition import list_sweeps, read_definition

MISTAKES = {
    "grids: {a: [1]}": "{path} says grids, which no sweep has; did you mean grid?",
    "zzz: 1": "{path} says zzz, which no sweep has; it may have title, description, base, grid, rows, "
    "time_limit_seconds",
    "title: a": "{path} has neither of grid and rows; give it one of them",
    "grid: {a: [1]}\nrows: [[a=1]]": "{path} has both of grid and rows; give it one of them",
    "grid: {a: 1}": "{path} says a=1 in grid, which must be a list of values; write a: [VALUE, …]",
    "grid: [a]": "{path} says grid=['a'], which must map keys to lists of values; write KEY: [VALUE, …]",
    "grid: {a: [{b: 1}]}": "{path} says a={{'b': 1}} in grid, which must be a word, a number or a list; correct it",
    "rows: [a=1]": "{path} says rows[0]=a=1, which must be a list of words; write [KEY=VALUE, …]",
    "rows: [[a]]": "{path} says a in rows[0], which must be a word KEY=VALUE; correct it",
    "rows: []": "{path} says rows=[], which must be a list of lists of words; write one list for each job",
    "base: a=1\nrows: [[b=1]]": "{path} says base=a=1, which must be a list of words; write [KEY=VALUE, …]",
    "title: [a]\nrows: [[a=1]]": "{path} says title=['a'], which must be text; put quotes around it",
    "time_limit_seconds: 0\nrows: [[a=1]]": "{path} says time_limit_seconds=0, which must be a number above 0; set it "
    "to 600",
    "- a": "{path} must be a mapping with grid or rows; see configs/sweep/debug.yaml for an example",
    "rows: [[a=1,2]]": "{path} says 2 in rows[0], which must be a word KEY=VALUE; correct it",
    "rows: [['a=1,2']]": "the sweep {path} says: a=1,2 gives several values; write them under grid",
    "grid: {a: ['1,2']}": "the sweep {path} says: a=1,2 gives several values where one is expected; write them one by "
    "one, or '\"1,2\"' for one text",
    "base: [a=1]\nbase: [b=1]\nrows: [[c=1]]": "{path} cannot be read (base occurs twice in one mapping, which keeps "
    "one of them); correct it",
    "grid: {a: [1], a: [2]}": "{path} cannot be read (a occurs twice in one mapping, which keeps one of them); correct "
    "it",
    "base: [a=1]\ngrid: {a: [1]}": "the sweep {path} says: a is set in base and in grid; keep one of them",
    "rows: [[metrics.run_dir=a]]": "the sweep {path} says: metrics.run_dir=a is not for a sweep, since each job of a "
    "sweep has a run directory of its own; leave it out",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_file_mistakes_are_reported_in_one_sentence(tmp_path: Path, text: str) -> None:
    """Oracle: the expected messages above, each of which names file, key and fix."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as mistake:
        read_base(read_definition(str(path)), str(path), list_choices())
    assert str(mistake.value) == MISTAKES[text].format(path=path)


def test_file_values_parse_as_on_the_command_line(tmp_path: Path) -> None:
    """Oracle: the command line's reading of true, null, numbers and lists."""
    path = tmp_path / "mine.yaml"
    path.write_text("grid: {a: [true, null, 1, 0.5, 1e-3, [b, 2], text, \"'x,y'\"]}\ntime_limit_seconds: 5")
    found = read_definition(str(path))
    assert found.grid == {"a": ["true", "null", "1", "0.5", "1e-3", "[b,2]", "text", "'x,y'"]}
    assert (found.title, found.time_limit_seconds) == ("mine", 5.0)


@pytest.mark.parametrize(
    ("name", "sentence"),
    {
        "debgu": "debgu is neither a sweep nor KEY=VALUE; did you mean fsdptoys sweep debug?",
        "zzzz": "zzzz is neither a sweep nor KEY=VALUE; name one of classic_fsdp1, classic_fsdp2, debug, mesh, "
        "offload, state_dtype, or a YAML file",
        "no/such.yaml": "no/such.yaml does not exist; name a YAML file like those of configs/sweep",
    }.items(),
)
def test_unknown_names_are_reported_with_the_closest_match(name: str, sentence: str) -> None:
    """Oracle: the expected message."""
    with pytest.raises(ConfigError) as mistake:
        read_definition(name)
    assert str(mistake.value) == sentence


def test_help_names_every_shipped_sweep() -> None:
    """Oracle: names and descriptions of ``configs/sweep``, within 120 columns."""
    page = help_page("sweep")
    for name, description in list_sweeps().items():
        assert f"    {name} " in page
        assert description in " ".join(page.split())
    assert max(map(len, page.splitlines())) <= 120
