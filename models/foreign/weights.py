"""Where the weights of a transformers model are in its folders.

Folders may have other names, and other tensors, than the model: Mixtral's experts are three tensors
each there and two stacked parameters here. transformers converts between them with tables of its
own (``revert_weight_conversion``), which work on any tensors. Here they convert tensors of the meta
device, without copies: each result is a view of one parameter, and its shape, strides and offset
say which region. So a rank reads its shard of a parameter from the files, and writing takes no
second copy of the model.

Folders of older versions have older names. Names that a folder lacks are looked for among its
others after transformers' renamings of both.

Not covered: tensors that join several parameters, or take other elements than a box of one. No
family of transformers 5.24 has these; they are refused by name.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..huggingface import FolderLayout, Piece, WeightsFormat, whole
from ..stored_buffers import stored_buffers
from .architecture import with_layers
from .base import TransformersSettings
from .json_text import config_text, parse_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROTARY_BUFFER = re.compile(r"(^|\.)rotary_emb\.\w*inv_freq$")
"""Frequencies that transformers 4 stored, and that models compute."""


class TransformersFormat(WeightsFormat):
    """The format of one transformers model.

    Args:
        original: transformers' own model on the meta device, before an adapter changes it.
        names: our name of each parameter and stored buffer, of shared ones the first → its name in
            ``original``.
        config: of the model.
    """

    def __init__(
        self,
        original: "PreTrainedModel",
        names: Mapping[str, str],
        config: TransformersSettings,
    ) -> None:
        self.source = config.path
        self._config = config
        self._original = original
        self._names = dict(names)
        weights = dict(_all_weights(original))
        self._shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self._integers = [
            f"{name} as {tensor.dtype}"
            for name, tensor in weights.items()
            if not tensor.is_floating_point()
        ]
        ties = original.all_tied_weights_keys
        self._ties = {alias: ties[alias] for alias in ties if alias in weights}
        self._unexpected = [
            re.compile(pattern)
            for pattern in original._keys_to_ignore_on_load_unexpected or ()
        ]
        modules = original._keep_in_fp32_modules_strict or ()
        patterns = [module.replace("*", r"\d+") for module in modules]
        self._float32 = re.compile(
            "|".join(rf"(^|\.){pattern}($|\.)" for pattern in patterns) or r"(?!)"
        )

    def check(self) -> None:
        """Check that every weight has a place in a folder."""
        if self._integers:
            raise ValueError(
                f"{type(self._original).__name__} stores {self._integers[0]}, and folders are read "
                "and written of floating-point numbers only"
            )
        _ = self._pieces

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        """The regions that transformers' own conversion gives."""
        original_name = self._names[name]
        assert self._shapes[original_name] == shape, name
        return self._pieces[original_name]

    def layout(self, stored: Collection[str]) -> FolderLayout:
        """Names of this version of transformers, or older ones that it renames; parameters that a
        folder has under their own names, in place of the tensors that they are split into."""
        needed = {
            piece.tensor
            for name in self._names.values()
            for piece in self._pieces[name]
        }
        aliases = {
            piece.tensor: other.tensor
            for alias, name in self._ties.items()
            for piece, other in zip(
                self._pieces[alias], self._pieces[name], strict=True
            )
        }
        locations = self._find(needed, stored, aliases)

        def pieces(name: str, shape: tuple[int, ...]) -> list[Piece]:
            parts = self.pieces(name, shape)
            if not any(part.tensor in locations for part in parts):
                original_name = locations.get(self._names[name], self._names[name])
                if original_name in stored:
                    return [Piece(whole(shape), original_name, shape, whole(shape))]
            return [
                dataclasses.replace(
                    part, tensor=locations.get(part.tensor, part.tensor)
                )
                for part in parts
            ]

        own_names = set(locations.values())
        copies = {
            alias: locations.get(name, name)
            for alias, name in aliases.items()
            if alias not in own_names
        }
        unused = {
            name
            for name in stored
            if name not in own_names
            and (
                ROTARY_BUFFER.search(name)
                or any(pattern.search(name) for pattern in self._unexpected)
            )
        }
        return FolderLayout(pieces, unused, copies)

    def write_config(
        self, dtype: str, source: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The model's own ``config.json``, with the dtype and the version of transformers.

        The source's file has keys that a run does not keep. It is used if it still says what the
        run knows; but code that it names is not beside the written weights.
        """
        import transformers

        config = self._config
        tree = parse_text(config.text)
        if source is not None and config_text(source, "config.json") == config.text:
            tree = {key: source[key] for key in source if key != "auto_map"}
        tree = with_layers(tree, config.layers)
        if "torch_dtype" in tree:
            tree["torch_dtype"] = dtype
        return tree | {
            "dtype": dtype,
            "transformers_version": transformers.__version__,
        }

    def adapter_piece(self, layer: str, shape: tuple[int, int]) -> Piece:
        """The layer's name in transformers' model, to which PEFT adds its adapters."""
        name = self._names[f"{layer}.weight"]
        return Piece(whole(shape), name, shape, whole(shape))

    def keeps_float32(self, tensor: str) -> bool:
        """Whether transformers keeps it in float32 in models of any dtype."""
        return tensor in self._float32_tensors

    @functools.cached_property
    def _float32_tensors(self) -> set[str]:
        return {
            piece.tensor
            for name, pieces in self._pieces.items()
            if self._float32.search(name)
            for piece in pieces
        }

    @functools.cached_property
    def _pieces(self) -> dict[str, list[Piece]]:
        """Name in transformers' model → pieces."""
        return split_weights(self._original, self._shapes)

    def _find(
        self,
        needed: Collection[str],
        stored: Collection[str],
        aliases: Mapping[str, str],
    ) -> dict[str, str]:
        """Name of a tensor → its name in a folder, for all that it holds."""
        locations = {name: name for name in needed if name in stored}
        others = [name for name in stored if name not in locations]
        if others and len(locations) < len(needed):
            current = self._renaming()
            by_name = {current(name): name for name in reversed(others)}
            for name in (*needed, *self._names.values()):
                if name not in stored and current(name) in by_name:
                    locations[name] = by_name[current(name)]
        for alias, name in aliases.items():
            # A folder may hold a tied weight under its second name alone.
            if name not in locations and alias in stored:
                locations[name] = alias
        return locations

    def _renaming(self) -> Callable[[str], str]:
        """Return the function from a stored name to that of this version, below the base model."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, apply_renamings

        renamings = [
            conversion
            for conversion in get_model_conversion_mapping(self._original)
            if isinstance(conversion, WeightRenaming)
        ]
        prefix = f"{self._original.base_model_prefix}."
        return lambda name: apply_renamings(name, renamings).removeprefix(prefix)


def match_names(model: nn.Module, original: nn.Module) -> dict[str, str]:
    """Our name of each parameter and stored buffer → its name in another module that has the same
    ones, of tied weights the one that the others are copies of.

    Raises:
        ValueError: if one of them is missing in the other module, or in the model.
    """
    ties: Collection[str] = getattr(original, "all_tied_weights_keys", {})
    names: dict[int, str] = {}
    for name, tensor in _all_weights(original):
        if id(tensor) not in names or names[id(tensor)] in ties:
            names[id(tensor)] = name
    matches: dict[str, str] = {}
    identities = set()
    for name, tensor in _all_weights(model):
        if id(tensor) not in names:
            raise ValueError(f"{name} is no weight of {type(original).__name__}")
        if id(tensor) not in identities:
            matches[name] = names[id(tensor)]
        identities.add(id(tensor))
    missing = [name for tensor, name in names.items() if tensor not in identities]
    if missing:
        raise ValueError(
            f"{missing[0]} of {type(original).__name__} is no weight of the model"
        )
    return matches


def split_weights(
    original: "PreTrainedModel", shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[Piece]]:
    """Split weights into the tensors that transformers stores.

    Args:
        original: transformers' model.
        shapes: name in it → full shape.

    Raises:
        ValueError: for a tensor that is no region of one weight.
    """
    from transformers.core_model_loading import revert_weight_conversion

    bases = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {base.untyped_storage()._cdata: name for name, base in bases.items()}
    with _Views():
        stored: dict[str, Tensor] = revert_weight_conversion(original, dict(bases))
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    for tensor, view in stored.items():
        owner = owners.get(view.untyped_storage()._cdata)
        piece = _piece(tensor, view, shapes[owner]) if owner is not None else None
        if owner is None or piece is None:
            raise ValueError(
                f"{type(original).__name__} stores {tensor} in a form that is no part of one of "
                "its weights; use another model"
            )
        pieces[owner].append(piece)
    for name, parts in pieces.items():
        if sum(math.prod(part.tensor_shape) for part in parts) != math.prod(
            shapes[name]
        ):
            raise ValueError(
                f"{type(original).__name__} does not store all of {name}; use another model"
            )
    return pieces


class _Views(TorchFunctionMode):
    """Leaves out copies, so that results of a conversion stay views."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in (Tensor.contiguous, Tensor.clone):
            return args[0]
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Axis:
    """A dim of a contiguous tensor."""

    size: int
    stride: int
    start: int
    """First index that a view has."""


def _piece(tensor: str, view: Tensor, shape: tuple[int, ...]) -> Piece | None:
    """The piece that a view of a contiguous weight is, or None if it is no box of it."""
    axes = []
    offset = int(view.storage_offset())
    for dim, size in enumerate(shape):
        stride = math.prod(shape[dim + 1 :])
        axes.append(_Axis(size, stride, offset // stride if stride else 0))
        offset %= max(stride, 1)
    extra = len(shape) - view.ndim
    if extra < 0:
        return None
    for transposed in (False, True):
        if transposed and view.ndim < 2:
            return None
        matrix = view.mT if transposed else view
        own = axes[extra:]
        if all(
            (count == 1 or stride == axis.stride) and axis.start + count <= axis.size
            for count, stride, axis in zip(
                matrix.shape, matrix.stride(), own, strict=True
            )
        ):
            region = tuple((axis.start, axis.start + 1) for axis in axes[:extra])
            region += tuple(
                (axis.start, axis.start + count)
                for axis, count in zip(own, matrix.shape, strict=True)
            )
            stored = tuple(view.shape)
            return Piece(region, tensor, stored, whole(stored), transposed)
    return None


def _all_weights(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters under all of their names, and stored buffers."""
    yield from model.named_parameters(remove_duplicate=False)
    for buffer in stored_buffers(model):
        yield buffer.name, buffer.tensor
