"""Directories written before ``result.json`` existed: a sweep of two jobs, ``old_sweep/``, recorded by that version."""

import csv
import io
from pathlib import Path

import pytest

from fsdptoys.report.compare import compare_runs, open_run
from fsdptoys.report.result_file import operators, read_ending, references
from fsdptoys.report.runs_table import gather
from fsdptoys.report.table import make_table
from fsdptoys.report.table_export import to_csv
from fsdptoys.sweep import JobStatus
from fsdptoys.train.recorded_run import read_recorded_run

FOLDER = Path(__file__).parent / "old_sweep"
RUNS = [FOLDER / "jobs" / number / "run" for number in ("01", "02")]


@pytest.mark.parametrize("paths", [[FOLDER], RUNS], ids=["sweep", "runs"])
def test_tables_of_old_directories_keep_their_values(paths: list[Path]) -> None:
    """Oracle: the table written by the old version at the end of the sweep."""
    found = list(csv.DictReader(io.StringIO(to_csv(make_table(gather(paths))))))
    expected = list(csv.DictReader(io.StringIO((FOLDER / "expected.csv").read_text())))
    for row, old in zip(found, expected, strict=True):
        assert {key: row[key] for key in old if key not in ("run", "path")} == {
            key: value for key, value in old.items() if key not in ("run", "path")
        }


def test_reports_of_old_directories_keep_the_facts_of_the_summary() -> None:
    """Oracle: rows of summary.md."""
    run = read_recorded_run(RUNS[0])
    assert run.result is None and run.finished and run.notes == ()
    ending = read_ending(RUNS[1])
    assert (ending.status, ending.text) == (JobStatus.done, "1 of 3; train.max_seconds=0.08 reached")
    assert references(run.result, run.path) == {"unigram entropy of the data": 3.235}
    head, *rows = operators(run.result, run.path)
    assert head == ["operator", "calls", "self CPU time", "CPU time with what it calls"] and len(rows) == 20
    text = (RUNS[0] / "summary.md").read_text()
    assert all(f"| `{name}` | {' | '.join(cells)} |" in text for name, *cells in rows)


def test_old_directories_compare_as_before() -> None:
    """Oracle: the old version's output: equal in their one common step, after which A has two more."""
    found = compare_runs(*(open_run(path) for path in RUNS))
    assert [change.key for change in found.changes] == ["train.max_seconds"]
    assert found.only_first == [2, 3] and not found.only_second
