"""Float8 matmuls, emulated: strategies against one process, communicated and saved bytes, and
refused configurations.
"""

import copy
import functools
import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.launch.launch import resolve_run
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import LlamaConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
    ToyZero3Config,
    host_copy,
)
from fsdptoys.parallel.float8 import Float8, check_float8_here, convert_to_float8
from fsdptoys.parallel.precision import DType
from fsdptoys.train import parallelize as prepare
from fsdptoys.train.compile import compile_blocks
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.torchao import torchao_fault
from tests.harness.outcomes import train_all
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Pairs, Row, levels, trained_rows
from tests.harness.tiny import TINY, make_config, with_sizes

fault = torchao_fault()
pytestmark = [
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.skipif(fault is not None, reason=f"torchao {fault}"),
]

MODEL = LlamaConfig(
    name="tiny",
    dim=32,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    ffn_dim=48,
    vocab_size=67,
    max_seq_len=64,
)


def config_of(
    parallel: ParallelConfig,
    world_size: int,
    kind: Float8 = Float8.tensorwise,
    **settings: Any,
) -> Config:
    return make_config(
        parallel,
        world_size,
        **{"model": copy.copy(MODEL), "float8": kind, "steps": 3, **settings},
    )


FULL = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
TENSORWISE = Float8.tensorwise
ROWWISE = Float8.rowwise
SHORT = {
    "ddp rowwise",
    "fsdp2 checkpointing tensorwise",
    "fsdp2 gather",
    "toy_zero3 tensorwise",
}
ROWS: dict[str, Row] = {}
for kind in (TENSORWISE, ROWWISE):
    common = {"model": MODEL, "float8": kind, "steps": 3}
    ROWS |= {
        f"ddp {kind.value}": Row(DDPConfig(), 2, {}, common),
        f"fsdp2 checkpointing {kind.value}": Row(
            FSDP2Config(), 2, {"memory": FULL}, common
        ),
        f"toy_zero3 {kind.value}": Row(ToyZero3Config(), 2, {}, common),
    }
for label, memory in {
    "fsdp2 gather": FULL,
    "fsdp2 gather, offload": MemoryConfig(optimizer_offload=True),
}.items():
    layout = {"float8_all_gather": True, "memory": memory}
    ROWS[label] = Row(
        FSDP2Config(), 2, layout, {"model": MODEL, "float8": TENSORWISE, "steps": 3}
    )
trained = trained_rows(ROWS)


@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_float8_matches_a_single_process_bitwise(row: str, trained: Pairs) -> None:
    """Oracle: one process over the same micro-batches in deterministic mode; scales are of the full
    weight."""
    result, expected = trained[row]
    assert result == expected


@pytest.mark.parametrize(
    "kind", [TENSORWISE, pytest.param(ROWWISE, marks=pytest.mark.extended)]
)
def test_operands_are_rounded(kind: Float8) -> None:
    """Oracle: losses without float8, which differ by less than 5%."""
    configs = [config_of(SingleConfig(), 1, float8) for float8 in (kind, Float8.none)]
    rounded, plain = run_ranks(1, train_all, configs)[0]
    assert rounded.losses != plain.losses
    assert rounded.losses == pytest.approx(plain.losses, rel=0.05)


def gathered(configs: list[Config]) -> list[int]:
    """Bytes that this rank received in all-gathers of a step, for each configuration."""
    name = (
        "all_gather_single"
        if hasattr(dist, "all_gather_single")
        else "all_gather_into_tensor"
    )
    inner = getattr(dist, name)
    totals = []
    for config in configs:
        sizes = []

        def call(
            output: Tensor, *args: Any, sizes: list[int] = sizes, **options: Any
        ) -> Any:
            sizes.append(output.numel() * output.itemsize)
            return inner(output, *args, **options)

        with mock.patch.object(dist, name, call):
            Trainer(config).train()
        totals.append(sum(sizes))
    return totals


def test_float8_all_gather_communicates_one_byte_per_element() -> None:
    """Oracle: elements of the blocks' matrices, which two micro-batches gather for forward and
    backward."""
    options = {"deterministic": False, "steps": 1}
    configs = [
        config_of(
            FSDP2Config(param_dtype=dtype), 2, float8_all_gather=all_gather, **options
        )
        for dtype in (DType.float32, DType.bfloat16)
        for all_gather in (False, True)
    ]
    wide, wide_float8, half, half_float8 = run_ranks(2, gathered, configs)[0]
    with torch.device("meta"):
        blocks = MODEL.build().layers
    elements = (
        2 * 2 * sum(param.numel() for param in blocks.parameters() if param.ndim == 2)
    )
    assert (wide - wide_float8, half - half_float8) == (
        elements * (4 - 1),
        elements * (2 - 1),
    )


def train_in_sequence(configs: list[Config]) -> list[list[float]]:
    """Losses of successive runs, each resumed from the end of the previous one."""
    losses: list[list[float]] = []
    facts: dict[str, Any] = {}
    saved: dict[str, Tensor] = {}

    def load(tensors: dict[str, Tensor]) -> None:
        assert tensors.keys() == saved.keys()
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])

    for config in configs:
        trainer = Trainer(config)
        if facts:
            trainer.load_state_dict(facts, load)
        trainer.train()
        tensors = trainer.strategy.state_tensors(trainer.optimizer)
        assert {
            type(getattr(tensor, "_local_tensor", tensor))
            for tensor in tensors.values()
        } == {Tensor}
        saved = host_copy(tensors)
        facts = trainer.state_dict()
        losses.append([step.loss for step in trainer.history])
    return losses


@pytest.mark.extended
def test_run_resumes_with_and_without_float8_from_plain_checkpoints() -> None:
    """Oracle: one process with the same schedule; checkpoints are plain tensors for any gathered
    dtype."""
    chain = [
        (TENSORWISE, True),
        (Float8.none, False),
        (TENSORWISE, True),
        (TENSORWISE, False),
    ]
    one, two = (
        [
            config_of(
                parallel,
                ranks,
                kind,
                float8_all_gather=all_gather and ranks == 2,
                steps=2 * number,
            )
            for number, (kind, all_gather) in enumerate(chain, start=1)
        ]
        for ranks, parallel in (
            (1, SingleConfig(simulated_ranks=2)),
            (2, FSDP2Config()),
        )
    )
    assert (
        run_ranks(2, train_in_sequence, two)[0]
        == run_ranks(1, train_in_sequence, one)[0]
    )


@pytest.mark.extended
def test_optimizer_in_backward_gathers_float8_with_current_scales() -> None:
    """Oracle: the ordinary optimizer step, through a checkpoint too, after which scales are known
    before the first gather.
    """
    options: dict[str, Any] = {
        "float8_all_gather": True,
        "grad_accum": 1,
        "max_grad_norm": None,
        "skip_nonfinite": False,
    }
    ordinary, in_backward = (
        [
            config_of(
                FSDP2Config(),
                2,
                memory=MemoryConfig(optimizer_in_backward=early),
                steps=steps,
                **options,
            )
            for steps in (2, 5)
        ]
        for early in (False, True)
    )
    assert (
        run_ranks(2, train_in_sequence, in_backward)[0]
        == run_ranks(2, train_in_sequence, ordinary)[0]
    )


def train_on_graphs(configs: list[Config]) -> Any:
    """Train without generating machine code; return the number of graphs too."""
    compiling = functools.partial(compile_blocks, backend="aot_eager_decomp_partition")
    with mock.patch.object(prepare, "compile_blocks", compiling):
        # of the process that this one was forked from
        before = counters["stats"]["unique_graphs"]
        return train_all(configs), counters["stats"]["unique_graphs"] - before


@pytest.mark.extended
def test_compiled_blocks_support_float8() -> None:
    """Oracle: the same blocks in eager mode, losses to 1e-5; one graph for all equal blocks,
    gathered operands included.
    """
    options = {"deterministic": False, "steps": 2, "float8_all_gather": True}
    configs = [
        config_of(FSDP2Config(), 2, compile=compiles, **options)
        for compiles in (False, True)
    ]
    (expected, result), graphs = run_ranks(2, train_on_graphs, configs)[0]
    assert result.losses == pytest.approx(expected.losses, rel=1e-5)
    assert graphs == 1


def test_only_the_blocks_linear_layers_divisible_by_16_are_converted() -> None:
    """Oracle: their names: no router, expert, head or embedding."""
    with torch.device("meta"):
        model = with_sizes(
            TINY["qwen3_moe"], dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16
        ).build()
        odd = TINY["qwen3"].build()
    assert convert_to_float8(model, Float8.tensorwise, False, "cpu") == 4
    converted = {
        name
        for name, module in model.named_modules()
        if type(module).__name__ == "Float8Linear"
    }
    assert converted == {f"layers.0.attn.{name}_proj" for name in "qkvo"}
    with pytest.raises(
        ConfigError,
        match=r"train\.float8=rowwise finds no linear layer .*; set train\.float8=none",
    ):
        convert_to_float8(odd, Float8.rowwise, False, "cpu")


def test_devices_and_environments_without_float8_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the expected message, with the device found; a plan skips this check, since it
    predicts other devices."""
    planned = config_of(FSDP2Config(param_dtype=DType.bfloat16), 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(
        ConfigError,
        match=r"8\.9 or more, and this one has 8\.0; set train\.float8=none",
    ):
        check_float8_here(Float8.tensorwise, "cuda")
    planned.validate(2, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_float8_here(Float8.tensorwise, "cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for device_type in ("cuda", "cpu"):
        with pytest.raises(
            ConfigError, match="needs torchao, which is not installed; run pip install"
        ):
            check_float8_here(Float8.tensorwise, device_type)
        check_float8_here(Float8.none, device_type)
    with pytest.raises(
        ConfigError, match="needs torchao, which is not installed; run pip install"
    ):
        resolve_run(["train.float8=tensorwise", "launch.device=cpu"], {})
    planned.validate(2, "cuda")
