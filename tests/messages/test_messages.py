"""Every recorded sentence answers its line, names what was typed, and suggests words that are
accepted."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdptoys.config.rules import memory as memory_rules
from fsdptoys.config.rules import optimizer as optimizer_rules
from fsdptoys.data import DataConfig
from fsdptoys.data.bin import BinConfig
from fsdptoys.data.byte_text import TextConfig
from fsdptoys.data.hf import HFConfig
from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.sweep.slurm_settings import SLURM_COMMANDS
from tests.harness.byte_model import edit_settings, save_model, train_on
from tests.harness.families import SMALL
from tests.harness.folders import build, write
from tests.harness.message_lines import (
    FILE,
    Row,
    answer,
    answer_without_start,
    corrected,
    dump_rows,
    names_word,
    read_rows,
)
from tests.harness.recorded_runs import run_of, write_run
from tests.harness.short_runs import train_run

ROWS = read_rows()

RUNS: dict[str, DataConfig] = {
    "without_part": SyntheticConfig(eval_samples=0),
    "lost": TextConfig(files=["gone"]),
    "narrow": TextConfig(files=["digits"], eval_fraction=0.2),
    "endless": BinConfig(files=["digits"], eval_fraction=0.2, mask_documents=True),
    "unprepared": PreparedConfig(folder="gone"),
    "mute": HFConfig(files=["a.jsonl"], tokenizer="gone.json", cache="gone"),
}
"""Run → its recorded data."""


def parameters(without: str = "") -> list[object]:
    """Return the rows without a note of that name."""
    levels = (True, "fix") if without == "unfixed" else (True,)
    return [
        pytest.param(
            row,
            id=f"{row.topic}: {row.notes.get('file', row.line)}",
            marks=pytest.mark.extended if row.notes.get("extended") in levels else (),
        )
        for row in ROWS
        if without not in row.notes
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs, weights and files that the lines name, and stand-ins for SLURM's
    commands."""
    folder = tmp_path_factory.mktemp("messages")
    steps = run_of(2)
    write_run(folder / "a", steps)
    write_run(folder / "b", [replace(step, loss=step.loss + 1) for step in steps])
    save_model(folder)
    train_run(folder / "done")
    write(folder / "96_ids", build(SMALL["qwen3"]))
    for name, data in RUNS.items():
        shutil.copytree(folder / "run", folder / name)
        edit_settings(folder / name, "train", {"seq_len": 24})
        train_on(folder / name, data)
    for name in ("empty", "elsewhere", "bin"):
        (folder / name).mkdir()
    (folder / "elsewhere" / "config.yaml").write_text(
        "checkpoint:\n  folder: s3://bucket/run\n"
    )
    (folder / "text").write_bytes(b"\xff\xfe")
    (folder / "short").write_text("7")
    (folder / "digits").write_text("0123456789" * 4)
    (folder / "x.txt").write_text("some text " * 10_000)
    (folder / "stream.bin").write_bytes(b"\x01\x00" * 2000)
    for name in SLURM_COMMANDS:
        (folder / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module", autouse=True)
def updated_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--update``, write the file of the messages at the end."""
    yield
    if request.config.option.update:
        FILE.write_text(dump_rows(ROWS), encoding="utf-8")


@pytest.fixture(autouse=True)
def machine(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in that folder, on a machine with 8 cores, torchao, SLURM and an account for Weights &
    Biases."""
    monkeypatch.chdir(files)
    monkeypatch.setattr(memory_rules, "available_cores", lambda: 8)
    monkeypatch.setattr(optimizer_rules, "torchao_fault", lambda: None)
    monkeypatch.setenv("PATH", f"{files / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)


def skip_if_torch_lacks(sentence: str) -> None:
    """Skip where an older torch lacks what the row is about."""
    if TORCH < (2, 13) and ("needs torch" in sentence or "FSDP2 of torch" in sentence):
        pytest.skip(sentence)


@pytest.mark.parametrize("row", parameters())
def test_answer_is_the_recorded_sentence(
    row: Row,
    files: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the sentence in the file; it is one line, and nothing is written."""
    if "file" in row.notes:
        Path("mine.yaml").write_text(row.notes["file"])
    before = sorted(files.rglob("*"))
    sentence = (
        answer(row.argv, row, capsys)
        .replace(str(files), "{folder}")
        .replace(torch.__version__, "{torch}")
    )
    skip_if_torch_lacks(sentence)
    assert sentence and "\n" not in sentence
    if request.config.option.update:
        row.says = sentence
    assert sentence == row.says
    assert sorted(files.rglob("*")) == before


@pytest.mark.parametrize("row", parameters(without="unnamed"))
def test_sentence_names_a_typed_word(row: Row) -> None:
    """Oracle: key and value as typed, or an equal number."""
    assert any(names_word(word, row.says) for word in row.settings), row.says


@pytest.mark.parametrize("row", parameters(without="unfixed"))
def test_every_suggested_fix_is_accepted(
    row: Row,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the same line with each alternative of the sentence, composed and validated, or run
    as a command."""
    if row.ranks is None:
        copy = shutil.copytree(
            files, tmp_path / "copy", ignore=shutil.ignore_patterns("done")
        )
        (copy / "done").symlink_to(files / "done")
        monkeypatch.chdir(copy)
    lines = corrected(row)
    assert lines, row.says
    for line in lines:
        sentence = answer_without_start(line, row, capsys)
        skip_if_torch_lacks(sentence)
        assert sentence == "", line


def test_file_is_in_canonical_form() -> None:
    """Oracle: the form that ``--update`` writes, so that its diff shows changed sentences only."""
    assert FILE.read_text(encoding="utf-8") == dump_rows(read_rows())
