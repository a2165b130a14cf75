"""Adapters in the commands that use trained weights."""

import json
from pathlib import Path

import pytest
import torch

from fsdptoys.cli.main import main
from fsdptoys.models import LlamaConfig
from tests.checkpoint.folders import build, load, write
from tests.checkpoint.test_adapter_folder import adapted, draw_adapters, write_own
from tests.cli.byte_model import BYTES, save_model


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a run and a folder with the same weights, and an adapter."""
    save_model(tmp_path)
    model = adapted(build(BYTES))
    write_own(tmp_path / "adapter", model, draw_adapters(model))
    (tmp_path / "text").write_text("some text to predict, a few words long")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("source", ["run", "folder"])
def test_adapters_are_added_to_converted_weights(source: str, places: Path) -> None:
    """Oracle: the logits of the model with adapters."""
    tokens_BT = torch.arange(40).view(2, 20)
    model = adapted(build(BYTES))
    draw_adapters(model)
    assert main(["convert", "to-hf", source, "merged", "adapter=adapter"]) == 0
    torch.testing.assert_close(load(places / "merged")(tokens_BT), model(tokens_BT), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("line", ["generate SOURCE --prompt ab --tokens 8", "evaluate SOURCE --text text"])
@pytest.mark.usefixtures("places")
def test_adapters_are_added_to_the_weights_of_a_command(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the converted folder with added adapters."""
    assert main(["convert", "to-hf", "folder", "merged", "adapter=adapter"]) == 0
    capsys.readouterr()
    answers = []
    for source in ("folder", "folder --adapter adapter", "merged"):
        words = f"{line.replace('SOURCE', source)} --device cpu --tokenizer bytes --context 16 --json"
        assert main(words.split()) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[1] == answers[2] != answers[0]


def test_adapters_of_another_model_are_refused(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: status 2 and the message."""
    write(places / "wide", build(LlamaConfig(**vars(BYTES) | {"dim": 64, "head_dim": 8})))
    assert main(["generate", "wide", "--adapter", "adapter", "--prompt", "a", "--tokenizer", "bytes"]) == 2
    assert "lora_A.weight in the shape 4×32, and the adapter of a llama model as configured needs 4×64" in (
        capsys.readouterr().err
    )
