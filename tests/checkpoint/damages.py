"""Damages to a folder in Hugging Face format, each with its expected error message."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fsdptoys.models import GPT2Config, Llama4Config, LlamaConfig, ModelConfig
from fsdptoys.models.rotary import RopeScaling
from tests.checkpoint.folders import build, write

CONFIG = LlamaConfig(
    dim=16,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    ffn_dim=24,
    vocab_size=32,
    max_seq_len=16,
    rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=8),
)
LLAMA4 = Llama4Config(
    dim=16,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    ffn_dim=24,
    vocab_size=32,
    max_seq_len=16,
    n_experts=2,
    expert_ffn_dim=8,
    attention_chunk_len=8,
)
GPT2 = GPT2Config(dim=16, n_layers=1, n_heads=2, vocab_size=32, max_seq_len=16)
FIRST, SECOND, THIRD = (f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3))
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
"""In the third file, as the last but one."""

Damage = Callable[[Path], object]


def edit_json(file: str, **values: Any) -> Damage:
    """Set keys, or remove those with the value ``...``."""

    def damage(folder: Path) -> None:
        tree = json.loads((folder / file).read_text()) | values
        (folder / file).write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))

    return damage


def edit_rope(**values: Any) -> Damage:
    def damage(folder: Path) -> None:
        rope = json.loads((folder / "config.json").read_text())["rope_parameters"] | values
        edit_json("config.json", rope_parameters={k: v for k, v in rope.items() if v is not ...})(folder)

    return damage


def edit_place(place: object) -> Damage:
    def damage(folder: Path) -> None:
        places = json.loads((folder / INDEX).read_text())["weight_map"]
        edit_json(INDEX, weight_map=places | {NORM: place})(folder)

    return damage


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object], file: str = THIRD) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file)

    return damage


def edit_bytes(change: Callable[[bytes], bytes], file: str = THIRD) -> Damage:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def edit_header(change: Callable[[Any], object]) -> Damage:
    """Write another header before the same tensors."""

    def apply(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return edit_bytes(apply)


def only_pickle(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(folder / "opened")))


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def both_layouts(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")


AGAIN = "download or write the folder again"
OURS = "LlamaForCausalLM, Llama4ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, GPT2LMHeadModel"


def without_norm(folder: Path) -> None:
    edit_tensors(lambda tensors: tensors.pop(NORM))(folder)
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(INDEX, weight_map={name: file for name, file in places.items() if name != NORM})(folder)


DAMAGED_CONFIGS: dict[str, tuple[Damage, str]] = {
    "missing": (
        lambda folder: (folder / "config.json").unlink(),
        f"{{}}/config.json is missing, which describes the model of the weights; {AGAIN}",
    ),
    "no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        "{}/config.json cannot be read as JSON (Expecting property name enclosed in double quotes: line 1 column 2 "
        f"(char 1)); {AGAIN}",
    ),
    "a list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        f"{{}}/config.json cannot be read as JSON (it is not an object); {AGAIN}",
    ),
    "unknown architecture": (
        edit_json("config.json", architectures=["MistralForCausalLM"]),
        "{}/config.json says architectures=['MistralForCausalLM'], which is not supported; use weights of " + OURS,
    ),
    "no architecture": (
        edit_json("config.json", architectures=...),
        f"{{}}/config.json says architectures=null, which is not supported; use weights of {OURS}",
    ),
    "architecture not a list": (
        edit_json("config.json", architectures="LlamaForCausalLM"),
        f"{{}}/config.json says architectures='LlamaForCausalLM', which is not supported; use weights of {OURS}",
    ),
    "missing key": (
        edit_json("config.json", num_hidden_layers=...),
        f"{{}}/config.json lacks num_hidden_layers, which a llama model needs; {AGAIN}",
    ),
    "integer as text": (
        edit_json("config.json", hidden_size="16"),
        "{}/config.json: hidden_size is '16', not an integer from 1 to 1048576; correct it",
    ),
    "integer as fraction": (
        edit_json("config.json", vocab_size=32.0),
        "{}/config.json: vocab_size is 32.0, not an integer from 1 to 1073741824; correct it",
    ),
    "integer as switch": (
        edit_json("config.json", num_hidden_layers=True),
        "{}/config.json: num_hidden_layers is true, not an integer from 1 to 10000; correct it",
    ),
    "number as text": (
        edit_json("config.json", rms_norm_eps="1e-5"),
        "{}/config.json: rms_norm_eps is '1e-5', not a finite number above 0; correct it",
    ),
    "non-finite number": (
        edit_json("config.json", rms_norm_eps=float("nan")),
        "{}/config.json: rms_norm_eps is nan, not a finite number above 0; correct it",
    ),
    "switch as number": (
        edit_json("config.json", tie_word_embeddings=1),
        "{}/config.json: tie_word_embeddings is 1, not true or false; correct it",
    ),
    "impossible model": (
        edit_json("config.json", num_key_value_heads=3),
        "{}/config.json describes a model that cannot be built: model.n_kv_heads=3 must divide model.n_heads=2; "
        "set model.n_kv_heads=1",
    ),
    "bias": (
        edit_json("config.json", attention_bias=True),
        "{}/config.json says attention_bias=True, which llama models here do not compute (only False); use weights of "
        "another model",
    ),
    "quantized": (
        edit_json("config.json", quantization_config={"bits": 4}),
        "{}/config.json says quantization_config={'bits': 4}, which llama models here do not compute (only None); use "
        "weights of another model",
    ),
    "yarn": (
        edit_rope(rope_type="yarn", factor=None),
        "{}/config.json says rope_type='yarn', which llama models here do not compute (only 'default' and 'llama3'); "
        "use weights of another model",
    ),
    "rotary settings as a list": (
        edit_json("config.json", rope_parameters=[1]),
        "{}/config.json: rope_parameters is [1], not an object or null; correct it",
    ),
    "rotary number as text": (
        edit_rope(factor="8"),
        "{}/config.json: rope_parameters.factor is '8', not a finite number; correct it",
    ),
    "missing rotary key": (
        edit_rope(low_freq_factor=...),
        f"{{}}/config.json lacks low_freq_factor in its rotary scaling; {AGAIN}",
    ),
    "impossible rotary number": (
        edit_rope(factor=0.5),
        "{}/config.json describes a model that cannot be built: model.rope_scaling.factor=0.5 must be at least 1; "
        "set model.rope_scaling.factor=1.0",
    ),
}
"""Case → change of the folder, expected message; {} is the folder."""

DAMAGED_FILES: dict[str, tuple[Damage, str]] = {
    "no weights": (
        lambda folder: [file.unlink() for file in folder.glob("*.safetensors*")],
        f"{{}} holds neither model.safetensors nor {INDEX}; {AGAIN}",
    ),
    "only a pickle": (
        only_pickle,
        "{} holds weights as pytorch_model.bin alone, which can run code when it is opened and is not read here; "
        "convert it to safetensors",
    ),
    "one file and shards": (
        both_layouts,
        f"{{}} holds both model.safetensors and {INDEX}; remove the outdated one",
    ),
    "missing file": (
        lambda folder: (folder / SECOND).unlink(),
        f"{{}}/{SECOND} is missing, though {INDEX} lists it; {AGAIN}",
    ),
    "index with invalid JSON": (
        lambda folder: (folder / INDEX).write_text("x"),
        f"{{}}/{INDEX} cannot be read as JSON (Expecting value: line 1 column 1 (char 0)); {AGAIN}",
    ),
    "index without files": (
        edit_json(INDEX, weight_map=...),
        f"{{}}/{INDEX} lacks weight_map, which maps tensors to files; {AGAIN}",
    ),
    "index with a path outside": (
        edit_place("../x.safetensors"),
        f"{{}}/{INDEX} says that {NORM} is in '../x.safetensors', which is not the name of a file in that "
        f"folder; {AGAIN}",
    ),
    "index with an absolute path": (
        edit_place("/etc/passwd"),
        f"{{}}/{INDEX} says that {NORM} is in '/etc/passwd', which is not the name of a file in that folder; {AGAIN}",
    ),
    "index with a number": (
        edit_place(3),
        f"{{}}/{INDEX} says that {NORM} is in 3, which is not the name of a file in that folder; {AGAIN}",
    ),
    "index with the wrong file": (
        edit_place(FIRST),
        f"{{}}/{INDEX} says that {FIRST} holds {NORM}, which it does not; {AGAIN}",
    ),
    "empty file": (
        edit_bytes(lambda content: b""),
        f"{{}}/{THIRD} is no safetensors file or is damaged: its header does not fit into its 0 bytes; {AGAIN}",
    ),
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
        f"{{}}/{THIRD} is no safetensors file or is damaged: its header cannot be read "
        f"('utf-8' codec can't decode byte 0xff in position 0: "
        f"invalid start byte); {AGAIN}",
    ),
    "header with invalid JSON": (
        edit_bytes(lambda content: content[:8] + b"x" + content[9:]),
        f"{{}}/{THIRD} is no safetensors file or is damaged: its header cannot be read "
        f"(Expecting value: line 1 column 1 (char 0)); {AGAIN}",
    ),
    "header as a list": (
        edit_bytes(lambda content: struct.pack("<Q", 2) + b"[]"),
        f"{{}}/{THIRD} is no safetensors file or is damaged: its header is not an object; {AGAIN}",
    ),
    "absurd length of the header": (
        edit_bytes(lambda content: bytes([255] * 8) + content[8:]),
        f"{{}}/{THIRD} is no safetensors file or is damaged: its header does not fit into its 3936 bytes; {AGAIN}",
    ),
    "header longer than the file": (
        edit_bytes(lambda content: struct.pack("<Q", len(content) - 7) + content[8:]),
        f"{{}}/{THIRD} is no safetensors file or is damaged: its header does not fit into its 3936 bytes; {AGAIN}",
    ),
    "header that covers half a tensor": (
        edit_header(lambda header: header.update({NORM: {"dtype": "F32"}})),
        f"{{}}/{THIRD} is damaged: its header describes {NORM} wrongly, as {{'dtype': 'F32'}}; {AGAIN}",
    ),
    "header with a shape and a span that differ": (
        edit_header(lambda header: header[NORM].update(shape=[17])),
        f"{{}}/{THIRD} is damaged: its header describes {NORM} wrongly, as {{'dtype': 'F32', 'shape': [17], "
        f"'data_offsets': [3584, 3648]}}; {AGAIN}",
    ),
    "header with a negative shape": (
        edit_header(lambda header: header[NORM].update(shape=[-4, -4])),
        f"{{}}/{THIRD} is damaged: its header describes {NORM} wrongly, as {{'dtype': 'F32', 'shape': [-4, -4], "
        f"'data_offsets': [3584, 3648]}}; {AGAIN}",
    ),
    "overlapping tensors": (
        edit_header(lambda header: header[NORM].update(data_offsets=[0, 64])),
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
        edit_tensors(lambda tensors: tensors.update({NORM: torch.zeros(16)}), FIRST),
        f"{{}} holds {NORM} twice, in {FIRST} and {THIRD}; {AGAIN}",
    ),
    "extra tensor": (
        edit_tensors(lambda tensors: tensors.update(extra=torch.zeros(2))),
        f"{{}}/{THIRD} holds extra, for which a llama model as configured has no place; use a folder whose config.json "
        "fits its weights",
    ),
    "extra tensor with control characters in its name": (
        edit_tensors(lambda tensors: tensors.update({"\x1b]0;title\x07": torch.zeros(2)})),
        f"{{}}/{THIRD} holds \\x1b]0;title\\x07, for which a llama model as configured has no place; use a folder "
        "whose config.json fits its weights",
    ),
    "wrong shape": (
        edit_tensors(lambda tensors: tensors.update({NORM: torch.zeros(4, 4)})),
        f"{{}}/{THIRD} holds {NORM} in the shape 4×4, and a llama model as configured needs 16; {AGAIN}",
    ),
    "integers": (
        edit_tensors(lambda tensors: tensors.update({NORM: torch.zeros(16, dtype=torch.int8)})),
        f"{{}}/{THIRD} holds {NORM} as I8, and weights are read from F64, F32, F16, BF16 alone; convert it to "
        "one of these",
    ),
    "8-bit floating point": (
        edit_tensors(lambda tensors: tensors.update({NORM: torch.zeros(16, dtype=torch.float8_e4m3fn)})),
        f"{{}}/{THIRD} holds {NORM} as F8_E4M3, and weights are read from F64, F32, F16, BF16 alone; convert it "
        "to one of these",
    ),
}
"""The same for the safetensors files."""


def make_folder(folder: Path, config: ModelConfig = CONFIG) -> None:
    write(folder, build(config), max_file_bytes=9000)
