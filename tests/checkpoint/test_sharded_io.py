"""Each rank reads its shards' parts of a folder, with no more memory than they take."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdptoys.checkpoint import HuggingFaceFolder
from fsdptoys.device import Device
from fsdptoys.models import GPT2Config, LlamaConfig, ModelConfig
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, ParallelContext
from fsdptoys.parallel.mesh import MeshConfig
from scripts.ranks import run_ranks
from tests.checkpoint.folders import build, write
from tests.models.families import SMALL
from tests.parallel.test_init_weights import status_bytes


def with_odd_sizes(config: ModelConfig) -> ModelConfig:
    """With sizes of which none divides evenly over 4 ranks, and fewer experts than make 2 for each."""
    sizes = {"dim": 30, "n_heads": 3, "ffn_dim": 50, "vocab_size": 67, "max_seq_len": 33}
    sizes |= {"n_kv_heads": 1, "head_dim": 6, "n_experts": 5, "expert_ffn_dim": 22, "top_k": 1}
    names = {field.name for field in dataclasses.fields(config)}
    return dataclasses.replace(config, **{name: size for name, size in sizes.items() if name in names})


def check_shards_of_full_parameters(config: ModelConfig, folder: Path) -> None:
    model = build(config)
    source = HuggingFaceFolder(folder)
    source.check(model)
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
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
            if any(isinstance(placement, Shard) and placement.dim >= param.ndim for placement in placements):
                continue
            sharded = distribute_tensor(torch.full_like(param.detach(), torch.nan), mesh, placements)
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
    """Oracle: the full parameters; sharded along every dim and along two, unevenly, with empty shards."""
    config = with_odd_sizes(SMALL[case])
    write(tmp_path, build(config), max_file_bytes=20_000)
    run_ranks(4, check_shards_of_full_parameters, config, tmp_path)


def strategy_starts_from(parallel: ParallelConfig, config: ModelConfig, folder: Path) -> None:
    expected = dict(build(config).named_parameters())
    parallel.resolve(deterministic=False)
    strategy = parallel.build(ParallelContext(Device("cpu", 0), torch.distributed.get_rank(), 2, MeshConfig()))
    with torch.device("meta"):
        model = config.build()
    source = HuggingFaceFolder(folder)
    source.check(model)
    strategy.parallelize(model, source.fill)
    parameters = dict(strategy.full_parameters())
    assert set(parameters) == set(expected)
    for name, param in parameters.items():
        assert torch.equal(param, expected[name]), name


@pytest.mark.parametrize("case", ["qwen3_moe", "llama3 scaled tied", "gpt2"])
@pytest.mark.parametrize("parallel", [DDPConfig(), FSDP1Config(), FSDP2Config()], ids=lambda parallel: parallel.name)
def test_every_strategy_starts_from_the_folders_weights(parallel: ParallelConfig, case: str, tmp_path: Path) -> None:
    """Oracle: the written parameters."""
    config = with_odd_sizes(SMALL[case])
    write(tmp_path, build(config))
    run_ranks(2, strategy_starts_from, parallel, config, tmp_path)


BIG: dict[str, ModelConfig] = {
    "llama2": LlamaConfig(dim=512, n_layers=6, n_heads=8, n_kv_heads=8, ffn_dim=1408, vocab_size=6000, max_seq_len=64),
    "gpt2": GPT2Config(dim=640, n_layers=5, n_heads=8, vocab_size=2000, max_seq_len=64),
    "qwen3_moe": dataclasses.replace(
        SMALL["qwen3_moe"], dim=256, n_layers=4, ffn_dim=512, vocab_size=3000, n_experts=16, expert_ffn_dim=448
    ),
}


def write_both(small: ModelConfig, big: ModelConfig, path: Path) -> None:
    write(path / "small", build(small))
    write(path / "folder", build(big))


def peak_growth_bytes(config: ModelConfig, small: Path, folder: Path) -> tuple[int, int]:
    """How far reading a folder into an FSDP2 model raised the peak of the resident set; its shard."""
    context = ParallelContext(Device("cpu", 0), torch.distributed.get_rank(), 2, MeshConfig())
    parallel = FSDP2Config()
    parallel.resolve(deterministic=False)

    def start(path: Path) -> list[torch.Tensor]:
        source = HuggingFaceFolder(path)
        with torch.device("meta"):
            model = source.model_config().build()
        source.check(model)
        parallel.build(context).parallelize(model, source.fill)
        return [param.to_local() for param in model.parameters() if isinstance(param, DTensor)]

    start(small)  # triggers lazy imports
    Path("/proc/self/clear_refs").write_text("5")  # start a new peak
    before = status_bytes("VmHWM")
    shards = start(folder)
    return status_bytes("VmHWM") - before, sum(shard.nbytes for shard in shards)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not report a peak")
@pytest.mark.parametrize("case", ["qwen3_moe", *(pytest.param(case, marks=EXTENDED) for case in ("llama2", "gpt2"))])
def test_peak_memory_of_a_rank_is_its_shard_and_one_tensor(case: str, tmp_path: Path) -> None:
    """Oracle: Linux's own peak of the resident set: a shard, the file's pages of one parameter, 8 MiB for all else."""
    # In a child process, because the ranks would otherwise inherit freed memory to reuse.
    run_ranks(1, write_both, SMALL[case], BIG[case], tmp_path)
    with torch.device("meta"):
        sizes = [param.nbytes for param in BIG[case].build().parameters()]
    # Queries, keys and values of GPT-2 are one tensor in the file.
    largest_bytes = max(sizes) if case != "gpt2" else max(*sizes, 3 * 640 * 640 * 4)
    assert sum(sizes) > 80 * 2**20
    for growth, shard_bytes in run_ranks(2, peak_growth_bytes, BIG[case], tmp_path / "small", tmp_path / "folder"):
        assert shard_bytes == pytest.approx(sum(sizes) / 2, rel=0.01)
        assert growth <= shard_bytes + largest_bytes + 2**23 < sum(sizes)
