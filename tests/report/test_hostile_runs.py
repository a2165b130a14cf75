"""Run directories written by someone else or damaged by a disk: each is one row and does not stop
the report."""

import dataclasses
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from fsdptoys.cli.main import main
from fsdptoys.errors import ConfigError
from fsdptoys.report.live import follow
from fsdptoys.report.page_parts import escape
from fsdptoys.report.runs_table import Record, gather
from fsdptoys.report.table import make_table
from fsdptoys.report.table_export import to_csv, to_json, to_markdown
from fsdptoys.sweep import JobStatus
from tests.harness.recorded_runs import run_of, write_run

STEERING = re.compile(r"[^\n\t -~\u00a0-\ud7ff\ue000-\uffff]")

extended = pytest.mark.extended
FILES = yaml.safe_load(
    Path(__file__).with_name("hostile_files.yaml").read_text(encoding="utf-8")
)
LONG = {"{deep}": "[" * 100_000, "{digits}": "9" * 400}


def write_content(path: Path, text: str | None) -> None:
    """Write a text, or remove the file."""
    if text is None:
        path.unlink()
        return
    for name, long_text in LONG.items():
        text = text.replace(name, long_text)
    path.write_text(text, encoding="latin-1")


def write_giant(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**30)


KINDS = [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir, write_giant]
every_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=["pipe", "device", "folder", "giant"]
)


def check_others(folder: Path, output: str) -> None:
    """The other run is in the table and can be compared with itself; a sentence reports the damaged
    one."""
    table = make_table(gather([folder]))
    text = to_markdown(table) + to_csv(table) + to_json(table)
    bad, good = table.records
    assert (bad.status, bad.run, good.status) == (
        JobStatus.failed,
        None,
        JobStatus.completed,
    )
    assert good.run is not None and output in str(bad.reason)
    assert str(bad.reason) in to_csv(table) + "\n".join(table.notes)
    assert not STEERING.search(text)
    assert main(["compare", str(folder / "good"), str(folder / "bad")]) == 2
    with pytest.raises(ConfigError, match=output):
        gather([folder / "bad"])
    # No process writes it, so following it ends.
    assert follow(folder / "bad", Console(file=io.StringIO()), poll_seconds=0.0) in (
        0,
        1,
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of two runs, one of them to be damaged."""
    write_run(tmp_path / "good", run_of(4))
    write_run(tmp_path / "bad", run_of(4))
    return tmp_path


def row_of_bad(runs: Path) -> Record:
    (bad,) = [record for record in gather([runs]).records if record.name == "bad"]
    return bad


@pytest.mark.parametrize(("name", "text"), FILES["required"])
def test_run_with_a_damaged_file_is_listed_with_the_reason(
    runs: Path, name: str, text: str | None
) -> None:
    """Oracle: the other run, and a sentence that names the file."""
    write_content(runs / "bad" / name, text)
    fault = "cannot be read" if text else "holds no settings"
    check_others(runs, f"{name} {fault}" if name == "config.yaml" else name)


@every_kind
@pytest.mark.parametrize("name", ["environment.json", "resumes.jsonl"])
def test_run_with_special_files_is_listed_with_the_reason(
    runs: Path, name: str, kind: Callable[[Path], None]
) -> None:
    """Oracle: the other run, and a sentence that names the file; reading a pipe would wait for a
    writer."""
    (runs / "bad" / name).unlink(missing_ok=True)
    kind(runs / "bad" / name)
    if name == "environment.json":
        check_others(runs, "environment.json cannot be read")
    else:
        bad = row_of_bad(runs)
        assert bad.run is None and "resumes.jsonl cannot be read" in str(bad.reason)
        assert follow(runs / "bad", Console(file=io.StringIO()), poll_seconds=0.0) in (
            0,
            1,
        )


@every_kind
@pytest.mark.parametrize("name", ["prediction.json", "result.json", "summary.md"])
def test_damaged_optional_files_are_ignored(
    runs: Path, name: str, kind: Callable[[Path], None]
) -> None:
    """Oracle: the run's steps, which are intact."""
    (runs / "bad" / name).unlink(missing_ok=True)
    kind(runs / "bad" / name)
    for record in gather([runs]).records:
        assert record.run is not None and record.run.results.steps == 4


@pytest.mark.parametrize(("name", "text"), FILES["optional"])
def test_damaged_optional_file_is_omitted_with_a_note(
    runs: Path, name: str, text: str
) -> None:
    """Oracle: the run's other numbers, and the note."""
    write_content(runs / "bad" / name, text)
    run = row_of_bad(runs).run
    assert run is not None and run.results.steps == 4
    assert getattr(run, name.removesuffix(".json")) is None
    reason = "cannot be read" if name == "result.json" else ""
    assert any(f"{name} {reason}" in note for note in run.notes)


@pytest.mark.parametrize(
    "form", ["--table", "--markdown", "--csv", "--json", "compare", "--live"]
)
def test_control_characters_of_a_run_are_escaped_on_the_terminal(
    runs: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: no control character in the output, of keys and of values; their names are
    escaped."""
    hostile = "\x1b[2J\x1b]0;owned\x07\r\u202e"
    for name, value in (("good", "a"), ("bad", hostile)):
        path = runs / name / "config.yaml"
        text = path.read_text().replace(
            "name: tiny", f"name: {json.dumps(f'tiny{value}')}"
        )
        path.write_text(
            text
            + json.dumps({f"x{hostile}": {f"y{hostile}": f"z{value}"}})[1:-1]
            + "\n"
        )
        environment = json.loads((runs / name / "environment.json").read_text())
        environment["device"]["name"] = f"d{value}"
        environment["versions"][f"v{hostile}"] = f"w{value}"
        (runs / name / "environment.json").write_text(json.dumps(environment))
    names = [str(runs / "good"), str(runs / "bad")]
    if form == "compare":
        main([form, *names])
    elif form == "--live":
        main(["report", form, names[1]])
    else:
        main(["report", *names, form])
    output = "".join(capsys.readouterr())
    assert "\\x1b" in output or "\\u001b" in output
    assert not STEERING.search(output)


@pytest.mark.parametrize(
    "argv",
    [
        ["report", "x" * 300],
        ["compare", "x" * 300, "y"],
        ["report", "--live", "x" * 300],
    ],
)
def test_impossible_file_name_is_reported_in_one_sentence(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: status 2, and one line."""
    assert main(argv) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


HUGE = [
    "loss",
    "step_time_seconds",
    "tokens_per_second",
    "learning_rate",
    "grad_norm",
    "memory_peak_gib",
]


@pytest.mark.parametrize(
    "value",
    [1e308, pytest.param(-1e308, marks=extended), pytest.param(1e-320, marks=extended)],
)
@pytest.mark.parametrize(
    "name",
    [HUGE[0], HUGE[-1], *(pytest.param(name, marks=extended) for name in HUGE[1:-1])],
)
def test_numbers_near_the_ends_of_floats_do_not_end_the_report(
    runs: Path, name: str, value: float
) -> None:
    """Oracle: the page and the table with the other run, and its end; ticks, digits and sizes
    overflow."""
    shutil.rmtree(runs / "bad")
    write_run(
        runs / "bad", [dataclasses.replace(step, **{name: value}) for step in run_of(4)]
    )
    assert (
        main(["report", str(runs)]) == 0 and main(["report", str(runs), "--table"]) == 0
    )
    assert (runs / "report.html").exists()
    assert follow(runs / "bad", Console(file=io.StringIO()), poll_seconds=0.0) in (0, 1)


def test_error_messages_escape_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: Python's own escapes."""
    assert main(["report", "\x1b]0;owned\x07"]) == 2
    assert capsys.readouterr().err.startswith(
        "fsdptoys: \\x1b]0;owned\\x07 holds neither"
    )


def test_pages_escape_control_characters() -> None:
    """Oracle: Python's own escapes, within HTML's."""
    assert escape("<\x1b\ud800\n>") == "&lt;\\x1b\\ud800\n&gt;"
