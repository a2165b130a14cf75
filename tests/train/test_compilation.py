"""Compilations: counted, reported while training continues, and skipped where they do not help."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo

from fsdptoys.config.schema import Config
from fsdptoys.data import TextConfig
from fsdptoys.metrics import Console, MetricsConfig
from fsdptoys.metrics.compilation import Compilations, CompilationWatch, compilation_line, recompilation_rows
from fsdptoys.models import LlamaConfig
from fsdptoys.models.generate import Draw, generate
from fsdptoys.parallel import SingleConfig
from fsdptoys.train import build as prepare
from fsdptoys.train.compile import compile_blocks
from fsdptoys.train.run import train as run_in_directory
from fsdptoys.train.trainer import Trainer
from scripts.ranks import run_ranks
from tests.memory.blocks import LLAMA, build
from tests.parallel.runs import make_config

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(model: Any, length: int) -> None:
    tokens_BT = torch.zeros(2, length, dtype=torch.long)
    model(tokens_BT, tokens_BT, lambda hidden, weight, labels: (hidden @ weight.T).sum()).backward()


def test_new_shape_is_reported_as_a_recompilation_with_its_reason() -> None:
    """Oracle: the lengths of the sequences."""
    model = build(LLAMA)
    compile_blocks(model.layers, backend="aot_eager")
    watch = CompilationWatch()
    for step, length in enumerate((8, 8, 16), start=1):
        run(model, length)
        watch.record_pass("training", step)
        assert len(watch.result().recompilations) == (length == 16)
    result = watch.result()
    assert (result.compiled, result.graph_breaks) == (2, {})
    (again,) = result.recompilations
    assert (again.step, again.phase, again.at_limit) == (3, "training", False)
    assert again.reason.endswith("expected 8, actual 16")
    (sentence,) = watch.take_messages()
    assert sentence.startswith("training of step 3 recompiled forward: ") and again.reason in sentence
    assert watch.take_messages() == []
    assert compilation_line(result).startswith("compiled 2 functions in ")
    assert recompilation_rows(result)[0][:3] == ("3", "training", "`forward`")


def test_first_evaluation_recompiles_without_a_message() -> None:
    """Oracle: the changed gradient mode."""
    model = build(LLAMA)
    compile_blocks(model.layers, backend="aot_eager")
    watch = CompilationWatch()
    run(model, 8)
    watch.record_pass("training", 1)
    with torch.no_grad():
        model(torch.zeros(2, 8, dtype=torch.long))
    watch.record_pass("evaluation", 1)
    assert [(each.phase, each.reason) for each in watch.result().recompilations] == [
        ("evaluation", "GLOBAL_STATE changed: grad_mode")
    ]
    assert watch.take_messages() == []


def test_reached_recompilation_limit_is_reported() -> None:
    """Oracle: PyTorch's limit, set so low that a second shape is too many."""
    model = build(LLAMA)
    compile_blocks(model.layers, backend="aot_eager")
    watch = CompilationWatch()
    with torch._dynamo.config.patch(recompile_limit=1):
        for step, length in enumerate((8, 16), start=1):
            run(model, length)
            watch.record_pass("training", step)
    result = watch.result()
    assert result.compiled == 1 and [each.at_limit for each in result.recompilations] == [True] * len(
        result.recompilations
    )
    (sentence,) = watch.take_messages()
    assert sentence.startswith("training of step 2 reached PyTorch's recompilation limit for a function")
    assert "reached the recompilation limit" in compilation_line(result)


def text_config(path: str, compiles: bool) -> Config:
    model = LlamaConfig(
        name="tiny", dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=256, max_seq_len=16
    )
    config = make_config(SingleConfig(), 1, model=model, deterministic=False, seq_len=16, compile=compiles)
    config.data = TextConfig([path], sample_tokens=3)
    config.train.eval_every, config.train.eval_batches = 2, 1
    return config


def train(configs: list[Config]) -> list[tuple[list[float], list[Compilations]]]:
    """Losses of training and evaluation; the compilations for them, with a sample, and with one without a stance."""
    results = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        losses = [step.loss for step in trainer.history] + [step.eval_loss or 0.0 for step in trainer.history]
        found = []
        if trainer.compilation is not None:
            found.append(trainer.compilation.result())
            for once_more in (trainer.sample, functools.partial(draw, trainer)):
                once_more()
                trainer.compilation.record_pass("sample", config.train.steps)
                found.append(trainer.compilation.result())
        results.append((losses, found))
    return results


def draw(trainer: Trainer) -> None:
    """``sample``, without its compiler stance."""
    trainer.strategy.model.eval()
    generate(trainer.strategy.model, torch.zeros(5, dtype=torch.long), 1, 16, Draw(1.0, seed=0))


def test_blocks_compile_once_for_training_and_evaluation_never_for_samples(
    tmp_path: Path,
) -> None:
    """Oracle: the run in eager mode, losses to 1e-5; the same generation without the stance, which compiles."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    configs = [text_config(str(tmp_path / "text.txt"), compiles) for compiles in (False, True)]
    (expected, none), (losses, (compilation, after_sample, without_stance)) = run_ranks(1, train, configs)[0]
    assert none == []
    assert losses == pytest.approx(expected, rel=1e-5)
    assert compilation.compiled == 2
    assert [(each.step, each.phase, each.reason) for each in compilation.recompilations] == [
        (2, "evaluation", "GLOBAL_STATE changed: grad_mode")
    ]
    assert compilation.graph_breaks == {} and compilation.seconds > 0
    assert after_sample.compiled == 2 < without_stance.compiled


def record(config: Config) -> None:
    """Train in a run directory, with a recompilation limit of one."""
    compiling = functools.partial(compile_blocks, backend="aot_eager")
    with mock.patch.object(prepare, "compile_blocks", compiling), torch._dynamo.config.patch(recompile_limit=1):
        run_in_directory(config)


def test_console_and_summary_report_compilations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: PyTorch's limit, set so low that the evaluation runs in eager mode."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    config = text_config(str(tmp_path / "text.txt"), compiles=True)
    config.metrics = MetricsConfig(console=Console.plain, run_dir=str(tmp_path / "run"))
    run_ranks(1, record, config)
    message, summary = capfd.readouterr().out, (tmp_path / "run" / "summary.md").read_text()
    assert message.count("evaluation of step 2 reached PyTorch's recompilation limit for a function") == 1
    line = next(line for line in message.splitlines() if line.startswith("compiled 1 function in "))
    assert "0 graph breaks; reached the recompilation limit " in line
    assert f"| compiler, rank 0 | {line} |" in summary
    assert "| 2 | evaluation | `a function` | `GLOBAL_STATE changed: grad_mode` (limit reached) |" in summary
