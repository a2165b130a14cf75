"""Blocks compiled one by one: their gradients, the activations saved under a budget, and reports of
compilations.

Compilations are counted, reported while training continues, and skipped where they do not help.
"""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from fsdptoys.config.schema import Config
from fsdptoys.data.byte_text import TextConfig
from fsdptoys.errors import ConfigError
from fsdptoys.memory.activation_checkpointing import (
    GradientCheckpointing,
    checkpoint_blocks,
)
from fsdptoys.memory.activation_offload import ActivationOffload
from fsdptoys.metrics import Console, MetricsConfig
from fsdptoys.metrics.compilation import (
    Compilations,
    CompilationWatch,
    compilation_line,
    recompilation_rows,
)
from fsdptoys.models import DecoderModel, LlamaConfig
from fsdptoys.models.generate import Draw, generate
from fsdptoys.models.lora import Samples, add_adapters
from fsdptoys.models.nf4 import is_packed, pack, quantize_linears, unquantized_name
from fsdptoys.parallel import SingleConfig
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.train import parallelize as prepare
from fsdptoys.train.compile import compile_blocks
from fsdptoys.train.run import train as run_in_directory
from fsdptoys.train.text_sample import sample_text
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import Base
from tests.harness.blocks import LLAMA, build, forward, gradients
from tests.harness.families import SMALL
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config

pytestmark = pytest.mark.usefixtures("unmeasured")

NONE, FULL, SELECTIVE = GradientCheckpointing
BACKEND = "aot_eager_decomp_partition"
"""Partitions graphs like inductor, without code generation."""


@pytest.fixture(autouse=True)
def new_compiler() -> None:
    """Forget earlier compilations."""
    torch._dynamo.reset()
    counters.clear()


def run(model: DecoderModel) -> tuple[dict[str, Tensor], int]:
    """Gradients of two micro-batches, and bytes of activations that one saves for its backward."""
    weights = {param.data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = (
                tensor.untyped_storage().nbytes()
            )
        return tensor

    forward(model, 1).backward()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(model, 2)
    loss.backward()
    return gradients(model), sum(saved.values())


def compiled(
    family: str,
    mode: GradientCheckpointing = NONE,
    offload: bool = False,
    **options: Any,
) -> DecoderModel:
    model = build(SMALL[family])
    host = ActivationOffload(torch.device("cpu"), min_bytes=0) if offload else None
    checkpoint_blocks(model.layers, mode, offload=host)
    compile_blocks(model.layers, backend=BACKEND, **options)
    return model


def assert_close(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To 1e-5 of each gradient's largest element."""
    assert grads.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (grads[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("family", "mode", "options"),
    [
        pytest.param("llama2", NONE, {}, marks=pytest.mark.extended),
        ("llama2", FULL, {}),
        ("llama2", FULL, {"offload": True}),
        ("llama2", FULL, {"inner_hooks": True}),
        ("llama2", SELECTIVE, {}),
        ("qwen3_moe", NONE, {}),
        pytest.param("qwen3_moe", FULL, {}, marks=pytest.mark.extended),
        pytest.param("qwen3_moe", FULL, {"offload": True}, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_compiled_blocks_have_the_gradients_of_eager_blocks(
    family: str, mode: GradientCheckpointing, options: dict[str, bool]
) -> None:
    """Oracle: the same model without checkpointing, in eager mode; graphs counted by Dynamo; bytes
    saved."""
    expected, plain_bytes = run(build(SMALL[family]))
    grads, saved_bytes = run(compiled(family, mode, **options))
    assert_close(grads, expected)
    assert counters["stats"]["unique_graphs"] >= 1
    assert saved_bytes < plain_bytes


def adapted(base: Base) -> DecoderModel:
    """Adapters with dropout, and values that depend only on parameter names."""
    model = build(SMALL["llama3 scaled tied"])
    samples = Samples(1)
    add_adapters(model, ["q_proj", "up_proj"], 4, 8.0, 0.2, samples)
    samples.numbers_B = torch.tensor([3, 4])
    for name, param in model.layers.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(
                param, 0.0, 0.1, generator=torch.Generator().manual_seed(len(name))
            )
    if base is Base.nf4:
        for mlp in [block.mlp for block in model.layers]:
            mlp.down_proj.__class__ = torch.nn.Linear  # of 112 columns
        weights = dict(model.layers.named_parameters())
        quantize_linears(model)
        model.init_buffers(torch.device("cpu"))
        for name, param in model.layers.named_parameters():
            if is_packed(name):
                pack(weights[unquantized_name(name)], param)
    return model


@pytest.mark.parametrize(
    "base", [Base.plain, pytest.param(Base.nf4, marks=pytest.mark.extended)]
)
@pytest.mark.parametrize("mode", [NONE, pytest.param(FULL, marks=pytest.mark.extended)])
def test_compiled_adapters_have_the_gradients_of_eager_ones(
    mode: GradientCheckpointing, base: Base
) -> None:
    """Oracle: the same model in eager mode; graphs counted by Dynamo.

    Layers that drop other elements share one; the first has its own, since its input needs no
    gradient.
    """
    expected, _ = run(adapted(base))
    model = adapted(base)
    checkpoint_blocks(model.layers, mode)
    compile_blocks(model.layers, backend=BACKEND)
    grads, _ = run(model)
    assert_close(grads, expected)
    assert len(grads) == 12 and not counters["graph_break"]
    # Torch 2.7 compiles checkpointed blocks once more, 2.11 does not.
    assert counters["stats"]["unique_graphs"] == 2 + (mode is FULL and TORCH < (2, 11))


@pytest.mark.parametrize(
    "family", ["llama2", pytest.param("qwen3_moe", marks=pytest.mark.extended)]
)
def test_lower_memory_budget_saves_fewer_bytes_with_equal_gradients(
    family: str,
) -> None:
    """Oracle: eager mode, with losses of routers that receive their gradients after the forward;
    bytes counted."""
    expected, _ = run(build(SMALL[family]))
    before = torch._functorch.config.activation_memory_budget
    saved = []
    for budget in (0.0, 0.5, 1.0):
        torch._dynamo.reset()
        grads, saved_bytes = run(compiled(family, budget=budget))
        assert_close(grads, expected)
        saved.append(saved_bytes)
    assert saved[0] < saved[1] < saved[2]
    assert torch._functorch.config.activation_memory_budget == before


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {}),
        ("llama2", {"offload": True}),
        ("llama2", {"inner_hooks": True}),
    ],
    ids=["experts", "offload", "inner hooks"],
)
def test_selective_checkpointing_refuses_unsupported_compiled_blocks(
    family: str, options: dict[str, Any]
) -> None:
    """Oracle: the message with the configuration key."""
    with pytest.raises(
        ConfigError, match=r"memory\.gradient_checkpointing=selective .*; set"
    ):
        compiled(family, SELECTIVE, **options)


def watched(*lengths: int) -> tuple[DecoderModel, CompilationWatch]:
    """Compiled blocks, and the watch over steps with sequences of these lengths."""
    model = build(LLAMA)
    compile_blocks(model.layers, backend="aot_eager")
    watch = CompilationWatch()
    for step, length in enumerate(lengths, start=1):
        tokens_BT = torch.zeros(2, length, dtype=torch.long)
        model(
            tokens_BT,
            tokens_BT,
            lambda hidden, weight, labels: (hidden @ weight.T).sum(),
        ).backward()
        watch.record_pass("training", step)
    return model, watch


def test_new_shape_is_reported_as_a_recompilation_with_its_reason() -> None:
    """Oracle: the lengths of the sequences."""
    _, watch = watched(8, 8, 16)
    result = watch.result()
    assert (result.compiled, result.graph_breaks) == (2, {})
    (again,) = result.recompilations
    assert (again.step, again.phase, again.at_limit) == (3, "training", False)
    assert again.reason.endswith("expected 8, actual 16")
    (sentence,) = watch.take_messages()
    assert (
        sentence.startswith("training of step 3 recompiled compute: ")
        and again.reason in sentence
    )
    assert watch.take_messages() == []
    assert compilation_line(result).startswith("compiled 2 functions in ")
    assert recompilation_rows(result)[0][:3] == ("3", "training", "`compute`")


def text_config(path: str, compiles: bool) -> Config:
    model = LlamaConfig(
        name="tiny",
        dim=32,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=48,
        vocab_size=256,
        max_seq_len=16,
    )
    config = make_config(
        SingleConfig(),
        1,
        model=model,
        deterministic=False,
        seq_len=16,
        compile=compiles,
    )
    config.data = TextConfig([path], sample_tokens=3)
    config.train.eval_every = 2
    config.train.eval_batches = 1
    return config


def train(
    configs: list[Config], backend: str
) -> list[tuple[list[float], list[Compilations]]]:
    """Losses of training and evaluation; the compilations for them, with a sample, and with one
    without a stance."""
    prepare.compile_blocks = functools.partial(compile_blocks, backend=backend)  # type: ignore[assignment]
    results = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        losses = [step.loss for step in trainer.history] + [
            step.eval_loss or 0.0 for step in trainer.history
        ]
        compilations = []
        if trainer.compilation is not None:
            compilations.append(trainer.compilation.result())
            for sample in (sample_text, draw):
                sample(trainer)
                trainer.compilation.record_pass("sample", config.train.steps)
                compilations.append(trainer.compilation.result())
        results.append((losses, compilations))
    return results


def draw(trainer: Trainer) -> None:
    """``sample``, without its compiler stance."""
    trainer.strategy.model.eval()
    generate(
        trainer.strategy.model,
        torch.zeros(5, dtype=torch.long),
        1,
        16,
        Draw(1.0, seed=0),
    )


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.extended)]
)
def test_blocks_compile_once_for_training_and_evaluation_never_for_samples(
    backend: str, tmp_path: Path
) -> None:
    """Oracle: the run in eager mode, losses to 1e-5; the same generation without the stance, which
    compiles."""
    (tmp_path / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog. " * 60
    )
    configs = [
        text_config(str(tmp_path / "text.txt"), compiles) for compiles in (False, True)
    ]
    (expected, none), (losses, (compilation, after_sample, without_stance)) = run_ranks(
        1, train, configs, backend
    )[0]
    assert none == []
    assert losses == pytest.approx(expected, rel=1e-5)
    assert compilation.compiled == 2
    assert [
        (record.step, record.phase, record.reason)
        for record in compilation.recompilations
    ] == [(2, "evaluation", "GLOBAL_STATE changed: grad_mode")]
    assert compilation.graph_breaks == {} and compilation.seconds > 0
    assert after_sample.compiled == 2 < without_stance.compiled


def record(config: Config) -> None:
    """Train in a run directory, with a recompilation limit of one."""
    compiling = functools.partial(compile_blocks, backend="aot_eager")
    with (
        mock.patch.object(prepare, "compile_blocks", compiling),
        torch._dynamo.config.patch(recompile_limit=1),
    ):
        run_in_directory(config)


def test_console_and_summary_report_compilations(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Oracle: PyTorch's limit, set so low that the evaluation runs in eager mode."""
    (tmp_path / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog. " * 60
    )
    config = text_config(str(tmp_path / "text.txt"), compiles=True)
    config.metrics = MetricsConfig(console=Console.plain, run_dir=str(tmp_path / "run"))
    run_ranks(1, record, config)
    message = capfd.readouterr().out
    summary = (tmp_path / "run" / "summary.md").read_text()
    assert (
        message.count(
            "evaluation of step 2 reached PyTorch's recompilation limit for a function"
        )
        == 1
    )
    line = next(
        line
        for line in message.splitlines()
        if line.startswith("compiled 1 function in ")
    )
    assert "0 graph breaks; reached the recompilation limit " in line
    assert f"| compiler, rank 0 | {line} |" in summary
    assert (
        "| 2 | evaluation | `a function` | `GLOBAL_STATE changed: grad_mode` (limit reached) |"
        in summary
    )
