"""Grids of settings: values of a key, and their combinations."""

from pathlib import Path

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.sweep.axes import Axis, combine
from fsdptoys.sweep.definition import read_definition
from tests.sweep.jobs import axes


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("parallel=fsdp1,fsdp2", ("fsdp1", "fsdp2")),
        ("train.steps=choice(5,7)", ("5", "7")),
        ("train.steps=range(1,4)", ("1", "2", "3")),
        ("optim.lr=range(0.1,0.5,0.2)", ("0.1", "0.3")),
        ("memory.chunk_loss=false,true", ("false", "true")),
        ("train.max_grad_norm=1.5,null", ("1.5", "null")),
        ("parallel=glob(fsdp*)", ("fsdp1", "fsdp2")),
        ("data.files=[a,b],[c]", ("[a,b]", "[c]")),
        ("data.files=[a,b]", ("[a,b]",)),
        ("data.sample_prompt='a,b'", ("'a,b'",)),
        ("data.sample_prompt='a,b','c'", ("'a,b'", "'c'")),
        ("train.steps=5", ("5",)),
    ],
)
def test_values_are_read_as_hydra_reads_them(
    word: str, values: tuple[str, ...]
) -> None:
    """Oracle: Hydra's documentation of its sweep syntax: quoted text and lists are one value."""
    assert axes(word) == [Axis(word.partition("=")[0], values)]


def test_last_key_varies_fastest() -> None:
    """Oracle: the order of nested loops over the typed arguments."""
    combinations = combine(
        [], [], axes("train.seed=1,2", "train.steps=5", "parallel=ddp,fsdp2")
    )
    assert [one.overrides for one in combinations] == [
        (f"train.seed={seed}", "train.steps=5", f"parallel={strategy}")
        for seed in (1, 2)
        for strategy in ("ddp", "fsdp2")
    ]
    assert combinations[1].varied == {"train.seed": "1", "parallel": "fsdp2"}


def test_typed_arguments_replace_those_of_the_file() -> None:
    """Oracle: a value for the file's axis fixes it, several replace it at its position, other keys
    come last."""
    base = axes("train.steps=10", "parallel=fsdp1,fsdp2", "train.seed=1,2")
    combinations = combine(
        base, [], axes("parallel=ddp", "train.seed=7,8,9", "train.batch_size=1,2")
    )
    assert len(combinations) == 6
    assert combinations[0].overrides == (
        "train.steps=10",
        "parallel=ddp",
        "train.seed=7",
        "train.batch_size=1",
    )
    assert combinations[1].varied == {"train.seed": "7", "train.batch_size": "2"}


def test_rows_alternate_before_typed_axes_vary() -> None:
    """Oracle: a row's value overrides the base's, a typed one the row's; a row without a key has
    the base's."""
    base = axes("train.steps=10", "memory.chunk_loss=false")
    rows = [
        tuple(axes("parallel=fsdp1")),
        tuple(axes("parallel=fsdp2", "memory.chunk_loss=true")),
    ]
    combinations = combine(base, rows, axes("train.steps=5,6"))
    assert [sorted(one.overrides) for one in combinations] == [
        [f"memory.chunk_loss={chunk}", f"parallel={strategy}", f"train.steps={steps}"]
        for strategy, chunk in (("fsdp1", "false"), ("fsdp2", "true"))
        for steps in (5, 6)
    ]
    assert combinations[3].varied == {
        "parallel": "fsdp2",
        "memory.chunk_loss": "true",
        "train.steps": "6",
    }
    fixed = combine(base, rows, axes("parallel=ddp"))
    assert [one.varied for one in fixed] == [{}, {"memory.chunk_loss": "true"}]


def test_product_is_bounded() -> None:
    """Oracle: 10 000 combinations are made, and 20 000 refused by their number, since rows count
    too."""
    hundred = axes("train.seed=range(0,100)", "train.steps=range(1,101)")
    assert len(combine(hundred, [], [])) == 10_000
    rows = [tuple(axes("parallel=fsdp1")), tuple(axes("parallel=fsdp2"))]
    with pytest.raises(ConfigError, match="the sweep has 20000 combinations"):
        combine(hundred, rows, [])


def test_file_values_parse_as_on_the_command_line(tmp_path: Path) -> None:
    """Oracle: the command line's reading of true, null, numbers and lists."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "grid: {a: [true, null, 1, 0.5, 1e-3, [b, 2], text, \"'x,y'\"]}\ntime_limit_seconds: 5"
    )
    definition = read_definition(str(path))
    assert definition.grid == {
        "a": ["true", "null", "1", "0.5", "1e-3", "[b,2]", "text", "'x,y'"]
    }
    assert (definition.title, definition.time_limit_seconds) == ("mine", 5.0)
