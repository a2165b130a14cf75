"""Round trips of tensors of any layout on any number of ranks, and rejection of damaged or hostile files."""

import errno
import json
import math
import resource
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdptoys.checkpoint import sharded_io as shards
from fsdptoys.checkpoint.sharded_io import load_tensors, save_full_tensors, save_tensors
from fsdptoys.checkpoint.storage import LocalStorage, open_storage
from fsdptoys.checkpoint.tensor_index import read_index
from fsdptoys.errors import ConfigError
from scripts.ranks import run_ranks

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
    content = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape)


def laid_out(layout: str, meshes: dict[int, DeviceMesh]) -> dict[str, Tensor]:
    """All tensors as a rank holds them."""
    placements = LAYOUTS[layout]
    tensors = {}
    for name, (shape, _) in FORMS.items():
        tensors[name] = full(name)
        if placements:
            fit = [p if not p.is_shard() or p.dim < len(shape) else Replicate() for p in placements]
            tensors[name] = distribute_tensor(tensors[name], meshes[len(fit)], fit, src_data_rank=None)
    return tensors


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def equal(one: Tensor, other: Tensor) -> bool:
    """In every bit."""
    one, other = local(one).contiguous(), local(other).contiguous()
    same_form = one.shape == other.shape and one.dtype == other.dtype
    return same_form and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def setting(world_size: int) -> tuple[Any, dict[int, DeviceMesh], list[str]]:
    """Group, meshes by their number of axes, and layouts that this many ranks can have."""
    if world_size == 1:
        return None, {}, ["plain"]
    meshes = {1: init_device_mesh("cpu", (world_size,))}
    if world_size == 4:
        meshes[2] = init_device_mesh("cpu", (2, 2))
    layouts = [name for name, placements in LAYOUTS.items() if len(placements) <= len(meshes)]
    return dist.new_group(backend="gloo"), meshes, layouts


def save_layouts(folder: str, world_size: int) -> list[list[str]]:
    group, meshes, layouts = setting(world_size)
    storage = open_storage(folder)
    files = []
    for layout in layouts:
        storage.make(f"{world_size} {layout}")
        if group is not None:
            dist.barrier(group)
        files.append(save_tensors(storage, f"{world_size} {layout}", laid_out(layout, meshes), group))
    return files


def load_layouts(folder: str, world_size: int) -> list[str]:
    """Load every checkpoint into every layout; return those that differ from the distributed full tensor."""
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
                f"{name} of {checkpoint} as {layout}" for name in FORMS if not equal(tensors[name], expected[name])
            ]
    return wrong


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[list[str]]]]:
    """A folder with the checkpoints of 1, 2 and 4 ranks in all layouts, and the files that each rank wrote."""
    folder = tmp_path_factory.mktemp("checkpoints")
    written = {}
    for world_size in (1, 2, 4):
        by_rank = (
            [save_layouts(str(folder), 1)]
            if world_size == 1
            else run_ranks(world_size, save_layouts, str(folder), world_size)
        )
        layouts = [name.split(" ", 1)[1] for name in sorted(path.name for path in folder.glob(f"{world_size} *"))]
        order = [layout for layout in LAYOUTS if layout in layouts]
        for position, layout in enumerate(order):
            written[f"{world_size} {layout}"] = [files[position] for files in by_rank]
    return folder, written


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_layout_of_1_2_and_4_ranks_is_loaded_into_every_other(world_size: int, checkpoints: Any) -> None:
    """Oracle: the full tensor, distributed by PyTorch."""
    folder, written = checkpoints
    assert len(written) == 1 + 4 + 8
    if world_size == 1:
        assert load_layouts(str(folder), 1) == []
    else:
        assert run_ranks(world_size, load_layouts, str(folder), world_size) == [[]] * world_size


def test_files_are_safetensors_that_hold_every_number_once(checkpoints: Any) -> None:
    """Oracle: tensors assembled with the safetensors library and the JSON index, without our code."""
    folder, written = checkpoints
    for checkpoint, files_of_ranks in written.items():
        list_with_retries = [file for files in files_of_ranks for file in files]
        assert sorted(list_with_retries) == sorted(path.name for path in (folder / checkpoint).iterdir())
        assert "tensors.json" in files_of_ranks[0]
        index = json.loads((folder / checkpoint / "tensors.json").read_text())
        chunks = {file: load_file(folder / checkpoint / file) for file in list_with_retries if file != "tensors.json"}
        for name in FORMS:
            entry = index["tensors"][name]
            whole = torch.zeros(entry["shape"], dtype=full(name).dtype)
            for chunk in entry["chunks"]:
                part = chunks[chunk["file"]].pop(chunk["key"])
                box = tuple(slice(o, o + s) for o, s in zip(chunk["offsets"], chunk["sizes"], strict=True))
                whole.view(torch.uint8 if whole.dtype.itemsize == 1 else whole.dtype)[box] = part.view(
                    torch.uint8 if part.dtype.itemsize == 1 else part.dtype
                )
            assert equal(whole, full(name)), f"{name} of {checkpoint}"
        assert not any(chunks.values())


def test_replicated_tensors_are_written_once_and_by_all_ranks(checkpoints: Any) -> None:
    """Oracle: the sum of the tensors' sizes."""
    folder, _ = checkpoints
    total = sum(full(name).nbytes for name in FORMS)
    for checkpoint in ("2 plain", "4 plain", "4 replicated", "4 replicated rows"):
        sizes = [
            sum(tensor.nbytes for tensor in load_file(file).values())
            for file in sorted((folder / checkpoint).glob("*.safetensors"))
        ]
        assert sum(sizes) == total and len(sizes) == int(checkpoint[0]) and max(sizes) < 0.75 * total


def test_names_types_and_shapes_are_known_without_loading(checkpoints: Any) -> None:
    """Oracle: the saved tensors."""
    folder, written = checkpoints
    for checkpoint in written:
        index = read_index(open_storage(str(folder)), checkpoint)
        assert {name: tensor.shape for name, tensor in index.items()} == {n: shape for n, (shape, _) in FORMS.items()}
        assert (index["uneven"].dtype, index["number"].dtype, index["flags"].dtype) == ("BF16", "I64", "BOOL")


@pytest.mark.parametrize("kind", ["file://", "memory:/"])
def test_a_url_holds_the_same_as_a_folder(kind: str, tmp_path: Path) -> None:
    """Oracle: the original tensors, also non-contiguous ones with gradients."""
    storage = open_storage(f"{kind}{tmp_path}")
    storage.make("a")
    tensors = laid_out("plain", {})
    tensors["transposed"] = torch.arange(12.0).reshape(3, 4).t().requires_grad_()
    assert save_tensors(storage, "a", tensors, None) == ["tensors-00000.safetensors", "tensors.json"]
    filled = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(storage, "a", filled, None)
    assert all(equal(filled[name], tensors[name]) for name in tensors)


def test_part_of_a_checkpoint_is_loaded_and_nothing_is_an_answer_too(checkpoints: Any, tmp_path: Path) -> None:
    """Extra tensors in a checkpoint are left alone; a rank or a run without any tensors writes an index alone."""
    folder, _ = checkpoints
    tensors = {"even": torch.zeros(8, 6)}
    load_tensors(open_storage(str(folder)), "4 rows and columns", tensors, None)
    assert equal(tensors["even"], full("even"))
    storage = open_storage(str(tmp_path))
    storage.make("a")
    assert save_tensors(storage, "a", {}, None) == ["tensors.json"] and read_index(storage, "a") == {}
    load_tensors(storage, "a", {}, None)


def save_beside_training(folder: str) -> bool:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (2,))
    tensors = laid_out("rows", {1: mesh})
    filled = {name: tensor.clone() for name, tensor in tensors.items()}

    def save_and_load() -> None:
        save_tensors(open_storage(folder), "a", tensors, group)
        load_tensors(open_storage(folder), "a", filled, group)

    thread = threading.Thread(target=save_and_load)
    thread.start()
    # Rank 0 waits inside a collective of the default group, which rank 1 joins only when all is over.
    if rank == 1:
        thread.join()
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    thread.join()
    return int(total) == 3 and all(equal(filled[name], tensors[name]) for name in tensors)


def test_nothing_is_said_over_the_default_group(tmp_path: Path) -> None:
    """A save and a load in a thread end while the default group's only collective waits for them."""
    (tmp_path / "a").mkdir()
    assert run_ranks(2, save_beside_training, str(tmp_path), timeout_seconds=60) == [True, True]


class Interrupting(LocalStorage):
    """Is interrupted while it writes a file of the given name."""

    def __init__(self, where: str, error: BaseException, file: str) -> None:
        super().__init__(where)
        self.error, self.file = error, file

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """Raise the error instead."""
        if path.endswith(self.file):
            raise self.error
        with super().writing(path) as file:
            yield file


class Limited(LocalStorage):
    """The kernel lets one file grow to a few bytes."""

    def __init__(self, where: str, file: str) -> None:
        super().__init__(where)
        self.file = file

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """Set the limit while this file is open."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if path.endswith(f"a/{self.file}"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
        try:
            with super().writing(path) as file:
                yield file
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def gather_whole(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor | None]]:
    """As a strategy would: one at a time, on rank 0 alone."""
    for name in sorted(tensors):
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, whole if dist.get_rank() == 0 else None


def fail_and_go_on(folder: str, error: BaseException | None, file: str, whole: bool) -> list[str]:
    """Save where a file cannot be written, then where all can, over the same group."""
    group, mesh = dist.new_group(backend="gloo"), init_device_mesh("cpu", (2,))
    tensors = {name: tensor for name, tensor in laid_out("rows", {1: mesh}).items() if name != "float8"}
    storage = Limited(folder, file) if error is None else Interrupting(folder, error, file)

    def save(where: str) -> list[str]:
        if whole:
            return save_full_tensors(storage, where, tensors, gather_whole, group)
        return save_tensors(storage, where, tensors, group)

    try:
        save("a")
        raise AssertionError("it was saved")
    except (OSError, ConfigError, KeyboardInterrupt) as caught:
        message = f"{type(caught).__name__} {getattr(caught, 'errno', None)} {caught}"
    storage = open_storage(folder)
    save("b")
    load_tensors(storage, "b", tensors, group)
    return [message, "" if all(equal(t, laid_out("rows", {1: mesh})[name]) for name, t in tensors.items()) else "wrong"]


@pytest.mark.parametrize(
    ("file", "whole"),
    [
        ("tensors-00000.safetensors", False),
        ("tensors-00001.safetensors", False),
        ("tensors.json", False),
        ("tensors-00000.safetensors", True),
        ("tensors.json", True),
    ],
)
def test_a_disk_full_under_one_rank_is_the_same_error_on_all(file: str, whole: bool, tmp_path: Path) -> None:
    """Oracle: the kernel's error for one file that grows over a limit; the group serves the next save."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    results = run_ranks(2, fail_and_go_on, str(tmp_path), None, file, whole)
    message = f"OSError {errno.EFBIG} [Errno {errno.EFBIG}] File too large: '{tmp_path}/a/{file}'"
    assert results == [[message, ""]] * 2
    assert (tmp_path / "b" / "tensors-00001.safetensors").exists() != whole


@pytest.mark.parametrize("file", ["tensors-00001.safetensors", "tensors.json"])
@pytest.mark.parametrize("error", [ConfigError("message"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_errors_and_interruptions_of_one_rank_reach_all_as_what_they_are(
    error: BaseException, file: str, tmp_path: Path
) -> None:
    """And not as PyTorch's CheckpointException, which no handler of Exceptions catches."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    results = run_ranks(2, fail_and_go_on, str(tmp_path), error, file, False)
    assert results == [[f"{type(error).__name__} None {error}", ""]] * 2


def damaged_load(folder: str, tensors_of: Callable[[], dict[str, Tensor]]) -> list[Any]:
    tensors = tensors_of()
    group, _, _ = setting(dist.get_world_size())
    try:
        load_tensors(open_storage(folder), "a", tensors, group)
    except ConfigError as error:
        return [str(error), all(bool((tensor == 7).all()) for tensor in tensors.values())]
    return ["", False]


def test_a_header_that_one_rank_needs_is_refused_by_all_before_anything_is_filled(tmp_path: Path) -> None:
    """Rank 0 finds its own rows in an undamaged file."""
    shutil.copytree(make_saved(tmp_path / "x"), tmp_path / "a")
    tree = json.loads((tmp_path / "a" / "tensors.json").read_text())
    tree["tensors"]["w"]["chunks"][1]["file"] = "tensors-00001.safetensors"
    (tmp_path / "a" / "tensors.json").write_text(json.dumps(tree))

    def tensors() -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        return {"w": distribute_tensor(torch.full((6, 4), 7.0), mesh, [Shard(0)], src_data_rank=None)}

    results = run_ranks(2, damaged_load, str(tmp_path), tensors)
    assert results[0] == results[1] and "tensors-00001.safetensors is missing" in results[0][0] and results[0][1]


def make_saved(folder: Path) -> Path:
    """A checkpoint with ``w`` in two chunks and ``b`` in one, all in one file."""
    folder.mkdir(parents=True)
    storage = open_storage(str(folder.parent))
    save_tensors(storage, folder.name, {"w@0,0": torch.ones(3, 4), "w@3,0": torch.ones(3, 4), "b": torch.ones(4)}, None)
    tree = json.loads((folder / "tensors.json").read_text())
    parts = [tree["tensors"].pop(key)["chunks"][0] for key in ("w@0,0", "w@3,0")]
    parts[1]["offsets"] = [3, 0]
    tree["tensors"]["w"] = {"dtype": "F32", "shape": [6, 4], "chunks": parts}
    (folder / "tensors.json").write_text(json.dumps(tree))
    return folder


def change_index(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tree = json.loads((folder / "tensors.json").read_text())
        change(tree)
        (folder / "tensors.json").write_text(json.dumps(tree))

    return damage


def change_header(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "tensors-00000.safetensors"
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        tree = json.loads(content[8 : 8 + length])
        text = json.dumps(change(tree) or tree).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return damage


def change_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def chunk(**values: Any) -> Callable[[Path], None]:
    """Change the second chunk of ``w`` in the index."""
    return change_index(lambda tree: tree["tensors"]["w"]["chunks"][1].update(values))


def tensor(**values: Any) -> Callable[[Path], None]:
    return change_index(lambda tree: tree["tensors"]["w"].update(values))


def entry(**values: Any) -> Callable[[Path], None]:
    return change_header(lambda tree: tree["w@3,0"].update(values))


def twice(tree: Any) -> list[Any]:
    """The chunks of ``w``, one of them said once more."""
    chunks = tree["tensors"]["w"]["chunks"]
    return [*chunks, chunks[1]]


def negative(tree: Any) -> list[Any]:
    """The chunks of ``w``, one of them too long, and one of negative size that compensates for it."""
    chunks = tree["tensors"]["w"]["chunks"]
    return [chunks[0], chunks[1] | {"sizes": [4, 4]}, chunks[1] | {"offsets": [7, 0], "sizes": [-1, 4]}]


INDEX, DATA = "tensors.json", "tensors-00000.safetensors"

DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "index gone": (INDEX, lambda folder: (folder / INDEX).unlink()),
    "index empty": (INDEX, change_bytes(INDEX, lambda text: b"")),
    "index cut": (INDEX, change_bytes(INDEX, lambda text: text[:-9])),
    "index binary": (INDEX, change_bytes(INDEX, lambda text: b"\xff" + text)),
    "index deep": (INDEX, change_bytes(INDEX, lambda text: b"[" * 100_000)),
    "index a pickle": (INDEX, change_bytes(INDEX, lambda text: b"cos\nsystem\n(S'true'\ntR.")),
    "index a list": (INDEX, change_bytes(INDEX, lambda text: b"[1]")),
    "other format": (INDEX, change_index(lambda tree: tree.update(format=2))),
    "format a flag": (INDEX, change_index(lambda tree: tree.update(format=True))),
    "field too many": (INDEX, change_index(lambda tree: tree.update(code="x"))),
    "tensors a list": (INDEX, change_index(lambda tree: tree.update(tensors=[]))),
    "dtype unknown": (INDEX, tensor(dtype="F4")),
    "dtype a list": (INDEX, tensor(dtype=["F32"])),
    "shape larger": (INDEX, tensor(shape=[7, 4])),
    "shape without end": (INDEX, tensor(shape=[2**70, 4])),
    "shape of floats": (INDEX, tensor(shape=[6.0, 4])),
    "shape negative": (INDEX, tensor(shape=[-6, 4])),
    "shape a flag": (INDEX, tensor(shape=[6, True])),
    "no chunks": (INDEX, tensor(chunks=[])),
    "chunks a number": (INDEX, tensor(chunks=3)),
    "chunk missing": (INDEX, change_index(lambda tree: tree["tensors"]["w"]["chunks"].pop())),
    "chunk in another's place": (INDEX, chunk(offsets=[0, 0])),
    "chunk twice": (INDEX, change_index(lambda tree: tree["tensors"]["w"].update(chunks=twice(tree)))),
    "chunks of negative size": (INDEX, change_index(lambda tree: tree["tensors"]["w"].update(chunks=negative(tree)))),
    "chunk at a flag": (INDEX, change_index(lambda tree: tree["tensors"]["w"]["chunks"][0].update(offsets=[0, False]))),
    "chunk overlaps": (INDEX, chunk(offsets=[2, 0], sizes=[4, 4])),
    "chunk leaves a gap": (INDEX, chunk(offsets=[4, 0], sizes=[2, 4])),
    "chunk outside": (INDEX, chunk(offsets=[5, 0])),
    "chunk of other dims": (INDEX, chunk(offsets=[3])),
    "chunk narrow": (INDEX, chunk(sizes=[3, 3])),
    "chunk with a field too many": (INDEX, chunk(url="http://x")),
    "key a number": (INDEX, chunk(key=3)),
    "file a number": (INDEX, chunk(file=3)),
    "file above": (INDEX, chunk(file="../a/tensors-00000.safetensors")),
    "file absolute": (INDEX, chunk(file="/etc/passwd")),
    "file of another kind": (INDEX, chunk(file="pickle.pt")),
    "file with a line end": (INDEX, chunk(file="tensors-00000.safetensors\n")),
    "file not there": ("tensors-00009.safetensors", chunk(file="tensors-00009.safetensors")),
    "key not in file": (DATA, chunk(key="w@9,9")),
    "key of another chunk": (DATA, chunk(key="b")),
    "data gone": (DATA, lambda folder: (folder / DATA).unlink()),
    "data empty": (DATA, change_bytes(DATA, lambda content: b"")),
    "data seven bytes": (DATA, change_bytes(DATA, lambda content: content[:7])),
    "data cut in the header": (DATA, change_bytes(DATA, lambda content: content[:40])),
    "data cut": (DATA, change_bytes(DATA, lambda content: content[:-1])),
    "header without end": (DATA, change_bytes(DATA, lambda content: b"\xff" * 8 + content[8:])),
    "header not JSON": (DATA, change_bytes(DATA, lambda content: content[:8] + b"x" + content[9:])),
    "header a list": (DATA, change_header(lambda tree: [1])),
    "entry a number": (DATA, change_header(lambda tree: tree.update({"w@3,0": 1}))),
    "entry of another dtype": (DATA, entry(dtype="I32")),
    "entry of another shape": (DATA, entry(shape=[4, 3])),
    "entry without place": (DATA, entry(data_offsets=None)),
    "entry with half a place": (DATA, entry(data_offsets=[0])),
    "entry at a float": (DATA, entry(data_offsets=[0.0, 48.0])),
    "entry before the data": (DATA, entry(data_offsets=[-48, 0])),
    "entry too short": (DATA, entry(data_offsets=[0, 44])),
    "entry beyond the end": (DATA, entry(data_offsets=[2**62, 2**62 + 48])),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_by_its_file_before_anything_is_filled(damage: str, tmp_path: Path) -> None:
    """Oracle: the name of the damaged file, for each damage alone."""
    folder = make_saved(tmp_path / "a")
    tensors = {"b": torch.full((4,), 7.0), "w": torch.full((6, 4), 7.0)}
    load_tensors(open_storage(str(tmp_path)), "a", tensors, None)
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())
    tensors = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
    file, apply = DAMAGES[damage]
    apply(folder)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a/{file} .*; resume from another checkpoint$"):
        load_tensors(open_storage(str(tmp_path)), "a", tensors, None)
    assert all(bool((tensor == 7).all()) for tensor in tensors.values())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.zeros(6, 4), "x": torch.zeros(1)}, r"holds no x, which"),
        ({"x": torch.zeros(1), "y": torch.zeros(1)}, r"holds no x nor 1 others, which"),
        ({"w": torch.zeros(4, 6)}, r"holds w as F32 of shape 6×4, and this run has it as F32 of shape 4×6"),
        ({"w": torch.zeros(6, 4).half()}, r"holds w as F32 of shape 6×4, and this run has it as F16 of shape 6×4"),
        ({"w": torch.zeros(())}, r"holds w as F32 of shape 6×4, and this run has it as a single number of F32"),
    ],
)
def test_what_the_checkpoint_does_not_hold_is_told(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    """Checkpoint, tensor, found and wanted, before anything is filled."""
    make_saved(tmp_path / "a")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a {message}.*; resume with the model and the optimizer"):
        load_tensors(open_storage(str(tmp_path)), "a", tensors, None)
    assert not any(bool(tensor.any()) for tensor in tensors.values())


def test_an_index_too_long_to_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of reading holds for writing."""
    monkeypatch.setattr("fsdptoys.checkpoint.tensor_index.LARGEST_INDEX_BYTES", 100)
    with pytest.raises(ConfigError, match=r"at most 100 are read again; set checkpoint\.form=full"):
        make_saved(tmp_path / "a")
    assert shards.INDEX_FILE not in [path.name for path in (tmp_path / "a").iterdir()]
