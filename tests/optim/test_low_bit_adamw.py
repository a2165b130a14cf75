"""States of 8 and 4 bits against torchao's own optimizers, and layouts against one process."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from fsdptoys.memory import MemoryConfig
from fsdptoys.optim import AdamWConfig, Implementation, OptimStateDType, WeightDecayOn, build_optimizer
from fsdptoys.parallel import DDPConfig, FSDP2Config, ParallelConfig, ToyDDPConfig, ToyFSDPConfig
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.utils.torchao import torchao_fault
from tests.parallel.groups import Pairs, Row, levels, trained_rows
from tests.parallel.runs import WITH_BLOCKS

fault = torchao_fault()
pytestmark = pytest.mark.skipif(fault is not None, reason=f"torchao {fault}")

LOW_BITS = [OptimStateDType.int8, OptimStateDType.float8, OptimStateDType.int4]
SHAPES = {"layers.0": (20, 256), "layers.1": (512, 32), "layers.2": (16, 8), "layers.3": (4100,)}
"""Rows of full blocks, of smaller ones, of none, and a vector: the first two have low-bit states."""


def make_params(names: Iterable[str] = SHAPES) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(SHAPES[name], generator=generator)) for name in names}


def take_steps(optimizers: list[torch.optim.Optimizer], params: dict[str, nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


def ours(
    kept: OptimStateDType, implementation: Implementation, names: Iterable[str] = SHAPES
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Parameters and optimizer after a few steps."""
    params = make_params(names)
    config = AdamWConfig(lr=1e-2, state_dtype=kept, implementation=implementation)
    optimizer = build_optimizer(config, params.items(), {name for name in params if name != "layers.3"})
    take_steps([optimizer], params)
    return params, optimizer


@pytest.mark.parametrize("kept", LOW_BITS, ids=lambda each: each.value)
def test_matrices_match_torchao_and_other_parameters_match_pytorch(kept: OptimStateDType) -> None:
    """Oracle: torchao's optimizers, uncompiled, with the same blocks, and torch.optim.AdamW: bitwise."""
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

    mine, optimizer = ours(kept, Implementation.for_loop)
    kind = {OptimStateDType.int8: AdamW8bit, OptimStateDType.float8: AdamWFp8, OptimStateDType.int4: AdamW4bit}[kept]
    largest = 128 if kept is OptimStateDType.int4 else 256
    theirs = make_params()
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizers = {
        "layers.0": kind([theirs["layers.0"]], weight_decay=0.1, block_size=largest, **options),
        "layers.1": kind([theirs["layers.1"]], weight_decay=0.1, block_size=32, **options),
        "layers.2": torch.optim.AdamW([theirs["layers.2"]], weight_decay=0.1, foreach=False, **options),
        "layers.3": torch.optim.AdamW([theirs["layers.3"]], weight_decay=0.0, foreach=False, **options),
    }
    with torch.compiler.set_stance("force_eager"):
        take_steps(list(optimizers.values()), theirs)
    for name, param in mine.items():
        assert torch.equal(param, theirs[name]), name
        state, expected = optimizer.state[param], optimizers[name].state[theirs[name]]
        assert state["step"] == expected["step"] == 4
        for mean in ("exp_avg", "exp_avg_sq"):
            if name in ("layers.0", "layers.1"):
                codes, scales = state[f"{mean}_codes"], state[f"{mean}_scales"]
                assert torch.equal(codes.view(-1), expected[mean].codes.view(torch.uint8).view(-1))
                assert torch.equal(scales.view(-1), expected[mean].scale)
            else:
                assert torch.equal(state[mean], expected[mean])


def test_compiled_step_equals_the_eager_step_up_to_rounding() -> None:
    """Oracle: the uncompiled one; a step is about the learning rate, 1e-2."""
    names = ("layers.0", "layers.3")
    implementations = (Implementation.fused, Implementation.for_loop)
    (compiled, _), (plain, _) = (ours(OptimStateDType.float8, each, names) for each in implementations)
    start = make_params(names)
    for name, param in compiled.items():
        assert (param - start[name]).abs().max() > 1e-2
        # A moment near the middle between two codes may round to either: a few elements.
        far = (param - plain[name]).abs() > 1e-5
        assert far.float().mean() < 1e-3


@pytest.mark.parametrize("kept", LOW_BITS, ids=lambda each: each.value)
def test_state_bytes_follow_the_formula_and_survive_loading(kept: OptimStateDType) -> None:
    """Oracle: bytes of the tensors; the states before."""
    params, optimizer = ours(kept, Implementation.for_loop)
    config = AdamWConfig(state_dtype=kept)
    before = {param: dict(optimizer.state[param]) for param in params.values()}
    optimizer.load_state_dict(optimizer.state_dict())
    for name, param in params.items():
        states = {key: state for key, state in optimizer.state[param].items() if key != "step"}
        assert tuple(state.nbytes for state in states.values()) == config.state_bytes(param.shape, param.numel(), False)
        few_bits = name in ("layers.0", "layers.1")
        assert (sum(state.nbytes for state in states.values()) < 8 * param.numel() / 3) == few_bits
        for key, state in states.items():
            assert state.dtype == before[param][key].dtype and torch.equal(state, before[param][key])


def row(parallel: ParallelConfig, kind: OptimStateDType, model: str = "llama", ranks: int = 2, **layout: Any) -> Row:
    optim = AdamWConfig(lr=1e-2, state_dtype=kind, weight_decay_on=WeightDecayOn.all)
    return Row(parallel, ranks, layout, {"model": WITH_BLOCKS[model], "optim": optim, "steps": 3})


INT8, FLOAT8, INT4 = LOW_BITS
ROWS = {
    "ddp": row(DDPConfig(), INT8),
    "fsdp2": row(FSDP2Config(), INT8),
    "fsdp2 cpu offload": row(FSDP2Config(), INT8, memory=MemoryConfig(cpu_offload=True)),
    "fsdp2 int4": row(FSDP2Config(), INT4),
    "fsdp2 float8": row(FSDP2Config(), FLOAT8),
    "fsdp2 experts": row(FSDP2Config(), INT4, "qwen3_moe"),
    "toy_fsdp": row(ToyFSDPConfig(), INT4),
    "toy_ddp": row(ToyDDPConfig(), INT8),
    "fsdp2 on 4": row(FSDP2Config(), INT8, ranks=4),
}
if TORCH >= (2, 8):
    ROWS["hsdp2"] = row(FSDP2Config(), INT8, ranks=4, fsdp_size=2)
trained = trained_rows(ROWS)


@pytest.mark.parametrize("row", levels(ROWS, {"ddp", "fsdp2", "fsdp2 float8", "fsdp2 experts", "toy_fsdp"}))
def test_low_bit_states_match_a_single_process_bitwise(row: str, trained: Pairs) -> None:
    """Oracle: one process that runs the same micro-batches in turn; deterministic mode, on real gloo ranks."""
    found, expected = trained[row]
    assert found == expected
