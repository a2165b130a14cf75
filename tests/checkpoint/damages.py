"""Damage to folders of weights, and the sentences that answer it."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsdptoys.checkpoint.sharded_io import save_tensors
from fsdptoys.checkpoint.storage import open_storage
from fsdptoys.models import GPT2Config, LlamaConfig, ModelConfig
from fsdptoys.models.rope_scaling import RopeScaling
from tests.harness.folders import build, write

SIZES: dict[str, int] = {
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "vocab_size": 32,
    "max_seq_len": 16,
}


LLAMA_SIZES = SIZES | {"n_kv_heads": 1, "ffn_dim": 24}


CONFIG = LlamaConfig(
    **LLAMA_SIZES, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=8)
)  # type: ignore[arg-type]
GPT2 = GPT2Config(**SIZES)  # type: ignore[arg-type]


FIRST, SECOND, THIRD = (
    f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
)
SENTENCES = yaml.safe_load(
    (Path(__file__).parent / "sentences.yaml").read_text(encoding="utf-8")
)
"""Topic → expected sentences, by case or with the changed keys."""


Damage = Callable[[Path], object]


def make_folder(folder: Path, config: ModelConfig = CONFIG) -> None:
    write(folder, build(config), max_file_bytes=9000)


def change_json(file: str, change: Callable[[Any], object]) -> Damage:
    """Change the content of a file in place."""

    def damage(folder: Path) -> None:
        tree = json.loads((folder / file).read_text())
        change(tree)
        (folder / file).write_text(json.dumps(tree))

    return damage


def update(tree: dict[str, Any], values: dict[str, Any]) -> None:
    """Set keys, or remove those with the value ``(removed)``."""
    for key, value in values.items():
        if value == "(removed)":
            del tree[key]
        else:
            tree[key] = value


def edit_json(file: str, **values: Any) -> Damage:
    return change_json(file, lambda tree: update(tree, values))


def edit_tensors(
    change: Callable[[dict[str, Tensor]], object], file: str = THIRD
) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file)

    return damage


def edit_bytes(change: Callable[[bytes], bytes], file: str = THIRD) -> Damage:
    return lambda folder: (folder / file).write_bytes(
        change((folder / file).read_bytes())
    )


def flip(file: str) -> Damage:
    def flip_middle(content: bytes) -> bytes:
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]

    return edit_bytes(flip_middle, file)


def edit_header(change: Callable[[Any], object], file: str = THIRD) -> Damage:
    """Change the header in place, or replace it by the result of ``change``, before the same
    tensors."""

    def apply(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        text = json.dumps(change(header) or header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return edit_bytes(apply, file)


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def make_saved(folder: Path) -> Path:
    """A checkpoint with ``w`` in two chunks and ``b`` in one, all in one file."""
    folder.mkdir(parents=True)
    storage = open_storage(str(folder.parent))
    save_tensors(
        storage,
        folder.name,
        {"w@0,0": torch.ones(3, 4), "w@3,0": torch.ones(3, 4), "b": torch.ones(4)},
        None,
    )
    tree = json.loads((folder / "tensors.json").read_text())
    parts = [tree["tensors"].pop(key)["chunks"][0] for key in ("w@0,0", "w@3,0")]
    parts[1]["offsets"] = [3, 0]
    tree["tensors"]["w"] = {"dtype": "F32", "shape": [6, 4], "chunks": parts}
    (folder / "tensors.json").write_text(json.dumps(tree))
    return folder


INDEX = "tensors.json"


def chunk(**values: Any) -> Damage:
    """Change the second chunk of ``w`` in the index."""
    return change_json(
        INDEX, lambda tree: tree["tensors"]["w"]["chunks"][1].update(values)
    )
