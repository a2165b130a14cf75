"""``fsdptoys evaluate``: loss, perplexity, bits per byte, and error messages."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.cli.evaluate import evaluate_command
from fsdptoys.config.schema import Config
from fsdptoys.data import DataConfig
from fsdptoys.data.byte_text import TextConfig
from fsdptoys.data.packing import Packing
from fsdptoys.data.prepare import prepare_folder
from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.parallel import SingleConfig
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from tests.harness import prepared_data as prepared
from tests.harness.byte_model import BYTES, save_tokenizer
from tests.harness.families import SMALL
from tests.harness.folders import build, write
from tests.harness.levels import by_level
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config, tiny_model
from tests.harness.transformers_oracle import import_transformers


def output_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert evaluate_command([*argv, "--device", "cpu", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.oracle
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "case", by_level(("qwen3_moe", "llama2", "gpt2"), ["qwen3_moe"])
)
def test_loss_equals_transformers(
    case: str, batch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: transformers' own loss of each window, weighted by its tokens; the last is
    shorter."""
    transformers = import_transformers()
    write(tmp_path / "folder", build(SMALL[case]))
    ids_T = torch.randint(0, 96, (150,))
    (tmp_path / "ids").write_text(" ".join(map(str, ids_T.tolist())))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "folder"
    ).eval()
    total = 0.0
    for start in range(0, 149, 40):
        window_BT = ids_T[None, start : start + 41]
        with torch.no_grad():
            total += oracle(window_BT, labels=window_BT).loss.item() * (
                window_BT.shape[1] - 1
            )
    argv = [str(tmp_path / "folder"), "--text", str(tmp_path / "ids")]
    argv += f"--tokenizer ids --context 40 --batch {batch}".split()
    result = output_of(capsys, *argv)
    assert result["loss"] == pytest.approx(total / 149, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(total / 149), rel=1e-4)
    assert (result["predicted_tokens"], result["context"], result["bits_per_byte"]) == (
        149,
        40,
        None,
    )


def data_of(kind: str, folder: Path) -> DataConfig:
    """Write data of a kind that supports a held-out part."""
    torch.manual_seed(0)
    if kind == "text":
        (folder / "text").write_bytes(bytes(torch.randint(32, 127, (2000,)).tolist()))
        return TextConfig(
            files=[str(folder / "text")], sample_tokens=0, eval_fraction=0.2
        )
    if kind == "synthetic":
        return SyntheticConfig(branching=4, ragged=True, eval_samples=21)
    pytest.importorskip("tokenizers")
    lines = prepared.write_lines(folder / "a.jsonl", prepared.documents(80))
    tokenizer = prepared.save_tokenizer(folder / "tokenizer", None)
    prepare_folder(
        prepared.request(folder / "data", lines, tokenizer=tokenizer, eval_fraction=0.3)
    )
    return PreparedConfig(
        folder=str(folder / "data"),
        packing=Packing.best_fit,
        cache=str(folder / "cache"),
        mask_documents=True,
    )


def train_each(configs: dict[str, Config]) -> dict[str, float | None]:
    """Loss of each run's own evaluation after its last step."""
    losses = {}
    for name, config in configs.items():
        trainer = Trainer(config)
        Run(trainer).run()
        losses[name] = trainer.history[-1].eval_loss
    return losses


Runs = tuple[str, Path, dict[str, float | None]]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    """Kind of data, folder and losses: ``final`` evaluates everything, ``saved`` one batch, and
    saves a checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    data = data_of(request.param, folder)
    configs: dict[str, Config] = {}
    for name, batches in (("final", 100), ("saved", 1)):
        settings = {
            "steps": 1,
            "grad_accum": 1,
            "batch_size": 3,
            "eval_every": 1,
            "eval_batches": batches,
        }
        model = dataclasses.replace(tiny_model(), vocab_size=256, n_layers=1)
        config = make_config(
            SingleConfig(), 1, model=model, data=data, seed=5, **settings
        )
        config.data.prepare(config.train.seq_len, 256)
        config.metrics.run_dir = str(folder / name)
        is_final = name == "final"
        config.checkpoint = dataclasses.replace(
            config.checkpoint, final_weights=is_final, every=int(not is_final)
        )
        configs[name] = config
    (losses,) = run_ranks(1, train_each, configs)
    return request.param, folder, losses


@pytest.mark.parametrize("runs", ["text", "synthetic", "packed"], indirect=True)
def test_default_data_is_the_held_out_part_of_the_run(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the run's own evaluation of all held-out samples, and of the first three; only data
    of bytes has bits per byte."""
    kind, folder, losses = runs
    result = output_of(capsys, str(folder / "final"))
    assert result["loss"] == pytest.approx(losses["final"], rel=1e-6)
    in_bytes = result["loss"] / math.log(2) if kind == "text" else None
    assert result["bits_per_byte"] == pytest.approx(in_bytes)
    result = output_of(capsys, str(folder / "saved"), "--windows", "3", "--batch", "2")
    assert result["loss"] == pytest.approx(losses["saved"], rel=1e-6)
    assert result["predicted_tokens"] <= 3 * 24 and result["context"] == 24


def test_bits_per_byte_do_not_depend_on_the_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the loss by hand over the bytes after the first word."""
    folder = tmp_path / "folder"
    text = "two one one two"
    write(folder, build(BYTES))
    (folder / "checksums.json").unlink()
    save_tokenizer(folder)
    (tmp_path / "text").write_text(text)
    result = output_of(capsys, str(folder), "--text", str(tmp_path / "text"))
    logits_TV = build(BYTES)(torch.tensor([[1, 0, 0]]))[0]
    total = torch.nn.functional.cross_entropy(
        logits_TV, torch.tensor([0, 0, 1]), reduction="sum"
    ).item()
    assert result["bits_per_byte"] == pytest.approx(
        total / math.log(2) / len(" one one two"), rel=1e-5
    )
    assert result["predicted_tokens"] == 3


def test_text_output_has_the_numbers_of_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the numbers of the JSON form; a loss that overflows gives status 1."""
    model = build(BYTES)
    write(tmp_path / "folder", model)
    (tmp_path / "text").write_bytes(b"\xffabc" * 300)
    argv = [
        str(tmp_path / "folder"),
        "--text",
        str(tmp_path / "text"),
        "--tokenizer",
        "bytes",
    ]
    result = output_of(capsys, *argv)
    assert evaluate_command(argv) == 0
    assert capsys.readouterr().out == (
        f"loss           {result['loss']:.6f} nats per token\nperplexity     "
        f"{result['perplexity']:.4f}\ntokens         1,199 predicted, in windows of 64\nbits per "
        f"byte  {result['bits_per_byte']:.6f}\n"
    )
    with torch.no_grad():
        model.get_parameter("norm.weight").fill_(3e38)
    write(tmp_path / "broken", model)
    assert evaluate_command([str(tmp_path / "broken"), *argv[1:], "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["loss"] is None
