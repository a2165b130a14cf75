"""Weights in Hugging Face format by way of ranks: the shards that a rank reads, the folder that all
write, and a rank's memory."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdptoys.checkpoint import (
    HuggingFaceFolder,
    RunWeights,
    save_weights,
)
from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig, whole
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
    World,
)
from fsdptoys.parallel.mesh import MeshConfig
from tests.harness.families import SMALL
from tests.harness.folders import build, write
from tests.harness.process_memory import NEEDS_PEAK, peak_growth_bytes
from tests.harness.ranks import run_ranks
from tests.harness.saved_runs import FILE_BYTES, write_config


def with_odd_sizes(config: ModelConfig) -> ModelConfig:
    """With sizes that do not divide evenly over 4 ranks, and fewer than 2 experts for a rank."""
    sizes = {
        "dim": 30,
        "n_heads": 3,
        "ffn_dim": 50,
        "vocab_size": 67,
        "max_seq_len": 33,
    }
    sizes |= {
        "n_kv_heads": 1,
        "head_dim": 6,
        "n_experts": 5,
        "expert_ffn_dim": 22,
        "top_k": 1,
    }
    names = {field.name for field in dataclasses.fields(config)}
    return dataclasses.replace(
        config, **{name: size for name, size in sizes.items() if name in names}
    )


def check_shards_of_full_parameters(config: ModelConfig, folder: Path) -> None:
    model = build(config)
    source = HuggingFaceFolder(folder)
    source.check(model)
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    layouts: list[tuple[Any, list[Any]]] = [
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (flat, [Shard(2)]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(0), Shard(1)]),
    ]
    uneven = False
    for name, param in model.named_parameters():
        for mesh, placements in layouts:
            if any(
                isinstance(placement, Shard) and placement.dim >= param.ndim
                for placement in placements
            ):
                continue
            sharded = distribute_tensor(
                torch.full_like(param.detach(), torch.nan), mesh, placements
            )
            source.fill(sharded, name)
            assert torch.equal(sharded.full_tensor(), param), (name, placements)
            uneven |= sharded.to_local().numel() * 4 != param.numel()
    assert uneven


EXTENDED = pytest.mark.extended


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("llama3 scaled tied", marks=EXTENDED),
        pytest.param("qwen3", marks=EXTENDED),
        *("llama4", "qwen3_moe", "gpt2"),
    ],
)
def test_shards_equal_parts_of_the_full_parameters(case: str, tmp_path: Path) -> None:
    """Oracle: the full parameters; sharded along every dim and along two, unevenly, with empty
    shards."""
    config = with_odd_sizes(SMALL[case])
    write(tmp_path, build(config), max_file_bytes=20_000)
    run_ranks(4, check_shards_of_full_parameters, config, tmp_path)


def start_and_save(parallel: ParallelConfig, config: ModelConfig, folder: Path) -> None:
    parallel.resolve(deterministic=False)
    rank = torch.distributed.get_rank()
    world_size = torch.distributed.get_world_size()
    strategy = parallel.build(World(Device("cpu", 0), rank, world_size, MeshConfig()))
    with torch.device("meta"):
        model = config.build()
    source = HuggingFaceFolder(folder / "start")
    source.check(model)
    strategy.shard(model, source.fill)
    for expected in (
        nullcontext(),
        pytest.raises(ConfigError, match="is not empty, and nothing is written over"),
    ):
        if rank > 0:
            assert len(list(strategy.full_parameters())) > 0
        else:
            with expected:
                save_weights(
                    folder / "run" / "weights", strategy.full_parameters(), FILE_BYTES
                )
    torch.distributed.barrier()


@pytest.mark.parametrize("case", ["qwen3_moe", "llama3 scaled tied", "gpt2"])
@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [(SingleConfig(), 1), (DDPConfig(), 2), (FSDP1Config(), 2), (FSDP2Config(), 2)],
    ids=["single", "ddp", "fsdp1", "fsdp2"],
)
def test_every_strategy_saves_the_weights_of_the_folder_that_it_starts_from(
    parallel: ParallelConfig, ranks: int, case: str, tmp_path: Path
) -> None:
    """Oracle: the written parameters; a write error on one rank leaves no other rank waiting."""
    config = with_odd_sizes(SMALL[case])
    model = build(config)
    write(tmp_path / "start", model)
    write_config(tmp_path / "run", config)
    run_ranks(ranks, start_and_save, parallel, config, tmp_path)
    weights = RunWeights(tmp_path / "run")
    assert set(weights.tensors.stored) == {name for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        assert torch.equal(weights.read(name, whole(tuple(param.shape))), param), name


def write_all(configs: dict[Path, ModelConfig]) -> None:
    for folder, config in configs.items():
        write(folder, build(config))


def growth_and_shard_bytes(
    config: ModelConfig, small: Path, folder: Path
) -> tuple[int, int]:
    """How far reading a folder into an FSDP2 model raised the peak of the resident set; its
    shard."""
    context = World(Device("cpu", 0), torch.distributed.get_rank(), 2, MeshConfig())
    parallel = FSDP2Config()
    parallel.resolve(deterministic=False)

    def start(path: Path) -> list[torch.Tensor]:
        source = HuggingFaceFolder(path)
        with torch.device("meta"):
            model = source.model_config().build()
        source.check(model)
        parallel.build(context).shard(model, source.fill)
        return [
            param.to_local()
            for param in model.parameters()
            if isinstance(param, DTensor)
        ]

    start(small)  # triggers lazy imports
    shards: list[torch.Tensor] = []
    growth = peak_growth_bytes(lambda: shards.extend(start(folder)))
    return growth, sum(shard.nbytes for shard in shards)


@NEEDS_PEAK
def test_peak_memory_of_a_rank_is_its_shard_and_one_tensor(tmp_path: Path) -> None:
    """Oracle: Linux's own peak of the resident set: a shard, the file's pages of one parameter, 16
    MiB for all else."""
    small = SMALL["qwen3_moe"]
    sizes = {
        "dim": 256,
        "n_layers": 4,
        "ffn_dim": 512,
        "vocab_size": 3000,
        "n_experts": 16,
    }
    big = dataclasses.replace(small, **sizes, expert_ffn_dim=448)
    # In a child process, because the ranks would otherwise inherit freed memory to reuse.
    run_ranks(1, write_all, {tmp_path / "small": small, tmp_path / "folder": big})
    with torch.device("meta"):
        nbytes = [param.nbytes for param in big.build().parameters()]
    assert sum(nbytes) > 80 * 2**20
    for growth, shard_bytes in run_ranks(
        2, growth_and_shard_bytes, big, tmp_path / "small", tmp_path / "folder"
    ):
        assert shard_bytes == pytest.approx(sum(nbytes) / 2, rel=0.01)
        assert growth <= shard_bytes + max(nbytes) + 2**24 < sum(nbytes)
