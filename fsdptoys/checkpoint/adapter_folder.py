"""Low-rank adapters as a folder in PEFT's format: ``adapter_config.json`` and
``adapter_model.safetensors``.

A folder holds for each linear layer A (R, I) and B (O, R), and ``alpha``; the layer's weight is W +
scale · B A, with the scale alpha / R, or alpha / sqrt(R) with ``use_rslora``. Settings that compute
anything else are refused by name.

Where one Hugging Face tensor holds several of our layers (GPT-2's queries, keys and values), a
folder has one adapter for them. Written, it has the sum of their ranks, and zeros outside of each
one's rows. Read, adapters of that form are split again; of any other, each layer gets A, and its
rows of B.

Shapes: O and I outer and inner width of a layer, R rank of its adapter.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.models.lora import LinearLayer, adapted_layers, linear_layers
from fsdptoys.utils.dtensor import local_bounds, local_tensor
from fsdptoys.utils.text import one_line, short_text

from .checksums import verify_checksums
from .model_config import weights_format
from .safetensors_io import AGAIN, TensorFolder, read_json

STEM = "adapter_model"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
A = ".lora_a.weight"
B = ".lora_b.weight"
THEIR_A = ".lora_A.weight"
THEIR_B = ".lora_B.weight"

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    # The others change the base weights too.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Key of ``adapter_config.json`` → the values that leave W + scale · B A."""


@dataclass(frozen=True)
class AdapterLocation:
    """Where a folder holds the adapter of one of our layers."""

    module: str
    """Name of the adapter's tensors, without their endings."""
    rows: tuple[int, int]
    """The layer's rows of B."""
    inner: int
    """I."""
    total: int
    """Rows of B."""
    transposed: bool
    """Whether the layer's weight is (I, O)."""


class AdapterFolder:
    """A folder in PEFT's format: call ``check`` before anything else.

    Raises:
        ConfigError: if it is missing or damaged, or computes something else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        config = self.path / CONFIG_FILE
        if not config.is_file():
            raise ConfigError(
                f"{path} holds no {CONFIG_FILE}; name a folder in PEFT's format, with it and "
                f"{STEM}.safetensors"
            )
        verify_checksums(self.path, only_sizes=True)
        self._config = read_json(config)
        for key, supported in UNSUPPORTED.items():
            value = self._config.get(key)
            if not any(
                value is option or (type(value) is type(option) and value == option)
                for option in supported
            ):
                raise ConfigError(
                    f"{config} says {key}={short_text(value)}, and only "
                    f"{short_text(supported[0])} is read here; use an adapter trained with it"
                )
        self._tensors = TensorFolder(self.path, STEM)
        self._locations: dict[str, AdapterLocation] = {}
        self._layers: dict[str, list[str]] = {}
        """Module → our layers that have its adapter, in the order of their rows."""
        self.ranks: dict[str, int] = {}
        """Our layer → rows of its A."""
        self.scales: dict[str, float] = {}
        """Our layer → factor on B A."""

    @property
    def base(self) -> str | None:
        """Name or path of the model that the adapters were trained on, if the folder says it."""
        name = self._config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    @property
    def targets(self) -> list[str]:
        """Last parts of the names of our layers that have adapters."""
        return sorted({layer.rpartition(".")[2] for layer in self._locations})

    def check(self, model: DecoderModel) -> None:
        """Check from the files' headers that every tensor belongs to a linear layer of a model on
        the meta device."""
        for name, layer in linear_layers(model).items():
            location = locate_adapter(model, name, layer)
            names = {location.module + THEIR_A, location.module + THEIR_B}
            if names & self._tensors.stored.keys():
                self._locations[name] = location
                self._layers.setdefault(location.module, []).append(name)
        reader = f"the adapter of a {model.config.family} model as configured"
        needed: dict[str, tuple[int, ...]] = {}
        for module_name, layers in self._layers.items():
            layers.sort(key=lambda layer: self._locations[layer].rows)
            location = self._locations[layers[0]]
            stored = self._tensors.stored.get(module_name + THEIR_A)
            rank = max([1, *stored.shape[:1]]) if stored is not None else 1
            needed[module_name + THEIR_A] = (rank, location.inner)
            needed[module_name + THEIR_B] = (location.total, rank)
            scale = self._scale(module_name.removeprefix(PREFIX), rank)
            self.ranks |= dict.fromkeys(layers, rank)
            self.scales |= dict.fromkeys(layers, scale)
        self._tensors.require(
            needed, reader, "use one of linear layers of this model's blocks"
        )
        if not needed:
            raise ConfigError(f"{self.path} holds no tensor of an adapter; {AGAIN}")

    def check_values(self) -> None:
        """Read all tensors; reject values that are not finite."""
        self._tensors.read_all(
            {name: stored.shape for name, stored in self._tensors.stored.items()}
        )

    def check_run(
        self,
        key: str,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        model: DecoderModel,
    ) -> None:
        """Check that the folder holds adapters of exactly the layers of a run, of its rank and
        alpha.

        Args:
            key: setting that names the folder, for messages.
            rank: of every adapter of the run.
            alpha: the run's scale is alpha / rank.
            targets: of ``adapted_layers``.
            model: on the meta device.
        """
        for sharing in self._layers.values():
            if len(sharing) > 1 and all(
                self._is_split(layer, rank) for layer in sharing
            ):
                self.ranks |= dict.fromkeys(sharing, rank)
        where = f"{key}={self.path}"
        ranks = sorted(set(self.ranks.values()))
        if len(ranks) > 1:
            raise ConfigError(
                f"{where} holds adapters of ranks {ranks[0]} and {ranks[1]}, and a run has one "
                "rank; use an adapter without rank_pattern"
            )
        if ranks != [rank]:
            raise ConfigError(
                f"tune.rank={rank} is not {ranks[0]}, the rank of {where}; set tune.rank={ranks[0]}"
            )
        scales = sorted(set(self.scales.values()))
        if len(scales) > 1:
            raise ConfigError(
                f"{where} multiplies layers by {scales[0]:g} and by {scales[1]:g}, and a run has "
                "one tune.alpha / tune.rank; use an adapter without alpha_pattern"
            )
        if not math.isclose(scales[0], alpha / rank, rel_tol=1e-6):
            fitting = scales[0] * rank
            raise ConfigError(
                f"tune.alpha={alpha:g} is not {fitting:g}, that of {where}; set "
                f"tune.alpha={fitting:g}"
            )
        layers = adapted_layers(model, targets)
        own = sorted({name.rpartition(".")[2] for name in layers})
        if own != self.targets:
            lists = [f"[{','.join(names)}]" for names in (own, self.targets)]
            raise ConfigError(
                f"tune.targets={lists[0]} is not {lists[1]}, the layers of {where}; set "
                f"tune.targets={lists[1]}"
            )
        for name in layers:
            if name not in self._locations:
                raise ConfigError(
                    f"{where} holds no adapter of {name}; use one of all blocks"
                )
        for name in self._locations:
            if name not in layers:
                raise ConfigError(
                    f"{where} holds an adapter of {name}, which tune.targets does not name; "
                    f"set tune.targets=[{','.join(self.targets)}]"
                )

    def fill(self, param: Tensor, name: str) -> None:
        """Fill A or B of a layer, or this rank's shard of it, in place and in its own dtype.

        Call ``check_run`` first.
        """
        layer = name.removesuffix(A).removesuffix(B)
        location = self._locations[layer]
        rank = self.ranks[layer]
        index = self._layers[location.module].index(layer)
        first = rank * index if self._stored_rank(layer) != rank else 0
        (low, high), (left, right) = local_bounds(param)
        with torch.no_grad(), self._tensors.reading() as read:
            if name.endswith(A):
                source = read(
                    location.module + THEIR_A,
                    ((first + low, first + high), (left, right)),
                )
            else:
                rows = (location.rows[0] + low, location.rows[0] + high)
                source = read(
                    location.module + THEIR_B, (rows, (first + left, first + right))
                )
            local_tensor(param).copy_(source)

    def adapts(self, name: str) -> bool:
        """Whether the folder has an adapter of this parameter."""
        return (
            name.endswith(".weight") and name.removesuffix(".weight") in self._locations
        )

    def merge(self, weight_OI: Tensor, name: str) -> None:
        """Add scale · B A to a layer's full float32 weight on the CPU, in place, which may be
        (I, O); leave others as they are."""
        if not self.adapts(name):
            return
        layer = name.removesuffix(".weight")
        location = self._locations[layer]
        rank = self._stored_rank(layer)
        if location.transposed:
            weight_OI = weight_OI.mT
        with self._tensors.reading() as read:
            a_RI = read(
                location.module + THEIR_A, ((0, rank), (0, location.inner))
            ).float()
            b_OR = read(location.module + THEIR_B, (location.rows, (0, rank))).float()
            weight_OI.addmm_(b_OR, a_RI, alpha=self.scales[layer])

    def _stored_rank(self, layer: str) -> int:
        return self._tensors.stored[self._locations[layer].module + THEIR_A].shape[0]

    def _is_split(self, layer: str, rank: int) -> bool:
        """Whether this is one of several layers of a rank that were written here: its rows of B are
        zero but in columns of its own."""
        location = self._locations[layer]
        layers = self._layers[location.module]
        if self._stored_rank(layer) != rank * len(layers):
            return False
        first = rank * layers.index(layer)
        with self._tensors.reading() as read:
            b_OR = read(
                location.module + THEIR_B, (location.rows, (0, rank * len(layers)))
            )
            return not b_OR[:, :first].any() and not b_OR[:, first + rank :].any()

    def _scale(self, module: str, rank: int) -> float:
        """The factor of an adapter; ConfigError if the configuration has another rank than the
        tensors."""
        stored_rank = self._setting("r", "rank_pattern", module)
        if stored_rank != rank:
            raise ConfigError(
                f"{self.path / CONFIG_FILE} says r={stored_rank:g} for {one_line(module)}, whose "
                f"tensors have {rank}; {AGAIN}"
            )
        alpha = self._setting("lora_alpha", "alpha_pattern", module)
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _setting(self, key: str, pattern: str, module: str) -> float:
        where = self.path / CONFIG_FILE
        value: Any = self._config.get(key)
        patterns = self._config.get(pattern) or {}
        for part, special in patterns.items() if isinstance(patterns, dict) else ():
            if not re.fullmatch(r"[\w.]+", part):
                raise ConfigError(
                    f"{where} names layers by the expression {one_line(part)} in {pattern}, and "
                    "only names are read here; write the names in its place"
                )
            # As PEFT does, for which a dot is any character
            if re.fullmatch(rf"(.*\.)?{part}", module):
                value = special
                break
        if type(value) not in (int, float) or not 0 < value < 1e9:
            raise ConfigError(
                f"{where} says {key}={short_text(value)}, which is no number above 0; {AGAIN}"
            )
        return float(value)


def locate_adapter(
    model: DecoderModel, name: str, layer: LinearLayer
) -> AdapterLocation:
    """Where a folder holds the adapter of a layer of this name."""
    shape = (layer.out_features, layer.in_features)
    piece = weights_format(model).adapter_piece(name, shape)
    dim = -1 if piece.transposed else 0
    return AdapterLocation(
        PREFIX + piece.tensor.removesuffix(".weight"),
        piece.tensor_region[dim],
        layer.in_features,
        piece.tensor_shape[dim],
        layer.transposed,
    )
