"""``fsdptoys new`` and the page on own code: what they write and show runs as it is."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptoys.cli.main import main
from fsdptoys.cli.new import list_kinds
from tests.harness.own_code import forgotten_imports, write_code
from tests.harness.pages import ROOT, blocks

ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
CHEAP = "optimizer"
"""The kind for the short level; all kinds share the code that writes them."""


@pytest.mark.launcher
@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == CHEAP else pytest.mark.extended)
        for kind in list_kinds()
    ],
)
def test_new_files_pass_their_own_tests(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: pytest's exit status in a process of its own, where two ranks train."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", kind, f"made_{kind}"]) == 0
    assert sorted(os.listdir()) == [f"made_{kind}.py", f"test_made_{kind}.py"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_new_names_what_it_cannot_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: a sentence for each mistake, and no file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").touch()
    sentences = {
        "optimzer mine": "optimzer is not a kind of own code; did you mean fsdptoys new optimizer?",
        "optimizer muon": "muon is taken by optim=muon; choose another name",
        "optimizer json": "json is taken by the module json; choose another name",
        "optimizer a-b": "a-b cannot be registered; use small letters",
        "optimizer there": "there.py exists already; choose another name",
        "optimizer": "fsdptoys new needs a kind and a name, not optimizer; write",
    }
    for arguments, sentence in sentences.items():
        assert main(["new", *arguments.split()]) == 2
        assert sentence in capsys.readouterr().err
    assert os.listdir() == ["there.py"]


def test_import_is_an_option_of_every_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the help of a registered class, before or after the command; the sentence without a
    value."""
    monkeypatch.chdir(tmp_path)
    options = write_code(tmp_path)
    for argv in (
        ["train", *options, "--help"],
        [*options, "train", "--help"],
        ["train", "--import=copied.py", "--help"],
    ):
        with forgotten_imports():
            assert main(argv) == 0
            page = capsys.readouterr().out
        assert re.search(r"optim\.beta2=0\.95 +Decay of the mean of squares", page)
        assert "AdamW with the loop over parameters of its paper" in page
    with forgotten_imports():
        assert main(["report", "--import"]) == 2
        assert (
            "--import has no value; write --import ./mine.py" in capsys.readouterr().err
        )
        assert main(["train", "--imports", "copied.py"]) == 2
        assert "did you mean --import?" in capsys.readouterr().err
        assert main(["compare", "a", "b", "--import", "absent"]) == 2
        assert "there is no module absent" in capsys.readouterr().err
        assert main(["train", *options, "optim=copied", "--cfg", "job"]) == 0
        assert "name: copied" in capsys.readouterr().out


@pytest.mark.launcher
@pytest.mark.extended
@pytest.mark.limit(600)
def test_files_and_commands_of_the_page_run_in_order(tmp_path: Path) -> None:
    """Oracle: the exit statuses, in a folder with the page's Python files."""
    for block in blocks(ROOT / "docs" / "own_code.md"):
        language, _, name = block.info.partition(" ")
        if language == "python" and name:
            (tmp_path / name).write_text(block.text)
        for line in block.text.splitlines() if language == "bash" else ():
            argv = shlex.split(line)
            ended = subprocess.run(
                [sys.executable, "-m", *argv],
                cwd=tmp_path,
                env=os.environ | ENVIRONMENT,
                capture_output=True,
                text=True,
            )
            assert ended.returncode == 0, f"{line}\n{ended.stdout}\n{ended.stderr}"
