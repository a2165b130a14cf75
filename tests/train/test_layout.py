"""The layout printed at the start of a run: its numbers are those of the tensors that a step then
has."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import load_hardware
from fsdptoys.memory import MemoryConfig
from fsdptoys.metrics.layout import Layout, RankBytes, Unit, layout_rows
from fsdptoys.metrics.prediction import Category
from fsdptoys.models import LlamaConfig
from fsdptoys.optim import MuonConfig, SGDConfig
from fsdptoys.parallel import (
    STRATEGIES,
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
)
from fsdptoys.parallel.fsdp import Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.train.layout import measure_layout
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import Base, LoRAConfig
from fsdptoys.utils.storages import storage_bytes
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config

EVEN = LlamaConfig(
    name="even",
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=4,
    ffn_dim=128,
    vocab_size=256,
    max_seq_len=64,
)
NF4 = LoRAConfig(rank=4, base=Base.nf4)
KINDS = ("gradients", "optimizer states", "parameters")


def config_of(parallel: ParallelConfig, ranks: int = 2, **settings: object) -> Config:
    return make_config(parallel, ranks, steps=1, grad_accum=1, seq_len=8, **settings)  # type: ignore[arg-type]


def measured(config: Config) -> tuple[Layout, list[int]]:
    """The layout, and the bytes of ``KINDS`` in the first step, the largest over the ranks."""
    trainer = Trainer(config)
    layout = measure_layout(trainer)
    params = [param for _, param in trainer.strategy.held_parameters()]
    gradients: list[int] = []

    def read(*_: object) -> None:
        gradients.append(
            storage_bytes(param.grad for param in params if param.grad is not None)
        )

    trainer.optimizer.register_step_pre_hook(read)
    trainer.train()
    if config.memory.optimizer_in_backward:
        read()
    values = [
        value for state in trainer.optimizer.state.values() for value in state.values()
    ]
    states = storage_bytes(
        value for value in values if isinstance(value, Tensor) and value.ndim
    )
    counts = torch.tensor([gradients[-1], states, storage_bytes(params)])
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    return layout, counts.tolist()


def sizes_of(config: Config) -> dict[str, int]:
    with torch.device("meta"):
        return {
            name: param.numel()
            for name, param in config.model.build().named_parameters()
        }


NAMES = [name for name in STRATEGIES if name != "single"]
SWITCHED = {"max_grad_norm": None, "skip_nonfinite": False}
LAYOUTS: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
    **{name: (STRATEGIES[name](), {}) for name in NAMES},
    "fsdp1, flat": (FSDP1Config(use_orig_params=False), {}),
    "fsdp2, parts of blocks": (FSDP2Config(wrap=Wrap.block_attn_mlp), {}),
    "fsdp2, muon": (FSDP2Config(), {"optim": MuonConfig()}),
    "fsdp2, no states": (FSDP2Config(), {"optim": SGDConfig(momentum=0.0)}),
    "fsdp2, bf16, tied": (
        FSDP2Config(param_dtype=DType.bfloat16),
        {"tie_embeddings": True},
    ),
    "half of the states offloaded": (
        FSDP2Config(),
        {
            "memory": MemoryConfig(optimizer_offload=True, offload_fraction=0.5),
            **SWITCHED,
        },
    ),
    "cpu offload": (
        FSDP2Config(),
        {"memory": MemoryConfig(cpu_offload=True), **SWITCHED},
    ),
    "optimizer in the backward": (
        FSDP2Config(),
        {"memory": MemoryConfig(optimizer_in_backward=True), **SWITCHED},
    ),
}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("case", LAYOUTS)
def test_bytes_per_rank_are_those_of_the_first_step(case: str) -> None:
    """Oracle: storages of gradients, states and parameters in the first step; no dim divides evenly
    over the ranks.

    With the optimizer in the backward, the gradients that are left after it.
    """
    parallel, options = LAYOUTS[case]
    config = config_of(parallel, **options)
    layout, nbytes = run_ranks(2, measured, config)[0]
    of_kinds = [layout.bytes_per_rank[kind] for kind in KINDS]
    memory = config.memory
    assert [kind.device + kind.host for kind in of_kinds] == nbytes
    assert layout.parameters == sum(sizes_of(config).values())
    assert 4 * layout.parameters_per_rank == nbytes[2]
    whole = memory.cpu_offload
    assert [kind.host > 0 for kind in of_kinds] == [
        whole,
        whole or memory.optimizer_offload,
        whole,
    ]
    assert (of_kinds[1].device > 0) == (not whole and nbytes[1] > 0)


def mark_toy(name: str) -> Any:
    """The short level has FSDP1's and the toy ZeRO-3's flat parameters, and those of DDP and
    FSDP2."""
    is_short = name in ("ddp", "fsdp1", "fsdp2", "toy_zero3")
    return name if is_short else pytest.param(name, marks=pytest.mark.extended)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "name", [*map(mark_toy, NAMES), "fsdp2, quantized", "ddp, quantized"]
)
def test_frozen_parameters_have_neither_gradients_nor_states(name: str) -> None:
    """Oracle: storages in the first step; the numbers of adapters and of quantized weights, by
    name.

    FSDP1's flat parameters and the toy ZeRO-3's shares have gradients of their frozen elements too.
    """
    name, _, is_quantized = name.partition(", ")
    kind = STRATEGIES[name]
    if is_quantized and not kind.capabilities.mixed_dtypes:
        pytest.skip("this torch shards no mixed dtypes")
    config = config_of(kind(), tune=LoRAConfig(rank=4), model=EVEN)
    if is_quantized:
        config = config_of(kind(param_dtype=DType.bfloat16), tune=NF4, model=EVEN)
    layout, nbytes = run_ranks(2, measured, config)[0]
    of_kinds = [layout.bytes_per_rank[kind].device for kind in KINDS]
    assert of_kinds == nbytes
    total = sum(sizes_of(config_of(DDPConfig(), model=EVEN)).values())
    rank_4 = 4 * 2 * (4 * (64 + 64) + 3 * (64 + 128))
    assert (layout.parameters, layout.trained) == (total + rank_4, rank_4)
    if name in ("ddp", "fsdp2"):
        shards = 2 if config.parallel.capabilities.shards_parameters else 1
        assert layout.parameters_per_rank == layout.parameters // shards
        assert of_kinds[:2] == [4 * rank_4 // shards, 8 * rank_4 // shards]
    if name == "ddp":
        assert layout_rows(layout)[0][1] == (
            f"{total + rank_4:,}, of which {rank_4:,} (7.04%) train and a rank holds "
            f"{total + rank_4:,}"
        )


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("parallel", "fsdp_size", "shards"),
    [
        (DDPConfig(), -1, 1),
        (FSDP1Config(), 2, 2),
        (FSDP2Config(), 2, 2),
        pytest.param(FSDP1Config(), -1, 4, marks=pytest.mark.extended),
        pytest.param(FSDP2Config(), -1, 4, marks=pytest.mark.extended),
    ],
)
def test_four_ranks_print_mesh_units_and_bytes(
    parallel: ParallelConfig, fsdp_size: int, shards: int
) -> None:
    """Oracle: the formulas of a Llama, also for the planner, which rounds blocks up to 512
    bytes."""
    config = config_of(parallel, 4, fsdp_size=fsdp_size, model=EVEN)
    layout = run_ranks(4, lambda: measure_layout(Trainer(config)))[0]
    block = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    total = 2 * 256 * 64 + 64 + 2 * block
    assert [layout.bytes_per_rank[kind].device * shards for kind in KINDS] == [
        4 * total,
        8 * total,
        4 * total,
    ]
    assert layout.parameters == total and layout.parameters_per_rank == total // shards
    planned = fast_estimate(config, load_hardware("cpu"), 4).memory.categories
    tensors = 3 + 2 * 9
    assert 0 <= planned[Category.parameters] - 4 * total // shards <= 512 * tensors
    assert (
        0
        <= planned[Category.optimizer_states] - 8 * total // shards
        <= 3 * 512 * tensors
    )
    axes = {"replicate": 4 // shards, "shard": shards}
    assert layout.mesh == {axis: size for axis, size in axes.items() if size > 1}
    if shards == 1:
        assert (layout.units, layout.largest_unit, layout.smallest_unit) == (
            0,
            None,
            None,
        )
        return
    flat = config.parallel.capabilities.flattens_parameters
    smallest = (
        Unit("root", 64, 256) if flat else Unit("embed_tokens", 256 * 64, 4 * 256 * 64)
    )
    assert (layout.units, layout.smallest_unit) == (5 if flat else 4, smallest)
    assert layout.largest_unit == Unit("layers.0", block, 4 * block)


@pytest.mark.parametrize(
    ("mesh", "sharded", "expected"),
    [
        (
            {"replicate": 4, "cp": 2},
            "all",
            "replicate=4: 4 ranks with full copies; cp=2: each sequence shared by 2 ranks",
        ),
        (
            {"replicate": 2, "shard": 4},
            "parameters",
            "replicate=2 × shard=4: 2 copies, each with parameters split over 4 ranks",
        ),
    ],
)
def test_rows_name_axes_and_memory_in_words(
    mesh: dict[str, int], sharded: str, expected: str
) -> None:
    """Oracle: the sentences."""
    bytes_by_kind = {
        "parameters": RankBytes(2048, 0),
        "gradients": RankBytes(0, 1024),
        "optimizer states": RankBytes(1, 2**20),
    }
    layout = Layout(
        2000,
        1000,
        1,
        Unit("a", 2000, 4000),
        Unit("a", 2000, 4000),
        mesh,
        sharded,
        bytes_by_kind,
    )
    assert layout_rows(layout) == [
        ("parameters", "2,000, of which a rank holds 1,000"),
        (
            "units",
            (
                "1; largest a (2,000 parameters, 3.91 KiB gathered), smallest a (2,000 parameters, "
                "3.91 KiB gathered)"
            ),
        ),
        ("mesh", expected),
        (
            "bytes per rank",
            "parameters 2.00 KiB, gradients 1.00 KiB in host memory, "
            "optimizer states 1 bytes and 1.00 MiB in host memory",
        ),
    ]
