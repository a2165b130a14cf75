"""Round trips of tensors of any layout on any number of ranks, and rejection of damaged or hostile
files."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdptoys.checkpoint.shard_format import ShardFiles, read_index
from fsdptoys.checkpoint.sharded_io import load_tensors, save_tensors
from fsdptoys.checkpoint.storage import open_storage
from fsdptoys.errors import ConfigError
from tests.checkpoint.damages import chunk, make_saved
from tests.harness.ranks import run_ranks

FORMS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((8, 6), torch.float32),
    "uneven": ((7, 5), torch.bfloat16),
    "fewer rows than ranks": ((3, 2), torch.float16),
    "three dims": ((5, 4, 3), torch.float32),
    "vector": ((10,), torch.float64),
    "number": ((), torch.int64),
    "one": ((1,), torch.int32),
    "flags": ((9,), torch.bool),
    "bytes": ((5, 3), torch.uint8),
    "float8": ((6, 4), torch.float8_e4m3fn),
    "nothing": ((0, 3), torch.float32),
    "no columns": ((4, 0), torch.bfloat16),
}

LAYOUTS: dict[str, tuple[Any, ...]] = {
    "plain": (),
    "replicated": (Replicate(),),
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "replicated rows": (Replicate(), Shard(0)),
    "rows and columns": (Shard(0), Shard(1)),
    "columns and rows": (Shard(1), Shard(0)),
    "rows of rows": (Shard(0), Shard(0)),
}


def full(name: str) -> Tensor:
    """Return the full tensor, with random bytes seeded by its name."""
    shape, dtype = FORMS[name]
    generator = torch.Generator().manual_seed(list(FORMS).index(name))
    high = 2 if dtype == torch.bool else 256
    content = torch.randint(
        0,
        high,
        (math.prod(shape) * dtype.itemsize,),
        dtype=torch.uint8,
        generator=generator,
    )
    return content.view(dtype).reshape(shape)


def laid_out(layout: str, meshes: dict[int, DeviceMesh]) -> dict[str, Tensor]:
    """The local tensors of a rank."""
    placements = LAYOUTS[layout]
    tensors = {}
    for name, (shape, _) in FORMS.items():
        tensors[name] = full(name)
        if placements:
            fit = [
                p if not p.is_shard() or p.dim < len(shape) else Replicate()
                for p in placements
            ]
            tensors[name] = distribute_tensor(
                tensors[name], meshes[len(fit)], fit, src_data_rank=None
            )
    return tensors


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are bitwise equal."""
    one, other = local(one).contiguous(), local(other).contiguous()
    same_form = one.shape == other.shape and one.dtype == other.dtype
    return same_form and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def setting(world_size: int) -> tuple[Any, dict[int, DeviceMesh], list[str]]:
    """Group, meshes by their number of axes, and layouts that this many ranks can have."""
    if world_size == 1:
        return None, {}, ["plain"]
    meshes = {1: init_device_mesh("cpu", (world_size,))}
    if world_size == 4:
        meshes[2] = init_device_mesh("cpu", (2, 2))
    layouts = [
        name for name, placements in LAYOUTS.items() if len(placements) <= len(meshes)
    ]
    return dist.new_group(backend="gloo"), meshes, layouts


def save_layouts(folder: str, world_size: int) -> dict[str, list[str]]:
    """Save all tensors in every layout; return the files that this rank wrote of each
    checkpoint."""
    group, meshes, layouts = setting(world_size)
    storage = open_storage(folder)
    files = {}
    for layout in layouts:
        name = f"{world_size} {layout}"
        storage.make(name)
        if group is not None:
            dist.barrier(group)
        files[name] = list(save_tensors(storage, name, laid_out(layout, meshes), group))
    return files


def load_layouts(folder: str, world_size: int) -> list[str]:
    """Load every checkpoint into every layout; return those that differ from the distributed full
    tensor."""
    group, meshes, layouts = setting(world_size)
    storage = open_storage(folder)
    wrong = []
    for layout in layouts:
        expected = laid_out(layout, meshes)
        for checkpoint in storage.names():
            tensors = {name: tensor.clone() for name, tensor in expected.items()}
            for tensor in tensors.values():
                local(tensor).reshape(-1).view(torch.uint8).fill_(1)
            load_tensors(storage, checkpoint, tensors, group)
            wrong += [
                f"{name} of {checkpoint} as {layout}"
                for name in FORMS
                if not equal(tensors[name], expected[name])
            ]
    return wrong


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, list[list[str]]]]:
    """A folder with the checkpoints of 1, 2 and 4 ranks in all layouts, and the files that each
    rank wrote."""
    folder = tmp_path_factory.mktemp("checkpoints")
    files_by_layout: dict[str, list[list[str]]] = {}
    for world_size in (1, 2, 4):
        by_rank = run_ranks(world_size, save_layouts, str(folder), world_size)
        files_by_layout |= {
            name: [files[name] for files in by_rank] for name in by_rank[0]
        }
    return folder, files_by_layout


@pytest.mark.parametrize(
    "world_size", [1, 2, pytest.param(4, marks=pytest.mark.extended)]
)
def test_layouts_of_1_2_and_4_ranks_load_into_each_other(
    world_size: int, checkpoints: Any
) -> None:
    """Oracle: the full tensor, distributed by PyTorch."""
    folder, files_by_layout = checkpoints
    assert len(files_by_layout) == 1 + 4 + 8
    assert (
        run_ranks(world_size, load_layouts, str(folder), world_size)
        == [[]] * world_size
    )


def test_files_are_safetensors_with_every_element_once(checkpoints: Any) -> None:
    """Oracle: tensors assembled with the safetensors library and the JSON index, without our
    code."""
    folder, files_by_layout = checkpoints
    for checkpoint, files_of_ranks in files_by_layout.items():
        files = [file for names in files_of_ranks for file in names]
        assert sorted(files) == sorted(
            path.name for path in (folder / checkpoint).iterdir()
        )
        assert "tensors.json" in files_of_ranks[0]
        index = json.loads((folder / checkpoint / "tensors.json").read_text())
        chunks = {
            file: load_file(folder / checkpoint / file)
            for file in files
            if file != "tensors.json"
        }
        for name in FORMS:
            entry = index["tensors"][name]
            assembled = torch.zeros(entry["shape"], dtype=full(name).dtype)
            for stored in entry["chunks"]:
                part = chunks[stored["file"]].pop(stored["key"])
                box = tuple(
                    slice(o, o + s)
                    for o, s in zip(stored["offsets"], stored["sizes"], strict=True)
                )
                as_bytes = torch.uint8 if part.dtype.itemsize == 1 else part.dtype
                assembled.view(as_bytes)[box] = part.view(as_bytes)
            assert equal(assembled, full(name)), f"{name} of {checkpoint}"
        assert not any(chunks.values())


def test_replicated_tensors_are_written_once_distributed_over_ranks(
    checkpoints: Any,
) -> None:
    """Oracle: the sum of the tensors' sizes."""
    folder, _ = checkpoints
    total = sum(full(name).nbytes for name in FORMS)
    for checkpoint in ("2 plain", "4 plain", "4 replicated", "4 replicated rows"):
        sizes = [
            sum(tensor.nbytes for tensor in load_file(file).values())
            for file in sorted((folder / checkpoint).glob("*.safetensors"))
        ]
        assert (
            sum(sizes) == total
            and len(sizes) == int(checkpoint[0])
            and max(sizes) < 0.75 * total
        )


def test_partial_and_empty_checkpoints_load(checkpoints: Any, tmp_path: Path) -> None:
    """Extra tensors in a checkpoint are left alone; a rank or a run without any tensors writes an
    index alone."""
    folder, _ = checkpoints
    tensors = {"even": torch.zeros(8, 6)}
    load_tensors(open_storage(str(folder)), "4 rows and columns", tensors, None)
    assert equal(tensors["even"], full("even"))
    storage = open_storage(str(tmp_path))
    storage.make("a")
    assert list(save_tensors(storage, "a", {}, None)) == ["tensors.json"]
    assert read_index(storage, "a") == {}
    load_tensors(storage, "a", {}, None)


def test_layout_with_several_files_a_rank_needs_other_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the full tensors, from files of other names, written as shards and in full."""
    monkeypatch.setattr(
        ShardFiles,
        "file_of",
        lambda rank, name: f"tensors-0000{len(name) % 3}.safetensors",
    )
    storage = open_storage(str(tmp_path))
    tensors = {name: full(name) for name in FORMS}
    for folder, gather in (("a", None), ("b", lambda some: iter(sorted(some.items())))):
        storage.make(folder)
        assert len(save_tensors(storage, folder, tensors, None, gather)) == 4
        filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load_tensors(storage, folder, filled, None)
        assert all(equal(filled[name], tensors[name]) for name in FORMS)


def save_during_training(folder: str) -> bool:
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (2,))
    tensors = laid_out("rows", {1: mesh})
    filled = {name: tensor.clone() for name, tensor in tensors.items()}

    def save_and_load() -> None:
        save_tensors(open_storage(folder), "a", tensors, group)
        load_tensors(open_storage(folder), "a", filled, group)

    thread = threading.Thread(target=save_and_load)
    thread.start()
    # Rank 0 waits inside a collective of the default group, which rank 1 joins only when all is
    # over.
    if rank == 1:
        thread.join()
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    thread.join()
    return int(total) == 3 and all(
        equal(filled[name], tensors[name]) for name in tensors
    )


def test_saving_and_loading_do_not_use_the_default_group(tmp_path: Path) -> None:
    """A save and a load in a thread end while the default group's only collective waits for
    them."""
    (tmp_path / "a").mkdir()
    assert run_ranks(2, save_during_training, str(tmp_path)) == [True, True]


SECOND = "tensors-00001.safetensors"


def load_damaged(folder: str) -> tuple[str, bool]:
    """Return the message of a refusal, and whether the tensors are unchanged."""
    group = dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (2,))
    tensors = {
        "w": distribute_tensor(
            torch.full((6, 4), 7.0), mesh, [Shard(0)], src_data_rank=None
        )
    }
    with pytest.raises(ConfigError) as refused:
        load_tensors(open_storage(folder), "a", tensors, group)
    return str(refused.value), all(
        bool((tensor == 7).all()) for tensor in tensors.values()
    )


def test_missing_file_of_one_rank_is_refused_by_all_before_loading(
    tmp_path: Path,
) -> None:
    """Oracle: the message, the same on both; rank 0 finds its own rows in an undamaged file."""
    make_saved(tmp_path / "a")
    chunk(file=SECOND)(tmp_path / "a")
    results = run_ranks(2, load_damaged, str(tmp_path))
    assert (
        results[0] == results[1]
        and f"{SECOND} is missing" in results[0][0]
        and results[0][1]
    )
