"""The layout printed at the start of a run: its numbers are those of the tensors that a step then has."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import load_hardware
from fsdptoys.memory import MemoryConfig
from fsdptoys.metrics.layout import Layout, RankBytes, Unit, layout_rows
from fsdptoys.metrics.prediction import Category
from fsdptoys.models import LlamaConfig
from fsdptoys.optim import MuonConfig, SGDConfig
from fsdptoys.parallel import STRATEGIES, DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig
from fsdptoys.parallel.fsdp import Wrap
from fsdptoys.parallel.precision import DType
from fsdptoys.plan.estimate.estimate import closed_form
from fsdptoys.train.layout import measure_layout, unit_sizes
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import Base, LoRAConfig
from fsdptoys.utils.storages import storage_bytes
from scripts.ranks import run_ranks
from tests.parallel.runs import make_config

EVEN = LlamaConfig(
    name="even", dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=256, max_seq_len=64
)
NF4 = LoRAConfig(rank=4, base=Base.nf4)
KINDS = ("gradients", "optimizer states", "parameters")


def config_of(parallel: ParallelConfig, ranks: int = 2, **settings: object) -> Config:
    return make_config(parallel, ranks, steps=1, grad_accum=1, seq_len=8, **settings)  # type: ignore[arg-type]


def measured(configs: list[Config]) -> list[tuple[Layout, list[int]]]:
    """Each layout, and the bytes of ``KINDS`` in its first step, the largest over the ranks."""
    rows = []
    for config in configs:
        trainer = Trainer(config)
        layout = measure_layout(trainer)
        params = [param for _, param in trainer.strategy.held_parameters()]
        gradients: list[int] = []

        def read(*_: object, params: list[nn.Parameter] = params, gradients: list[int] = gradients) -> None:
            gradients.append(storage_bytes(param.grad for param in params if param.grad is not None))

        trainer.optimizer.register_step_pre_hook(read)
        trainer.train()
        if config.memory.optimizer_in_backward:
            read()
        kept = [value for state in trainer.optimizer.state.values() for value in state.values()]
        states = storage_bytes(value for value in kept if isinstance(value, Tensor) and value.ndim)
        counts = torch.tensor([gradients[-1], states, storage_bytes(params)])
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        rows.append((layout, counts.tolist()))
    return rows


def sizes_of(config: Config) -> dict[str, int]:
    with torch.device("meta"):
        return {name: param.numel() for name, param in config.model.build().named_parameters()}


@pytest.mark.usefixtures("unmeasured")
def test_bytes_per_rank_are_those_of_the_first_step_under_every_strategy() -> None:
    """Oracle: storages of gradients, states and parameters in the first step; no dim divides evenly over the ranks.

    With the optimizer in the backward, the gradients that are left after it.
    """
    kinds: list[ParallelConfig] = [kind() for name, kind in STRATEGIES.items() if name != "single"]
    kinds += [FSDP1Config(use_orig_params=False), FSDP2Config(wrap=Wrap.block_attn_mlp)]
    configs = [config_of(kind) for kind in kinds]
    configs += [config_of(FSDP2Config(), optim=optim) for optim in (MuonConfig(), SGDConfig(momentum=0.0))]
    configs.append(config_of(FSDP2Config(param_dtype=DType.bfloat16), tie_embeddings=True))
    switches: list[MemoryConfig] = [
        MemoryConfig(optimizer_offload=True, offload_fraction=0.5),
        MemoryConfig(cpu_offload=True),
        MemoryConfig(optimizer_in_backward=True),
    ]
    configs += [
        config_of(FSDP2Config(), memory=memory, max_grad_norm=None, skip_nonfinite=False) for memory in switches
    ]
    for config, (layout, found) in zip(configs, run_ranks(2, measured, configs)[0], strict=True):
        held, memory = [layout.bytes_per_rank[kind] for kind in KINDS], config.memory
        assert [each.device + each.host for each in held] == found, (config.parallel, memory)
        assert layout.parameters == sum(sizes_of(config).values())
        assert 4 * layout.parameters_per_rank == found[2]
        whole = memory.cpu_offload
        assert [each.host > 0 for each in held] == [whole, whole or memory.optimizer_offload, whole]
        assert (held[1].device > 0) == (not whole and found[1] > 0)


@pytest.mark.usefixtures("unmeasured")
def test_frozen_parameters_have_neither_gradients_nor_states_under_any_strategy() -> None:
    """Oracle: storages in the first step; the numbers of adapters and of quantized weights, by name.

    FSDP1's flat parameters and the toy ZeRO-3's shares have gradients of their frozen elements too.
    """
    kinds = {name: kind for name, kind in STRATEGIES.items() if name != "single"}
    configs = [config_of(kind(), tune=LoRAConfig(rank=4), model=EVEN) for kind in kinds.values()]
    dtypes = {"param_dtype": DType.bfloat16}
    configs += [
        config_of(kinds[name](**dtypes), tune=NF4, model=EVEN) for name in ("fsdp2", "ddp") if kinds[name].mixes_dtypes
    ]
    total, rank_4 = sum(sizes_of(configs[0]).values()), 4 * 2 * (4 * (64 + 64) + 3 * (64 + 128))
    for config, (layout, found) in zip(configs, run_ranks(2, measured, configs)[0], strict=True):
        held = [layout.bytes_per_rank[kind].device for kind in KINDS]
        assert held == found, config.parallel.name
        assert (layout.parameters, layout.trained) == (total + rank_4, rank_4)
        shards = 2 if config.parallel.shards_parameters else 1
        if config.parallel.name in ("ddp", "fsdp2"):
            assert layout.parameters_per_rank == layout.parameters // shards
            assert held[:2] == [4 * rank_4 // shards, 8 * rank_4 // shards]
    assert layout_rows(layout)[0][1] == (
        f"{total + rank_4:,}, of which {rank_4:,} (7.04%) train and a rank holds {total + rank_4:,}"
    )


def layouts(configs: list[Config]) -> list[Layout]:
    return [measure_layout(Trainer(config)) for config in configs]


PLANNED: list[tuple[ParallelConfig, int]] = [(DDPConfig(), -1), (FSDP1Config(), -1), (FSDP2Config(), -1)]
PLANNED += [(FSDP1Config(), 2), (FSDP2Config(), 2)]


UNITS = [[256 * 64], *[[64, *[64 * 64] * 4, 64, *[64 * 128] * 3]] * 2, [256 * 64], [64]]
"""Elements of the parameters of each unit of ``EVEN``: embedding, blocks, head, norm."""


def planned_bytes(ranks: int, flat: bool) -> tuple[int, int]:
    """Parameters and AdamW's states of the first rank, in blocks of 512 bytes; also the number of steps is a block."""
    blocks = [[-(-4 * size // 512) * 512 for size in sizes] for sizes in first_shards(ranks, flat)]
    units = [-(-4 * sum(sizes) // 512) * 512 for sizes in first_shards(ranks, flat)]
    states = sum(2 * block + 512 for unit in blocks for block in unit)
    return sum(units if flat else map(sum, blocks)), states


def first_shards(ranks: int, flat: bool) -> list[list[int]]:
    """Elements of each parameter on the first rank, unit by unit; FSDP1 cuts the concatenation of a unit."""
    if not flat:
        return [[size // ranks for size in unit] for unit in UNITS]
    starts = [list(itertools.accumulate(unit, initial=0)) for unit in UNITS]
    held = [
        [min(size, sum(unit) // ranks - start) for size, start in zip(unit, first, strict=False)]
        for unit, first in zip(UNITS, starts, strict=True)
    ]
    return [[size for size in unit if size > 0] for unit in held]


@pytest.mark.usefixtures("unmeasured")
def test_four_ranks_print_the_bytes_of_the_planner_and_of_formulas() -> None:
    """Oracles: the formulas of a Llama; those of its blocks for the planner's closed form."""
    configs = [config_of(parallel, 4, fsdp_size=size, model=EVEN) for parallel, size in PLANNED]
    shards = [1, 4, 4, 2, 2]
    block, total = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64, 2 * 256 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    for config, layout, ranks in zip(configs, run_ranks(4, layouts, configs)[0], shards, strict=True):
        planned = closed_form(config, load_hardware("cpu"), 4).memory.categories
        gradients, states, parameters = (layout.bytes_per_rank[kind].device for kind in KINDS)
        assert parameters == gradients == 4 * total // ranks and states == 8 * total // ranks
        of_plan = planned[Category.parameters], planned[Category.optimizer_states]
        assert of_plan == planned_bytes(ranks, config.parallel.flattens_parameters)
        assert layout.parameters == total and layout.parameters_per_rank == total // ranks
        axes = {"replicate": 4 // ranks, "shard": ranks}
        assert layout.mesh == {axis: size for axis, size in axes.items() if size > 1}
        flat = config.parallel.flattens_parameters
        assert layout.units == (0 if ranks == 1 else 5 if flat else 4)
        assert layout.largest_unit == (Unit("layers.0", block, 4 * block) if ranks > 1 else None)
        smallest = Unit("root", 64, 256) if flat else Unit("embed_tokens", 256 * 64, 4 * 256 * 64)
        assert layout.smallest_unit == (smallest if ranks > 1 else None)


def test_a_parameter_belongs_to_the_innermost_unit() -> None:
    """Oracle: by hand; a unit of several modules, nested ones, and one whose parameters are all in others."""
    sizes = {"embed.weight": 5, "layers.1.attn.wq.weight": 3, "layers.1.mlp.w": 4, "layers.10.w": 6, "norm.weight": 1}
    units = [[""], ["embed", "norm"], ["layers.1"], ["layers.1.attn"], ["layers.10"]]
    assert unit_sizes(units, sizes) == {"embed, norm": 6, "layers.1": 4, "layers.1.attn": 3, "layers.10": 6}
    assert unit_sizes([], sizes) == {}


@pytest.mark.parametrize(
    ("mesh", "sharded", "expected"),
    [
        ({}, "", "one rank"),
        ({"replicate": 2}, "all", "replicate=2: 2 ranks with full copies"),
        ({"shard": 4}, "optimizer states", "shard=4: optimizer states split over 4 ranks"),
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
def test_rows_name_axes_and_memory_in_words(mesh: dict[str, int], sharded: str, expected: str) -> None:
    """Oracle: the sentences."""
    held = {"parameters": RankBytes(2048, 0), "gradients": RankBytes(0, 1024), "optimizer states": RankBytes(1, 2**20)}
    layout = Layout(2000, 1000, 1, Unit("a", 2000, 4000), Unit("a", 2000, 4000), mesh, sharded, held)
    assert layout_rows(layout) == [
        ("parameters", "2,000, of which a rank holds 1,000"),
        (
            "units",
            "1; largest a (2,000 parameters, 3.91 KiB gathered), smallest a (2,000 parameters, 3.91 KiB gathered)",
        ),
        ("mesh", expected),
        (
            "bytes per rank",
            "parameters 2.00 KiB, gradients 1.00 KiB in host memory, "
            "optimizer states 1 bytes and 1.00 MiB in host memory",
        ),
    ]
