"""Settings that strategies and layouts of ranks rule out are refused in a sentence with a fix."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fsdptoys.config import optimizer_checks
from fsdptoys.parallel.fsdp import TORCH
from tests.messages.lines import Row, answer, corrected

TINY = (
    "model=llama_debug model.dim=36 model.n_heads=6 model.ffn_dim=50 model.vocab_size=67 model.n_layers=3 "
    "train.seq_len=24 train.batch_size=2 train.grad_accum=2 train.deterministic=true"
)
ROWS = [
    Row(name, typed, says, topic["ranks"], topic.get("device", "cpu"), f"{TINY} {topic['shared']}")
    for name, topic in yaml.safe_load((Path(__file__).parent / "refusals.yaml").read_text(encoding="utf-8")).items()
    for typed, says in topic["rows"].items()
]
UNSPELLED = ("remove it", "to a multiple of 16 times mesh.cp_size")
"""Ends of sentences that describe their fix."""


def is_fixed(row: Row, capsys: pytest.CaptureFixture[str], tries: int = 3) -> bool:
    """Return whether a suggested fix is accepted, or refused with another one that is."""
    for words in corrected(row) if tries else ():
        says = answer(words, row, capsys)
        if not says or is_fixed(replace(row, typed=shlex.join(words), says=says, prefix=""), capsys, tries - 1):
            return True
    return False


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.topic}: {row.typed}")
def test_settings_are_refused_with_a_fix(
    row: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the sentence in the file; the same settings with a fix that it suggests are accepted."""
    monkeypatch.setattr(optimizer_checks, "torchao_fault", lambda: None)
    says = answer(row.words, row, capsys)
    if TORCH < (2, 13) and ("needs torch" in says or "FSDP2 of torch" in says):
        pytest.skip(says)
    start, is_cut, _ = row.says.partition(" …")
    assert says.startswith(start) if is_cut else says == row.says
    assert is_fixed(replace(row, says=says), capsys) or says.endswith(UNSPELLED)


@pytest.mark.parametrize("typed", [row.typed for row in ROWS if row.topic == "layout" and "grains" not in row.typed])
def test_settings_that_the_layout_mode_refuses_are_accepted_outside_it(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: no answer."""
    row = Row("layout", f"{typed} train.deterministic=false", "", 1, prefix=f"{TINY} parallel=single")
    assert answer(row.words, row, capsys) == ""
