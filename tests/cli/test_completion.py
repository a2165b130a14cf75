"""Completion of the command line, by the candidates and by the shells' own machinery."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptoys.cli.candidates import complete
from fsdptoys.cli.commands import command_names
from fsdptoys.cli.completion import SCRIPTS
from fsdptoys.cli.main import main
from fsdptoys.config.choices import CONFIG_DIRS, list_choices
from fsdptoys.config.fixes import all_options

ROOT = Path(__file__).parents[2]

LINES = {
    "fsdptoys tra": ["train"],
    "fsdptoys plan se": ["search"],
    "fsdptoys config ": ["cp", "diff", "schema", "show"],
    "fsdptoys train mod": ["model.", "model="],
    "fsdptoys train model=gpt2_": [
        *("model=gpt2_debug", "model=gpt2_large", "model=gpt2_medium"),
        "model=gpt2_xl",
    ],
    "fsdptoys train model=min": ["model=mine"],
    "fsdptoys train --config-dir more model=ba": ["model=bare"],
    "fsdptoys train experiment=n": ["experiment=null"],
    "fsdptoys train train.see": ["train.seed="],
    "fsdptoys train optim=muon optim.mo": ["optim.momentum="],
    "fsdptoys train optim=adamw optim.mo": [],
    "fsdptoys train model=mine model.rope_t": ["model.rope_theta="],
    "fsdptoys train memory.chunk_loss=": [
        *("memory.chunk_loss=false", "memory.chunk_loss=true"),
    ],
    "fsdptoys train train.deterministic=": [
        *("train.deterministic=false", "train.deterministic=layout"),
        "train.deterministic=true",
    ],
    "fsdptoys train optim.schedule=c": [
        "optim.schedule=constant",
        "optim.schedule=cosine",
    ],
    "fsdptoys train checkpoint.resume=runs/": ["checkpoint.resume=runs/first/"],
    "fsdptoys train checkpoint.resume=a": ["checkpoint.resume=auto"],
    "fsdptoys train --co": ["--config", "--config-dir"],
    "fsdptoys train --config mi": ["mine.yaml"],
    "fsdptoys train --config=mi": ["--config=mine.yaml"],
    "fsdptoys train --cfg ": ["job"],
    "fsdptoys sweep off": ["offload"],
    "fsdptoys sweep debug parallel=fsdp1,fsdp": [
        *("parallel=fsdp1,fsdp1", "parallel=fsdp1,fsdp2"),
    ],
    "fsdptoys report runs/f": ["runs/first/"],
    "fsdptoys generate runs/first --dev": ["--device"],
    "fsdptoys generate runs/first --device c": ["cpu", "cuda"],
    "fsdptoys config cp optim/": ["optim/adamw", "optim/muon", "optim/sgd"],
    "fsdptoys config schema hard": ["hardware"],
    "fsdptoys models qwen3_d": ["qwen3_debug"],
    "fsdptoys completion f": ["fish"],
    "fsdptoys train plan.hardware=h1": ["plan.hardware=h100"],
    "fsdptoys trane ": [],
    "fsdptoys train 'open": [],
    "fsdptoys train model=nothing model.rope": [],
    "fsdptoys": [],
}
"""Line up to the cursor → words by which the last one may be replaced."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run, a file of settings and own files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CONFIG_DIRS, "")
    for name in ("runs/first", "configs/model", "more/model"):
        Path(name).mkdir(parents=True)
    Path("mine.yaml").write_text("")
    Path("configs/model/mine.yaml").write_text("defaults: [llama_debug]\n")
    Path("more/model/bare.yaml").write_text("defaults: [base_llama]\n")
    return tmp_path


@pytest.mark.parametrize("line", LINES)
def test_lines_are_completed(line: str, folder: Path) -> None:
    """Oracle: the words above."""
    assert complete(line) == sorted(LINES[line])


def test_every_command_group_and_key_is_a_candidate(folder: Path) -> None:
    """Oracle: the commands, the choices of the groups, and the keys of all schemas."""
    assert set(command_names()) <= set(complete("fsdptoys "))
    first = complete("fsdptoys train ")
    choices = list_choices()
    assert {f"{group}=" for group in choices} <= set(first)
    for group, names in choices.items():
        candidates = complete(f"fsdptoys train {group}=")
        assert {f"{group}={name}" for name in names} <= set(candidates)
    keys = {
        word.removesuffix("=")
        for section in first
        if section.endswith(".")
        for word in complete(f"fsdptoys train {section}")
    }
    assert keys == {key for key in all_options(())[0] if "." in key}


BASH = """
fsdptoys() { "$PYTHON" -m fsdptoys "$@"; }
source <(fsdptoys completion bash)
for COMP_LINE in "$@"; do
    COMP_POINT=${#COMP_LINE}
    COMPREPLY=()
    _fsdptoys
    echo "${COMPREPLY[*]}"
done
complete -p fsdptoys
"""

ANSWERS = {
    "fsdptoys tra": "train",
    "fsdptoys train model=gpt2_d": "gpt2_debug",
    "fsdptoys train train.see": "train.seed=",
    "fsdptoys train --config=mi": "mine.yaml",
}
"""Line → what bash inserts after the last of its word breaks."""


def environment() -> dict[str, str]:
    """Return the environment of a shell that starts this package."""
    present = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("COVERAGE")
    }
    return present | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}


@pytest.mark.launcher
def test_bash_completes_after_an_equals_sign(folder: Path) -> None:
    """Oracle: the words above; ``=`` is among bash's word breaks."""
    process = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", *ANSWERS],
        env=environment(),
        capture_output=True,
        text=True,
    )
    lines = process.stdout.splitlines()
    assert (process.returncode, process.stderr) == (0, "")
    assert lines == [*ANSWERS.values(), "complete -F _fsdptoys fsdptoys"]


@pytest.mark.launcher
@pytest.mark.extended
def test_fish_completes(folder: Path) -> None:
    """Oracle: fish's own answer to ``complete -C``."""
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("fish is not installed")
    script = f"function fsdptoys\n{sys.executable} -m fsdptoys $argv\nend\n"
    script += SCRIPTS["fish"] + 'complete -C "fsdptoys train model=gpt2_d"\n'
    process = subprocess.run(
        [fish, "--no-config", "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert process.stdout.split() == ["model=gpt2_debug"]


def test_an_answer_imports_neither_torch_nor_hydra(folder: Path) -> None:
    """Oracle: the modules of the interpreter that answered."""
    code = """
import sys
from fsdptoys.cli.main import main
main(["completion", "--line", "fsdptoys train train.see"])
print(*{"torch", "hydra", "omegaconf", "numpy", "rich"} & set(sys.modules))
"""
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert process.stdout == "train.seed=\n\n"


def test_unknown_shells_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the sentence; the scripts are printed as they are."""
    assert main(["completion", "bsh"]) == 2
    assert "did you mean fsdptoys completion bash?" in capsys.readouterr().err
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == script
