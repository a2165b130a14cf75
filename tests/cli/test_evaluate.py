"""``fsdptoys evaluate``: loss, perplexity, bits per byte, and error messages."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fsdptoys.cli.evaluate import evaluate_command
from fsdptoys.config.schema import Config
from fsdptoys.data import BinConfig, DataConfig, HFConfig, PreparedConfig, SyntheticConfig, TextConfig
from fsdptoys.data.packing import Packing
from fsdptoys.errors import ConfigError
from fsdptoys.parallel import SingleConfig
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from scripts.ranks import run_ranks
from tests.checkpoint.folders import build, write
from tests.checkpoint.test_weights import save_run
from tests.cli.test_generate import BYTES, save_tokenizer, train_on
from tests.data import test_prepare as prepared
from tests.models.families import SMALL
from tests.oracle import import_transformers
from tests.parallel.runs import make_config, tiny_model


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert evaluate_command([*words, "--device", "cpu", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("case", ["llama2", "qwen3_moe", "gpt2"])
def test_loss_equals_transformers(case: str, batch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: transformers' own loss of each window, weighted by its tokens; the last is shorter."""
    transformers = import_transformers()
    write(tmp_path / "folder", build(SMALL[case]))
    ids_T = torch.randint(0, 96, (150,))
    (tmp_path / "ids").write_text(" ".join(map(str, ids_T.tolist())))
    oracle, total = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval(), 0.0
    for start in range(0, 149, 40):
        window_BT = ids_T[None, start : start + 41]
        with torch.no_grad():
            total += oracle(window_BT, labels=window_BT).loss.item() * (window_BT.shape[1] - 1)
    words = [str(tmp_path / "folder"), "--text", str(tmp_path / "ids"), "--tokenizer", "ids", "--context", "40"]
    found = output_of(capsys, *words, "--batch", str(batch))
    assert found["loss"] == pytest.approx(total / 149, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / 149), rel=1e-4)
    assert (found["predicted_tokens"], found["context"], found["bits_per_byte"]) == (149, 40, None)


def trained(config: Config) -> float:
    trainer = Trainer(config)
    Run(trainer).run()
    assert trainer.history[-1].eval_loss is not None
    return trainer.history[-1].eval_loss


@pytest.mark.parametrize("checkpoints", [False, True], ids=["final weights", "checkpoint"])
def test_loss_of_the_held_out_text_equals_the_held_out_loss_of_the_run(
    checkpoints: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the run's own evaluation after its last step, on the same bytes in the same windows."""
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
    found = output_of(capsys, str(tmp_path / "run"), "--text", str(tmp_path / "text"))
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["predicted_tokens"] == len(held_out) - 1 and found["context"] == config.train.seq_len
    assert found["bits_per_byte"] == pytest.approx(expected / math.log(2), rel=1e-6)


def kinds_of_data(folder: Path) -> dict[str, DataConfig]:
    """Every kind of data that supports a held-out part."""
    torch.manual_seed(0)
    choice = prepared.save_tokenizer(folder / "tokenizer", None)
    lines = prepared.write_lines(folder / "a.jsonl", prepared.documents(80))
    for name, tokenizer in (("words", choice), ("bytes", "bytes")):
        prepared.prepare_folder(prepared.request(folder / name, lines, tokenizer=tokenizer, eval_fraction=0.3))
    torch.randint(1, 67, (1500,), dtype=torch.int16).numpy().tofile(folder / "ids.bin")
    (folder / "text").write_bytes(bytes(torch.randint(32, 127, (2000,)).tolist()))
    return {
        "text": TextConfig(files=[str(folder / "text")], sample_tokens=0, eval_fraction=0.2),
        "bin": BinConfig(files=[str(folder / "ids.bin")], eval_fraction=0.2, document_end=7, mask_documents=True),
        "synthetic": SyntheticConfig(branching=4, ragged=True, eval_samples=21),
        "prepared": PreparedConfig(folder=str(folder / "bytes")),
        "packed": PreparedConfig(
            folder=str(folder / "words"), packing=Packing.best_fit, cache=str(folder / "cache"), mask_documents=True
        ),
        "hf": HFConfig(files=[str(lines)], tokenizer=choice, eval_fraction=0.3, cache=str(folder / "cache")),
    }


def train_each(configs: dict[str, Config]) -> dict[str, float]:
    return {name: trained(config) for name, config in configs.items()}


def test_default_data_is_the_held_out_part_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: each run's own evaluation after its last step, on all held-out samples or the first three."""
    pytest.importorskip("tokenizers")
    configs: dict[str, Config] = {}
    kinds = kinds_of_data(tmp_path)
    for name, data in kinds.items():
        for batches in (100, 1):
            settings = {"steps": 1, "grad_accum": 1, "batch_size": 3, "eval_every": 1, "eval_batches": batches}
            model = dataclasses.replace(tiny_model(), vocab_size=256, n_layers=1)
            config = make_config(SingleConfig(), 1, model=model, data=data, seed=5, **settings)
            config.data.prepare(config.train.seq_len, 256)
            config.metrics.run_dir = str(tmp_path / f"{name}-{batches}")
            final = batches == 100
            config.checkpoint = dataclasses.replace(config.checkpoint, final_weights=final, every=0 if final else 1)
            configs[f"{name}-{batches}"] = config
    (expected,) = run_ranks(1, train_each, configs)
    for name in kinds:
        whole = output_of(capsys, str(tmp_path / f"{name}-100"))
        assert whole["loss"] == pytest.approx(expected[f"{name}-100"], rel=1e-6), name
        few = output_of(capsys, str(tmp_path / f"{name}-1"), "--windows", "3", "--batch", "2")
        assert few["loss"] == pytest.approx(expected[f"{name}-1"], rel=1e-6), name
        assert few["predicted_tokens"] < whole["predicted_tokens"] and few["context"] == 24
        in_bytes = whole["loss"] / math.log(2) if name in ("text", "prepared") else None
        assert whole["bits_per_byte"] == pytest.approx(in_bytes), name
    for name in ("bin-100", "packed-100"):
        settings = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        settings["data"]["mask_documents"] = False
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(settings))
        assert output_of(capsys, str(tmp_path / name))["loss"] != pytest.approx(expected[name], rel=1e-6)
    held_out = (tmp_path / "text").read_bytes()[1600 : 1600 + 39 * 10 + 1]
    (tmp_path / "held out").write_bytes(held_out)
    run = str(tmp_path / "text-100")
    of_text = output_of(capsys, run, "--text", str(tmp_path / "held out"), "--context", "10")
    assert output_of(capsys, run, "--context", "10") == pytest.approx(of_text)


@pytest.mark.parametrize(
    ("data", "words", "sentence"),
    [
        (SyntheticConfig(eval_samples=0), "", "run held nothing out of data=synthetic; write --text FILE"),
        (
            TextConfig(files=["gone"]),
            "",
            "the held-out part of run cannot be opened in windows of 24 tokens (data.files=[gone] does not exist); put "
            "the data back, write this where the run was started, or write --text FILE",
        ),
        (
            TextConfig(files=["text"], eval_fraction=0.2),
            "--context 9",
            "the held-out part of run cannot be opened in windows of 9 tokens (train.seq_len=9 needs 10 tokens for one "
            "sequence, but the part held out by data.eval_fraction=0.2 has 8); put the data back, write this where the "
            "run was started, or write --text FILE",
        ),
        (
            BinConfig(files=["text"], eval_fraction=0.2, mask_documents=True),
            "",
            "the held-out part of run cannot be opened in windows of 24 tokens (data.mask_documents=true "
            "needs the id that ends a document, which data=bin does not know as set); put the data back, write this "
            "where the run was started, or write --text FILE",
        ),
    ],
    ids=["nothing", "gone", "short", "ends"],
)
def test_part_that_cannot_be_evaluated_is_reported(
    data: DataConfig, words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("0123456789" * 4)
    save_run(tmp_path / "run", BYTES)
    train_on(tmp_path / "run", data)
    with pytest.raises(ConfigError) as refused:
        evaluate_command(["run", *words.split()])
    assert str(refused.value) == sentence


def test_bits_per_byte_do_not_depend_on_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the loss by hand over the bytes after the first word."""
    folder, text = tmp_path / "folder", "two one one two"
    write(folder, build(BYTES))
    (folder / "checksums.json").unlink()
    save_tokenizer(folder)
    (tmp_path / "text").write_text(text)
    found = output_of(capsys, str(folder), "--text", str(tmp_path / "text"))
    logits_TV = build(BYTES)(torch.tensor([[1, 0, 0]]))[0]
    total = torch.nn.functional.cross_entropy(logits_TV, torch.tensor([0, 0, 1]), reduction="sum").item()
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / len(" one one two"), rel=1e-5)
    assert found["predicted_tokens"] == 3


def test_text_output_has_the_numbers_of_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the numbers of the JSON form; a loss of NaN gives status 1."""
    model = build(BYTES)
    write(tmp_path / "folder", model)
    (tmp_path / "text").write_bytes(b"\xffabc" * 300)
    words = [str(tmp_path / "folder"), "--text", str(tmp_path / "text"), "--tokenizer", "bytes"]
    found = output_of(capsys, *words)
    assert evaluate_command(words) == 0
    assert capsys.readouterr().out == (
        f"loss           {found['loss']:.6f} nats per token\nperplexity     {found['perplexity']:.4f}\n"
        f"tokens         1,199 predicted, in windows of 64\nbits per byte  {found['bits_per_byte']:.6f}\n"
    )
    with torch.no_grad():
        model.get_parameter("norm.weight").fill_(torch.nan)
    write(tmp_path / "broken", model)
    assert evaluate_command([str(tmp_path / "broken"), *words[1:], "--json"]) == 1
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
        ("folder --text text --windows 3", "--windows 3 limits a run's held-out data, and --text text is read "
         "to its end; leave one of them out"),
        ("folder --windows 0", "--windows 0 must be a whole number of at least 1; write --windows 1"),
        ("folder --tokenizer ids", "--tokenizer ids encodes a text, and a run's held-out data is token ids "
         "already; leave it out, or write --text FILE"),
        ("folder --text text --prompt a", "--prompt is not an option of fsdptoys evaluate; see fsdptoys evaluate "
         "--help"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_in_one_sentence(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message."""
    write(tmp_path / "folder", build(BYTES))
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    (tmp_path / "short").write_text("7")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        evaluate_command(words.split())
    assert str(refused.value) == sentence
