"""A family's parameters and configuration in Hugging Face format: names and shapes, no files.

A parameter is split into pieces, each of which equals a region of one Hugging Face tensor: usually
all of it under another name, but GPT-2 has one transposed tensor for queries, keys and values, and
Qwen3-MoE one tensor per expert. The same pieces serve to read any part of a parameter, so that a
rank reads only its shard, and to write.

``config.json`` is read and written through tables of keys. Settings that change the arithmetic and
that a family does not support are refused by name, rather than computed differently.

``WeightsFormat`` is what reading and writing folders needs of a model; a family's
``HuggingFaceFormat`` is one, and a transformers model has its own (``foreign.weights``).
"""

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Bounds = tuple[tuple[int, int], ...]
"""First and past-the-last index of each dim."""


def whole(shape: tuple[int, ...]) -> Bounds:
    """Bounds of a full tensor."""
    return tuple((0, size) for size in shape)


@dataclass(frozen=True)
class Piece:
    """A region of a parameter that equals a region of one Hugging Face tensor.

    Where the parameter has more dims, the first of them have extent 1 in ``region``.
    """

    region: Bounds
    """Region of the parameter."""
    tensor: str
    """Name of the Hugging Face tensor."""
    tensor_shape: tuple[int, ...]
    """Full shape of the Hugging Face tensor."""
    tensor_region: Bounds
    """Region of the Hugging Face tensor, as stored."""
    transposed: bool = False
    """Whether the last two dims are swapped."""

    def narrow(self, bounds: Bounds) -> "Piece | None":
        """The part of this piece within bounds of the parameter; None if empty."""
        region = tuple(
            (max(low, first), min(high, last))
            for (low, high), (first, last) in zip(self.region, bounds, strict=True)
        )
        if any(low >= high for low, high in region):
            return None
        offsets = [
            (low - first, high - first)
            for (low, high), (first, _) in zip(region, self.region, strict=True)
        ][-len(self.tensor_region) :]
        if self.transposed:
            offsets[-2:] = offsets[:-3:-1]
        tensor_region = tuple(
            (first + low, first + high)
            for (first, _), (low, high) in zip(self.tensor_region, offsets, strict=True)
        )
        return Piece(
            region, self.tensor, self.tensor_shape, tensor_region, self.transposed
        )


Pieces = Callable[[str, tuple[int, ...]], list[Piece]]
"""``pieces(name, shape)`` splits the parameter of this name and full shape."""


@dataclass(frozen=True)
class FolderLayout:
    """Where one folder has a model's weights."""

    pieces: Pieces
    """With the names that the folder has."""
    unused: Collection[str] = ()
    """Names of tensors that such folders hold and that are not needed."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may be in the folder beside the equal one → that one; of tied weights."""


class WeightsFormat(ABC):
    """Where a model's weights are in folders in Hugging Face format."""

    source: str | None = None
    """Folder with other files of the model, which a written one gets too."""

    @abstractmethod
    def check(self) -> None:
        """Check that every weight has a place in a folder.

        Raises:
            ValueError: naming one that has none.
        """

    @abstractmethod
    def pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        """Split a parameter into pieces, as folders are written.

        Args:
            name: our name of it.
            shape: its full shape.
        """

    @abstractmethod
    def layout(self, stored: Collection[str]) -> FolderLayout:
        """Find the weights in a folder that holds tensors of these names."""

    @abstractmethod
    def write_config(
        self, dtype: str, source: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """``config.json`` of a folder with weights of a dtype, as a tree.

        Args:
            dtype: name of it.
            source: ``config.json`` in the folder ``source``, if that has one.
        """

    def adapter_piece(self, layer: str, shape: tuple[int, int]) -> Piece:
        """The piece by which a folder in PEFT's format names a layer's adapter.

        Args:
            layer: our name of a linear layer.
            shape: outer and inner width.
        """
        (piece,) = self.pieces(f"{layer}.weight", shape)
        return piece

    def keeps_float32(self, tensor: str) -> bool:
        """Whether a tensor is written in float32 in any case."""
        return False


EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class HuggingFaceFormat:
    """The format of one family; a family with split or transposed tensors overrides
    ``pieces``."""

    architecture: str
    """The transformers class, ``architectures`` in ``config.json``."""
    model_type: str
    """``model_type`` in ``config.json``."""
    keys: Mapping[str, str]
    """Field of our configuration → key of ``config.json``."""
    names: Mapping[str, str]
    """Part of our parameters' names → part of theirs."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Key of ``config.json`` → the only value that the family supports."""
    write_only: Mapping[str, Any] = field(default_factory=dict)
    """Key of ``config.json`` → value to write, such as dropout; not read."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Field of our configuration → its value where ``config.json`` lacks the key."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Key of ``config.json`` → fallback key."""
    drops: tuple[str, ...] = ()
    """Names of unused tensors in such folders; ``{}`` is the number of a layer."""

    def tensor_name(self, name: str) -> str:
        """Their name of an unsplit parameter."""
        head = "" if name.startswith("lm_head") else self.names[""]
        return head + ".".join(self.names.get(part, part) for part in name.split("."))

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        """Split a parameter into pieces.

        Args:
            name: our name of it.
            shape: its full shape.
        """
        return [Piece(whole(shape), self.tensor_name(name), shape, whole(shape))]

    def write_config(self, config: Any) -> dict[str, Any]:
        """``config.json`` of a ``ModelConfig``, as a tree."""
        tree = {"architectures": [self.architecture], "model_type": self.model_type}
        tree |= {
            key: getattr(config, name)
            for name, key in self.keys.items()
            if getattr(config, name) is not None
        }
        return tree | dict(self.fixed) | dict(self.write_only)

    def read_config(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of our configuration from a ``config.json``.

        Raises:
            ValueError: for a missing key, or a value that the family does not support.
        """
        for key, value in {"quantization_config": None, **self.fixed}.items():
            if tree.get(key, value) != value:
                raise ValueError(
                    f"config.json says {key}={tree[key]!r}, which {self.model_type} models here "
                    f"do not compute (only {value!r})"
                )
        fields = {}
        for name, key in self.keys.items():
            value = tree.get(key, tree.get(self.aliases.get(key, key)))
            if value is not None:
                fields[name] = value
            elif name in self.defaults:
                fields[name] = self.defaults[name]
            else:
                raise ValueError(
                    f"config.json lacks {key}, which a {self.model_type} model needs"
                )
        return fields


class FamilyFormat(WeightsFormat):
    """The format of a model of one of the families.

    Args:
        style: of the family.
        config: of the model, a ``ModelConfig``.
    """

    def __init__(self, style: HuggingFaceFormat, config: Any) -> None:
        self.style = style
        self._config = config

    def check(self) -> None:
        """All weights of a family have one."""

    def write_config(
        self, dtype: str, source: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The family's; transformers 4 reads the dtype's second spelling."""
        return self.style.write_config(self._config) | {
            "dtype": dtype,
            "torch_dtype": dtype,
        }

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        """The family's."""
        return self.style.pieces(name, shape)

    def layout(self, stored: Collection[str]) -> FolderLayout:
        """The family's names. The published GPT-2 was saved without the name prefix of the decoder
        below the head."""
        style = self.style
        prefix = style.names[""]
        if any(name.startswith(prefix) for name in stored):
            prefix = ""

        def pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
            return [
                dataclasses.replace(piece, tensor=piece.tensor.removeprefix(prefix))
                for piece in self.pieces(name, shape)
            ]

        drops = [
            re.escape(drop.removeprefix(prefix)).replace(r"\{\}", r"\d+")
            for drop in style.drops
        ]
        unused = {
            name for name in stored if any(re.fullmatch(drop, name) for drop in drops)
        }
        embedding = style.tensor_name(EMBEDDING).removeprefix(prefix)
        copies = {HEAD: embedding} if self._config.tie_embeddings else {}
        return FolderLayout(pieces, unused, copies)
