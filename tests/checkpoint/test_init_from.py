"""Weights of another configuration are rejected if they would compute another function."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.checkpoint import open_init_from
from fsdptoys.cli.convert import training_words
from fsdptoys.cli.main import main
from fsdptoys.errors import ConfigError
from fsdptoys.models.rotary import RopeScaling
from tests.checkpoint.damages import CONFIG, GPT2, THIRD, make_folder
from tests.checkpoint.folders import build

MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "one key": (
        {"rope_theta": 500.0},
        "model.rope_theta=500.0 is not 10000.0, with which the weights of model.init_from={} "
        "were made; set model.rope_theta=10000.0",
    ),
    "several keys": (
        {"dim": 32, "tie_embeddings": True},
        "model.dim=32 is not 16, with which the weights of model.init_from={} were made; set model.dim=16 "
        "(fsdptoys convert from-hf {} lists the other 1 too)",
    ),
    "implied key": (
        {"head_dim": 4},
        "model.head_dim=4 is not 8, with which the weights of model.init_from={} were made; set model.head_dim=8",
    ),
    "nested key": (
        {"rope_scaling": RopeScaling(factor=4.0, original_max_seq_len=8)},
        "model.rope_scaling.factor=4.0 is not 8.0, with which the weights of model.init_from={} were made; set "
        "model.rope_scaling.factor=8.0",
    ),
    "switch": (
        {"tie_embeddings": True},
        "model.tie_embeddings=true is not false, with which the weights of "
        "model.init_from={} were made; set model.tie_embeddings=false",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_weights_of_another_model_are_refused(case: str, tmp_path: Path) -> None:
    """Oracle: the expected message, for configurations whose weights may even have the same shapes."""
    folder = tmp_path / "folder"
    make_folder(folder)
    changes, sentence = MISMATCHES[case]
    chosen = dataclasses.replace(CONFIG, init_from=str(folder), **changes)
    with pytest.raises(ConfigError) as refused:
        open_init_from(chosen.build())
    assert str(refused.value).replace(str(folder), "{}") == sentence


@pytest.mark.parametrize(
    "changes", [{}, {"name": "x", "init_std": 1.0}, {"max_seq_len": 512}, {"head_dim": 8}], ids=str
)
def test_settings_unrelated_to_weights_may_differ(changes: dict[str, Any], tmp_path: Path) -> None:
    """Oracle: the same weights."""
    folder = tmp_path / "folder"
    make_folder(folder)
    model = dataclasses.replace(CONFIG, init_from=str(folder), **changes).build()
    source, written = open_init_from(model), build(CONFIG)
    for name, param in model.named_parameters():
        source.fill(param, name)
        assert torch.equal(param, written.get_parameter(name))


def test_init_from_without_a_folder_of_the_family_is_refused(tmp_path: Path) -> None:
    """Oracle: the expected messages."""
    make_folder(tmp_path / "folder", GPT2)
    (tmp_path / "file").touch()
    expected = (
        "where a folder in Hugging Face format is expected; name one that holds config.json and safetensors files"
    )
    for name, message in {
        "nothing": f"model.init_from={{}}/nothing does not exist, {expected}",
        "file": f"model.init_from={{}}/file is a file, {expected}",
        "folder": "model=llama is of the family llama, and model.init_from={}/folder holds a gpt2 model; take the "
        "settings of fsdptoys convert from-hf {}/folder",
    }.items():
        chosen = dataclasses.replace(CONFIG, init_from=str(tmp_path / name))
        with pytest.raises(ConfigError) as refused:
            open_init_from(chosen.build())
        assert str(refused.value).replace(str(tmp_path), "{}") == message


def test_damaged_folder_is_refused_before_workers_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: status 2 and the file's name, for one bit that only the checksums know of."""
    make_folder(tmp_path / "weights")
    weights = tmp_path / "weights" / THIRD
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    _, *words = training_words(CONFIG, str(tmp_path / "weights"))
    assert main([*words, "experiment=null"]) == 2
    assert f"{weights} is damaged: its SHA-256 is" in capsys.readouterr().err
