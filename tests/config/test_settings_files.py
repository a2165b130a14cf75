"""Files of settings and the folders of runs, held against the same settings on the command line."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from fsdptoys.cli.main import main
from fsdptoys.cli.sweep import read_arguments
from fsdptoys.config.choices import list_choices, schema_name
from fsdptoys.config.compose import compose_config, list_presets
from fsdptoys.config.schema import SCHEMAS
from fsdptoys.config.settings import read_file, read_settings
from fsdptoys.config.sources import flatten
from fsdptoys.errors import ConfigError
from tests.harness.levels import by_level
from tests.harness.short_runs import train_run

GROUPS = [group for group in list_choices() if group != "experiment"]
CHOICES = [
    f"{group}={name}"
    for group in GROUPS
    for name in (list_presets() if group == "model" else list_choices()[group])
]
SHORT = ("model=qwen3_moe_debug", "parallel=fsdp1", "data=chat", "optim=muon")
SHORT += ("memory=lean", "tune=lora")

FILES = {
    "model: gpt2_debug": "model=gpt2_debug",
    "model: {name: gpt2_debug, dim: 32}": "model=gpt2_debug model.dim=32",
    "model: {family: llama, name: mine, dim: 64}": (
        "model=base_llama model.name=mine model.dim=64"
    ),
    "parallel: {name: ddp, bucket_cap_mb: 3}": "parallel=ddp parallel.bucket_cap_mb=3",
    "memory: {name: lean, chunk_tokens: 64}": "memory=lean memory.chunk_tokens=64",
    "memory: {gradient_checkpointing: true}": "memory.gradient_checkpointing=full",
    "train: {steps: 20, deterministic: true}": (
        "train.steps=20 train.deterministic=true"
    ),
    "optim: {lr: 3e-4, schedule: wsd}": "optim.lr=0.0003 optim.schedule=wsd",
    "optim.lr: 1e-3": "optim.lr=1e-3",
    "experiment: cpu_compare\ntrain: {steps: 2}": (
        "experiment=cpu_compare train.steps=2"
    ),
    "profile: {enabled: true, ranks: [0, 1]}\ntrain:\n": (
        "profile.enabled=true profile.ranks=[0,1]"
    ),
    "metrics: {run_dir: '1e3'}": "metrics.run_dir='1e3'",
    "metrics: {run_dir: 'null'}": "metrics.run_dir='null'",
    "patches: []\nmesh: {fsdp_size: node}": "patches=[] mesh.fsdp_size=node",
    "parallel: {name: fsdp2, schedule: 1f1b}": "parallel=fsdp2 parallel.schedule='1f1b'",
    "model: {name: llama_debug, rope_scaling: {factor: 2}}": (
        "model=llama_debug model.rope_scaling.factor=2"
    ),
    "# nothing": "",
}
"""Text of a file → settings that are typed without a file."""


def overrides_of(folder: Path, text: str, *later: str) -> list[str]:
    """Return the overrides of a file with a text, and of typed ones."""
    file = folder / "mine.yaml"
    file.write_text(text)
    return read_settings([str(file)], later).overrides


@pytest.mark.parametrize("text", FILES)
def test_a_file_means_its_settings_on_the_command_line(
    text: str, tmp_path: Path
) -> None:
    """Oracle: the composition of the typed line."""
    expected = compose_config(shlex.split(FILES[text], posix=False))
    assert compose_config(overrides_of(tmp_path, text)).to_dict() == expected.to_dict()


@pytest.mark.parametrize(
    "path", ["it's", 'a "b"', "a\\", "\\'", "a=b,c", "null", "1_000", "~x", "é", "a: b"]
)
def test_texts_of_a_file_arrive_unchanged(path: str, tmp_path: Path) -> None:
    """Oracle: the text itself; Hydra's grammar gives meaning to these characters."""
    tree = {"metrics": {"run_dir": path}}
    (word,) = overrides_of(tmp_path, yaml.safe_dump(tree, allow_unicode=True))
    assert OverridesParser.create().parse_override(word).value() == path


@pytest.mark.parametrize("choice", by_level(CHOICES, SHORT))
def test_a_printed_configuration_is_a_file_of_settings(
    choice: str, tmp_path: Path
) -> None:
    """Oracle: the composition that was printed, for every choice of every group."""
    tree = compose_config([choice]).to_dict()
    overrides = overrides_of(tmp_path, yaml.safe_dump(tree, sort_keys=False))
    assert compose_config(overrides).to_dict() == tree


def test_later_files_and_the_command_line_win(tmp_path: Path) -> None:
    """Oracle: the rule of docs/configuration.md, by hand; a choice replaces a section."""
    (tmp_path / "a.yaml").write_text(
        "model: {name: llama_debug, dim: 128}\nparallel: {name: ddp, bucket_cap_mb: 3}\n"
        "train: {steps: 5, batch_size: 2}\n"
    )
    (tmp_path / "b.yaml").write_text("model: gpt2_debug\ntrain: {steps: 6}\n")
    files = [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    settings = read_settings(files, ["train.batch_size=3", "parallel=fsdp2"])
    assert settings.overrides == [
        *("model=gpt2_debug", "train.steps=6", "train.batch_size=3", "parallel=fsdp2")
    ]
    assert settings.replaced == [
        "model=gpt2_debug replaces model.dim=128 of the files before it",
        "parallel=fsdp2 replaces parallel.bucket_cap_mb=3 of the files before it",
    ]
    assert settings.origins["train.steps"] == f"{files[1]}, line 2"
    assert settings.origins["train.batch_size"] == ""


MISTAKES = {
    "train:\n  steps: 3\n  batch_sise: 2": (
        "mine.yaml, line 3: train.batch_sise=2 names a key that does not exist; did you mean "
        "train.batch_size=2?"
    ),
    "stepz: 3": (
        "mine.yaml, line 1: stepz=3 names a key that does not exist; did you mean train.steps=3?"
    ),
    "optim:\n  lr: fast": (
        "mine.yaml, line 2: optim.lr=fast must be a finite number; set optim.lr=0.0003"
    ),
    "\ntrain: {steps: 0}": (
        "mine.yaml, line 2: train.steps=0 must be at least 1, or -1; set train.steps=1"
    ),
    "train: {steps: '20'}": (
        "mine.yaml, line 1: train.steps='20' must be an integer; set train.steps=20"
    ),
    "model: lama_debug": (
        "mine.yaml, line 1: model=lama_debug must be a preset that fsdptoys models lists; did you "
        "mean model=llama_debug?"
    ),
    "model: {name: lama_debug, dim: 3}": (
        "mine.yaml, line 1: model=lama_debug must be a preset that fsdptoys models lists; did you "
        "mean model=llama_debug?"
    ),
    "model: {family: lama}": (
        f"mine.yaml, line 1: model.family=lama must be one of {', '.join(SCHEMAS['model'])}; did "
        "you mean llama?"
    ),
    "parallel: {name: ddp, wrap: block}": (
        "mine.yaml, line 1: parallel.wrap=block is not an option of parallel=ddp; set "
        "parallel=fsdp1 or leave it out"
    ),
    "train: {float8_all_gather: true}": (
        "mine.yaml, line 1: train.float8_all_gather=true has no effect unless "
        "train.float8=tensorwise; set train.float8=tensorwise or leave it out"
    ),
    "defaults: [base_config]": (
        "mine.yaml, line 1: defaults belongs to the files of a group, and a file of settings "
        "chooses by name; write a line such as model: llama_debug"
    ),
    "train: {steps: [{a: 1}]}": (
        "mine.yaml, line 1: train.steps holds a list of mappings or of lists, and a setting takes "
        "a list of values; write [a, b]"
    ),
    "train: {1: 2}": (
        "mine.yaml, line 1 has the key 1, which is not text; write the name of a setting"
    ),
    "+train.steps: 3": (
        "mine.yaml, line 1: +train.steps is no setting's name; write it as fsdptoys train --help "
        "does"
    ),
    "[1, 2]": (
        "mine.yaml holds no settings by name; write lines such as train: {steps: 20}"
    ),
}
"""Text of a file → the sentence."""


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_name_file_line_key_and_fix(
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the sentences above; those of the command line follow the place."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    argv = ["train", "--config", "mine.yaml", "launch.device=cpu", "--cfg", "job"]
    assert main(argv) == 2
    assert capsys.readouterr().err == f"fsdptoys: {MISTAKES[text]}\n"


HOSTILE = {
    "model: {_target_: os.system}": "names code to run",
    "train: {_partial_: true}": "names code to run",
    "hydra: {launcher: x}": "names code to run",
    "hydra/launcher: submitit_slurm": "names code to run",
    "imports: [mine]": "names code to run",
    "train: {a: [{_target_: x}]}": "names code to run",
    "model: !!python/object/apply:os.system [true]": "it has a tag",
    "model: !!python/name:os.system": "it has a tag",
    "a: &x [1]\nb: *x": "it has an alias",
    "a: 1\na: 2": "occurs twice",
    "metrics: {run_dir: '${oc.env:HOME}'}": "refers to another value",
    "train: {steps: '${train.grad_accum}'}": "refers to another value",
    "[" * 100 + "]" * 100: "nested",
    "a: {" * 60 + "b: 1" + "}" * 60: "nested",
    "\n".join(f"k{index}: 1" for index in range(1500)): "more than 1000 settings",
    "#" * 2**21: "longer than",
    "a: \x00": "cannot be read",
    "\ufeff\u202e: {": "cannot be read",
}
"""Text of a file from elsewhere → part of the sentence."""


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:30].encode().hex())
def test_files_from_elsewhere_run_nothing(text: str, tmp_path: Path) -> None:
    """Oracle: one sentence on one line, before anything is composed."""
    with pytest.raises(ConfigError) as caught:
        overrides_of(tmp_path, text)
    assert HOSTILE[text] in str(caught.value) and "\n" not in str(caught.value)


def test_paths_that_are_no_files_of_settings_are_refused(tmp_path: Path) -> None:
    """Oracle: the sentences, by hand."""
    with pytest.raises(ConfigError, match="does not exist; name a YAML file"):
        read_file(str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigError, match=r"is a folder without a run's config\.yaml"):
        read_file(str(tmp_path))
    with pytest.raises(ConfigError, match="is a device and not a regular file"):
        read_file("/dev/zero")


def recorded(folder: Path) -> dict[str, Any]:
    """Return the settings that a run has recorded, by key."""
    return flatten(yaml.safe_load((folder / "config.yaml").read_text()))


def test_the_folder_of_a_run_means_its_settings(tmp_path: Path) -> None:
    """Oracle: what the run has recorded, except for its own folder and machine; seeds that followed
    train.seed do so again, and a missing key has its default."""
    folder = tmp_path / "run"
    train_run(folder)
    before = recorded(folder)
    file = folder / "config.yaml"
    tree = yaml.safe_load(file.read_text())
    del tree["optim"]["beta2"], tree["model"]["rope_theta"]
    tree["checkpoint"]["folder"] = "elsewhere"
    file.write_text(yaml.safe_dump(tree))
    for source in (folder, file):
        overrides = read_settings([str(source)], ["train.seed=7"]).overrides
        config = compose_config(overrides)
        config.validate(1, "cpu")
        again = flatten(config.to_dict())
        differs = {key for key in again if again[key] != before.get(key)}
        assert differs == {
            *("metrics.run_dir", "train.seed", "train.init_seed", "train.data_seed"),
            "train.sample_seed",
        }
        assert config.train.init_seed == 7 and config.metrics.run_dir is None
        assert config.checkpoint.folder is None and before["checkpoint.every"] == 1
        assert config.checkpoint.every == 1


def test_a_file_with_records_of_own_code_asks_for_its_import(tmp_path: Path) -> None:
    """Oracle: the option that loads the recorded file; the record itself loads nothing."""
    (tmp_path / "mine.py").write_text("raise SystemExit(3)")
    record = {"name": "mine.py", "sha256": "0" * 64}
    text = yaml.safe_dump({"imports": [record], "optim": {"name": "mine"}})
    with pytest.raises(ConfigError, match=r"own code.*; add --import \./mine\.py$"):
        overrides_of(tmp_path, text)


def test_a_recorded_model_without_its_preset_keeps_its_values(tmp_path: Path) -> None:
    """Oracle: the recorded values; the preset, an own file, is not here."""
    config = compose_config(["model=llama_debug", "model.name=lost", "model.dim=96"])
    overrides = overrides_of(tmp_path, yaml.safe_dump(config.to_dict()))
    assert "model=base_llama" in overrides
    assert compose_config(overrides).to_dict() == config.to_dict()
    for family in SCHEMAS["model"]:
        assert schema_name("model", f"base_{family}") == family


def test_jobs_of_a_sweep_record_the_settings_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the arguments of the same sweep without a file; the file is read once."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        "model: llama_debug\nparallel: ddp\ntrain: {steps: 2}\n"
        "metrics: {run_dir: null}\ncheckpoint: {resume: never, folder: null}\n"
    )
    arguments = read_arguments(
        ["debug", "--config", "mine.yaml", "parallel=single,fsdp2", "--dry-run"]
    )
    assert arguments.argv == (
        *("debug", "model=llama_debug", "train.steps=2", "parallel=single,fsdp2"),
    )
    Path("mine.yaml").write_text("metrics: {run_dir: here}\n")
    assert main(["sweep", "--config", "mine.yaml", "train.steps=1,2"]) == 2
    assert capsys.readouterr().err == (
        "fsdptoys: mine.yaml, line 1: metrics.run_dir=here is not for a sweep, since each job of a "
        "sweep has a run directory of its own; leave it out\n"
    )


def test_a_search_varies_what_a_file_only_repeats(tmp_path: Path) -> None:
    """Oracle: the keys of a printed configuration that its choices do not set already."""
    from fsdptoys.config.sources import without_equal

    tree = compose_config(
        ["model=llama_debug", "memory=lean", "train.seq_len=64"]
    ).to_dict()
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    settings = read_settings([str(tmp_path / "mine.yaml")], ["train.steps=3"])
    keys = {word.partition("=")[0] for word in without_equal(settings)}
    assert keys == {
        *("model", "parallel", "data", "optim", "tune", "train.seq_len", "train.steps"),
        "loss",
        *("memory.gradient_checkpointing", "memory.chunk_loss"),
    }
