"""Damaged, hostile and unfit folders of shards are refused before any tensor is filled."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptoys.checkpoint import sharded_io as shards
from fsdptoys.checkpoint.sharded_io import load_tensors, save_tensors
from fsdptoys.checkpoint.storage import open_storage
from fsdptoys.errors import ConfigError
from tests.checkpoint.damages import Damage, change_json, edit_bytes, edit_header


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


INDEX, DATA = "tensors.json", "tensors-00000.safetensors"


def change_index(change: Callable[[Any], Any]) -> Damage:
    return change_json(INDEX, change)


def change_header(change: Callable[[Any], Any]) -> Damage:
    return edit_header(change, DATA)


def chunk(**values: Any) -> Damage:
    """Change the second chunk of ``w`` in the index."""
    return change_index(lambda tree: tree["tensors"]["w"]["chunks"][1].update(values))


def tensor(**values: Any) -> Damage:
    return change_index(lambda tree: tree["tensors"]["w"].update(values))


def entry(**values: Any) -> Damage:
    return change_header(lambda tree: tree["w@3,0"].update(values))


def twice(tree: Any) -> list[Any]:
    """The chunks of ``w``, one of them listed twice."""
    chunks = tree["tensors"]["w"]["chunks"]
    return [*chunks, chunks[1]]


def negative(tree: Any) -> list[Any]:
    """The chunks of ``w``, one of them too long, and one of negative size that compensates for it."""
    chunks = tree["tensors"]["w"]["chunks"]
    return [chunks[0], chunks[1] | {"sizes": [4, 4]}, chunks[1] | {"offsets": [7, 0], "sizes": [-1, 4]}]


DAMAGES: dict[str, tuple[str, Damage]] = {
    "index missing": (INDEX, lambda folder: (folder / INDEX).unlink()),
    "index empty": (INDEX, edit_bytes(lambda text: b"", INDEX)),
    "index truncated": (INDEX, edit_bytes(lambda text: text[:-9], INDEX)),
    "index binary": (INDEX, edit_bytes(lambda text: b"\xff" + text, INDEX)),
    "index deep": (INDEX, edit_bytes(lambda text: b"[" * 100_000, INDEX)),
    "index as a pickle": (INDEX, edit_bytes(lambda text: b"cos\nsystem\n(S'true'\ntR.", INDEX)),
    "index as a list": (INDEX, edit_bytes(lambda text: b"[1]", INDEX)),
    "other format": (INDEX, change_index(lambda tree: tree.update(format=2))),
    "format as a flag": (INDEX, change_index(lambda tree: tree.update(format=True))),
    "field too many": (INDEX, change_index(lambda tree: tree.update(code="x"))),
    "tensors as a list": (INDEX, change_index(lambda tree: tree.update(tensors=[]))),
    "dtype unknown": (INDEX, tensor(dtype="F4")),
    "dtype as a list": (INDEX, tensor(dtype=["F32"])),
    "shape larger": (INDEX, tensor(shape=[7, 4])),
    "shape without end": (INDEX, tensor(shape=[2**70, 4])),
    "shape of floats": (INDEX, tensor(shape=[6.0, 4])),
    "shape negative": (INDEX, tensor(shape=[-6, 4])),
    "shape as a flag": (INDEX, tensor(shape=[6, True])),
    "no chunks": (INDEX, tensor(chunks=[])),
    "chunks as a number": (INDEX, tensor(chunks=3)),
    "chunk missing": (INDEX, change_index(lambda tree: tree["tensors"]["w"]["chunks"].pop())),
    "chunk at another's offset": (INDEX, chunk(offsets=[0, 0])),
    "chunk twice": (INDEX, change_index(lambda tree: tree["tensors"]["w"].update(chunks=twice(tree)))),
    "chunks of negative size": (INDEX, change_index(lambda tree: tree["tensors"]["w"].update(chunks=negative(tree)))),
    "chunk at a flag": (INDEX, change_index(lambda tree: tree["tensors"]["w"]["chunks"][0].update(offsets=[0, False]))),
    "chunk overlaps": (INDEX, chunk(offsets=[2, 0], sizes=[4, 4])),
    "chunk leaves a gap": (INDEX, chunk(offsets=[4, 0], sizes=[2, 4])),
    "chunk outside": (INDEX, chunk(offsets=[5, 0])),
    "chunk of other dims": (INDEX, chunk(offsets=[3])),
    "chunk narrow": (INDEX, chunk(sizes=[3, 3])),
    "chunk with a field too many": (INDEX, chunk(url="http://x")),
    "key as a number": (INDEX, chunk(key=3)),
    "file as a number": (INDEX, chunk(file=3)),
    "file above": (INDEX, chunk(file="../a/tensors-00000.safetensors")),
    "file absolute": (INDEX, chunk(file="/etc/passwd")),
    "file of another kind": (INDEX, chunk(file="pickle.pt")),
    "file with a line end": (INDEX, chunk(file="tensors-00000.safetensors\n")),
    "file missing": ("tensors-00009.safetensors", chunk(file="tensors-00009.safetensors")),
    "key not in file": (DATA, chunk(key="w@9,9")),
    "key of another chunk": (DATA, chunk(key="b")),
    "data missing": (DATA, lambda folder: (folder / DATA).unlink()),
    "data empty": (DATA, edit_bytes(lambda content: b"", DATA)),
    "data seven bytes": (DATA, edit_bytes(lambda content: content[:7], DATA)),
    "data truncated in the header": (DATA, edit_bytes(lambda content: content[:40], DATA)),
    "data truncated": (DATA, edit_bytes(lambda content: content[:-1], DATA)),
    "header without end": (DATA, edit_bytes(lambda content: b"\xff" * 8 + content[8:], DATA)),
    "header not JSON": (DATA, edit_bytes(lambda content: content[:8] + b"x" + content[9:], DATA)),
    "header as a list": (DATA, change_header(lambda tree: [1])),
    "entry as a number": (DATA, change_header(lambda tree: tree.update({"w@3,0": 1}))),
    "entry of another dtype": (DATA, entry(dtype="I32")),
    "entry of another shape": (DATA, entry(shape=[4, 3])),
    "entry without place": (DATA, entry(data_offsets=None)),
    "entry with half its offsets": (DATA, entry(data_offsets=[0])),
    "entry at a float": (DATA, entry(data_offsets=[0.0, 48.0])),
    "entry before the data": (DATA, entry(data_offsets=[-48, 0])),
    "entry too short": (DATA, entry(data_offsets=[0, 44])),
    "entry beyond the end": (DATA, entry(data_offsets=[2**62, 2**62 + 48])),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_with_its_file_before_tensors_are_filled(damage: str, tmp_path: Path) -> None:
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
def test_missing_tensors_are_reported(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    """Checkpoint, tensor, found and wanted, before anything is filled."""
    make_saved(tmp_path / "a")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/a {message}.*; resume with the model and the optimizer"):
        load_tensors(open_storage(str(tmp_path)), "a", tensors, None)
    assert not any(bool(tensor.any()) for tensor in tensors.values())


def test_too_long_index_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of reading holds for writing."""
    monkeypatch.setattr("fsdptoys.checkpoint.shard_format.LARGEST_INDEX_BYTES", 100)
    with pytest.raises(ConfigError, match=r"at most 100 are read again; set checkpoint\.form=full"):
        make_saved(tmp_path / "a")
    assert shards.INDEX_FILE not in [path.name for path in (tmp_path / "a").iterdir()]
