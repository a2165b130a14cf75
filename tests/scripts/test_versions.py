"""The page that compares versions of PyTorch: common arguments, failures, and the reasons of skipped tests."""

import dataclasses
import json
from pathlib import Path

import pytest

from scripts.versions import COMMANDS, Result, Row, main


def result(torch: str, tests: list[Row]) -> Result:
    """A version under which every command passed."""
    commands = [Row(f"fsdptoys {arguments}", passed=1) for arguments, _ in COMMANDS]
    return Result(torch, f"a machine, torch {torch}", "abc1234", tests, commands)


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
