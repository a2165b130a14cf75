"""Adapters in the commands that use trained weights."""

import json
from pathlib import Path

import pytest
import torch

from fsdptoys.cli.main import main
from fsdptoys.models import LlamaConfig
from tests.checkpoint.folders import build, load, write
from tests.checkpoint.test_adapter_folder import adapted, draw_adapters, write_own
from tests.checkpoint.test_weights import save_run

BYTES = LlamaConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=256, max_seq_len=64)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run and a folder with the same weights, and an adapter."""
    save_run(tmp_path / "run", BYTES)
    write(tmp_path / "folder", build(BYTES))
    model = adapted(build(BYTES))
    write_own(tmp_path / "adapter", model, draw_adapters(model))
    (tmp_path / "text").write_text("some text to predict, a few words long")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_adapters_are_added_to_the_weights(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the model with adapters, for the converted folder's logits; that folder, for the other commands."""
    tokens_BT = torch.arange(40).view(2, 20)
    model = adapted(build(BYTES))
    draw_adapters(model)
    for source in ("run", "folder"):
        assert main(["convert", "to-hf", source, f"merged-{source}", "adapter=adapter"]) == 0
        found = load(places / f"merged-{source}")
        torch.testing.assert_close(found(tokens_BT), model(tokens_BT), rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    options = ["--device", "cpu", "--tokenizer", "bytes", "--context", "16", "--json"]
    for command in (["generate", "--prompt", "ab", "--tokens", "8"], ["evaluate", "--text", "text"]):
        answers = []
        for source in (["folder"], ["folder", "--adapter", "adapter"], ["merged-folder"]):
            assert main([command[0], *source, *command[1:], *options]) == 0
            answers.append(json.loads(capsys.readouterr().out))
        assert answers[1] == answers[2] != answers[0]


def test_adapters_of_another_model_are_refused(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: status 2 and the message."""
    write(places / "wide", build(LlamaConfig(**vars(BYTES) | {"dim": 64, "head_dim": 8})))
    assert main(["generate", "wide", "--adapter", "adapter", "--prompt", "a", "--tokenizer", "bytes"]) == 2
    assert "lora_A.weight in the shape 4×32, and the adapter of a llama model as configured needs 4×64" in (
        capsys.readouterr().err
    )
    assert main(["convert", "to-hf", "folder", "out", "adapter=nowhere"]) == 2
    assert "nowhere holds no adapter_config.json" in capsys.readouterr().err
