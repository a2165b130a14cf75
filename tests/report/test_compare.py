"""The comparison of two runs, with differences made by the test."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fsdptoys.config.declared_options import declared_options
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import StepMetrics
from fsdptoys.report.compare import RunComparison, compare_runs, open_run
from fsdptoys.report.compare_text import print_comparison, verdict
from fsdptoys.train.recorded_run import read_recorded_run
from fsdptoys.utils.options import Effect
from tests.harness.recorded_runs import STEP, run_of, write_run


def compared(
    folder: Path,
    first: list[StepMetrics],
    second: list[StepMetrics],
    settings: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    tolerance: float = 0.0,
) -> RunComparison:
    """A run, and another with other settings and environment."""
    write_run(folder / "a", first)
    write_run(folder / "b", second, settings, environment)
    return compare_runs(
        read_recorded_run(folder / "a"), read_recorded_run(folder / "b"), tolerance
    )


def altered(**at: tuple[int, float]) -> list[StepMetrics]:
    """Six steps with single numbers replaced: quantity=(step, value)."""
    steps = run_of(6)
    for quantity, (step, value) in at.items():
        steps[step - 1] = replace(steps[step - 1], **{quantity: value})
    return steps


def printed(comparison: RunComparison, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_comparison(comparison, ("a", "b"), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_first_and_the_largest_difference_are_reported(tmp_path: Path) -> None:
    """Oracle: the altered numbers: a norm in step 2, losses of 4.7 and 4.5 in steps 3 and 5."""
    second = altered(grad_norm=(2, 1.5))
    second[2] = replace(second[2], loss=4.7001)
    second[4] = replace(second[4], loss=9.0)
    comparison = compared(tmp_path, run_of(6), second)
    courses = {course.quantity: course for course in comparison.courses}
    loss = courses["loss"]
    assert loss.first is not None and loss.largest is not None
    assert (loss.first.step, loss.largest.step, loss.differing, loss.steps) == (
        3,
        5,
        2,
        6,
    )
    assert loss.first.relative == pytest.approx(1e-4 / 4.7001)
    assert loss.largest.relative == pytest.approx(0.5)
    assert (
        courses["valid tokens"].first is None
        and courses["learning rate"].largest is None
    )
    assert verdict(comparison) == (
        "They differ from step 2 on, first in the gradient norm: 1 and 1.5, 0.5 apart (0.33 "
        "relative); 6 steps were compared."
    )


def test_one_bit_is_a_difference_that_a_tolerance_allows(tmp_path: Path) -> None:
    """Oracle: the next number after 4.7; step times are not compared."""
    second = altered(
        loss=(3, math.nextafter(run_of(6)[2].loss, 9.0)), step_time_seconds=(4, 7.0)
    )
    assert not compared(tmp_path, run_of(6), second).same
    first = read_recorded_run(tmp_path / "a")
    other = read_recorded_run(tmp_path / "b")
    assert (
        verdict(compare_runs(first, other, 1e-15))
        == "Same: 6 steps, within 1e-15 relative."
    )
    same = compare_runs(first, first)
    assert verdict(same) == "Same: 6 steps, equal in every bit."
    assert "All settings, versions and machines are equal." in printed(same)


@pytest.mark.parametrize("lengths", [(6, 4), (4, 6)], ids=str)
def test_run_that_ends_earlier_differs(
    tmp_path: Path, lengths: tuple[int, int]
) -> None:
    """Oracle: ``cmp``, which reports the end of one file as a difference."""
    comparison = compared(tmp_path, run_of(lengths[0]), run_of(lengths[1]))
    assert not comparison.same and comparison.first_difference is None
    assert (
        verdict(comparison)
        == "The 4 steps that both have are equal in every bit, but one has more."
    )
    letter = "A" if lengths[0] > lengths[1] else "B"
    assert f"{letter} has 2 steps that the other lacks: 5 to 6." in printed(comparison)


def test_nan_equals_only_nan(tmp_path: Path) -> None:
    """Oracle: NaN in both, then in one."""
    bad = altered(loss=(4, math.nan))
    both = compared(tmp_path / "both", bad, bad)
    assert both.same
    assert "The loss is NaN or infinite in some steps" in printed(both)
    comparison = compared(tmp_path / "one", bad, run_of(6), tolerance=0.9)
    assert (
        comparison.first_difference is not None
        and comparison.first_difference[1].step == 4
    )
    assert "nan and 4.6, which are not both finite" in verdict(comparison)


def evaluated(*losses: float | None) -> list[StepMetrics]:
    """A step for each held-out loss, with None for a step without."""
    return [
        replace(step, eval_loss=loss)
        for step, loss in zip(run_of(len(losses)), losses, strict=True)
    ]


def test_held_out_losses_are_compared_if_both_runs_have_one(tmp_path: Path) -> None:
    """Oracle: 4.0 and 4.4 after step 3; step 2 has one in the first run alone, which is no
    difference."""
    comparison = compared(
        tmp_path / "other",
        evaluated(None, 5.0, 4.0),
        evaluated(None, None, 4.4),
        CHANGES,
    )
    assert comparison.first_difference is not None and not comparison.same
    course, difference = comparison.first_difference
    assert (course.quantity, course.steps, difference.step, difference.second) == (
        "held-out loss",
        1,
        3,
        4.4,
    )
    assert compared(
        tmp_path / "same", evaluated(None, 5.0, 4.0), evaluated(None, None, 4.0)
    ).same
    assert "held-out loss" not in {
        course.quantity for course in compared(tmp_path / "no", [STEP], [STEP]).courses
    }


def test_held_out_losses_of_other_samples_are_reported_as_not_compared(
    tmp_path: Path,
) -> None:
    """Oracle: 3 batches are other samples than the usual 8; half the batch size with twice the
    batches is the same."""
    losses = evaluated(4.0), evaluated(4.4)
    other = compared(tmp_path / "other", *losses, {"train.eval_batches": 3})
    assert (
        other.same
        and "Their held-out losses are over different samples and were not compared."
        in printed(other)
    )
    split = {"train.batch_size": 1, "train.grad_accum": 4, "train.eval_batches": 16}
    assert not compared(tmp_path / "split", *losses, split).same


def test_runs_with_unreadable_lines_are_not_the_same(tmp_path: Path) -> None:
    """Oracle: the same invalid line in both."""
    for name in "ab":
        with open(write_run(tmp_path / name, run_of(3)) / "metrics.jsonl", "a") as file:
            file.write("garbage\n")
    comparison = compare_runs(
        read_recorded_run(tmp_path / "a"), read_recorded_run(tmp_path / "b")
    )
    assert not comparison.same
    assert (
        verdict(comparison)
        == "The 3 steps that both have are equal in every bit, but not all lines can be read."
    )
    for name in "ab":
        note = f"{tmp_path}/{name}/metrics.jsonl cannot be read in line 4"
        assert note in " ".join(printed(comparison, 1000).split())


CHANGES = {
    "optim.lr": 0.02,
    "data.branching": 5,
    "parallel.param_dtype": "bfloat16",
    "parallel.name": "ddp",
    "memory.chunk_loss": True,
    "memory.gradient_checkpointing": "full",
    "metrics.log_every": 1,
    "metrics.run_dir": "elsewhere",
}


@pytest.mark.parametrize(
    "first, second, first_keys",
    [
        (run_of(6), altered(loss=(1, 4.8)), ["data.branching", "optim.lr"]),
        (run_of(6), altered(loss=(3, 4.8)), ["optim.lr", "data.branching"]),
        (evaluated(4.0), evaluated(4.4), ["optim.lr", "data.branching"]),
    ],
    ids=["loss of step 1", "loss of step 3", "held-out loss of step 1"],
)
def test_most_likely_explanation_comes_first(
    tmp_path: Path, first: Any, second: Any, first_keys: list[str]
) -> None:
    """Oracle: the first loss depends on data and no update; the learning rate, later and held-out
    losses do on both."""
    comparison = compared(tmp_path, first, second, CHANGES)
    keys = {
        effect: [change.key for change in comparison.changes if change.effect is effect]
        for effect in Effect
    }
    assert keys[Effect.training] == first_keys
    assert keys[Effect.format] == ["parallel.param_dtype"]
    assert set(keys[Effect.rounding]) == {"parallel.name", "memory.chunk_loss"}
    assert set(keys[Effect.none]) == {
        "memory.gradient_checkpointing",
        "metrics.log_every",
    }


def test_option_without_effect_is_never_accused(tmp_path: Path) -> None:
    """Oracle: the declarations: of two runs that differ in such an option, none changes the
    training or rounds."""
    others = {
        key: "another"
        for key, option in declared_options().items()
        if option.effect is Effect.none
    }
    switched = {
        "profile.enabled": True,
        "memory.optimizer_offload": True,
        "memory.gradient_checkpointing": "selective",
    }
    comparison = compared(tmp_path, run_of(6), run_of(6), others | switched)
    assert {change.effect for change in comparison.changes} == {Effect.none} and len(
        others
    ) > 75
    assert {change.key for change in comparison.changes} >= {
        "train.gc_every",
        "memory.offload_fraction",
        "data.workers",
    }
    assert "Settings that change the training" not in printed(comparison)


@pytest.mark.parametrize(
    "change",
    [
        {"train.grad_accum": 4},
        {"mesh.pp_size": 2},
        {"train.deterministic": "layout"},
        {"memory.chunk_loss": True},
        {"train.max_grad_norm": None},
    ],
    ids=str,
)
def test_switch_alone_is_blamed_and_not_the_options_that_need_it(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """Oracle: the change; an option that gains its switch and keeps its default was not changed,
    and null is a value."""
    comparison = compared(tmp_path, run_of(6), run_of(6), change)
    assert [change.key for change in comparison.changes] == list(change)


def test_another_batch_size_is_another_training_and_another_split_of_it_is_not(
    tmp_path: Path,
) -> None:
    """Oracle: 2 ranks x 2 sequences x 2 micro-batches are 8 sequences a step."""
    more = compared(tmp_path / "more", run_of(6), run_of(6), {"train.batch_size": 4})
    assert [change.effect for change in more.changes] == [Effect.training]
    split = {"train.batch_size": 1, "train.grad_accum": 4}
    assert {
        change.effect
        for change in compared(tmp_path / "as", run_of(6), run_of(6), split).changes
    } == {Effect.rounding}
    (ranks,) = compared(
        tmp_path / "ranks", run_of(6), run_of(6), None, {"world_size": 4}
    ).changes
    assert (ranks.key, ranks.first, ranks.second, ranks.effect) == (
        "ranks",
        2,
        4,
        Effect.training,
    )


def test_versions_and_machines_are_reported(tmp_path: Path) -> None:
    """Oracle: the values given to the second run's environment."""
    other = {
        "versions.torch": "2.7.1",
        "device.name": "Another",
        "started_at": "later",
        "command": "typed otherwise",
    }
    comparison = compared(tmp_path, run_of(6), run_of(6), None, other)
    assert comparison.environment == [
        ("device.name", "A processor", "Another"),
        ("versions.torch", "2.13.0", "2.7.1"),
    ]
    assert "versions.torch  2.13.0       2.7.1" in printed(comparison)


def test_invalid_comparisons_are_refused_in_a_sentence(tmp_path: Path) -> None:
    """Oracle: the exact messages."""
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({}))
    write_run(tmp_path / "none", [])
    for name, sentence in {
        "sweep": (
            f"{tmp_path}/sweep is a sweep, and two runs are compared; give one of its jobs, as "
            f"{tmp_path}/sweep/jobs/01"
        ),
        "none": (
            f"{tmp_path}/none has no step that could be compared; give a run that has taken some"
        ),
    }.items():
        with pytest.raises(ConfigError) as refused:
            open_run(tmp_path / name)
        assert str(refused.value) == sentence
    with pytest.raises(
        ConfigError,
        match="have no step in common: steps 1 to 2 and 3 to 6; compare runs that overlap",
    ):
        compared(tmp_path, run_of(2), run_of(6)[2:])


def test_tolerance_is_relative_to_the_larger(tmp_path: Path) -> None:
    """Oracle: 5 and 4 are 0.2 apart of 5."""
    assert compared(
        tmp_path / "x", [STEP], [replace(STEP, loss=4.0)], tolerance=0.2
    ).same
    assert not compared(
        tmp_path / "y", [STEP], [replace(STEP, loss=4.0)], tolerance=0.19
    ).same
