"""The page that compares versions of PyTorch: common arguments, failures, and the reasons of skipped tests."""

import dataclasses
import json
from pathlib import Path

import pytest

from scripts.versions import COMMANDS, PLAN, SMALL, Result, Row, main, page_of


def result(torch: str, tests: list[Row]) -> Result:
    """A version under which every command passed."""
    commands = [Row(f"fsdptoys {arguments}", passed=1) for arguments, _ in COMMANDS]
    return Result(torch, f"a machine, torch {torch}", "abc1234", tests, commands)


def test_common_arguments_stand_once_above_the_commands() -> None:
    """Oracle: one occurrence for each set of them, and one row for each command."""
    page = page_of([result("2.7.1", [Row("models", passed=2)])], "bash versions.sh", "2026-01-01")
    assert page.count(SMALL) == page.count(PLAN) == 1
    assert f"- `train`, `sweep`: `{SMALL}`" in page and f"- `plan`: `{PLAN}`" in page
    assert page.count("| `fsdptoys ") == len(COMMANDS)


def test_skipped_has_a_row_for_each_version_group_and_whole_reason() -> None:
    """Oracle: the table's lines; 300 characters of a reason on two lines are neither cut nor left out."""
    long = "needs a\n" + "x" * 300
    old = [Row("models", passed=2, skipped=3, reasons=[long, "a | b", long]), Row("loss", skipped=1, reasons=[long])]
    page = page_of([result("2.7.1", old), result("2.15.0", [Row("models", passed=5), Row("loss", passed=1)])], "", "")
    assert [line for line in page.splitlines() if line.startswith("| 2.7.1 | ") and line.endswith(("x |", "b |"))] == [
        "| 2.7.1 | models | 1 | a / b |",
        f"| 2.7.1 | models | 2 | needs a {'x' * 300} |",
        f"| 2.7.1 | loss | 1 | needs a {'x' * 300} |",
    ]


@pytest.mark.parametrize("failed", [0, 1])
def test_status_is_1_if_any_version_failed(failed: int, tmp_path: Path) -> None:
    """Oracle: the status, and the failure's line of the page."""
    failures = ["test_it: assert <1>"][:failed]
    paths = []
    for torch, tests in {"2.7.1": [Row("loss", failed=failed, failures=failures)], "2.15.0": [Row("loss")]}.items():
        paths.append(tmp_path / f"{torch}.json")
        paths[-1].write_text(json.dumps(dataclasses.asdict(result(torch, tests))))
    page = tmp_path / "page.md"
    assert main(["page", str(page), "--command", "bash versions.sh", *map(str, paths)]) == failed
    assert ("- torch 2.7.1, loss: test_it: assert &lt;1>" in page.read_text()) == bool(failed)
