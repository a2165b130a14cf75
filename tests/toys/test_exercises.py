"""Exercises of docs/toys: their checks accept right answers, and name what is wrong with others."""

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.ranks import run_ranks
from tests.toys.page_files import PAGES, load_file

EXERCISES = PAGES / "exercises"
SOLUTIONS = Path(__file__).with_name("solutions.py")

WRONG: dict[str, tuple[dict[str, str], str]] = {
    "ring": (
        {"ranks - 1:\n            received": "ranks:\n            received"},
        "the sum of",
    ),
    "buckets": ({"room = cap": "room = cap + 1"}, "nothing more in a full bucket"),
    "step": (
        {"length = -(-len(parameter) // ranks)": "length = len(parameter)"},
        "of states kept",
    ),
    "rows": (
        {
            "    most = -(-rows // ranks)\n    return": "    most = rows // ranks + 1\n    return"
        },
        "rows of rank",
    ),
    "owners": ({", key=lambda number: -sizes[number]": ""}, "on a rank for"),
    "linear": (
        {
            "ctx.save_for_backward(inputs, shard)": (
                "ctx.save_for_backward(inputs, shard, gather(shard))"
            ),
            "inputs, shard = ctx": "inputs, shard, _ = ctx",
        },
        "is kept for the backward",
    ),
    "attention": (
        {"torch.logaddexp(lse, block_lse)": "torch.maximum(lse, block_lse)"},
        "to the keys of all ranks",
    ),
    "dispatch": ({"[order.argsort()]": "[order]"}, "in the order of the rows"),
}
"""Exercise → replacements in its solution, and the resulting message of its check."""


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """``check.py`` as a module."""
    return load_file(EXERCISES / "check.py")


@pytest.fixture
def solutions(check: ModuleType, tmp_path: Path) -> Path:
    """A folder with the right answers."""
    for name in check.CHECKS:
        shutil.copy(SOLUTIONS, tmp_path / f"{name}.py")
    return tmp_path


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.extended)])
def test_solutions_pass_and_unanswered_exercises_are_reported(
    check: ModuleType, solutions: Path, ranks: int
) -> None:
    """Oracle: the checks, which compare answers with PyTorch's collectives, Adam, chunk, linear and
    softmax."""
    names = list(check.CHECKS)
    right = {}
    unanswered = dict.fromkeys(names, "not answered yet")
    verdicts = run_ranks(
        ranks, lambda: (check.check(solutions, names), check.check(EXERCISES, names))
    )
    assert verdicts == [(right, unanswered)] * ranks


def test_every_exercise_has_a_wrong_answer(check: ModuleType) -> None:
    """Oracle: the names of the checks."""
    assert set(WRONG) == set(check.CHECKS)


@pytest.mark.parametrize("name", WRONG)
def test_check_detects_a_wrong_answer(
    name: str, check: ModuleType, solutions: Path
) -> None:
    """Oracle: a solution with a mistake, made by replacing pieces of it; the message on some
    rank."""
    replacements, sentence = WRONG[name]
    text = SOLUTIONS.read_text()
    for piece, wrong in replacements.items():
        assert text.count(piece) == 1, piece
        text = text.replace(piece, wrong)
    (solutions / f"{name}.py").write_text(text)
    messages = [
        of_rank.get(name, "")
        for of_rank in run_ranks(3, check.check, solutions, [name])
    ]
    assert any(sentence in message for message in messages), messages


def test_command_reports_right_wrong_and_hanging_answers(
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    solutions: Path,
) -> None:
    """Oracle: status and output for a solution, for an unanswered exercise, and for deadlocked
    ranks."""
    monkeypatch.setattr(check, "WORLD_SIZES", (2,))
    monkeypatch.setattr(sys, "argv", ["check.py", "owners", "--folder", str(solutions)])
    assert check.main() == 0
    monkeypatch.setattr(sys, "argv", ["check.py", "owners"])
    assert check.main() == 1
    assert (
        capsys.readouterr().out == "owners: right\nowners, 2 ranks: not answered yet\n"
    )
    (solutions / "ring.py").write_text(
        "import torch.distributed as dist\ndef all_reduce(tensor):\n    dist.recv(tensor)\n"
    )
    monkeypatch.setattr(check, "PATIENCE_SECONDS", 3)
    assert (
        check.run(solutions, "ring", 2)
        == "no answer within 3 seconds; a rank waits for what nobody sends"
    )
