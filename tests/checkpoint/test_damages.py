"""Incomplete or damaged folders, and those of other models, are rejected without touching the model."""

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
from fsdptoys.models import ModelConfig
from tests.checkpoint.damages import (
    CONFIG,
    FIRST,
    GPT2,
    INDEX,
    LLAMA4,
    NORM,
    SECOND,
    THIRD,
    Damage,
    Hostile,
    edit_below,
    edit_bytes,
    edit_header,
    edit_json,
    edit_tensors,
    make_folder,
)
from tests.checkpoint.folders import build_empty

AGAIN = "download or write the folder again"
UNSUPPORTED = (
    "which is not supported; use weights of LlamaForCausalLM, Llama4ForCausalLM, Qwen3ForCausalLM, "
    "Qwen3MoeForCausalLM, GPT2LMHeadModel"
)
OTHER_MODEL = "use weights of another model"


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


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (CONFIG, {"architectures": ["Other"]}, f" says architectures=['Other'], {UNSUPPORTED}"),
        (CONFIG, {"architectures": ...}, f" says architectures=null, {UNSUPPORTED}"),
        (CONFIG, {"architectures": "Other"}, f" says architectures='Other', {UNSUPPORTED}"),
        (CONFIG, {"num_hidden_layers": ...}, f" lacks num_hidden_layers, which a llama model needs; {AGAIN}"),
        (CONFIG, {"hidden_size": "16"}, ": hidden_size is '16', not an integer from 1 to 1048576; correct it"),
        (CONFIG, {"vocab_size": 32.0}, ": vocab_size is 32.0, not an integer from 1 to 1073741824; correct it"),
        (
            CONFIG,
            {"num_hidden_layers": True},
            ": num_hidden_layers is true, not an integer from 1 to 10000; correct it",
        ),
        (CONFIG, {"rms_norm_eps": "1e-5"}, ": rms_norm_eps is '1e-5', not a finite number above 0; correct it"),
        (CONFIG, {"rms_norm_eps": float("nan")}, ": rms_norm_eps is nan, not a finite number above 0; correct it"),
        (CONFIG, {"tie_word_embeddings": 1}, ": tie_word_embeddings is 1, not true or false; correct it"),
        (
            CONFIG,
            {"num_key_value_heads": 3},
            " describes a model that cannot be built: model.n_kv_heads=3 must divide model.n_heads=2; set "
            "model.n_kv_heads=1",
        ),
        (
            CONFIG,
            {"attention_bias": True},
            f" says attention_bias=True, which llama models here do not compute (only False); {OTHER_MODEL}",
        ),
        (
            CONFIG,
            {"quantization_config": {"bits": 4}},
            " says quantization_config={'bits': 4}, which llama models here do not compute (only None); " + OTHER_MODEL,
        ),
        (CONFIG, {"rope_parameters": [1]}, ": rope_parameters is [1], not an object or null; correct it"),
        (LLAMA4, {"num_hidden_layers": "2"}, ": num_hidden_layers is '2', not an integer; correct it"),
        (
            LLAMA4,
            {"attention_chunk_size": 8.0},
            ": attention_chunk_size is 8.0, not an integer from 1 to 1073741824; correct it",
        ),
        (
            LLAMA4,
            {"moe_layers": [0]},
            " says moe_layers=[0], which llama4_text models here do not compute (only [0, 1], as its other keys say); "
            + OTHER_MODEL,
        ),
        (GPT2, {"n_inner": "x"}, ": n_inner is 'x', not an integer from 1 to 4194304; correct it"),
        (
            GPT2,
            {"scale_attn_by_inverse_layer_idx": True},
            " says scale_attn_by_inverse_layer_idx=True, which gpt2 models here do not compute (only False); "
            + OTHER_MODEL,
        ),
    ],
    ids=str,
)
def test_invalid_keys_of_the_configuration_are_refused(
    config: ModelConfig, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Oracle: the expected message."""
    make_folder(tmp_path / "folder", config)
    edit_json("config.json", **values)(tmp_path / "folder")
    (tmp_path / "folder" / "checksums.json").unlink()
    assert refusal(tmp_path / "folder", config) == f"{{}}/config.json{message}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rope_type": "yarn", "factor": None},
            " says rope_type='yarn', which llama models here do not compute (only 'default' and 'llama3'); "
            + OTHER_MODEL,
        ),
        ({"factor": "8"}, ": rope_parameters.factor is '8', not a finite number; correct it"),
        ({"low_freq_factor": ...}, f" lacks low_freq_factor in its rotary scaling; {AGAIN}"),
        (
            {"factor": 0.5},
            " describes a model that cannot be built: model.rope_scaling.factor=0.5 must be at least 1; set "
            "model.rope_scaling.factor=1.0",
        ),
    ],
    ids=str,
)
def test_invalid_rotary_settings_are_refused(values: dict[str, Any], message: str, folder: Path) -> None:
    """Oracle: the expected message."""
    edit_below("config.json", "rope_parameters", **values)(folder)
    (folder / "checksums.json").unlink()
    assert refusal(folder) == f"{{}}/config.json{message}"


def replace_by_pickle(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(folder / "opened")))


def without_norm(folder: Path) -> None:
    edit_tensors(lambda tensors: tensors.pop(NORM))(folder)
    edit_below(INDEX, "weight_map", **{NORM: ...})(folder)


def locate_norm(place: object) -> Damage:
    return edit_below(INDEX, "weight_map", **{NORM: place})


def with_tensor(name: str, tensor: Tensor, file: str = THIRD) -> Damage:
    return edit_tensors(lambda tensors: tensors.update({name: tensor}), file)


def with_norm_entry(**values: Any) -> Damage:
    return edit_header(lambda header: header[NORM].update(values))


NO_NAME = f"which is not the name of a file in that folder; {AGAIN}"
NO_FILE = f"{{}}/{THIRD} is no safetensors file or is damaged: its header"
WRONG_ENTRY = f"{{}}/{THIRD} is damaged: its header describes {NORM} wrongly, as"
NO_PLACE = "for which a llama model as configured has no place; use a folder whose config.json fits its weights"
FLOATS = "and weights are read from F64, F32, F16, BF16 alone; convert it to one of these"

DAMAGES: dict[str, tuple[Damage, str]] = {
    "no configuration": (
        lambda folder: (folder / "config.json").unlink(),
        f"{{}}/config.json is missing, which describes the model of the weights; {AGAIN}",
    ),
    "configuration with invalid JSON": (
        edit_bytes(lambda content: b"{", "config.json"),
        "{}/config.json cannot be read as JSON (Expecting property name enclosed in double quotes: line 1 column 2 "
        f"(char 1)); {AGAIN}",
    ),
    "configuration as a list": (
        edit_bytes(lambda content: b"[]", "config.json"),
        f"{{}}/config.json cannot be read as JSON (it is not an object); {AGAIN}",
    ),
    "no weights": (
        lambda folder: [file.unlink() for file in folder.glob("*.safetensors*")],
        f"{{}} holds neither model.safetensors nor {INDEX}; {AGAIN}",
    ),
    "only a pickle": (
        replace_by_pickle,
        "{} holds weights as pytorch_model.bin alone, which can run code when it is opened and is not read here; "
        "convert it to safetensors",
    ),
    "one file and shards": (
        lambda folder: save_file({"a": torch.zeros(1)}, folder / "model.safetensors"),
        f"{{}} holds both model.safetensors and {INDEX}; remove the outdated one",
    ),
    "missing file": (
        lambda folder: (folder / SECOND).unlink(),
        f"{{}}/{SECOND} is missing, though {INDEX} lists it; {AGAIN}",
    ),
    "index with invalid JSON": (
        edit_bytes(lambda content: b"x", INDEX),
        f"{{}}/{INDEX} cannot be read as JSON (Expecting value: line 1 column 1 (char 0)); {AGAIN}",
    ),
    "index without files": (
        edit_json(INDEX, weight_map=...),
        f"{{}}/{INDEX} lacks weight_map, which maps tensors to files; {AGAIN}",
    ),
    "index with a path outside": (
        locate_norm("../x.safetensors"),
        f"{{}}/{INDEX} says that {NORM} is in '../x.safetensors', {NO_NAME}",
    ),
    "index with an absolute path": (
        locate_norm("/etc/passwd"),
        f"{{}}/{INDEX} says that {NORM} is in '/etc/passwd', {NO_NAME}",
    ),
    "index with a number": (locate_norm(3), f"{{}}/{INDEX} says that {NORM} is in 3, {NO_NAME}"),
    "index with the wrong file": (
        locate_norm(FIRST),
        f"{{}}/{INDEX} says that {FIRST} holds {NORM}, which it does not; {AGAIN}",
    ),
    "empty file": (edit_bytes(lambda content: b""), f"{NO_FILE} does not fit into its 0 bytes; {AGAIN}"),
    "truncated file": (
        edit_bytes(lambda content: content[:-5]),
        f"{{}}/{THIRD} is damaged: it holds 3931 bytes, and its header asks for 3936; {AGAIN}",
    ),
    "longer file": (
        edit_bytes(lambda content: content + b"12"),
        f"{{}}/{THIRD} is damaged: it holds 3938 bytes, and its header asks for 3936; {AGAIN}",
    ),
    "header with invalid UTF-8": (
        edit_bytes(lambda content: content[:8] + bytes([255] * 16) + content[24:]),
        f"{NO_FILE} cannot be read ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte); {AGAIN}",
    ),
    "header with invalid JSON": (
        edit_bytes(lambda content: content[:8] + b"x" + content[9:]),
        f"{NO_FILE} cannot be read (Expecting value: line 1 column 1 (char 0)); {AGAIN}",
    ),
    "header as a list": (
        edit_bytes(lambda content: struct.pack("<Q", 2) + b"[]"),
        f"{NO_FILE} is not an object; {AGAIN}",
    ),
    "absurd length of the header": (
        edit_bytes(lambda content: bytes([255] * 8) + content[8:]),
        f"{NO_FILE} does not fit into its 3936 bytes; {AGAIN}",
    ),
    "header longer than the file": (
        edit_bytes(lambda content: struct.pack("<Q", len(content) - 7) + content[8:]),
        f"{NO_FILE} does not fit into its 3936 bytes; {AGAIN}",
    ),
    "header that covers half a tensor": (
        edit_header(lambda header: header.update({NORM: {"dtype": "F32"}})),
        f"{WRONG_ENTRY} {{'dtype': 'F32'}}; {AGAIN}",
    ),
    "header with a shape and a span that differ": (
        with_norm_entry(shape=[17]),
        f"{WRONG_ENTRY} {{'dtype': 'F32', 'shape': [17], 'data_offsets': [3584, 3648]}}; {AGAIN}",
    ),
    "header with a negative shape": (
        with_norm_entry(shape=[-4, -4]),
        f"{WRONG_ENTRY} {{'dtype': 'F32', 'shape': [-4, -4], 'data_offsets': [3584, 3648]}}; {AGAIN}",
    ),
    "overlapping tensors": (
        with_norm_entry(data_offsets=[0, 64]),
        f"{{}}/{THIRD} is damaged: its header places tensors that overlap or leave gaps; {AGAIN}",
    ),
    "missing tensor": (
        without_norm,
        f"{{}} holds no {NORM}, which a llama model as configured needs in the shape 16; {AGAIN}",
    ),
    "missing tensor of the index": (
        edit_tensors(lambda tensors: tensors.pop(NORM)),
        f"{{}}/{INDEX} says that {THIRD} holds {NORM}, which it does not; {AGAIN}",
    ),
    "duplicate tensor": (
        with_tensor(NORM, torch.zeros(16), FIRST),
        f"{{}} holds {NORM} twice, in {FIRST} and {THIRD}; {AGAIN}",
    ),
    "extra tensor with control characters in its name": (
        with_tensor("\x1b]0;title\x07", torch.zeros(2)),
        f"{{}}/{THIRD} holds \\x1b]0;title\\x07, {NO_PLACE}",
    ),
    "wrong shape": (
        with_tensor(NORM, torch.zeros(4, 4)),
        f"{{}}/{THIRD} holds {NORM} in the shape 4×4, and a llama model as configured needs 16; {AGAIN}",
    ),
    "integers": (with_tensor(NORM, torch.zeros(16, dtype=torch.int8)), f"{{}}/{THIRD} holds {NORM} as I8, {FLOATS}"),
    "8-bit floating point": (
        with_tensor(NORM, torch.zeros(16, dtype=torch.float8_e4m3fn)),
        f"{{}}/{THIRD} holds {NORM} as F8_E4M3, {FLOATS}",
    ),
}
"""Case → change of the folder, expected message; {} is the folder."""


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_folder_is_refused_in_one_sentence(case: str, folder: Path) -> None:
    """Oracle: the message; the model keeps its values, and no pickle is executed."""
    damage, sentence = DAMAGES[case]
    (folder / "checksums.json").unlink()
    assert sorted(file.name for file in folder.glob("*.safetensors")) == [FIRST, SECOND, THIRD]
    damage(folder)
    assert refusal(folder) == sentence
    assert not (folder / "opened").exists()


CHANGED = "or delete checksums.json if the file was changed on purpose"
LIST_DAMAGED = rf"\{{}}/checksums.json is damaged: it does not list names, sizes and SHA-256; {AGAIN}"


@pytest.mark.parametrize(
    ("damage", "is_size_changed", "sentence"),
    [
        (
            edit_bytes(lambda content: content[:-1] + bytes([content[-1] ^ 1])),
            False,
            rf"\{{}}/{THIRD} is damaged: its SHA-256 is [0-9a-f]{{12}}…, and checksums.json says [0-9a-f]{{12}}…; "
            f"{AGAIN}, {CHANGED}",
        ),
        (
            edit_bytes(lambda content: content + b" ", "config.json"),
            True,
            rf"\{{}}/config.json is damaged: it holds \d+ bytes, and checksums.json says \d+; {AGAIN}, {CHANGED}",
        ),
        (
            lambda folder: (folder / FIRST).unlink(),
            True,
            rf"\{{}}/{FIRST} is missing, though checksums.json lists it; {AGAIN}",
        ),
        (edit_json("checksums.json", files={"../x": {"bytes": 1, "sha256": ""}}), True, LIST_DAMAGED),
        (edit_json("checksums.json", files=["x"]), True, LIST_DAMAGED),
    ],
    ids=["flipped bit", "changed config", "missing file", "path to elsewhere", "list"],
)
def test_checksums_identify_changed_files(damage: Damage, is_size_changed: bool, sentence: str, folder: Path) -> None:
    """Oracle: the message. Sizes are looked at before a run, sums where all is read; a flipped bit has its size."""
    damage(folder)
    source = HuggingFaceFolder(folder)
    model = build_empty(CONFIG)
    with pytest.raises(ConfigError) if is_size_changed else nullcontext():
        source.check(model)
    with pytest.raises(ConfigError) as refused:
        verify_checksums(source.path)
    assert re.fullmatch(sentence, str(refused.value).replace(str(folder), "{}"))


def test_non_finite_values_are_reported(folder: Path) -> None:
    """Oracle: the expected message, for one NaN among many; after a check of all other values of the folder."""
    source = HuggingFaceFolder(folder)
    source.check(build_empty(CONFIG))
    source.check_values()
    edit_tensors(lambda tensors: tensors[NORM][15:].fill_(torch.inf))(folder)
    with pytest.raises(ConfigError, match=f"{THIRD} holds {NORM} with values that are not finite; use other weights"):
        source.check_values()
