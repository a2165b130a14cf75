"""A small model of bytes as a run and as a folder in Hugging Face format."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from fsdptoys.data import DataConfig
from fsdptoys.models import LlamaConfig
from fsdptoys.parallel import SingleConfig
from tests.harness.folders import build, write
from tests.harness.saved_runs import save_run
from tests.harness.tiny import make_config

BYTES = LlamaConfig(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=48,
    vocab_size=256,
    max_seq_len=64,
)


def edit_settings(run: Path, section: str, values: dict[str, object]) -> None:
    """Change settings that a run has recorded."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings[section].update(values)
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


def train_on(run: Path, data: DataConfig) -> None:
    """Change the data that a run has recorded."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["data"] = dataclasses.replace(
        make_config(SingleConfig(), 1), data=data
    ).to_dict()["data"]
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


def save_model(folder: Path) -> None:
    """Write ``run`` with ``train.seq_len=16``, and ``folder``, with the same weights in Hugging
    Face format."""
    save_run(folder / "run", BYTES)
    edit_settings(folder / "run", "train", {"seq_len": 16})
    write(folder / "folder", build(BYTES))


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of three words."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
