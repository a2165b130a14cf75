"""``fsdptoys evaluate``: loss, perplexity and bits a byte, and how it refuses."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.config import Config
from fsdptoys.data import TextConfig
from fsdptoys.errors import ConfigError
from fsdptoys.evaluating import run_evaluate
from fsdptoys.parallel import SingleConfig
from fsdptoys.run import Run
from fsdptoys.trainer import Trainer
from scripts.ranks import run_ranks
from tests.checkpoint.folders import build, write
from tests.models.families import SMALL
from tests.parallel.runs import make_config
from tests.test_generating import BYTES, save_tokenizer


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run_evaluate([*words, "--device", "cpu", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", ["llama2", "qwen3_moe", "gpt2"])
def test_the_loss_is_that_of_transformers(
    case: str, batch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: transformers' own loss of each window, weighed by its tokens; the last is shorter."""
    transformers = pytest.importorskip("transformers")
    write(tmp_path / "folder", build(SMALL[case]))
    ids_T = torch.randint(0, 96, (150,))
    (tmp_path / "ids").write_text(" ".join(map(str, ids_T.tolist())))
    oracle, total = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval(), 0.0
    for start in range(0, 149, 40):
        window_BT = ids_T[None, start : start + 41]
        with torch.no_grad():
            total += oracle(window_BT, labels=window_BT).loss.item() * (window_BT.shape[1] - 1)
    words = [str(tmp_path / "folder"), "--text", str(tmp_path / "ids"), "--tokenizer", "ids", "--context", "40"]
    found = told(capsys, *words, "--batch", str(batch))
    assert found["loss"] == pytest.approx(total / 149, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / 149), rel=1e-4)
    assert (found["predicted_tokens"], found["context"], found["bits_per_byte"]) == (149, 40, None)


def trained(config: Config) -> float:
    trainer = Trainer(config)
    Run(trainer).run()
    assert trainer.history[-1].eval_loss is not None
    return trainer.history[-1].eval_loss


@pytest.mark.parametrize("checkpoints", [False, True], ids=["final weights", "checkpoint"])
def test_the_loss_of_a_runs_held_out_text_is_its_held_out_loss(
    checkpoints: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: what the run itself told after its last step, of the same bytes in the same windows."""
    content = bytes(torch.randint(32, 127, (2000,)).tolist())
    (tmp_path / "corpus").write_bytes(content)
    config = make_config(SingleConfig(), 1, steps=2, grad_accum=1, eval_every=2, eval_batches=100)
    config.model.vocab_size = 256
    config.data = TextConfig(files=[str(tmp_path / "corpus")], sample_tokens=0, eval_fraction=0.1)
    config.metrics.run_dir = str(tmp_path / "run")
    config.checkpoint = dataclasses.replace(
        config.checkpoint, final_weights=not checkpoints, every=2 if checkpoints else 0
    )
    config.validate(1, "cpu")
    (expected,) = run_ranks(1, trained, config)
    held_out = content[1800 : 1800 + 199 // config.train.seq_len * config.train.seq_len + 1]
    (tmp_path / "text").write_bytes(held_out)
    found = told(capsys, str(tmp_path / "run"), "--text", str(tmp_path / "text"))
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["predicted_tokens"] == len(held_out) - 1 and found["context"] == config.train.seq_len
    assert found["bits_per_byte"] == pytest.approx(expected / math.log(2), rel=1e-6)


def test_bits_a_byte_do_not_count_by_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the loss by hand over the bytes after the first word."""
    folder, text = tmp_path / "folder", "two one one two"
    write(folder, build(BYTES))
    (folder / "checksums.json").unlink()
    save_tokenizer(folder)
    (tmp_path / "text").write_text(text)
    found = told(capsys, str(folder), "--text", str(tmp_path / "text"))
    logits_TV = build(BYTES)(torch.tensor([[1, 0, 0]]))[0]
    total = torch.nn.functional.cross_entropy(logits_TV, torch.tensor([0, 0, 1]), reduction="sum").item()
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / len(" one one two"), rel=1e-5)
    assert found["predicted_tokens"] == 3


def test_it_is_told_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the numbers of the other form; a loss that is no number is told, with status 1."""
    model = build(BYTES)
    write(tmp_path / "folder", model)
    (tmp_path / "text").write_bytes(b"\xffabc" * 300)
    words = [str(tmp_path / "folder"), "--text", str(tmp_path / "text"), "--tokenizer", "bytes"]
    found = told(capsys, *words)
    assert run_evaluate(words) == 0
    assert capsys.readouterr().out == (
        f"loss        {found['loss']:.6f} nats a token\nperplexity  {found['perplexity']:.4f}\n"
        f"tokens      1,199 predicted, in windows of 64\nbits a byte {found['bits_per_byte']:.6f}\n"
    )
    with torch.no_grad():
        model.get_parameter("norm.weight").fill_(torch.nan)
    write(tmp_path / "broken", model)
    assert run_evaluate([str(tmp_path / "broken"), *words[1:], "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["loss"] is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "fsdptoys evaluate needs one run or folder, and none was given; write fsdptoys evaluate runs/NAME --text "
         "FILE"),
        ("folder", "there is no text to predict; write fsdptoys evaluate folder --text FILE"),
        ("folder --text gone", "--text gone cannot be read (No such file or directory); name a file that can"),
        ("folder --text text --batch 0", "--batch 0 must be a whole number of at least 1; write --batch 1"),
        ("folder --text short --tokenizer ids", "short has 1 tokens, of which none can be predicted; give a longer "
         "text"),
        ("folder --text text --tokenizer ids", "text holds no text in UTF-8 (byte 0); write it in UTF-8"),
        ("folder --text text --prompt a", "--prompt is not an option of fsdptoys evaluate; see fsdptoys evaluate "
         "--help"),
    ],
)  # fmt: skip
def test_mistakes_get_one_sentence(words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the sentence."""
    write(tmp_path / "folder", build(BYTES))
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    (tmp_path / "short").write_text("7")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        run_evaluate(words.split())
    assert str(refused.value) == sentence
