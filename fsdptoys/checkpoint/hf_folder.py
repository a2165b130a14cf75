"""Folders in Hugging Face format: initial weights from one, and export of a model to one.

Before a read ``config.json`` and the files' headers are checked, and nothing is allocated yet. Then
each rank reads only the parts its shards need. Pickled weights are never opened. Names and shapes
come from the families (``models/huggingface.py``).

A write holds one tensor at a time. One Hugging Face tensor may combine several parameters or the
reverse, so parts of parameters are requested as each tensor needs them. The folder also gets
``config.json``, ``generation_config.json`` and ``checksums.json``.

Not covered: remote folders, tokenizers (users add them themselves), a separate head with
``tie_word_embeddings=true``.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.models import (
    MODELS,
    DecoderModel,
    HuggingFaceFormat,
    ModelConfig,
    Piece,
    TransformersConfig,
    WeightsFormat,
)
from fsdptoys.models.foreign.architecture import has_causal_lm
from fsdptoys.models.huggingface import FolderLayout
from fsdptoys.models.rope_scaling import RopeKind
from fsdptoys.utils.dtensor import local_bounds, local_tensor
from fsdptoys.utils.sealed_folder import new_folder
from fsdptoys.utils.text import one_line, short_text

from .checksums import CHECKSUMS_FILE, verify_checksums
from .model_config import (
    build_model_config,
    check_same,
    check_type,
    named_weights,
    weights_format,
)
from .safetensors_io import (
    AGAIN,
    MAX_FILE_BYTES,
    ReadRegion,
    TensorFolder,
    Written,
    blocks,
    dtype_name,
    read_json,
    slices,
    write_tensors,
)

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
STEM = "model"

ROTARY_NUMBERS = {
    **dict.fromkeys(
        ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), float
    ),
    "original_max_position_embeddings": int,
    **dict.fromkeys(
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
        float | None,
    ),
    "truncate": bool,
}
"""Supported rotary settings → their types."""

NO_TOKENS: dict[str, int | list[int] | None] = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""Explicit nulls, because transformers would fill in its family defaults: token ids of another
vocabulary."""


def read_token_ids(folder: Path) -> dict[str, int | list[int]]:
    """Ids that a folder names for the begin, the end and the padding of texts; generation settings
    come first."""
    token_ids: dict[str, int | list[int]] = {}
    for name in (CONFIG_FILE, GENERATION_CONFIG_FILE):
        values = read_json(folder / name) if (folder / name).exists() else {}
        token_ids |= {
            key: values[key]
            for key in NO_TOKENS
            if isinstance(values.get(key), (int, list))
        }
    return token_ids


class HuggingFaceFolder:
    """A folder with ``config.json`` and safetensors files: call ``check``, then ``fill`` for each
    parameter."""

    # set by ``check``
    tensors: TensorFolder
    _layout: FolderLayout | None = None
    _needed: dict[str, tuple[int, ...]]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            owner = re.fullmatch(r"(\w[\w.-]*)/[\w.-]+", str(path))
            hub_name = (
                path
                if owner and not self.path.exists() and not Path(owner[1]).exists()
                else "OWNER/NAME"
            )
            raise ConfigError(
                f"{path} {'is a file' if self.path.exists() else 'does not exist'}, where a "
                "folder in Hugging Face format is expected; name one that holds config.json and "
                f"safetensors files, such as a download: hf download {hub_name} --local-dir "
                "FOLDER"
            )

    def model_config(self, family: str | None = None) -> ModelConfig:
        """Return the configuration in ``config.json``.

        Args:
            family: of the model to fill. None for the one of this project that computes such
                models, or else transformers'.

        Raises:
            ConfigError: naming the first invalid or unsupported setting.
        """
        path = self.path / CONFIG_FILE
        if not path.exists():
            raise ConfigError(
                f"{path} is missing, which describes the model of the weights; {AGAIN}"
            )
        tree = read_json(path)
        if family == TransformersConfig.family or (
            family is None and _is_foreign(tree)
        ):
            return self._foreign_config()
        kind, style = _family(tree, path)
        _check_rotary_numbers(tree, path)
        try:
            fields = style.read_config(tree)
        except TypeError as error:
            hints = typing.get_type_hints(kind)
            for name, key in style.keys.items():
                # A family may read a number into a bool field.
                if hints[name] is not bool and tree.get(key) is not None:
                    check_type(tree[key], hints[name], str(path), key)
            raise ConfigError(
                f"{path} holds a value of a type that no such file has ({one_line(error)}); {AGAIN}"
            ) from error
        except ValueError as error:
            reason = one_line(error)
            if reason.startswith(CONFIG_FILE):
                fix = "use weights of another model"
                if reason.startswith(f"{CONFIG_FILE} lacks"):
                    fix = AGAIN
                elif "quantization_config" not in reason:
                    fix = f"train it with model=transformers model.path={self.path}, or {fix}"
                raise ConfigError(
                    f"{path}{reason.removeprefix(CONFIG_FILE)}; {fix}"
                ) from error
            raise ConfigError(
                f"{path} describes a model that cannot be built: {reason}"
            ) from error
        return build_model_config(kind, fields, str(path), "", names=style.keys)

    def _foreign_config(self) -> ModelConfig:
        """Return the configuration of a model that transformers computes."""
        try:
            config = TransformersConfig(path=str(self.path))
            config.read_files(read_json)
            # some models have no initial values of their own
            dataclasses.replace(config, init_from=config.path).check()
        except ValueError as error:
            raise ConfigError(
                f"{self.path / CONFIG_FILE} describes a model that cannot be built: "
                f"{one_line(error)}"
            ) from error
        return config

    def check(self, model: DecoderModel) -> None:
        """Check from the files' headers that the folder holds exactly the tensors of a model on the
        meta device."""
        verify_checksums(self.path, only_sizes=True)
        tensors = TensorFolder(self.path, STEM)
        layout = weights_format(model).layout(tensors.stored)
        self._needed = {
            piece.tensor: piece.tensor_shape
            for name, tensor in named_weights(model)
            for piece in layout.pieces(name, tuple(tensor.shape))
        }
        reader = f"a {model.config.family} model as configured"
        fix = f"use a folder whose {CONFIG_FILE} fits its weights"
        ignored = {*layout.unused, *layout.copies}
        tensors.require(self._needed, reader, fix, ignored)
        self._layout = layout
        self.tensors = tensors

    def fill(self, param: Tensor, name: str) -> None:
        """Fill a parameter, or this rank's shard of it, from the files, in place and in its own
        dtype.

        ``param`` is a plain tensor, or a DTensor that :func:`~fsdptoys.utils.dtensor.local_bounds`
        accepts. Reads only the shard's part; extra memory is at most the mapped pages of this
        parameter. ConfigError if a file has become unreadable since ``check``.
        """
        assert self._layout is not None, "check the folder first"
        bounds = local_bounds(param)
        with torch.no_grad(), self.tensors.reading() as read:
            local = local_tensor(param)
            for piece in self._layout.pieces(name, tuple(param.shape)):
                part = piece.narrow(bounds)
                if part is None:
                    continue
                source = read(part.tensor, part.tensor_region)
                target = local[
                    slices(part.region, origin=tuple(first for first, _ in bounds))
                ]
                # If a parameter stacks several tensors, the target's first dims have size 1.
                target.copy_(
                    (source.mT if part.transposed else source).expand(target.shape)
                )

    def check_values(self) -> None:
        """Read all tensors in blocks; reject non-finite values, and a tied head that differs from
        the embedding."""
        assert self._layout is not None, "check the folder first"
        self.tensors.read_all(self._needed)
        for copy, name in self._layout.copies.items():
            stored = self.tensors.stored.get(copy)
            if stored is None or copy in self._needed:
                continue
            shape = self._needed[name]
            self.tensors.require({copy: shape}, "a head that is tied to the embedding")
            for block in blocks(shape):
                with self.tensors.reading() as read:
                    if not torch.equal(read(copy, block), read(name, block)):
                        raise ConfigError(
                            f"{self.path / stored.file} holds {copy} with other values than "
                            f"{name}, though {CONFIG_FILE} says that they are one; set "
                            "tie_word_embeddings to false there"
                        )


def open_init_from(model: DecoderModel) -> HuggingFaceFolder:
    """Open the folder of ``model.init_from`` and check that it fits the model, which is on the meta
    device."""
    weights_format(model)
    init_from = model.config.init_from
    assert init_from is not None
    try:
        folder = HuggingFaceFolder(init_from)
    except ConfigError as error:
        raise ConfigError(f"model.init_from={error}") from error
    foreign = model.config.family if model.config.hugging_face is None else None
    check_same(
        model.config,
        folder.model_config(foreign),
        f"model.init_from={init_from}",
        f"fsdptoys convert from-hf {init_from}",
    )
    folder.check(model)
    return folder


def write_hugging_face(
    out_dir: Path,
    config: ModelConfig,
    read: ReadRegion,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
    tokenizer: Mapping[str, bytes] | None = None,
    token_ids: Mapping[str, int | list[int] | None] = NO_TOKENS,
) -> Written:
    """Write a folder in Hugging Face format, atomically.

    ``read`` returns any part of a parameter by its name in the model; ``max_file_bytes`` is also
    roughly the peak memory; ``tokenizer`` has the names and contents of a tokenizer's files,
    ``token_ids`` the ids under the names of ``NO_TOKENS``. ConfigError if ``out_dir`` is taken or
    cannot be written, a value overflows ``dtype``, or the family has no such format.
    """
    with torch.device("meta"):
        model: DecoderModel = config.build()
    style = weights_format(model)
    ids = NO_TOKENS | dict(token_ids)
    trees: dict[str, dict[str, Any]] = {
        CONFIG_FILE: style.write_config(dtype_name(dtype)) | ids,
        GENERATION_CONFIG_FILE: ids,
    }
    if style.source is not None:
        trees = {
            name: read_json(path)
            for name in trees
            if (path := Path(style.source).expanduser() / name).exists()
        }
        config_tree = trees.get(CONFIG_FILE)
        trees[CONFIG_FILE] = style.write_config(dtype_name(dtype), config_tree)
    with new_folder(out_dir, CHECKSUMS_FILE) as folder:
        files = write_tensors(
            folder, STEM, _tensors(model, style, read, dtype), max_file_bytes
        )
        for name, values in trees.items():
            (folder / name).write_text(
                json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8"
            )
        for name, content in (tokenizer or {}).items():
            (folder / name).write_bytes(content)
    return files


def _tensors(
    model: DecoderModel,
    style: WeightsFormat,
    read: ReadRegion,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    pieces: dict[str, list[tuple[str, Piece]]] = {}
    for name, weight in named_weights(model):
        for piece in style.pieces(name, tuple(weight.shape)):
            pieces.setdefault(piece.tensor, []).append((name, piece))
    for tensor, parts in pieces.items():
        own_dtype = torch.float32 if style.keeps_float32(tensor) else dtype
        whole = torch.empty(parts[0][1].tensor_shape, dtype=own_dtype)
        filled = 0
        for name, piece in parts:
            target = whole[slices(piece.tensor_region)]
            source = read(name, piece.region)
            source = source.reshape(source.shape[-target.ndim :])
            target.copy_(source.mT if piece.transposed else source)
            filled += target.numel()
            if target.isinf().any() and not source.isinf().any():
                raise ConfigError(
                    f"{name} holds {source.abs().max():g}, too large for {dtype_name(dtype)}; "
                    "set dtype=bfloat16 or dtype=float32"
                )
        assert filled == whole.numel(), tensor
        yield tensor, whole


def _family(
    tree: Mapping[str, Any], path: Path
) -> tuple[type[ModelConfig], HuggingFaceFormat]:
    formats = ((family, family.hugging_face) for family in MODELS.values())
    families = {
        style.architecture: (family, style)
        for family, style in formats
        if style is not None
    }
    architectures = tree.get("architectures")
    if (
        isinstance(architectures, list)
        and len(architectures) == 1
        and architectures[0] in tuple(families)
    ):
        return families[architectures[0]]
    raise ConfigError(
        f"{path} says architectures={short_text(architectures)}, which is not supported; use "
        f"weights of {', '.join(families)}"
    )


def _is_foreign(tree: Mapping[str, Any]) -> bool:
    """Whether transformers is installed and computes a model that this project does not."""
    names = tree.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        return False
    styles = (family.hugging_face for family in MODELS.values())
    if any(style is not None and style.architecture == names[0] for style in styles):
        return False
    return has_causal_lm(names[0])


def _check_rotary_numbers(tree: Mapping[str, Any], path: Path) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        section = tree.get(key)
        if section is None:
            continue
        if not isinstance(section, dict):
            raise ConfigError(
                f"{path}: {key} is {short_text(section)}, not an object or null; correct it"
            )
        if section.get("rope_type", section.get("type", "default")) in (
            "default",
            *(kind.value for kind in RopeKind),
        ):
            for name, kind in ROTARY_NUMBERS.items():
                if name in section:
                    check_type(section[name], kind, str(path), f"{key}.{name}")
