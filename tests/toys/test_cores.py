"""The core of each toy is short, imports none of the extensions, and trains on its own."""

import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdptoys.toys
from tests.harness.ranks import run_ranks
from tests.toys.fsdp_models import NATIVE, Model, batches, mesh_of

TOYS = Path(fsdptoys.toys.__file__).parent
CORES = {
    "ddp": "ddp",
    "zero1": "zero1/core",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp": "fsdp/core",
}
LIMIT = 500
SHORT_CORES = ("cp", "ep")
SHORT_LIMIT = 200


def core_files(core: str) -> set[Path]:
    """The core and all files that it imports, in functions and under TYPE_CHECKING too, from empty
    packages."""
    root = TOYS.parents[1]
    finder = ModuleFinder([str(root)])
    for package in (TOYS.parent, *(file.parent for file in TOYS.rglob("__init__.py"))):
        finder.add_module(".".join(package.relative_to(root).parts)).__path__ = [
            str(package)
        ]
    finder.import_hook(f"fsdptoys.toys.{core.replace('/', '.')}")
    assert not [name for name in finder.badmodules if name.startswith("fsdptoys")]
    return {
        Path(module.__file__) for module in finder.modules.values() if module.__file__
    }


@pytest.mark.parametrize(
    ("core", "limit"),
    [
        *((core, LIMIT) for core in CORES.values()),
        *((core, SHORT_LIMIT) for core in SHORT_CORES),
    ],
)
def test_core_has_at_most_its_limit_of_lines(core: str, limit: int) -> None:
    """Oracle: the lines of the core and of all toys' files that it imports, docstrings included."""
    lines = {
        file.relative_to(TOYS): len(file.read_text().splitlines())
        for file in core_files(core)
    }
    assert sum(lines.values()) <= limit, lines


def load_alone(core: str) -> ModuleType:
    """Import a core into this process with empty packages, so that only its own imports run."""
    for name in [name for name in sys.modules if name.startswith("fsdptoys.toys")]:
        del sys.modules[name]
    package = TOYS
    for part in ("", *Path(core).parent.parts):
        package = package / part
        name = ".".join(("fsdptoys", "toys", *package.relative_to(TOYS).parts))
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(package)]
    return importlib.import_module(f"fsdptoys.toys.{core.replace('/', '.')}")


def loaded_files() -> set[str]:
    """Files of the toys in this process."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("fsdptoys.toys.")
    ]
    return {module.__file__ for module in modules if getattr(module, "__file__", None)}


def follow(
    model: Any,
    params: Iterable[nn.Parameter],
    attach: Callable[[Any], None] = lambda _: None,
) -> list[float]:
    """Train five steps; return their losses."""
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    attach(optimizer)
    losses = []
    for tokens_BT in batches(5):
        loss = nn.functional.cross_entropy(
            model(tokens_BT).flatten(0, 1), tokens_BT.flatten()
        )
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def shard_and_follow(library: Any, model: Model) -> list[float]:
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh_of())
    library.fully_shard(model, mesh=mesh_of(), reshard_after_forward=False)
    return follow(model, model.parameters())


def train_zero1(core: ModuleType, model: Model) -> list[float]:
    """Train on a module with gradients averaged on every rank."""
    module = DistributedDataParallel(model)
    update = core.ShardedUpdate()
    update.slices = core.Slices(model, dist.group.WORLD, 1000)
    return follow(module, update.pieces(), update.attach)


def train_ddp(model: Model) -> list[float]:
    return follow(DistributedDataParallel(model), model.parameters())


EXTENDED: dict[
    str, tuple[Callable[..., list[float]], Callable[[Model], list[float]]]
] = {
    "zero1": (train_zero1, train_ddp),
    "fsdp": (shard_and_follow, functools.partial(shard_and_follow, NATIVE)),
}
"""Toys with more files than their core: training with the core, and with PyTorch."""


@pytest.mark.parametrize("toy", EXTENDED)
def test_core_alone_trains_bitwise_equal_to_pytorch(toy: str) -> None:
    """Oracle: PyTorch's DDP, or ``fully_shard`` for FSDP; and the loaded modules."""

    def compare() -> None:
        core = load_alone(CORES[toy])
        torch.manual_seed(0)
        model = Model()
        with_core, native = EXTENDED[toy]
        expected = native(copy.deepcopy(model))
        assert with_core(core, model) == expected
        assert loaded_files() == {str(file) for file in core_files(CORES[toy])}

    run_ranks(2, compare)


def refusals(folder: str) -> list[str]:
    """What each core says of weights that two of its units share, and of a unit made twice."""
    fsdp = load_alone("fsdp/core")
    zero3 = load_alone("zero3")
    messages = []

    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    def shard_twice() -> None:
        block = nn.Linear(4, 4)
        fsdp.fully_shard(block, mesh_of())
        fsdp.fully_shard(block, mesh_of())

    def shard_both() -> None:
        for block in tied():
            fsdp.fully_shard(block, mesh_of())

    def make_zero3(*blocks: int) -> None:
        model = tied()
        zero3.Zero3(model, [model[index] for index in blocks], torch.device("cpu"))

    attempts = (
        shard_twice,
        shard_both,
        lambda: make_zero3(0, 1),
        lambda: make_zero3(0),
        lambda: make_zero3(0, 0),
    )
    for attempt in attempts:
        try:
            attempt()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_weights_of_two_units_are_refused_by_name(tmp_path: Path) -> None:
    """Oracle: the names; PyTorch's ``fully_shard`` refuses both too."""
    assert run_ranks(2, refusals, str(tmp_path))[0] == [
        *[
            "the parameter 'weight' is in a unit already; make one unit of all that have it"
        ]
        * 2,
        *[
            "two units have the parameter '0.weight'; make one block of all that have it, or none"
        ]
        * 3,
    ]
