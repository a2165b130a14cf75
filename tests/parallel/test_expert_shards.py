"""Shards of split experts from files in Hugging Face format.

``test_state.py`` loads them from the state of one process.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.checkpoint import HuggingFaceFolder
from fsdptoys.checkpoint.safetensors_io import TensorFolder
from fsdptoys.config.schema import Config
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import FSDP2Config, SingleConfig
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_bounds, local_tensor
from tests.harness.folders import build, write
from tests.harness.ranks import run_ranks
from tests.harness.tiny import EXPERTS, TINY, make_config, with_sizes
from tests.parallel.numeric_outcomes import initial_hashes

MODEL = with_sizes(TINY["qwen3_moe"], **EXPERTS)


def config(world_size: int, ep_size: int, model: ModelConfig) -> Config:
    parallel = FSDP2Config() if world_size > 1 else SingleConfig()
    return make_config(parallel, world_size, ep_size=ep_size, model=model)


def read_own(config: Config) -> tuple[int, int, set[str], set[str]]:
    """Elements of experts read and held; the experts read, and those held, as ``layer.expert``."""
    sizes: dict[str, int] = {}
    reading = TensorFolder.reading

    @contextmanager
    def counting(self: TensorFolder) -> Iterator[Any]:
        with reading(self) as read:

            def count(name: str, region: Any) -> Any:
                part = read(name, region)
                sizes[name] = sizes.get(name, 0) + part.numel()
                return part

            yield count

    TensorFolder.reading = counting  # type: ignore[method-assign,assignment]
    trainer = Trainer(config)
    of_experts = {name: size for name, size in sizes.items() if ".experts." in name}
    stacks = {
        name: param
        for name, param in trainer.strategy.named_parameters()
        if ".experts." in name
    }
    local_experts = {
        f"{n.split('.')[1]}.{e}"
        for n, p in stacks.items()
        for e in range(*local_bounds(p)[0])
    }
    read_experts = {f"{name.split('.')[2]}.{name.split('.')[5]}" for name in of_experts}
    return (
        sum(of_experts.values()),
        sum(local_tensor(p).numel() for p in stacks.values()),
        read_experts,
        local_experts,
    )


@pytest.mark.usefixtures("unmeasured")
def test_a_rank_reads_only_its_own_experts_from_a_folder(tmp_path: Path) -> None:
    """Oracle: the elements that a rank holds, a quarter of all, and the values of one process."""
    write(tmp_path / "folder", build(MODEL))
    HuggingFaceFolder(tmp_path / "folder")
    model = dataclasses.replace(MODEL, init_from=str(tmp_path / "folder"))
    split = config(4, 2, model)
    results = run_ranks(4, read_own, split)
    total = MODEL.n_layers * 4 * 3 * MODEL.dim * 24
    for elements, local_elements, experts_read, experts_held in results:
        assert elements == local_elements == total // 4
        assert experts_read == experts_held and len(experts_held) == MODEL.n_layers * 2
    alone = run_ranks(1, initial_hashes, [config(1, 1, model)])[0]
    assert run_ranks(4, initial_hashes, [split])[0] == alone
