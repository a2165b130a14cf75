"""Shards of split experts: initial values, checkpoints of any layout, and files in Hugging Face
format."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch.distributed as dist

from fsdptoys.checkpoint import HuggingFaceFolder
from fsdptoys.checkpoint.safetensors_io import TensorFolder
from fsdptoys.checkpoint.sharded_io import load_tensors, save_tensors
from fsdptoys.checkpoint.storage import open_storage
from fsdptoys.config.schema import Config
from fsdptoys.optim import AdamWConfig, MuonConfig, OptimConfig
from fsdptoys.parallel import FSDP2Config, ParallelConfig, SingleConfig, ToyEPConfig, full_tensors
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_bounds, local_tensor
from tests.harness.folders import build, write
from tests.harness.ranks import run_ranks
from tests.harness.tiny import EXPERTS, TINY, make_config, with_sizes

MODEL = with_sizes(TINY["qwen3_moe"], **EXPERTS)
States = dict[str, numpy.ndarray]


def config(
    world_size: int,
    ep_size: int,
    optim: OptimConfig | None = None,
    parallel: ParallelConfig | None = None,
    **options: Any,
) -> Config:
    parallel = parallel or (FSDP2Config() if world_size > 1 else SingleConfig())
    settings: dict[str, Any] = {
        "steps": 1,
        "seq_len": 8,
        "batch_size": 1,
        "grad_accum": 1,
        "model": MODEL,
    }
    return make_config(
        parallel, world_size, ep_size=ep_size, optim=optim, **{**settings, **options}
    )


def initial(configs: list[Config]) -> list[States]:
    return [
        {name: param.numpy().copy() for name, param in Trainer(each).strategy.full_parameters()}
        for each in configs
    ]


def assert_equal(got: States, expected: States) -> None:
    assert got.keys() == expected.keys()
    assert [
        name for name, value in got.items() if value.tobytes() != expected[name].tobytes()
    ] == []


def layouts(optim: OptimConfig, every: bool) -> dict[int, list[Config]]:
    """Return layouts by world size; the first of four ranks has two experts a rank."""
    of_two = [config(2, 2, optim)]
    if optim.name != "muon":  # which the toy refuses
        of_two.append(config(2, 2, optim, ToyEPConfig()))
    of_four = [config(4, 2, optim), config(4, 1, optim), config(4, 4, optim)]
    if TORCH >= (2, 8):
        of_four.append(config(4, 2, optim, fsdp_size=2))
    return {1: [config(1, 1, optim)], 2: of_two, **({4: of_four} if every else {})}


EVERY = pytest.param(True, marks=pytest.mark.extended)


def in_full(trainer: Trainer) -> States:
    tensors = trainer.strategy.state_tensors(trainer.optimizer)
    return {
        name: whole.numpy().copy() for name, whole in full_tensors(tensors) if whole is not None
    }


def save_all(folder: str, configs: list[Config]) -> list[States]:
    """Take a step under each layout and save the state; returns it in full on rank 0."""
    storage, states = open_storage(folder), []
    group = dist.new_group(backend="gloo")
    for index, each in enumerate(configs):
        trainer, name = Trainer(each), f"{dist.get_world_size()} {index}"
        trainer.train()
        storage.make(name)
        dist.barrier(group)
        save_tensors(storage, name, trainer.strategy.state_tensors(trainer.optimizer), group)
        states.append(in_full(trainer))
    return states


def load_all(folder: str, configs: list[Config]) -> list[dict[str, States]]:
    """Load checkpoints under each layout, one process all, and return the states in full on rank
    0."""
    storage, states = open_storage(folder), []
    names = sorted(storage.names())
    if dist.get_world_size() > 1:
        names = ["1 0", max(name for name in names if name.endswith(" 0"))]
    group = dist.new_group(backend="gloo")
    for each in configs:
        trainer, loaded = Trainer(each), {}
        for name in names:
            trainer.strategy.load_state_tensors(
                trainer.optimizer,
                lambda tensors, name=name: load_tensors(storage, name, tensors, group),
            )
            loaded[name] = in_full(trainer)
        states.append(loaded)
    return states


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("every", [False, EVERY], ids=["some", "every"])
@pytest.mark.parametrize(
    "optim",
    [AdamWConfig(), pytest.param(MuonConfig(), marks=pytest.mark.extended)],
    ids=["adamw", "muon"],
)
def test_a_checkpoint_of_any_split_loads_under_any_other(
    optim: OptimConfig, every: bool, tmp_path: Path
) -> None:
    """Oracle: the full tensors of the layout that saved them, parameters and states, in every bit.

    All layouts go into one process; one process, and two experts a rank on four ranks, into all
    layouts.
    """
    made = layouts(optim, every)
    saved: dict[str, States] = {}
    for ranks, configs in made.items():
        states = run_ranks(ranks, save_all, str(tmp_path), configs)[0]
        saved |= {f"{ranks} {index}": state for index, state in enumerate(states)}
    for ranks, configs in made.items():
        for loaded in run_ranks(ranks, load_all, str(tmp_path), configs)[0]:
            assert loaded.keys() == saved.keys() if ranks == 1 else len(loaded) == 2
            for name, state in loaded.items():
                assert_equal(state, saved[name])


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
        name: param for name, param in trainer.strategy.named_parameters() if ".experts." in name
    }
    held = {f"{n.split('.')[1]}.{e}" for n, p in stacks.items() for e in range(*local_bounds(p)[0])}
    read_experts = {f"{name.split('.')[2]}.{name.split('.')[5]}" for name in of_experts}
    return (
        sum(of_experts.values()),
        sum(local_tensor(p).numel() for p in stacks.values()),
        read_experts,
        held,
    )


@pytest.mark.usefixtures("unmeasured")
def test_a_rank_reads_only_its_own_experts_from_a_folder(tmp_path: Path) -> None:
    """Oracle: the elements that a rank holds, a quarter of all, and the values of one process."""
    write(tmp_path / "folder", build(MODEL))
    HuggingFaceFolder(tmp_path / "folder")
    model = dataclasses.replace(MODEL, init_from=str(tmp_path / "folder"))
    split = config(4, 2, model=model)
    results = run_ranks(4, read_own, split)
    total = MODEL.n_layers * 4 * 3 * MODEL.dim * 24
    for elements, held, experts_read, experts_held in results:
        assert elements == held == total // 4
        assert experts_read == experts_held and len(experts_held) == MODEL.n_layers * 2
    (expected,) = run_ranks(1, initial, [config(1, 1, model=model)])[0]
    assert_equal(run_ranks(4, initial, [split])[0][0], expected)
