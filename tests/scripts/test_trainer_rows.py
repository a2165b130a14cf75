"""Today's trainer on the rows of the first published table: switches, memory of a short model, and verdicts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import validate_plan
from scripts.published_programs import ROWS
from scripts.trainer_rows import NAMES, TrainerRow, row_words
from scripts.validate_plan import a2, trace_row
from tests.plan.processes import in_fresh_process
from tests.scripts.test_published_programs import newer_torch

SWITCHES = {
    "checkpointing": "memory.gradient_checkpointing=full",
    "chunk_loss": "memory.chunk_loss=true",
    "optimizer_offload": "memory.optimizer_offload=true",
    "cpu_offload": "memory.cpu_offload=true",
    "parts": "parallel.wrap=block_attn_mlp",
}


@pytest.mark.parametrize("row", NAMES)
def test_rows_have_the_published_switches(row: str) -> None:
    """Oracle: the switches of the program that made the published row."""
    words, (strategy, name) = row_words(row), NAMES[row]
    published = ROWS[strategy, name][0]
    assert f"parallel={strategy}" in words and len({word.partition("=")[0] for word in words}) == len(words)
    assert {switch for switch, word in SWITCHES.items() if word in words} == {
        switch for switch in SWITCHES if getattr(published, switch)
    }


@pytest.mark.extended
@newer_torch
def test_row_with_offloaded_states_ends_with_parameters(tmp_path: Path) -> None:
    """Oracle: bytes of two blocks and the rest over 8 ranks, by hand, 4 an element: no gradients and no buckets."""
    row = "trainer fsdp1 block gc chunk oo"
    block, rest = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096, 2 * 32000 * 4096 + 4096
    trace = in_fresh_process(trace_row, row, 2)
    rows = validate_plan.Rows(tmp_path, [])
    rows.traces[row] = trace
    end_bytes = rows.replay(row, a2()).memory().end_bytes
    expected = 4 * (2 * block + rest) / 8
    # Also the table of rotations, the mask of attention, and the step's few numbers.
    assert 0 <= end_bytes - expected < 8 * 2**20


@pytest.mark.parametrize(("reserved", "status"), [(18.0, 0), (18.2, 1)])
def test_a_cell_above_the_published_value_fails_the_script(
    reserved: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the published 18.17 GiB."""
    row = TrainerRow("trainer fsdp2 block gc", ROWS["fsdp2", "block gc"][1], 9.4, reserved, 1.13)
    monkeypatch.setattr(validate_plan, "make_traces", lambda *_: None)
    monkeypatch.setattr(validate_plan, "Rows", lambda folder, names: SimpleNamespace(traces={}))
    monkeypatch.setattr(validate_plan, "trainers_rows", lambda rows: [row])
    monkeypatch.setattr("sys.argv", ["validate_plan.py", "--rows", "trainer fsdp2 block gc"])
    assert validate_plan.main() == status
    page = capsys.readouterr().out
    assert f"{status} of 2 cells of today's trainer are above" in page
    assert page.count("**fail**") == status
