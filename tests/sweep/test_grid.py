"""Arguments with several values, and the grids that they span."""

import pytest

from fsdptoys.config.overrides import list_choices
from fsdptoys.errors import ConfigError
from fsdptoys.sweep.axes import Axis, combine, read_axes

CHOICES = list_choices()


def axes(*words: str) -> list[Axis]:
    return read_axes(words, CHOICES)


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
def test_values_are_read_as_hydra_reads_them(word: str, values: tuple[str, ...]) -> None:
    """Oracle: Hydra's documentation of its sweep syntax: quoted text and lists are one value."""
    assert axes(word) == [Axis(word.partition("=")[0], values)]


def test_last_key_varies_fastest() -> None:
    """Oracle: the order of nested loops over the typed arguments."""
    found = combine([], [], axes("train.seed=1,2", "train.steps=5", "parallel=ddp,fsdp2"))
    assert [one.words for one in found] == [
        (f"train.seed={seed}", "train.steps=5", f"parallel={strategy}")
        for seed in (1, 2)
        for strategy in ("ddp", "fsdp2")
    ]
    assert found[1].varied == {"train.seed": "1", "parallel": "fsdp2"}


def test_one_value_everywhere_is_one_job() -> None:
    """Oracle: one combination with no varied key."""
    (found,) = combine([], [], axes("train.steps=5", "parallel=ddp"))
    assert found.words == ("train.steps=5", "parallel=ddp") and not found.varied


def test_typed_arguments_replace_those_of_the_file() -> None:
    """Oracle: a value for the file's axis fixes it, several replace it at its position, other keys come last."""
    base = axes("train.steps=10", "parallel=fsdp1,fsdp2", "train.seed=1,2")
    found = combine(base, [], axes("parallel=ddp", "train.seed=7,8,9", "train.batch_size=1,2"))
    assert len(found) == 6
    assert found[0].words == ("train.steps=10", "parallel=ddp", "train.seed=7", "train.batch_size=1")
    assert found[1].varied == {"train.seed": "7", "train.batch_size": "2"}


def test_rows_alternate_before_typed_axes_vary() -> None:
    """Oracle: a row's value overrides the base's, a typed one the row's; a row without a key has the base's."""
    base = axes("train.steps=10", "memory.chunk_loss=false")
    rows = [tuple(axes("parallel=fsdp1")), tuple(axes("parallel=fsdp2", "memory.chunk_loss=true"))]
    found = combine(base, rows, axes("train.steps=5,6"))
    assert [sorted(one.words) for one in found] == [
        ["memory.chunk_loss=false", "parallel=fsdp1", "train.steps=5"],
        ["memory.chunk_loss=false", "parallel=fsdp1", "train.steps=6"],
        ["memory.chunk_loss=true", "parallel=fsdp2", "train.steps=5"],
        ["memory.chunk_loss=true", "parallel=fsdp2", "train.steps=6"],
    ]
    assert found[3].varied == {"parallel": "fsdp2", "memory.chunk_loss": "true", "train.steps": "6"}
    fixed = combine(base, rows, axes("parallel=ddp"))
    assert [one.varied for one in fixed] == [{}, {"memory.chunk_loss": "true"}]


def test_product_is_bounded() -> None:
    """Oracle: 10 000 combinations are made, 10 100 are refused by their number; rows count too."""
    hundred = axes("train.seed=range(0,100)", "train.steps=range(1,101)")
    assert len(combine(hundred, [], [])) == 10_000
    refused = "the sweep has 10100 combinations, 101 of them by train.steps alone, and may have 10000; give fewer"
    with pytest.raises(ConfigError, match=refused):
        combine(hundred, [], axes("train.steps=range(1,102)"))
    rows = [tuple(axes("parallel=fsdp1")), tuple(axes("parallel=fsdp2"))]
    with pytest.raises(ConfigError, match="the sweep has 20000 combinations"):
        combine(hundred, rows, [])


MISTAKES = {
    "sweep=debug": "sweep=debug names a sweep as if it were a setting; write fsdptoys sweep debug",
    "metrics.run_dir=runs/a": "metrics.run_dir=runs/a is not for a sweep, since each job of a sweep has a run "
    "directory of its own; leave it out",
    "checkpoint.resume=auto": "checkpoint.resume=auto is not for a sweep, since each job of a sweep starts a new run; "
    "leave it out",
    "checkpoint.folder=a,b": "checkpoint.folder=a,b is not for a sweep, since the jobs of a sweep would write into one "
    "folder; leave it out",
    "optim.lr=interval(0,1)": "optim.lr=interval(0,1) has no values that could be counted; write "
    "optim.lr=range(START,STOP,STEP) or optim.lr=VALUE,VALUE",
    "train.steps=range(3,3)": "train.steps=range(3,3) holds no value; write train.steps=VALUE,VALUE",
    "parallel=glob(zero*)": "parallel=glob(zero*) matches no choice of a group; write parallel=VALUE,VALUE",
    "train.steps=5 train.steps=6,7": "train.steps is given twice, as train.steps=5 and as train.steps=6,7; write "
    "train.steps=5,6,7 for all of these",
    "~train.steps": "~train.steps would take a key away, which every run needs; write KEY=null or a value instead",
    "train.steps=1,2,": "train.steps=1,2, has an empty value; leave out the comma, or write '' for an empty text",
    "train.steps=1,,2": "train.steps=1,,2 has an empty value; leave out the comma, or write '' for an empty text",
    "train.steps=range(0,3,0)": "train.steps=range(0,3,0) has steps of 0, which never end; write "
    "train.steps=range(START,STOP)",
    "train.steps=range(0,1000000000)": "train.steps=range(0,1000000000) has more than the 10000 values that a sweep "
    "may have; write train.steps=range(START,STOP,STEP) with fewer",
    "train.steps=shuffle(range(0,1000000000))": "train.steps=shuffle(range(0,1000000000)) has more than the 10000 "
    "values that a sweep may have; write train.steps=range(START,STOP,STEP) with fewer",
    "fsdp1": "fsdp1 has no value; write parallel=fsdp1",
    "--train.steps=1,2": "--train.steps=1,2 is not an option, since settings have no dashes before them; write "
    "train.steps=1,2",
    "model@other=a,b": "model@other=a names a package, and every group has its fixed place; write model=a",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_syntax_mistakes_are_reported_in_one_sentence(words: str) -> None:
    """Oracle: the expected messages above, each of which names argument and fix."""
    with pytest.raises(ConfigError) as mistake:
        axes(*words.split())
    assert str(mistake.value) == MISTAKES[words]
