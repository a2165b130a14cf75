"""``fsdptoys config``: sources, copies, differences and the JSON schema."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdptoys.cli.main import main
from fsdptoys.config.choices import CONFIGS, list_choices
from fsdptoys.config.compose import compose_config, list_presets
from fsdptoys.config.json_schema import file_schema
from fsdptoys.utils.foreign import parse_yaml
from tests.harness.levels import by_level

FOLDERS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())
FOLDERS = [name for name in FOLDERS if any((CONFIGS / name).glob("*.yaml"))]


def printed(*argv: str, capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    """Return the output of a command."""
    capsys.readouterr()
    assert main(list(argv)) == status
    output: str = capsys.readouterr().out
    return output


def test_show_prints_the_configuration_and_the_source_of_each_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: ``train --cfg job``, and the sources by hand."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: llama_debug\ntrain:\n  steps: 3\n")
    overrides = ["--config", "mine.yaml", "memory=lean", "train.seq_len=64"]
    overrides += ["launch.device=cpu"]
    text = printed("config", "show", *overrides, capsys=capsys)
    config = printed("train", *overrides, "--cfg", "job", capsys=capsys)
    assert yaml.safe_load(text) == yaml.safe_load(config)
    lines = dict(
        line.strip().split("  # ") for line in text.splitlines() if "#" in line
    )
    sources = {line.strip(): source for line, source in lines.items()}
    expected = {
        "name: llama_debug": "mine.yaml, line 1",
        "dim: 64": "model=llama_debug",
        "norm_eps: 1.0e-05": "default",
        "steps: 3": "mine.yaml, line 3",
        "seq_len: 64": "command line",
        "chunk_loss: true": "memory=lean",
        "sum_dtype: float64": "resolved from auto",
        "init_seed: 0": "resolved from null",
        "gc_every: 10": "default",
        "device: cpu": "command line",
    }
    assert {line: sources[line] for line in expected} == expected


def test_cp_copies_a_file_that_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the built-in file; the copy gives the same model under its own name."""
    monkeypatch.chdir(tmp_path)
    text = printed("config", "cp", "model/gpt2_debug", capsys=capsys)
    assert text == (
        "configs/model/my_gpt2_debug.yaml: edit it, then fsdptoys train model=my_gpt2_debug\n"
    )
    copied = compose_config(["model=my_gpt2_debug"]).to_dict()["model"]
    built_in = compose_config(["model=gpt2_debug"]).to_dict()["model"]
    assert copied == built_in | {"name": "my_gpt2_debug"}
    printed("config", "cp", "hardware/h100", "ours", capsys=capsys)
    assert Path("configs/hardware/ours.yaml").read_bytes() == (
        (CONFIGS / "hardware/h100.yaml").read_bytes()
    )
    for argv, sentence in {
        ("model/gpt2_debug",): "configs/model/my_gpt2_debug.yaml exists already",
        ("model/gpt2_debgu", "x"): "did you mean model/gpt2_debug?",
        ("modle/gpt2",): "did you mean model?",
        ("model/gpt2_debug", "gpt2"): "cannot be the name of a new file of model",
        ("model/gpt2_debug", "../x"): "cannot be the name of a new file of model",
        ("model/gpt2_debug", "a", "b"): "needs a file and maybe a name",
    }.items():
        assert main(["config", "cp", *argv]) == 2
        error = capsys.readouterr().err
        if argv[0] == "model/gpt2_debug" and len(argv) == 1:
            sentence = "cannot be the name of a new file"
        assert sentence in error and error.count("\n") == 1


def test_diff_lists_the_keys_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the settings, by hand."""
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("model: llama_debug\noptim: {lr: 1e-3}\n")
    line = "model=llama_debug optim=sgd train.steps=3"
    text = printed("config", "diff", "a.yaml", line, capsys=capsys, status=1)
    rows = {row.split()[0]: row.split()[1:] for row in text.splitlines()[1:]}
    assert rows["optim.name"] == ["adamw", "sgd"] and rows["optim.beta1"] == [
        "0.9",
        "-",
    ]
    assert rows["optim.lr"][0] == "0.001" and rows["train.steps"] == ["10", "3"]
    assert not any(key.startswith(("model", "parallel")) for key in rows)
    same = printed("config", "diff", "a.yaml", "a.yaml", capsys=capsys)
    assert same == "no setting differs\n"


@pytest.fixture(scope="module")
def validator() -> Any:
    """Validator of files of settings."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = file_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


CHOICES = [
    f"{group}={name}"
    for group, names in list_choices().items()
    for name in (list_presets() if group == "model" else names)
]
SHORT = ("model=qwen3_moe_debug", "parallel=toy_fsdp", "data=chat", "tune=lora")


@pytest.mark.parametrize("choice", by_level(CHOICES, SHORT))
def test_composed_configurations_satisfy_the_schema(
    choice: str, validator: Any
) -> None:
    """Oracle: jsonschema, for every choice of every group."""
    tree = compose_config([choice]).to_dict()
    assert not [error.message for error in validator.iter_errors(tree)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_shipped_files_satisfy_the_schema_of_their_folder(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: jsonschema; the root file is one of settings, after its defaults."""
    jsonschema = pytest.importorskip("jsonschema")
    out = tmp_path / "schema.json"
    assert printed("config", "schema", folder, "--out", str(out), capsys=capsys) == ""
    check = jsonschema.Draft202012Validator(json.loads(out.read_text()))
    for path in (CONFIGS / folder).glob("*.yaml"):
        tree = parse_yaml(path.read_text(encoding="utf-8"))
        assert not [error.message for error in check.iter_errors(tree)], path


def test_schema_accepts_files_of_settings_and_refuses_others(validator: Any) -> None:
    """Oracle: the command line's own answers, in tests/config/test_settings_files.py."""
    root = parse_yaml((CONFIGS / "config.yaml").read_text(encoding="utf-8"))
    del root["defaults"], root["hydra"]
    accepted = [
        root,
        {"model": "llama_debug", "train": {"steps": 3}},
        {"model": {"name": "gpt2", "dim": 3}, "experiment": None},
        {"model": {"family": "llama", "name": "mine", "n_kv_heads": 2}},
        {"parallel": {"name": "ddp", "bucket_cap_mb": 3}, "train.steps": 3},
        {"memory": {"name": "lean", "gradient_checkpointing": True}},
        {"mesh": {"fsdp_size": "node"}, "profile": {"ranks": [0, 1]}, "train": None},
    ]
    refused = [
        {"modle": "llama_debug"},
        {"model": "lama_debug"},
        {"train": {"stepz": 3}},
        {"train": {"steps": "3"}},
        {"train": {"steps": 0}},
        {"optim": {"schedule": "cosin"}},
        {"parallel": {"name": "ddp", "wrap": "block"}},
        {"model": {"family": "gpt2", "n_kv_heads": 2}},
        {"profile": {"ranks": [0.5]}},
        [],
    ]
    assert [tree for tree in accepted if not validator.is_valid(tree)] == []
    assert [tree for tree in refused if validator.is_valid(tree)] == []
    text = file_schema()["$defs"]["train"]["properties"]["batch_size"]
    assert text["description"].startswith("Sequences per micro-batch")
    assert text["minimum"] == 1 and text["default"] == 1
