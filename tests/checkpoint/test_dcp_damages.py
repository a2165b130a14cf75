"""Damaged and hostile folders of torch.distributed.checkpoint, which run nothing."""

import os
import pickle
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fsdptoys.checkpoint.dcp_metadata import DCPTensor, read_dcp_metadata
from fsdptoys.errors import ConfigError
from tests.checkpoint.titan_folders import (
    LLAMA,
    overrides_of,
    refusal,
    save_alone,
    titan_state,
)


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def edit_metadata(change: Callable[[Metadata], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return damage


def edit_place(**fields: Any) -> Callable[[Path], object]:
    """Change where the file says that the norm is."""

    def change(metadata: Metadata) -> None:
        index = MetadataIndex("norm.weight", [0])
        info = metadata.storage_data[index]
        metadata.storage_data[index] = _StorageInfo(**{**vars(info), **fields})

    return edit_metadata(change)


def run_code_in_metadata(folder: Path) -> None:
    content = pickle.dumps({"state_dict_metadata": Hostile(folder / "ran")})
    (folder / ".metadata").write_bytes(content)


def run_code_in_planner_data(metadata: Metadata) -> None:
    metadata.planner_data = Hostile(Path("ran"))


def use_file(file: Path) -> None:
    """Say that the norm is the whole of a file."""
    edit_place(relative_path=file.name, offset=0, length=file.stat().st_size)(
        file.parent
    )


def run_code_in_shard(folder: Path) -> None:
    """Put a pickle in the place of a tensor's bytes."""
    file = folder / "hostile.distcp"
    torch.save([Hostile(folder / "ran"), torch.ones(64)], file)
    use_file(file)


def compress_shard(folder: Path) -> None:
    torch.save(torch.ones(64), folder / "plain.pt")
    file = folder / "small.distcp"
    with (
        zipfile.ZipFile(folder / "plain.pt") as plain,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for name in plain.namelist():
            compressed.writestr(name, plain.read(name))
    use_file(file)


def other_shape_in_shard(folder: Path) -> None:
    file = folder / "other.distcp"
    torch.save(torch.ones(65), file)
    use_file(file)


def overlap(metadata: Metadata) -> None:
    item: Any = metadata.state_dict_metadata["norm.weight"]
    item.chunks.append(item.chunks[0])


def leave_gap(metadata: Metadata) -> None:
    item: Any = metadata.state_dict_metadata["norm.weight"]
    item.chunks.clear()


def claim_size(metadata: Metadata) -> None:
    item: Any = metadata.state_dict_metadata["norm.weight"]
    item.size = item.chunks[0].sizes = torch.Size([2**40])


def drop_tensor(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["layers.1.attention.wq.weight"]


def add_tensor(metadata: Metadata) -> None:
    items: Any = metadata.state_dict_metadata
    items["layers.0.attention.wq.bias"] = items["norm.weight"]
    index = MetadataIndex("norm.weight", [0])
    info = metadata.storage_data[index]
    metadata.storage_data[MetadataIndex("layers.0.attention.wq.bias", [0])] = info


def not_finite(folder: Path) -> None:
    file = folder / "nan.distcp"
    torch.save(torch.full((64,), torch.nan), file)
    use_file(file)


def allocate_memo(folder: Path) -> None:
    """Index four billion objects, for which the unpickler in C allocates a table."""
    content = b"\x80\x04N" + pickle.LONG_BINPUT + b"\xff\xff\xff\xff."
    (folder / ".metadata").write_bytes(content)


def call_torch(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x04ctorch\nload\n(U\x01xtR.")


def nest_key(folder: Path) -> None:
    """Hash a tuple of a million tuples, which takes as many frames of the stack."""
    content = b"\x80\x04}" + pickle.EMPTY_TUPLE + pickle.TUPLE1 * 10**6 + b"Ns."
    (folder / ".metadata").write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "code in metadata": (
        run_code_in_metadata,
        r"asks for 'posix'\.'mkdir', which .* was not run",
    ),
    "code in planner data": (
        edit_metadata(run_code_in_planner_data),
        r"asks for 'posix'\.'mkdir', which .* was not run",
    ),
    "a function of torch": (
        call_torch,
        r"asks for 'torch'\.'load', which .* was not run",
    ),
    "code in a shard": (
        run_code_in_shard,
        r"hostile.distcp holds a chunk of norm.weight that",
    ),
    "a table of billions": (
        allocate_memo,
        r"no metadata of torch.distributed.checkpoint",
    ),
    "a nested key": (nest_key, r"no metadata .*a key is no name"),
    "an empty file": (
        lambda folder: (folder / ".metadata").write_bytes(b""),
        r"no metadata",
    ),
    "a list": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([1])),
        r"no metadata .*a Metadata is missing",
    ),
    "no metadata": (
        lambda folder: (folder / ".metadata").unlink(),
        r"\.metadata is missing",
    ),
    "a path": (
        edit_place(relative_path="../x"),
        r"is in '\.\./x', which is not the name",
    ),
    "compressed": (
        edit_place(transform_descriptors=["zstd"]),
        r"norm.weight' is compressed",
    ),
    "a compressed zip": (
        compress_shard,
        r"small.distcp holds a chunk .*it is compressed",
    ),
    "no shard": (edit_place(relative_path="gone.distcp"), r"gone.distcp is missing"),
    "beyond the end": (
        edit_place(offset=2**40),
        r"holds \d+ bytes, and norm.weight ends",
    ),
    "a short place": (edit_place(length=8), r"8 bytes for a chunk of norm.weight"),
    "another place": (
        edit_place(offset=3),
        r"chunk of norm.weight that cannot be read",
    ),
    "negative place": (edit_place(offset=-3), r"\(-3, \d+\) are no sizes"),
    "another shape in a shard": (
        other_shape_in_shard,
        r"it has another dtype or shape",
    ),
    "overlapping chunks": (
        edit_metadata(overlap),
        r"'norm.weight' do not cover it once",
    ),
    "a gap": (edit_metadata(leave_gap), r"'norm.weight' do not cover it once"),
    "a size of terabytes": (
        edit_metadata(claim_size),
        r"norm.weight in the shape 1099511627776",
    ),
    "no tensor": (
        edit_metadata(drop_tensor),
        r"holds no layers.1.attention.wq.weight, which",
    ),
    "a tensor too many": (
        edit_metadata(add_tensor),
        r"wq.bias, for which a llama model",
    ),
    "not finite": (not_finite, r"holds norm.weight with values that are not finite"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_and_hostile_folders_run_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one sentence, no folder that the code would make, and no output."""
    monkeypatch.chdir(tmp_path)
    folder = save_alone(tmp_path / "step-3", titan_state(LLAMA))
    damage, message = DAMAGES[case]
    damage(folder)
    assert re.search(message, refusal(folder, *overrides_of(LLAMA)))
    assert not (folder / "ran").exists() and not (tmp_path / "ran").exists()


def test_random_edits_of_metadata_are_refused_or_harmless(tmp_path: Path) -> None:
    """Oracle: the tensors, or a ConfigError of one line; bytes are changed, cut and repeated."""
    folder = save_alone(tmp_path / "step-3", titan_state(LLAMA))
    content = (folder / ".metadata").read_bytes()
    draw = random.Random(0)
    for _ in range(150):
        edited = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            index = draw.randrange(len(edited))
            kind = draw.randrange(3)
            if kind == 0:
                edited[index] = draw.randrange(256)
            elif kind == 1:
                del edited[index : index + draw.randint(1, 40)]
            else:
                edited[index:index] = edited[index : index + draw.randint(1, 40)]
        (folder / ".metadata").write_bytes(edited)
        try:
            tensors = read_dcp_metadata(folder)
        except ConfigError as error:
            assert "\n" not in str(error)
        else:
            assert all(isinstance(tensor, DCPTensor) for tensor in tensors.values())
