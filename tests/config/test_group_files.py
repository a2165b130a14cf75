"""Own files of groups, in ``./configs`` and in folders of ``--config-dir``."""

import os
from pathlib import Path

import pytest

from fsdptoys.cli.main import main
from fsdptoys.config import choices
from fsdptoys.config.choices import CONFIG_DIRS, list_choices, schema_name
from fsdptoys.config.compose import compose, compose_config, compose_presets
from fsdptoys.errors import ConfigError
from fsdptoys.sweep.axes import combine, read_axes
from fsdptoys.sweep.validate import ValidJob, validate_combinations

MINE = "defaults: [llama_debug, _self_]\ndim: 128\n"
BARE = """\
defaults:
  - base_llama
dim: 64
n_layers: 2
n_heads: 2
n_kv_heads: 2
vocab_size: 256
"""
TRAINING = """\
defaults:
  - _self_
  - override /model: mine
  - override /optim: slow
train:
  steps: 3
optim:
  warmup_steps: 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with own files of three groups, and a further folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CONFIG_DIRS, "")
    files = {
        "configs/model/mine.yaml": MINE,
        "configs/model/deeper.yaml": "defaults: [mine, _self_]\nn_layers: 3\n",
        "configs/optim/slow.yaml": (
            "defaults: [base_adamw, _self_]\nlr: 1e-5\nwarmup_steps: 7\n"
        ),
        "configs/experiment/short.yaml": TRAINING,
        "configs/notes/other.yaml": "a: 1\n",
        "more/model/bare.yaml": BARE,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_own_files_are_choices_like_built_in_ones(folder: Path) -> None:
    """Oracle: the keys of the files, applied to the built-in ones by overrides."""
    assert {"mine", "deeper", "llama_debug"} <= set(list_choices()["model"])
    assert "bare" not in list_choices()["model"] and "notes" not in list_choices()
    assert schema_name("model", "deeper") == "llama"
    overrides = ["model=llama_debug", "model.dim=128", "model.n_layers=3"]
    expected = compose_config([*overrides, "model.name=deeper"]).to_dict()
    composition = compose(["model=deeper"])
    assert composition.config.to_dict() == expected
    assert composition.choices["model"] == "deeper"
    os.environ[CONFIG_DIRS] = str(folder / "more")
    bare = compose_config(["model=bare", "model.dim=32"]).model
    assert (bare.name, bare.family, bare.dim, bare.n_layers) == ("bare", "llama", 32, 2)
    names = [config.name for config in compose_presets(["mine", "gpt2", "bare"])]
    assert names == ["mine", "gpt2", "bare"]


def test_experiments_win_over_own_files_and_typed_settings_over_both(
    folder: Path,
) -> None:
    """Oracle: the order of built-in files."""
    config = compose_config(["experiment=short", "optim.lr=2e-5"])
    assert (config.model.name, config.train.steps) == ("mine", 3)
    assert (config.optim.lr, config.optim.warmup_steps) == (2e-5, 2)
    config = compose_config(["experiment=short", "model=gpt2_debug"])
    assert config.model.name == "gpt2_debug" and config.optim.lr == 1e-5


def test_changed_files_are_read_again(folder: Path) -> None:
    """Oracle: the new value; composed trees are cached."""
    assert compose_config(["model=mine"]).model.dim == 128
    (folder / "configs/model/mine.yaml").write_text(MINE.replace("128", "96"))
    assert compose_config(["model=mine"]).model.dim == 96


MISTAKES = {
    "model/x: defaults: [llama_debug]\ndimm: 3": (
        "configs/model/x.yaml, line 2: model.dimm=3 names a key that does not exist; did you mean "
        "model.dim=3?"
    ),
    "model/x: defaults: [llama_debug]\ndim: wide": (
        "configs/model/x.yaml, line 2: model.dim=wide must be an integer; set model.dim=4096"
    ),
    "model/x: defaults: [llama_debug]\nn_experts: 3": (
        "configs/model/x.yaml, line 2: model.n_experts=3 is not an option of model=x; set "
        "model=llama4_debug or leave it out"
    ),
    "model/x: dim: 3": (
        "configs/model/x.yaml has no list of defaults, with which the files of a group begin; "
        "write defaults: [llama_debug, _self_]"
    ),
    "model/x: defaults: [lama_debug]": (
        "configs/model/x.yaml, line 1: lama_debug is neither a schema nor a file of model; did you "
        "mean llama_debug?"
    ),
    "model/x: defaults: [base_llama, {optim: muon}]": (
        "configs/model/x.yaml, line 1: {'optim': 'muon'} is no entry of defaults; write the name "
        "of a file of model, _self_, or in an experiment 'override /GROUP: NAME'"
    ),
    "experiment/x: defaults: [{override /model: lama_debug}]": (
        "configs/experiment/x.yaml, line 1: model=lama_debug does not exist; did you mean "
        "llama_debug?"
    ),
    "experiment/x: defaults: [_self_]\ntrain: {stepz: 2}": (
        "configs/experiment/x.yaml, line 2: train.stepz=2 names a key that does not exist; did you "
        "mean train.steps=2?"
    ),
    "model/x: defaults: [base_llama]\n_target_: os.system": (
        "configs/model/x.yaml, line 2: _target_ names code to run, which no file may; leave it "
        "out, and name own code on the command line, as --import ./mine.py"
    ),
    "model/gpt2: defaults: [base_gpt2]": (
        "model=gpt2 is ambiguous, since configs/model/gpt2.yaml has the name of a built-in file; "
        "rename configs/model/gpt2.yaml"
    ),
    "optim/x: defaults: [hydra/launcher]": (
        "configs/optim/x.yaml, line 1: hydra/launcher is neither a schema nor a file of optim; "
        "begin with one of base_adamw, base_sgd, base_muon, adamw, muon, sgd, slow, x"
    ),
}
"""Group and name of a file, and its text → the sentence."""


@pytest.mark.parametrize("entry", MISTAKES)
def test_mistakes_in_own_files_name_file_line_and_fix(
    entry: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the sentences above; a run that does not choose the file is not concerned."""
    name_of_file, text = entry.split(": ", 1)
    group, name = name_of_file.split("/")
    path = folder / "configs" / f"{name_of_file}.yaml"
    path.write_text(text)
    assert main(["train", f"{group}={name}", "--cfg", "job"]) == 2
    assert capsys.readouterr().err == f"fsdptoys: {MISTAKES[entry]}\n"
    compose_config(["model=mine"])


def test_files_that_begin_with_one_another_are_refused(folder: Path) -> None:
    """Oracle: the sentence; no recursion."""
    (folder / "configs/model/mine.yaml").write_text("defaults: [deeper]\n")
    with pytest.raises(ConfigError, match="begins with itself"):
        compose_config(["model=mine"])


def test_the_folder_of_a_checkout_is_not_found_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the choices elsewhere; a checkout of another version holds no own files either."""
    monkeypatch.chdir("/")
    elsewhere = list_choices()
    monkeypatch.chdir(choices.CONFIGS.resolve().parent)
    assert list_choices() == elsewhere
    monkeypatch.chdir(folder)
    (folder / "configs" / "config.yaml").write_text("defaults: [base_config]\n")
    assert list_choices() == elsewhere


def test_folders_of_the_command_line_reach_every_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the own names in the answers; child processes inherit the folders."""
    monkeypatch.setenv(CONFIG_DIRS, "")
    assert main(["models", "bare", "--config-dir", "more", "--json"]) == 0
    assert '"name": "bare"' in capsys.readouterr().out
    assert os.environ[CONFIG_DIRS] == str(folder / "more")
    assert main(["train", "--config-dir=more", "model=bear", "--cfg", "job"]) == 2
    assert "did you mean model=bare?" in capsys.readouterr().err
    assert main(["train", "--help"]) == 0
    assert " bare," in capsys.readouterr().out
    assert main(["sweep", "--config-dir", "absent", "model=bare,mine"]) == 2
    assert "--config-dir absent is not a folder" in capsys.readouterr().err
    assert main(["train", "--config-dir"]) == 2
    assert "--config-dir has no value" in capsys.readouterr().err


def test_sweeps_vary_own_files(folder: Path) -> None:
    """Oracle: one valid job for each name."""
    axes = read_axes(["model=mine,deeper", "launch.device=cpu"], list_choices())
    entries = validate_combinations(combine([], [], axes))
    jobs = [entry for entry in entries if isinstance(entry, ValidJob)]
    assert [job.config.model.n_layers for job in jobs] == [2, 3]
