"""Damaged folders in Hugging Face format, and those of other models, are rejected without touching
the model."""

import pickle
import re
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fsdptoys.checkpoint import HuggingFaceFolder, verify_checksums
from fsdptoys.errors import ConfigError
from fsdptoys.models import Llama4Config, ModelConfig
from tests.checkpoint.damages import (
    CONFIG,
    FIRST,
    GPT2,
    LLAMA_SIZES,
    SECOND,
    SENTENCES,
    THIRD,
    Damage,
    Hostile,
    change_json,
    edit_bytes,
    edit_header,
    edit_json,
    edit_tensors,
    make_folder,
    update,
)
from tests.harness.families import SMALL
from tests.harness.folders import build_empty

LLAMA4 = Llama4Config(
    **LLAMA_SIZES, n_experts=2, expert_ffn_dim=8, attention_chunk_len=8
)  # type: ignore[arg-type]


INDEX = "model.safetensors.index.json"


NORM = "model.norm.weight"
"""In the third file, as the last but one."""


def edit_below(file: str, above: str, **values: Any) -> Damage:
    return change_json(file, lambda tree: update(tree[above], values))


AGAIN = "download or write the folder again"


FAMILIES: dict[str, ModelConfig] = {
    "llama": CONFIG,
    "llama4": LLAMA4,
    "gpt2": GPT2,
    "mistral": SMALL["mistral"],
    "qwen2": SMALL["qwen2"],
}


def refusal(folder: Path, config: ModelConfig = CONFIG) -> str:
    """Return the message that rejects a folder; check that the model is unchanged."""
    model = build_empty(config)
    with pytest.raises(ConfigError) as refused:
        source = HuggingFaceFolder(folder)
        source.model_config()
        source.check(model)
    assert all(param.isnan().all() for param in model.parameters())
    with pytest.raises(AssertionError, match="check the folder first"):
        source.fill(next(model.parameters()), "embed_tokens.weight")
    return str(refused.value).replace(str(folder), "{}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.mark.parametrize("row", SENTENCES["configurations of folders"], ids=str)
def test_invalid_keys_of_the_configuration_are_refused(
    row: dict[str, Any], tmp_path: Path
) -> None:
    """Oracle: the expected message."""
    config = FAMILIES[row.get("family", "llama")]
    make_folder(tmp_path, config)
    change_json(
        "config.json",
        lambda tree: update(tree.get(row.get("below"), tree), row["keys"]),
    )(tmp_path)
    (tmp_path / "checksums.json").unlink()
    assert refusal(tmp_path, config) == f"{{}}/config.json{row['says']}"


def replace_by_pickle(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(folder / "opened")))


def without_norm(folder: Path) -> None:
    edit_tensors(lambda tensors: tensors.pop(NORM))(folder)
    edit_below(INDEX, "weight_map", **{NORM: "(removed)"})(folder)


def locate_norm(file: object) -> Damage:
    return edit_below(INDEX, "weight_map", **{NORM: file})


def with_tensor(name: str, tensor: Tensor, file: str = THIRD) -> Damage:
    return edit_tensors(lambda tensors: tensors.update({name: tensor}), file)


def with_norm_entry(**values: Any) -> Damage:
    return edit_header(lambda header: header[NORM].update(values))


DAMAGES: dict[str, Damage] = {
    "no configuration": lambda folder: (folder / "config.json").unlink(),
    "configuration with invalid JSON": edit_bytes(lambda content: b"{", "config.json"),
    "configuration as a list": edit_bytes(lambda content: b"[]", "config.json"),
    "no weights": lambda folder: [
        file.unlink() for file in folder.glob("*.safetensors*")
    ],
    "only a pickle": replace_by_pickle,
    "one file and shards": lambda folder: save_file(
        {"a": torch.zeros(1)}, folder / "model.safetensors"
    ),
    "missing file": lambda folder: (folder / SECOND).unlink(),
    "index with invalid JSON": edit_bytes(lambda content: b"x", INDEX),
    "index without files": edit_json(INDEX, weight_map="(removed)"),
    "index with a path outside": locate_norm("../x.safetensors"),
    "index with an absolute path": locate_norm("/etc/passwd"),
    "index with a number": locate_norm(3),
    "index with the wrong file": locate_norm(FIRST),
    "empty file": edit_bytes(lambda content: b""),
    "truncated file": edit_bytes(lambda content: content[:-5]),
    "longer file": edit_bytes(lambda content: content + b"12"),
    "header with invalid UTF-8": edit_bytes(
        lambda content: content[:8] + bytes([255] * 16) + content[24:]
    ),
    "header with invalid JSON": edit_bytes(
        lambda content: content[:8] + b"x" + content[9:]
    ),
    "header as a list": edit_bytes(lambda content: struct.pack("<Q", 2) + b"[]"),
    "absurd length of the header": edit_bytes(
        lambda content: bytes([255] * 8) + content[8:]
    ),
    "header longer than the file": edit_bytes(
        lambda content: struct.pack("<Q", len(content) - 7) + content[8:]
    ),
    "header that covers half a tensor": edit_header(
        lambda header: header.update({NORM: {"dtype": "F32"}})
    ),
    "header with a shape and a span that differ": with_norm_entry(shape=[17]),
    "header with a negative shape": with_norm_entry(shape=[-4, -4]),
    "overlapping tensors": with_norm_entry(data_offsets=[0, 64]),
    "missing tensor": without_norm,
    "missing tensor of the index": edit_tensors(lambda tensors: tensors.pop(NORM)),
    "duplicate tensor": with_tensor(NORM, torch.zeros(16), FIRST),
    "extra tensor with control characters in its name": with_tensor(
        "\x1b]0;title\x07", torch.zeros(2)
    ),
    "wrong shape": with_tensor(NORM, torch.zeros(4, 4)),
    "integers": with_tensor(NORM, torch.zeros(16, dtype=torch.int8)),
    "8-bit floating point": with_tensor(
        NORM, torch.zeros(16, dtype=torch.float8_e4m3fn)
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_folder_is_refused_in_one_sentence(case: str, folder: Path) -> None:
    """Oracle: the message; the model keeps its values, and no pickle is executed."""
    (folder / "checksums.json").unlink()
    assert sorted(file.name for file in folder.glob("*.safetensors")) == [
        FIRST,
        SECOND,
        THIRD,
    ]
    DAMAGES[case](folder)
    assert refusal(folder) == SENTENCES["damaged folders"][case]
    assert not (folder / "opened").exists()


CHANGED = f"{AGAIN}, or delete checksums.json if the file was changed on purpose"
LIST_DAMAGED = (
    f"checksums.json is damaged: it does not list names, sizes and SHA-256; {AGAIN}"
)
SUMS = (
    r"is damaged: its SHA-256 is [0-9a-f]{12}…, and checksums.json says [0-9a-f]{12}…"
)
SIZE_DIFFERS = (
    r"config.json is damaged: it holds \d+ bytes, and checksums.json says \d+"
)


@pytest.mark.parametrize(
    ("damage", "is_size_changed", "sentence"),
    [
        (
            edit_bytes(lambda content: content[:-1] + bytes([content[-1] ^ 1])),
            False,
            f"{THIRD} {SUMS}; {CHANGED}",
        ),
        (
            edit_bytes(lambda content: content + b" ", "config.json"),
            True,
            f"{SIZE_DIFFERS}; {CHANGED}",
        ),
        (
            lambda folder: (folder / FIRST).unlink(),
            True,
            f"{FIRST} is missing, though checksums.json lists it; {AGAIN}",
        ),
        (
            edit_json("checksums.json", files={"../x": {"bytes": 1, "sha256": ""}}),
            True,
            LIST_DAMAGED,
        ),
        (edit_json("checksums.json", files=["x"]), True, LIST_DAMAGED),
    ],
    ids=["flipped bit", "changed config", "missing file", "path to elsewhere", "list"],
)
def test_checksums_identify_changed_files(
    damage: Damage, is_size_changed: bool, sentence: str, folder: Path
) -> None:
    """Oracle: the message. Sizes are looked at before a run, sums where all is read; a flipped bit
    has its size."""
    damage(folder)
    source = HuggingFaceFolder(folder)
    model = build_empty(CONFIG)
    with pytest.raises(ConfigError) if is_size_changed else nullcontext():
        source.check(model)
    with pytest.raises(ConfigError) as refused:
        verify_checksums(source.path)
    assert re.fullmatch(f"{folder}/{sentence}", str(refused.value))


def test_non_finite_values_are_reported(folder: Path) -> None:
    """Oracle: the expected message, for one NaN among many; after a check of all other values of
    the folder."""
    source = HuggingFaceFolder(folder)
    source.check(build_empty(CONFIG))
    source.check_values()
    edit_tensors(lambda tensors: tensors[NORM][15:].fill_(torch.inf))(folder)
    with pytest.raises(
        ConfigError,
        match=f"{THIRD} holds {NORM} with values that are not finite; use other weights",
    ):
        source.check_values()
