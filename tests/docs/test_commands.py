"""The commands of the pages: those of the first three run, all others are parsed, composed and validated."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptoys.cli.main import main
from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from tests.docs.pages import PAGES, ROOT, Block, blocks, commands

TOUR = [ROOT / "README.md", ROOT / "docs" / "first_steps.md", ROOT / "docs" / "fine_tuning.md"]
NOT_RUN = {
    "README.md": ["network", "gpu"],
    "first_steps.md": ["network", "gpu"],
    "fine_tuning.md": ["gpu"],
}
"""Page → requirements of the blocks that no test runs, in order."""
ABSENT = r"(data\.(folder|sources|files|tokenizer)|model\.init_from|tune\.adapter)="
"""Beginnings of the errors of settings that name a file or a folder."""
TINY = {
    "model": "llama_debug",
    "data.sample_tokens": "4",
    "train.steps": "3",
    "train.seq_len": "64",
    "train.eval_batches": "1",
    "checkpoint.every": "2",
}
"""Settings of the commands that train, the last one where the page has it."""


def run_block(block: Block, folder: Path) -> None:
    """Run a block's commands one after another, and compare the output of a ``console`` block."""
    lines = block.text.replace("\\\n", " ").splitlines()
    typed = [line.removeprefix("$ ") for line in lines if block.info == "bash" or line.startswith("$ ")]
    for line in typed:
        words = shlex.split(line)
        if words[0] == "fsdptoys":
            words[:1] = [sys.executable, "-m", "fsdptoys"]
        elif words[:2] == ["bash", "run_fsdp.sh"] and len(words) > 2:  # the script itself ran for the README
            words[:2] = [sys.executable, "-m", "fsdptoys", "train"]
        if {"run_fsdp.sh", "train", "sweep"} & set(words) and "--cfg" not in words:
            settings = [word.partition("=") for word in words]
            words = [key + mark + (TINY.get(key, value) if mark else "") for key, mark, value in settings]
            absent = TINY.keys() - {key for key, _, _ in settings} - {"checkpoint.every"}
            absent -= {"data.sample_tokens"} if {"data=chat", "data=prepared"} & set(words) else set()
            words += [f"{key}={TINY[key]}" for key in sorted(absent)]
        ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, errors="replace")
        if block.info == "bash":
            assert ended.returncode == 0, f"{line}\n{ended.stdout}\n{ended.stderr}"
        else:
            assert ended.stdout + ended.stderr == "\n".join(lines[1:]) + "\n"


@pytest.mark.usefixtures("warm", "unmeasured")
@pytest.mark.limit(900)
@pytest.mark.parametrize(
    "page",
    [TOUR[0], *(pytest.param(page, marks=pytest.mark.extended) for page in TOUR[1:])],
    ids=lambda page: page.name,
)
def test_commands_of_the_introductory_pages_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the exit statuses; later commands read the results of earlier ones."""
    for name in ("run_fsdp.sh", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shell = [block for block in blocks(page) if block.info.split(" ")[0] in ("bash", "console")]
    assert [block.info.partition("needs=")[2] for block in shell if "needs=" in block.info] == NOT_RUN[page.name]
    for block in shell:
        if "needs=" not in block.info:
            run_block(block, tmp_path)


def find_mistake(words: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """Return the error of a command, or None, without starting a run; the files that it names do not exist."""
    command, *rest = words
    if command == "train" and "-m" in rest:
        command, rest = "sweep", [word for word in rest if word != "-m"]
    if command == "train" or (command == "plan" and rest[0] != "calibrate"):
        settings = [word for word in rest if "=" in word and not word.startswith("-")]
        config = compose_config(settings)
        device_type = "npu" if config.launch.device == "npu" else "cuda"
        world_size = config.plan.world_size or 8 * config.launch.nnodes
        try:
            config.validate(world_size, device_type, min(8, world_size))
        except ConfigError as error:
            return None if re.match(ABSENT, str(error)) else str(error)
        return None
    if command == "sweep" and not any(word.startswith("--resume") for word in rest):
        rest.append("--dry-run")
    status = main([command, *rest])
    printed = capsys.readouterr().err
    absent = any(word.rstrip("/") in printed for word in rest if word[0] != "-") and "option" not in printed
    return None if status == 0 or absent else printed


def arguments(line: str) -> list[str]:
    """Arguments after ``fsdptoys`` in a command line, without placeholders and files that exist here."""
    words = [word.replace("stdlib", "absent.txt") for word in shlex.split(line) if word != "…" and word[0] != "["]
    programs = ("fsdptoys", "run_fsdp.sh", "docs/toys/stories/with_bug.py")
    start = next(place for place, word in enumerate(words) if word in programs)
    rest = [word for word in words[start + 1 :] if word != "--"]
    return ["train", *rest] if words[start] == "run_fsdp.sh" else rest


@pytest.mark.parametrize("page", [page for page in PAGES if "benchmarks" not in page.parts], ids=lambda page: page.stem)
def test_commands_are_valid(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: composition and validation; of commands that read a folder, that its absence is the only mistake."""
    monkeypatch.chdir(tmp_path)
    mistakes = {}
    for line in commands(page):
        if page in TOUR and "stepz" in line:
            continue
        try:
            mistake = find_mistake(arguments(line), capsys)
        except Exception as error:
            mistake = repr(error)
        if mistake:
            mistakes[line] = mistake
    assert not mistakes
    assert not os.listdir(tmp_path)
