"""Damaged, hostile and unfit checkpoints are skipped, or refused before any tensor is filled."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptoys.checkpoint import CheckpointConfig, peek
from fsdptoys.checkpoint.manifest import Manifest
from fsdptoys.checkpoint.sharded_io import load_tensors
from fsdptoys.checkpoint.storage import open_storage
from fsdptoys.errors import ConfigError
from fsdptoys.utils.sealed_folder import FileSum, sum_bytes
from tests.checkpoint.damages import (
    INDEX,
    SENTENCES,
    Damage,
    Hostile,
    change_json,
    chunk,
    edit_bytes,
    edit_header,
    flip,
    make_saved,
)
from tests.harness.folders import check, check_tensors, copied, resume

ONE, TWO, THREE = (f"step-0000000{step}" for step in (1, 2, 3))
TENSORS = "tensors-00000.safetensors"
MANIFEST = f"{THREE}/manifest.json"


def forge(change: Callable[[dict[str, FileSum]], object], name: str = THREE) -> Damage:
    """A manifest with a valid checksum of its own."""

    def damage(folder: Path) -> None:
        tree = json.loads((folder / THREE / "manifest.json").read_text())["files"]
        files = {
            path: FileSum(entry["bytes"], entry["sha256"])
            for path, entry in tree.items()
        }
        change(files)
        (folder / THREE / "manifest.json").write_bytes(Manifest(name, files).to_bytes())

    return damage


def replace_by(content: bytes, file: str = "state.json") -> Damage:
    """Other content of a file, with its checksum in the manifest."""

    def damage(folder: Path) -> None:
        (folder / THREE / file).write_bytes(content)
        forge(lambda files: files.update({file: sum_bytes(content)}))(folder)

    return damage


def link(path: str, content: bytes | None) -> Damage:
    """Replace a file by a symbolic link: to other content of the same length, or to a pipe."""

    def damage(folder: Path) -> None:
        elsewhere = folder.parent / "elsewhere"
        if content is None:
            os.mkfifo(elsewhere)
        else:
            size = (folder / path).stat().st_size
            elsewhere.write_bytes((content * size)[:size])
        (folder / path).unlink()
        (folder / path).symlink_to(elsewhere)

    return damage


def replace_folder(fill: Damage = Path.mkdir) -> Damage:
    return lambda folder: (shutil.rmtree(folder / THREE), fill(folder / THREE))


def rename_second(folder: Path) -> None:
    shutil.rmtree(folder / THREE)
    (folder / TWO).rename(folder / THREE)
    shutil.copytree(folder / ONE, folder / TWO)


def list_pipe(folder: Path) -> None:
    os.mkfifo(folder / THREE / "x")
    forge(lambda files: files.update({"x": sum_bytes(b"")}))(folder)


def replace_by_folder(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()


DAMAGES: dict[str, Damage] = {
    "a flipped bit in the tensors": flip(f"{THREE}/{TENSORS}"),
    "a flipped bit in the index": flip(f"{THREE}/tensors.json"),
    "a flipped bit in a rank's facts": flip(f"{THREE}/rank-00000.json"),
    "a flipped bit in the manifest": flip(MANIFEST),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "an empty folder": replace_folder(),
    "a file in place of the folder": replace_folder(Path.touch),
    "an empty manifest": edit_bytes(lambda text: b"", MANIFEST),
    "a pipe as the manifest": link(MANIFEST, None),
    "a folder as the manifest": replace_by_folder,
    "a missing file": lambda folder: (folder / THREE / TENSORS).unlink(),
    "a truncated file": lambda folder: os.truncate(folder / THREE / TENSORS, 20),
    "a pipe as a file": link(f"{THREE}/state.json", None),
    "a link to another file": link(f"{THREE}/{TENSORS}", b"secret"),
    "a manifest with other spaces": change_json(MANIFEST, lambda tree: None),
    "a newer format": change_json(MANIFEST, lambda tree: tree.update(format=2)),
    "a renamed folder": rename_second,
    "a manifest that lists a path": forge(
        lambda files: files.update({"../x": FileSum(1, "0" * 64)})
    ),
    "a manifest that lists an absolute path": forge(
        lambda files: files.update({"/etc/passwd": FileSum(1, "0" * 64)})
    ),
    "a manifest without the state": forge(lambda files: files.pop("state.json")),
    "a manifest that lists a pipe": list_pipe,
    "a state of another step": replace_by(b'{"step": 2}'),
    "a state of a fractional step": replace_by(b'{"step": 3.0}'),
    "a state of other ranks": replace_by(b'{"step": 3, "world_size": 2}'),
    "a state with invalid JSON": replace_by(b'{"step": NaN}'),
    "a deeply nested state": replace_by(b"[" * 100_000),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_invalid_checkpoint_is_skipped_or_refused(
    case: str, series: Path, tmp_path: Path
) -> None:
    """Oracle: the expected message, and the values of the previous checkpoint."""
    reason = SENTENCES["damaged checkpoints"][case]
    folder = copied(series, tmp_path / "checkpoints")
    DAMAGES[case](folder)
    twice = case == "a renamed folder"
    checkpoint, messages = resume(folder)
    whole, onward = (1, ONE) if twice else (2, TWO)
    check(checkpoint, whole)
    assert re.fullmatch(
        rf"{THREE} {reason}(?: \(.*\))?, in {re.escape(str(folder))}; resuming from {onward}",
        messages[0],
    ), messages
    assert len(messages) == 1 + twice
    for word in (f"{folder}/{THREE}", str(folder)):
        with pytest.raises(ConfigError) as refused:
            resume(folder, word)
        fix = f"move it away and set checkpoint.resume={folder}/{onward}"
        start = re.escape(f"checkpoint.resume={word} is refused: {THREE} in {folder} ")
        assert re.fullmatch(
            rf"{start}{reason}(?: \(.*\))?; {re.escape(fix)}", str(refused.value)
        ), refused.value
    # Damage that neither sizes nor the state's own sum show is found only by reading everything.
    assert (peek(CheckpointConfig(resume="auto"), str(folder)) or {})["step"] in (
        whole,
        3,
    )


def test_pickles_in_a_checkpoint_folder_are_never_loaded(
    series: Path, tmp_path: Path
) -> None:
    """Oracle: a file that the pickles would create, placed under every name that PyTorch's own
    loaders would open."""
    folder = copied(series, tmp_path / "checkpoints")
    proof = tmp_path / "made"
    hostile = pickle.dumps(Hostile(proof))
    for name in (
        ".metadata",
        "__0_0.distcp",
        "pytorch_model.bin",
        "model.pt",
        "rank-00000.pt",
        "state.pkl",
    ):
        for target in (folder, *(folder / step for step in (ONE, TWO, THREE))):
            (target / name).write_bytes(hostile)
    check(resume(folder)[0], 3)
    for name in sorted(os.listdir(folder / THREE)):
        for replace in (True, False):
            other = copied(series, tmp_path / f"{name}{replace}")
            (other / THREE / name).write_bytes(hostile)
            if replace and name in (
                "state.json",
                "tensors.json",
                TENSORS,
                "rank-00000.json",
            ):
                replace_by(hostile, name)(other)
            try:
                checkpoint, _ = resume(other)
                assert checkpoint is not None
                check_tensors(checkpoint, checkpoint.step)
            except ConfigError:
                pass
    assert not proof.exists()
    pickle.loads(hostile)
    assert proof.exists()


def set_value(tree: Any, path: str, value: Any) -> None:
    *above, last = path.split("/")
    for name in above:
        tree = tree[int(name) if name.isdigit() else name]
    tree[last] = value


def edit_index(path: str, value: Any) -> Damage:
    return change_json(INDEX, lambda tree: set_value(tree, path, value))


def cut_otherwise(*chunks: tuple[int, list[int], list[int]]) -> Damage:
    """List these chunks of ``w``: the number of one of its chunks, other offsets and other
    sizes."""

    def change(tree: Any) -> None:
        stored = tree["tensors"]["w"]["chunks"]
        tree["tensors"]["w"]["chunks"] = [
            stored[number] | {"offsets": offsets, "sizes": sizes}
            for number, offsets, sizes in chunks
        ]

    return change_json(INDEX, change)


WRONG_IN_INDEX: dict[str, list[Any]] = {
    "format": [2, True],
    "code": ["x"],
    "tensors": [[]],
    "tensors/w/dtype": ["F4", ["F32"]],
    "tensors/w/shape": [[7, 4], [2**70, 4], [6.0, 4], [-6, 4], [6, True]],
    "tensors/w/chunks": [[], 3],
    "tensors/w/chunks/0/offsets": [[0, False]],
    "tensors/w/chunks/1/offsets": [[0, 0], [5, 0], [3]],
    "tensors/w/chunks/1/sizes": [[3, 3]],
    "tensors/w/chunks/1/url": ["http://x"],
    "tensors/w/chunks/1/key": [3],
    "tensors/w/chunks/1/file": [
        3,
        "../a/tensors-00000.safetensors",
        "/etc/passwd",
        "pickle.pt",
        f"{TENSORS}\n",
    ],
}
WRONG_IN_HEADER: dict[str, list[Any]] = {
    "w@3,0": [1],
    "w@3,0/dtype": ["I32"],
    "w@3,0/shape": [[4, 3]],
    "w@3,0/data_offsets": [
        None,
        [0],
        [0.0, 48.0],
        [-48, 0],
        [0, 44],
        [2**62, 2**62 + 48],
    ],
}
WHOLE = (0, [0, 0], [3, 4])

SHARD_DAMAGES: dict[str, tuple[str, Damage]] = {
    "index missing": (INDEX, lambda folder: (folder / INDEX).unlink()),
    "index empty": (INDEX, edit_bytes(lambda text: b"", INDEX)),
    "index truncated": (INDEX, edit_bytes(lambda text: text[:-9], INDEX)),
    "index binary": (INDEX, edit_bytes(lambda text: b"\xff" + text, INDEX)),
    "index deep": (INDEX, edit_bytes(lambda text: b"[" * 100_000, INDEX)),
    "index as a pickle": (
        INDEX,
        edit_bytes(lambda text: b"cos\nsystem\n(S'true'\ntR.", INDEX),
    ),
    "index as a list": (INDEX, edit_bytes(lambda text: b"[1]", INDEX)),
    **{
        f"{path}={value}": (INDEX, edit_index(path, value))
        for path, values in WRONG_IN_INDEX.items()
        for value in values
    },
    "900 dims": (
        INDEX,
        edit_index("tensors/b", {"dtype": "F32", "shape": [1] * 900, "chunks": []}),
    ),
    "chunk missing": (INDEX, cut_otherwise(WHOLE)),
    "chunk twice": (INDEX, cut_otherwise(WHOLE, *[(1, [3, 0], [3, 4])] * 2)),
    "chunk of negative size": (
        INDEX,
        cut_otherwise(WHOLE, (1, [3, 0], [4, 4]), (1, [7, 0], [-1, 4])),
    ),
    "chunk overlaps": (INDEX, cut_otherwise(WHOLE, (1, [2, 0], [4, 4]))),
    "chunk leaves a gap": (INDEX, cut_otherwise(WHOLE, (1, [4, 0], [2, 4]))),
    "file missing": (
        "tensors-00009.safetensors",
        chunk(file="tensors-00009.safetensors"),
    ),
    "key not in file": (TENSORS, chunk(key="w@9,9")),
    "key of another chunk": (TENSORS, chunk(key="b")),
    "data missing": (TENSORS, lambda folder: (folder / TENSORS).unlink()),
    "data truncated": (TENSORS, edit_bytes(lambda content: content[:-1], TENSORS)),
    **{
        f"{path}={value}": (
            TENSORS,
            edit_header(partial(set_value, path=path, value=value), TENSORS),
        )
        for path, values in WRONG_IN_HEADER.items()
        for value in values
    },
}


@pytest.mark.parametrize("damage", SHARD_DAMAGES)
def test_damage_is_reported_with_its_file_before_tensors_are_filled(
    damage: str, tmp_path: Path
) -> None:
    """Oracle: the name of the damaged file, for each damage alone."""
    folder = make_saved(tmp_path / "a")
    tensors = {"b": torch.full((4,), 7.0), "w": torch.full((6, 4), 7.0)}
    load_tensors(open_storage(str(tmp_path)), "a", tensors, None)
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())
    tensors = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
    file, apply = SHARD_DAMAGES[damage]
    apply(folder)
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}/a/{file} .*; resume from another checkpoint$"
    ):
        load_tensors(open_storage(str(tmp_path)), "a", tensors, None)
    assert all(bool((tensor == 7).all()) for tensor in tensors.values())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.zeros(6, 4), "x": torch.zeros(1)}, r"holds no x, which"),
        ({"x": torch.zeros(1), "y": torch.zeros(1)}, r"holds no x nor 1 others, which"),
        (
            {"w": torch.zeros(4, 6)},
            r"holds w as F32 of shape 6×4, and this run has it as F32 of shape 4×6",
        ),
        (
            {"w": torch.zeros(6, 4).half()},
            r"holds w as F32 of shape 6×4, and this run has it as F16 of shape 6×4",
        ),
        (
            {"w": torch.zeros(())},
            r"holds w as F32 of shape 6×4, and this run has it as a single number of F32",
        ),
    ],
)
def test_missing_tensors_are_reported(
    tensors: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    """Checkpoint, tensor, found and wanted, before anything is filled."""
    make_saved(tmp_path / "a")
    with pytest.raises(
        ConfigError,
        match=rf"{tmp_path}/a {message}.*; resume with the model and the optimizer",
    ):
        load_tensors(open_storage(str(tmp_path)), "a", tensors, None)
    assert not any(bool(tensor.any()) for tensor in tensors.values())


def test_too_long_index_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of reading holds for writing."""
    monkeypatch.setattr("fsdptoys.checkpoint.shard_format.LARGEST_INDEX_BYTES", 100)
    with pytest.raises(
        ConfigError, match=r"at most 100 are read again; set checkpoint\.form=full"
    ):
        make_saved(tmp_path / "a")
    assert INDEX not in [path.name for path in (tmp_path / "a").iterdir()]
