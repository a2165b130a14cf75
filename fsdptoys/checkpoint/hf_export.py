"""Export of a model in Hugging Face format, one tensor at a time.

One Hugging Face tensor may combine several parameters or the reverse, so parts of parameters are requested as each
tensor needs them. The folder also gets ``config.json``, ``generation_config.json`` and ``checksums.json``. Not covered:
tokenizers, which users add themselves.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig, Piece

from .atomic_folder import new_folder
from .hf_load import CONFIG_FILE, STEM
from .safetensors_io import MAX_FILE_BYTES, ReadRegion, Written, dtype_name, slices, write_tensors

GENERATION_CONFIG_FILE = "generation_config.json"

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""Explicit nulls, because transformers would fill in its family defaults: token ids of another vocabulary."""


def write_hugging_face(
    out_dir: Path, config: ModelConfig, read: ReadRegion, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
) -> Written:
    """Write a folder in Hugging Face format, atomically.

    ``read`` returns any part of a parameter by its name in the model; ``max_file_bytes`` is also roughly the peak
    memory. ConfigError if ``out_dir`` is taken or cannot be written, or a value overflows ``dtype``.
    """
    with new_folder(out_dir) as folder:
        written = write_tensors(folder, STEM, _tensors(config, read, dtype), max_file_bytes)
        word = dtype_name(dtype)
        # transformers 4 reads the second spelling.
        tree = config.hugging_face.write_config(config) | {"dtype": word, "torch_dtype": word} | NO_TOKENS
        for name, values in ((CONFIG_FILE, tree), (GENERATION_CONFIG_FILE, NO_TOKENS)):
            (folder / name).write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return written


def _tensors(config: ModelConfig, read: ReadRegion, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    with torch.device("meta"):
        model = config.build()
    pieces: dict[str, list[tuple[str, Piece]]] = {}
    for name, param in model.named_parameters():
        for piece in config.hugging_face.pieces(name, tuple(param.shape)):
            pieces.setdefault(piece.tensor, []).append((name, piece))
    for tensor, parts in pieces.items():
        whole = torch.empty(parts[0][1].tensor_shape, dtype=dtype)
        filled = 0
        for name, piece in parts:
            target = whole[slices(piece.tensor_region)]
            source = read(name, piece.region)
            source = source.reshape(source.shape[-target.ndim :])
            target.copy_(source.mT if piece.transposed else source)
            filled += target.numel()
            if target.isinf().any() and not source.isinf().any():
                raise ConfigError(
                    f"{name} holds {source.abs().max():g}, too large for {dtype_name(dtype)}; set dtype=bfloat16 or "
                    "dtype=float32"
                )
        assert filled == whole.numel(), tensor
        yield tensor, whole
