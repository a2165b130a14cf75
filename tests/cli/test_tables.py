"""Printed tables: ``fsdptoys models``, ``fsdptoys report`` and ``fsdptoys compare``."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdptoys.cli.main import main
from fsdptoys.cli.models import ModelFacts, measure
from fsdptoys.config.compose import compose_config, compose_presets, list_presets
from fsdptoys.report.runs_table import gather
from fsdptoys.report.table import make_table
from fsdptoys.report.table_export import to_csv, to_json, to_markdown
from tests.harness.recorded_runs import run_of, write_run

PRESETS = list_presets()
LLAMA2_7B = ModelFacts(
    "llama2_7b",
    "llama",
    6738415616,
    6738415616,
    131072000,
    0,
    6607343616,
    32,
    4096,
    4096,
    42863689728.0,
)


def test_presets_composed_together_equal_those_composed_alone() -> None:
    """Oracle: the whole configuration composed with that model."""
    configs = dict(zip(PRESETS, compose_presets(PRESETS), strict=True))
    for name in (
        "gpt2",
        "llama3_8b",
        "llama4_scout",
        "qwen3_0.6b",
        "qwen3_moe_30b_a3b",
    ):
        assert configs[name] == compose_config([f"model={name}"]).model
    assert all(config.name == name for name, config in configs.items())


def test_numbers_of_llama2_7b_equal_the_published_ones_and_the_formula() -> None:
    """Oracle: 6,738,415,616 parameters are published; 6 FLOPs a weight but the embedding's and the
    norms', and 12·heads·width of a head·T/2 in each of the 32 layers."""
    (config,) = compose_presets(["llama2_7b"])
    facts = measure(config)
    assert facts == LLAMA2_7B
    weights = 6738415616 - 32000 * 4096 - 65 * 4096
    assert facts.flops_per_token == 6 * weights + 32 * 12 * 4096 * 4096 / 2


def test_json_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the model's own counts, for all presets and for the requested ones, each once."""
    assert main(["models", "--json"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert sorted(entry["name"] for entry in everything) == PRESETS
    order = [(entry["family"], entry["parameters"]) for entry in everything]
    assert order == sorted(order)
    assert main(["models", "llama3_8b", "--json", "llama2_7b", "llama3_8b"]) == 0
    some = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in some] == ["llama3_8b", "llama2_7b"]
    assert all(entry in everything for entry in some)
    assert ModelFacts(**some[1]) == LLAMA2_7B


def test_requested_presets_have_one_row_each_with_explained_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the output."""
    assert main(["models", "gpt2", "qwen3_moe_debug"]) == 0
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines()[1:3]] == [
        "gpt2",
        "qwen3_moe_debug",
    ]
    assert "124M" in table and "6 for each weight of a matrix" in " ".join(
        table.split()
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one: runs a and b. The third loss of b is another and its last step slow."""
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), run_of(4))
    steps = run_of(4)
    slow = replace(steps[3], step_time_seconds=0.2)
    write_run(
        Path("b"),
        [*steps[:2], replace(steps[2], loss=steps[2].loss + 1e-5), slow],
        {"optim.lr": 0.02},
    )
    return tmp_path


def test_tables_are_printed_in_each_format(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the table itself; both runs are found by their folders and by the one above."""
    table = make_table(gather([Path("a"), Path("b")]))
    for form, export in {
        "--markdown": to_markdown,
        "--csv": to_csv,
        "--json": to_json,
    }.items():
        assert main(["report", "a", "b", form]) == 0
        assert capsys.readouterr().out == export(table)
    assert main(["report", form := "--csv", "."]) == 0 and form
    assert [
        row["run"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))
    ] == [
        "a",
        "b",
    ]
    assert main(["report", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["path"] == "a"


@pytest.mark.parametrize("columns, brief", [("25", True), (None, False)])
def test_table_fits_the_terminal_and_is_full_in_a_pipe(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str | None,
    brief: bool,
) -> None:
    """Oracle: COLUMNS; without it and without a terminal all columns are printed."""
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert main(["report", "a", "b", "--table"]) == 0
    text = capsys.readouterr().out
    assert ("No room for the numbers in brackets" in " ".join(text.split())) == brief
    assert ("135 (131–139)" in text) != brief
    assert not brief or max(map(len, text.splitlines())) <= 25


def test_compare_reports_differences_by_its_exit_status(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the one loss that differs by 1e-5 of 4.7, and by no more than a tolerance of 1e-5."""
    assert main(["compare", "a", "a"]) == 0
    assert capsys.readouterr().out.startswith("Same: 4 steps, equal in every bit.")
    assert main(["compare", "a", "b"]) == 1
    text = capsys.readouterr().out
    assert text.startswith(
        "They differ from step 3 on, first in the loss: 4.7 and 4.70001, 1e-05 apart"
    )
    assert "optim.lr  0.01  0.02" in text
    assert main(["compare", "a", "b", "--tolerance", "1e-5"]) == 0
    assert main(["compare", "a", "b", "--tolerance=1e-6"]) == 1


def test_comparison_error_is_a_mistake_not_a_difference(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: status 2 and a message, since status 1 means that the runs differ."""

    def stumble(*_: object) -> None:
        raise TypeError("'<' not supported")

    monkeypatch.setattr("fsdptoys.report.compare.compare_runs", stumble)
    assert main(["compare", "a", "b"]) == 2
    assert capsys.readouterr() == (
        "",
        (
            "fsdptoys: a and b cannot be compared (TypeError: '<' not supported); check the "
            "files of both\n"
        ),
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize(
    "line",
    [f"report é a b --{form}" for form in ("table", "markdown", "csv", "json")]
    + ["compare a é"],
)
def test_output_fits_the_encoding_of_its_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, encoding: str
) -> None:
    """Oracle: the encoding itself, which rejects unsupported characters; JSON is lossless."""
    write_run(
        Path("é"),
        [replace(step, loss=step.loss * 1.1) for step in run_of(4)],
        {"data.files": "≠…"},
    )
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)
    assert main(line.split(" ")) in (0, 1)
    stream.flush()
    text = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    if line.endswith("--json"):
        assert json.loads(text)["rows"][0]["run"] == "é"
    else:
        assert ("é" in text) == (encoding != "ascii")
    if line.endswith("--table"):
        assert ("(131–139)" in text) == (encoding == "utf-8") != ("(131-139)" in text)


def test_active_parameters_count_only_the_experts_of_a_token() -> None:
    """Oracle: Scout's 24·2 layers of 16 experts with three matrices of 5120·8192, one of which is
    used."""
    (config,) = compose_presets(["llama4_scout"])
    facts = measure(config)
    expert = 3 * 5120 * 8192
    assert facts.expert_parameters == 48 * 16 * expert
    assert facts.active_parameters == facts.parameters - 48 * 15 * expert
