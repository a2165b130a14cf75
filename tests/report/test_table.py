"""Tables of run directories with known numbers."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fsdptoys.report.runs_table import Collection, Record
from fsdptoys.report.table import Table, make_table
from fsdptoys.report.table_export import to_csv, to_json, to_markdown
from fsdptoys.report.table_terminal import print_table
from fsdptoys.sweep import Job, JobStatus, Skipped
from fsdptoys.sweep.folder import write_job
from tests.harness.recorded_runs import (
    GPU_STEP,
    STEP,
    record_of,
    run_of,
    write_records,
    write_run,
)

GPU = {"device.type": "cuda", "device.name": "A device"}


def table_of(
    records: list[Record], title: str = "these", skipped: Any = (), commands: Any = ()
) -> Table:
    return make_table(Collection(title, records, list(skipped), list(commands)))


def cells(table: Table) -> dict[str, list[str]]:
    """Heading → texts."""
    return {
        column.heading: [cell.text for cell in column.cells] for column in table.columns
    }


def printed(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_table(table, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def two(tmp_path: Path) -> list[Record]:
    """Two runs on a device, 8 and 6 steps, with and without gradient checkpointing."""
    lean = replace(GPU_STEP, memory_peak_gib=1.5, memory_reserved_gib=2.25, loss=6.0)
    checkpointed = {"memory.gradient_checkpointing": "full", "optim.lr": 0.02}
    return write_records(
        tmp_path,
        plain=(run_of(8, GPU_STEP), None, GPU),
        lean=(run_of(6, lean), checkpointed, GPU),
    )


def test_columns_are_differing_settings_and_results(two: list[Record]) -> None:
    """Oracle: by hand: medians of 0.13 to 0.18 s and 0.13 to 0.16 s, and the loss of step 6."""
    table = table_of(two)
    assert cells(table) == {
        "Run": ["plain", "lean"],
        "Gradient Checkpointing": ["none", "full"],
        "optim.lr": ["0.01", "0.02"],
        "Step Time (ms)": ["155 (135–175)", "145 (133–157)"],
        "Memory Reserved (GiB)": ["3.00", "2.25"],
        "Peak memory (GiB)": ["2.00", "1.50"],
        "Loss after 6 steps": ["4.4000", "5.4000"],
    }
    assert (
        "model=tiny parallel=fsdp2 ranks=2" in table.everywhere[0]
        and "parallel.wrap=block" in table.everywhere[0]
    )
    assert table.everywhere[1:] == [
        "Memory allocated (GiB) 1.00",
        "tokens/s 5,120",
        "MFU (%) 40.0",
    ]
    assert table.notes[0].startswith("Step time, tokens/s and MFU are medians")


def test_only_relevant_settings_are_columns(tmp_path: Path) -> None:
    """Oracle: settings of disabled features, output paths, and the sizes implied by a model's name
    are left out."""
    changes = {
        "memory.offload_bucket_mib": 9,
        "metrics.run_dir": "b",
        "model.name": "other",
        "model.dim": 99,
    }
    changes |= {"train.max_grad_norm": None}
    table = table_of(write_records(tmp_path, a=[run_of(3)], b=[run_of(3), changes]))
    assert [column.name for column in table.columns if column.setting] == [
        "model.name",
        "train.max_grad_norm",
    ]
    assert cells(table)["train.max_grad_norm"] == ["0.5", "null"]


def test_on_a_cpu_the_resident_set_replaces_device_memory(tmp_path: Path) -> None:
    """Oracle: the peak recorded in the steps, and no column without values on a CPU."""
    larger = replace(STEP, resident_set_peak_gib=1.25)
    table = table_of(write_records(tmp_path, a=[run_of(5)], b=[run_of(5, larger)]))
    assert cells(table)["Peak resident set (GiB)"] == ["0.750", "1.250"]
    assert not any("emory" in heading or "MFU" in heading for heading in cells(table))
    assert any(
        note.startswith("Host memory is the resident set") for note in table.notes
    )


def test_counted_memory_of_a_cpu_has_the_columns_of_devices(tmp_path: Path) -> None:
    """Oracle: the numbers of the steps in the unit of the largest, with three significant digits of
    the smallest."""
    plain = replace(
        STEP, memory_allocated_gib=0.02, memory_peak_gib=0.25, memory_host_gib=0.0
    )
    offloaded = replace(
        plain, memory_allocated_gib=0.0039, memory_peak_gib=0.2, memory_host_gib=0.0161
    )
    texts = cells(
        table_of(
            write_records(tmp_path, a=[run_of(5, plain)], b=[run_of(5, offloaded)])
        )
    )
    assert texts["Memory allocated (MiB)"] == ["20.48", "3.99"]
    assert texts["Peak memory (MiB)"] == ["256", "205"]
    assert texts["Offloaded (MiB)"] == ["0.0", "16.5"]


@pytest.mark.parametrize(
    ("second", "heading", "texts"),
    [
        ({2: 4.0, 4: 3.0, 6: 2.0}, "Held-out loss after 6 steps", ["2.5000", "2.0000"]),
        ({2: 4.0, 4: 3.0, 5: 2.0}, "Held-out loss after 4 steps", ["3.5000", "3.0000"]),
        ({3: 4.0, 5: 2.0}, "Held-out loss of the last step", ["2.5000", "2.0000"]),
    ],
    ids=["same end", "common step", "none in common"],
)
def test_held_out_losses_are_of_the_same_step(
    tmp_path: Path, second: dict[int, float], heading: str, texts: list[str]
) -> None:
    """Oracle: by hand; one row ended earlier, as under a time limit, and evaluated at its end."""
    first = {2: 4.5, 4: 3.5, 6: 2.5}
    runs = [
        [replace(step, eval_loss=of.get(step.step)) for step in run_of(max(of))]
        for of in (first, second)
    ]
    table = table_of(write_records(tmp_path, a=runs[:1], b=runs[1:]))
    assert cells(table)[heading] == texts


@pytest.fixture
def mixed(tmp_path: Path) -> Table:
    """A finished job, one that died in its fourth step, one without output, and a skipped
    combination."""
    for number in ("01", "02"):
        steps = run_of(8 if number == "01" else 3)
        write_run(
            tmp_path / number / "run",
            steps,
            {"parallel.name": "ddp"} if number == "01" else None,
        )
    overrides = ("parallel=fsdp1", "train.seq_len=4096", "launch.nproc_per_node=2")
    write_job(tmp_path / "03", Job("03", overrides, {"parallel": "fsdp1"}, "f"))
    jobs = [
        ("01", JobStatus.completed, None, "ddp"),
        ("02", JobStatus.out_of_memory, "no room", "fsdp2"),
        ("03", JobStatus.failed, "it\nbroke", "fsdp1"),
    ]
    records = [
        record_of(
            tmp_path / name / "run",
            status,
            name=name,
            reason=reason,
            varied={"parallel": parallel},
        )
        for name, status, reason, parallel in jobs
    ]
    skipped = [Skipped({"parallel": "single"}, "it has one rank")]
    return table_of(records, skipped=skipped, commands=["fsdptoys sweep x"])


def test_failed_and_skipped_rows_are_listed_with_their_reason(mixed: Table) -> None:
    """Oracle: statuses, reasons and arguments of the jobs; a row without steps does not shorten the
    others' losses."""
    texts = cells(mixed)
    assert texts["Strategy"] == ["ddp", "fsdp2", "fsdp1"]
    assert texts["Status"] == ["done", "out of memory", "failed"]
    assert texts["Loss after 8 steps"] == ["4.2000", "–", "–"]
    for text in (printed(mixed, 100), to_markdown(mixed)):
        assert "02 out of memory: no room" in text and "03 failed: it broke" in text
        assert "parallel=single: it has one rank" in text
    assert to_markdown(mixed).startswith("# these\n\n    fsdptoys sweep x\n")


@pytest.mark.parametrize("width", [40, 80, 160])
def test_table_fits_its_terminal_and_names_omitted_columns(
    two: list[Record], width: int
) -> None:
    """Oracle: the width; each column is on the page or named below it."""
    folder = two[0].path.parent
    write_run(
        folder / "third",
        run_of(6),
        {"parallel.wrap": "block_attn_mlp"},
        environment=GPU,
    )
    table = table_of([*two, record_of(folder / "third")])
    text = printed(table, width)
    assert max(map(len, text.splitlines())) <= width
    output = " ".join(text.split())
    visible, _, missing = output.partition("No room for the numbers in brackets")
    for column in table.columns:
        assert (
            column.setting
            or column.heading.split()[0] in visible
            or column.heading in missing
        )
    for row, time in {"plain": "155", "lean": "145", "third": "145"}.items():
        assert re.search(rf"^{row} .*{time}", text, re.MULTILINE)
    assert ("155 (135–175)" in text) == (not missing) == (width == 160)


def test_markdown_shows_special_characters_literally(tmp_path: Path) -> None:
    """Oracle: one cell per column in each line, and no unescaped special character."""
    files = {
        "a|b*c": None,
        "x": {"data.files": "[a|b](c)<d>_e_"},
        "y": {"data.files": "plain_text"},
    }
    records = write_records(
        tmp_path, **{name: [run_of(3), settings] for name, settings in files.items()}
    )
    table = table_of(records, title="# `one`\nline\x1b[31m")
    text = to_markdown(table)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {
        len(table.columns) + 1
    }
    assert (
        r"a\|b\*c" in text and r"\[a\|b\](c)\<d\>\_e\_" in text and "plain_text" in text
    )
    assert text.splitlines()[0] == r"# # \`one\` line\\x1b\[31m"
    assert "\x1b" not in printed(table, 100)


def test_csv_has_no_cell_that_controls_a_terminal_or_a_spreadsheet(
    tmp_path: Path,
) -> None:
    """Oracle: OWASP's list of formula prefixes; numbers, negative ones too, stay numbers."""
    formula = {"data.files": "=1+1", "optim.weight_decay": -1.5}
    control = {"data.files": "x\x1b[31m\ny", "optim.weight_decay": 2.5}
    records = write_records(tmp_path, a=[run_of(3), formula], b=[run_of(3), control])
    text = to_csv(
        table_of(
            [replace(records[0], name="@SUM(A1)"), replace(records[1], name="-cmd")]
        )
    )
    assert "\x1b" not in text and len(text.splitlines()) == 3
    first, second = csv.DictReader(io.StringIO(text))
    assert (first["run"], second["run"]) == ("'@SUM(A1)", "'-cmd")
    assert (first["data.files"], second["data.files"]) == ("'=1+1", "x\\x1b[31m y")
    assert (first["optim.weight_decay"], first["path"]) == ("-1.5", str(tmp_path / "a"))


def test_rows_under_the_profiler_are_reported(tmp_path: Path) -> None:
    """Oracle: the row with the profiler switched on; a row without a time needs no note."""
    profiled = {"profile.enabled": True}
    records = write_records(
        tmp_path, a=[run_of(5)], b=[run_of(5), profiled], c=[run_of(1), profiled]
    )
    assert table_of(records).notes[-1].endswith("the medians include them: b.")


def test_json_has_everything_of_a_row(mixed: Table) -> None:
    """Oracle: the values in the jobs and runs."""
    tree = json.loads(to_json(mixed))
    completed, full, failed = tree["rows"]
    assert (tree["commands"], tree["loss_step"]) == (["fsdptoys sweep x"], 8)
    assert tree["skipped"] == [
        {"varied": {"parallel": "single"}, "reason": "it has one rank"}
    ]
    assert (
        completed["settings"]["train.seq_len"] == 24
        and completed["environment"]["versions"]["torch"] == "2.13.0"
    )
    assert (full["status"], full["reason"], full["steps"]) == (
        "out of memory",
        "no room",
        3,
    )
    assert failed["words"] == [
        "parallel=fsdp1",
        "train.seq_len=4096",
        "launch.nproc_per_node=2",
    ]
    assert (
        failed["settings"]["train.seq_len"] == 4096 and failed["settings"]["ranks"] == 2
    )
    assert failed["varied"] == {"parallel": "fsdp1"} and failed["environment"] is None


def test_nan_loss_is_null_in_json_and_shown(tmp_path: Path) -> None:
    """Oracle: strict JSON has no NaN."""
    table = table_of(
        write_records(
            tmp_path, a=[[*run_of(3), replace(STEP, step=4, loss=float("nan"))]]
        )
    )
    assert json.loads(to_json(table))["rows"][0]["loss"] is None
    assert cells(table)["Loss after 4 steps"] == ["nan"]


def test_differing_places_of_rows_are_reported(tmp_path: Path) -> None:
    """Oracle: the versions and devices that differ, and no note if none does."""
    commit = "0123456789abcdef0123456789abcdef01234567-dirty"
    other = {"versions.torch": "2.7.1", "versions.fsdptoys_commit": commit}
    records = write_records(
        tmp_path, a=[run_of(3)], b=[run_of(3), None, other], c=[run_of(3)]
    )
    assert (
        "Rows come from different environments, so their times and memory may not be comparable: "
        f"torch 2.13.0 (a, c), 2.7.1 (b); commit None (a, c), {commit} (b)."
    ) in table_of(records).notes
    assert not any(
        "different places" in note for note in table_of([records[0], records[2]]).notes
    )


def test_row_whose_losses_disagree_is_marked_and_explained(tmp_path: Path) -> None:
    """Oracle: the altered row."""
    wrong = [replace(step, loss=step.loss * 1.1) for step in run_of(5)]
    table = table_of(
        write_records(tmp_path, a=[run_of(5)], b=[wrong, {"parallel.name": "ddp"}])
    )
    assert cells(table)["Run"] == ["a", "b ≠"]
    sentence = table.disagreements["b"].sentence
    assert sentence in table.notes and sentence in to_markdown(table)
    row = json.loads(to_json(table))["rows"][1]
    disagreement = row["disagreement"]
    assert (row["run"], disagreement["reference"], disagreement["step"]) == (
        "b",
        "a",
        1,
    )


def test_tables_of_one_run_and_of_none_render(tmp_path: Path) -> None:
    """Oracle: its numbers have columns, since there is no other row to be equal to."""
    one_step, no_step = write_records(tmp_path, a=[run_of(1)], b=[[]])
    one = table_of([one_step])
    assert cells(one) == {
        "Run": ["a"],
        "Loss after 1 step": ["4.9000"],
        "Peak resident set (MiB)": ["768"],
    }
    assert "No row has a step after its warm-up (metrics.warmup_steps)" in one.notes[-1]
    killed = replace(no_step, status=JobStatus.stopped, reason="killed")
    assert cells(table_of([killed])) == {"Run": ["b"], "Status": ["stopped"]}
    empty = table_of([], skipped=[Skipped({"a": "b"}, "no")])
    assert (
        "skipped a=b: no" in printed(empty, 80)
        and to_csv(empty) == "run\n"
        and "- a=b: no" in to_markdown(empty)
    )


def test_stall_share_has_a_column_if_runs_record_it(tmp_path: Path) -> None:
    """Oracle: a share of the times of steps 3 to 5, which are 0.42 s; a run of an earlier version
    has none."""
    waiting = replace(STEP, data_wait_seconds=0.007)
    table = table_of(write_records(tmp_path, a=[run_of(5, waiting)], b=[run_of(5)]))
    assert cells(table)["Data stall (%)"] == ["5.00", "–"]


def test_csv_has_raw_numbers_with_units_in_their_names(two: list[Record]) -> None:
    """Oracle: the values in the runs' own results."""
    rows = list(csv.DictReader(io.StringIO(to_csv(table_of(two)))))
    for row, record in zip(rows, two, strict=True):
        assert record.run is not None
        for part in ("median", "p10", "p90"):
            assert float(row[f"step_time_seconds_{part}"]) == getattr(
                record.run.results.step_time_seconds, part
            )
        assert float(row["memory_peak_gib"]) == record.run.results.memory_peak_gib
        assert (
            row["path"] == str(record.path)
            and row["model.name"] == "tiny"
            and row["loss_step"] == "6"
        )
    assert [row["measured_steps"] for row in rows] == ["6", "4"]
