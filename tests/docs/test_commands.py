"""The site, the links of all pages, and their commands: those of the first three run, all others
are validated."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from fsdptoys.cli.main import main
from fsdptoys.cli.plan import compose_hypothetical
from fsdptoys.errors import ConfigError
from fsdptoys.launch.hardware import FoundHardware
from fsdptoys.launch.launch import resolve_run
from fsdptoys.plan.search.switches import validate_switches
from tests.harness.pages import (
    PAGES,
    ROOT,
    Block,
    anchors,
    blocks,
    code_spans,
    commands,
    links,
)

TOUR = [
    ROOT / "README.md",
    ROOT / "docs" / "first_steps.md",
    ROOT / "docs" / "fine_tuning.md",
]
NOT_RUN = {
    "README.md": ["network", "gpu"],
    "first_steps.md": ["network", "gpu"],
    "fine_tuning.md": ["gpu"],
}
"""Page → requirements of the blocks that no test runs, in order."""
ABSENT = (
    r"(data\.(folder|sources|files|tokenizer)|model\.(init_from|path)|tune\.adapter)="
)
"""Beginnings of the errors of settings that name a file or a folder."""
FEW_DEVICES = (
    r"launch\.nproc_per_node=\d+ is over the number of|"
    r"mesh\.fsdp_size=\d+ must divide the world size"
)
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
    commands = [
        line.removeprefix("$ ")
        for line in lines
        if block.info == "bash" or line.startswith("$ ")
    ]
    for line in commands:
        argv = shlex.split(line)
        if argv[0] == "fsdptoys":
            argv[:1] = [sys.executable, "-m", "fsdptoys"]
        elif argv[:2] == ["bash", "run_fsdp.sh"] and len(argv) > 2:
            # The script itself ran for the README
            argv[:2] = [sys.executable, "-m", "fsdptoys", "train"]
        if {"run_fsdp.sh", "train", "sweep"} & set(argv) and "--cfg" not in argv:
            settings = [word.partition("=") for word in argv]
            argv = [
                key + mark + (TINY.get(key, value) if mark else "")
                for key, mark, value in settings
            ]
            absent = (
                TINY.keys() - {key for key, _, _ in settings} - {"checkpoint.every"}
            )
            is_default = not any(
                word.startswith(("experiment=", "model=", "data=")) for word in argv
            )
            # Which it would be without the settings below
            argv += ["experiment=cpu_text"] * is_default
            absent -= (
                set()
                if {"data=text", "experiment=cpu_text"} & set(argv)
                else {"data.sample_tokens"}
            )
            argv += [f"{key}={TINY[key]}" for key in sorted(absent)]
        ended = subprocess.run(
            argv, cwd=folder, capture_output=True, text=True, errors="replace"
        )
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
    shell = [
        block
        for block in blocks(page)
        if block.info.split(" ")[0] in ("bash", "console")
    ]
    assert [
        block.info.partition("needs=")[2] for block in shell if "needs=" in block.info
    ] == NOT_RUN[page.name]
    for block in shell:
        if "needs=" not in block.info:
            run_block(block, tmp_path)


def find_mistake_of_run(settings: list[str]) -> str | None:
    """Return the error of ``fsdptoys train`` on a machine with 0, 1, 4 or 8 accelerators, or None.

    A number of ranks that some of them lack is no mistake.
    """
    kind = "npu" if "launch.device=npu" in settings else "cuda"
    mistakes = set()
    for devices in (0, 1, 4, 8):
        hardware = (
            FoundHardware(kind, devices, "made up", 16)
            if devices
            else FoundHardware("cpu", 0, "made up", 16)
        )
        with (
            patch("fsdptoys.launch.launch.find_hardware", return_value=hardware),
            patch("fsdptoys.launch.launch.check_float8_here"),
        ):
            try:
                resolve_run(settings, {})
                mistakes.add(None)
            except ConfigError as error:
                if not re.match(FEW_DEVICES, str(error)):
                    mistakes.add(None if re.match(ABSENT, str(error)) else str(error))
    return max(
        mistakes, key=lambda sentence: sentence or "", default="no machine can run it"
    )


def find_mistake(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """Return the error of a command, or None, without starting a run; the files that it names do
    not exist."""
    command, *rest = argv
    if command == "train" and "-m" in rest:
        command, rest = "sweep", [word for word in rest if word != "-m"]
    settings = [word for word in rest if "=" in word and not word.startswith("-")]
    if command == "train":
        return find_mistake_of_run(settings)
    if command == "plan" and rest[0] != "calibrate":
        try:
            run = compose_hypothetical(settings, searches=rest[0] == "search")
            validate_switches(
                run.config,
                run.world_size,
                run.hardware.device_type,
                min(8, run.world_size),
            )
        except ConfigError as error:
            return None if re.match(ABSENT, str(error)) else str(error)
        return None
    if command == "sweep" and not any(word.startswith("--resume") for word in rest):
        rest.append("--dry-run")
    status = main([command, *rest])
    printed = capsys.readouterr().err
    if command == "config":  # which writes here
        shutil.rmtree("configs", ignore_errors=True)
        for path in Path().glob("*.json"):
            path.unlink()
    absent = (
        any(word.rstrip("/") in printed for word in rest if word[0] != "-")
        and "option" not in printed
    )
    return None if status == 0 or absent else printed


def arguments(line: str) -> list[str]:
    """Arguments after ``fsdptoys`` in a command line, without placeholders and files that exist
    here."""
    argv = [
        word.replace("stdlib", "absent.txt")
        for word in shlex.split(line)
        if word != "…" and word[0] != "["
    ]
    programs = ("fsdptoys", "run_fsdp.sh", "docs/toys/stories/with_bug.py")
    start = next(index for index, word in enumerate(argv) if word in programs)
    rest = [word for word in argv[start + 1 :] if word != "--"]
    return ["train", *rest] if argv[start] == "run_fsdp.sh" else rest


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "benchmarks" not in page.parts],
    ids=lambda page: page.stem,
)
def test_commands_are_valid(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: composition and validation; of commands that read a folder, that its absence is the
    only mistake."""
    monkeypatch.chdir(tmp_path)
    mistakes = {}
    for line in commands(page):
        if page in TOUR and "stepz" in line:
            continue
        if (
            page.stem == "own_code"
        ):  # needs the page's files: tests/cli/test_own_code.py runs it
            continue
        try:
            mistake = find_mistake(arguments(line), capsys)
        except Exception as error:
            mistake = repr(error)
        if mistake:
            mistakes[line] = mistake
    assert not mistakes
    assert not os.listdir(tmp_path)


TOPS = (ROOT, ROOT / "fsdptoys")
SOURCES = [
    "fsdptoys",
    "models",
    "patches",
    "configs",
    "scripts",
    "tests",
    "run_fsdp.sh",
    "pyproject.toml",
]


@pytest.mark.extended
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Oracle: Sphinx, which warns of dead links, missing headings, and pages outside the
    navigation; and the HTML."""
    options = [
        "-q",
        "-W",
        "--keep-going",
        "-n",
        "-b",
        "html",
        "-d",
        str(tmp_path / "doctrees"),
    ]
    command = [
        sys.executable,
        "-m",
        "sphinx",
        *options,
        str(ROOT / "docs"),
        str(tmp_path / "site"),
    ]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("COVERAGE")
    }
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    front = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    for page in (
        "memory.html",
        "architecture.html",
        "toys/README.html",
        "benchmarks/peers.html",
    ):
        assert (tmp_path / "site" / page).is_file() and f'href="{page}"' in front, page


def test_links_name_files_and_headings_that_exist() -> None:
    """Oracle: the file system and the headings, including files outside the site."""
    dead = []
    for page in PAGES:
        for target in links(page):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, fragment = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if (
                not file.exists()
                or not file.is_relative_to(ROOT)
                or (fragment and fragment not in anchors(file))
            ):
                dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert not dead


def test_pages_named_in_sources_exist() -> None:
    """Oracle: the file system, for each mention of a page in code, settings, scripts and tests."""
    missing = []
    for source in SOURCES:
        files = (
            [ROOT / source] if (ROOT / source).is_file() else (ROOT / source).rglob("*")
        )
        for file in files:
            if file.suffix in (".py", ".sh", ".yaml", ".toml", ".sbatch"):
                pages = re.findall(
                    r"(?<![\w/.])docs/[\w/]+\.md", file.read_text(encoding="utf-8")
                )
                missing += [
                    f"{file.relative_to(ROOT)}: {page}"
                    for page in pages
                    if not (ROOT / page).exists()
                ]
    assert not missing


def test_files_named_on_pages_exist() -> None:
    """Oracle: the file system, for code spans that look like paths below the root or below
    ``fsdptoys``."""
    roots = "fsdptoys|models|patches|plan|scripts|tests|train|launch|configs"
    shape = rf"(?:{roots})/[a-z_\d./]+\.[a-z]+"
    missing = []
    for page in PAGES:
        paths = (path for path in code_spans(page) if re.fullmatch(shape, path))
        missing += [
            f"{page.name}: {path}"
            for path in paths
            if not any((top / path).exists() for top in TOPS)
        ]
    assert not missing
