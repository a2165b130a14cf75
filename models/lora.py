"""Low-rank adapters beside frozen linear layers (arXiv:2106.09685).

    y = W x + alpha / rank · B A dropout(x)        W (O, I) frozen, A (R, I), B (O, R)

A starts with PEFT's values, uniform in ±1/sqrt(I), B with zeros, so that the model starts as it
was. Dropout draws from a hash of (seed, layer, sample, position, channel) instead of a generator:
every layout of ranks and micro-batches, and the recomputation of activation checkpointing, drops
the same elements. The price: about ten integer passes over an adapter's input.

Shapes: B batch, T sequence, I and O inner and outer width, R rank.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from .context import FULL_SEQUENCES, Context
from .decoder import DecoderModel
from .layers import Linear

BITS = 2**32 - 1


class Samples:
    """Which samples of the run a micro-batch holds, for the layers that drop elements of their
    inputs."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.numbers_B: Tensor | None = None
        """int64 numbers of the samples, counted over the run, on the inputs' device; None where
        nothing is dropped."""
        self.context: Context = FULL_SEQUENCES


class LowRank(nn.Module):
    """A linear layer of any class with an adapter, whose product it adds to its own."""

    lora_a: Linear
    lora_b: Linear
    scale: float
    dropout: float
    number: Tensor
    """Of the layer, to drop other elements in each; on the CPU. With integers, compiled layers
    would share no graph."""
    samples: Samples

    def forward(self, input: Tensor) -> Tensor:
        """Multiply the last dim; any leading shape, with dropout (B, T) or (B·T)."""
        adapter_input = input
        if self.training and self.dropout > 0:
            assert self.samples.numbers_B is not None, (
                "dropout needs the numbers of the samples"
            )
            adapter_input = drop(input, self.dropout, self.samples, self.number)
        product = cast(Callable[[Tensor], Tensor], super().forward)
        # Scaled where it is narrow: one pass less over the output.
        return product(input) + self.lora_b(self.lora_a(adapter_input) * self.scale)


class LoRALinear(LowRank, Linear):
    """A frozen linear layer of the families with an adapter; made by :func:`add_adapters`."""


ADAPTED: dict[type[nn.Module], type[nn.Module]] = {Linear: LoRALinear}
"""Class of a linear layer → its class with an adapter."""


@dataclass(frozen=True)
class LinearLayer:
    """A layer that can get an adapter."""

    module: nn.Module
    in_features: int
    out_features: int
    transposed: bool
    """Whether its weight is (I, O), as of transformers' Conv1D."""


def linear_layers(model: DecoderModel) -> dict[str, LinearLayer]:
    """The linear layers of a model's blocks that can get adapters, by their names in the model.

    Subclasses of ``torch.nn.Linear`` are none of them, since they may compute otherwise. Nor are
    routers and routed experts, which do not see all tokens.
    """
    layers = {}
    for name, module in model.layers.named_modules():
        if is_adapter(f".{name}.") or is_routed(model, name):
            continue
        kind = _plain_class(module)
        if kind in (Linear, nn.Linear):
            assert isinstance(module, nn.Linear)
            layers[f"layers.{name}"] = LinearLayer(
                module, module.in_features, module.out_features, transposed=False
            )
        elif _is_conv1d(kind):
            inner, outer = module.get_parameter("weight").shape
            layers[f"layers.{name}"] = LinearLayer(
                module, inner, outer, transposed=True
            )
    return layers


def is_routed(model: DecoderModel, name: str) -> bool:
    """Whether a module is one of the routed experts, or scores or gates them.

    Args:
        model: the model.
        name: of the module, in the blocks.
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part == "experts":
            return True
        siblings = model.layers.get_submodule(".".join(parts[:index]))
        is_gate = part.endswith("gate") or "router" in part
        if is_gate and hasattr(siblings, "experts"):
            return True
    return False


def match_layers(names: Sequence[str], target: str) -> list[str]:
    """Those of the layers' names that a target means.

    A target is the end of a name (``q_proj``, ``self_attn.q_proj``) or a regular expression of the
    full name, which has other characters too.
    """
    if re.fullmatch(r"[\w.]+", target):
        return [name for name in names if f".{name}".endswith(f".{target}")]
    return [name for name in names if re.fullmatch(target, name)]


def adapted_layers(
    model: DecoderModel, targets: Sequence[str]
) -> dict[str, LinearLayer]:
    """The layers of a model that get adapters, by name, in the order of the model."""
    layers = linear_layers(model)
    names = {name for target in targets for name in match_layers(list(layers), target)}
    return {name: layer for name, layer in layers.items() if name in names}


def add_adapters(
    model: DecoderModel,
    targets: Sequence[str],
    rank: int,
    alpha: float,
    dropout: float,
    samples: Samples,
) -> list[str]:
    """Freeze a model on the meta device, and give linear layers of its blocks adapters; return
    their names.

    Call it before anything else changes the blocks.

    Raises:
        ValueError: if no block has one of the targets.
    """
    model.requires_grad_(False)
    layers = adapted_layers(model, targets)
    if not layers:
        raise ValueError(
            f"none of {', '.join(targets)} is a linear layer of this model's blocks"
        )
    for number, layer in enumerate(layers.values()):
        module = layer.module
        kind = type(module)
        if kind not in ADAPTED:
            ADAPTED[kind] = type(f"LoRA{kind.__name__}", (LowRank, kind), {})
        module.__class__ = ADAPTED[kind]
        assert isinstance(module, LowRank)
        weight = module.get_parameter("weight")
        module.lora_a = Linear(
            layer.in_features,
            rank,
            bias=False,
            dtype=weight.dtype,
            device=weight.device,
        )
        module.lora_b = Linear(
            rank,
            layer.out_features,
            bias=False,
            dtype=weight.dtype,
            device=weight.device,
        )
        module.scale = alpha / rank
        module.dropout = dropout
        module.number = torch.tensor(number, device="cpu")
        module.samples = samples
    return list(layers)


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module has without an adapter."""
    kind = type(module)
    if isinstance(module, LowRank):
        kind = kind.__mro__[kind.__mro__.index(LowRank) + 1]
    return kind


def _is_conv1d(kind: type[nn.Module]) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def init_adapter_rows(name: str, rows: Tensor, generator: torch.Generator) -> None:
    """Write initial values of an adapter into consecutive rows; see
    ``DecoderModel.row_initializer``."""
    if name.endswith("lora_b.weight"):
        rows.zero_()
    else:
        bound = 1 / math.sqrt(rows.shape[-1])  # torch.nn.Linear's, which PEFT takes
        rows.uniform_(-bound, bound, generator=generator)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_a." in name or ".lora_b." in name


def drop(input: Tensor, share: float, samples: Samples, layer: Tensor | int) -> Tensor:
    """Dropout with probability ``share`` of (B, T, I), or of (B·T, I)."""
    assert samples.numbers_B is not None
    B = len(samples.numbers_B)
    I = input.shape[-1]  # noqa: E741
    T = input.numel() // (B * I)
    device = input.device
    positions_T = samples.context.cut(
        torch.arange(T * samples.context.ranks, device=device), 0
    )
    first_B = _mixed(
        _mixed(samples.numbers_B)
        + samples.seed * 0x9E3779B1 % 2**32
        + layer * 0x27D4EB2F
    )
    hash_BT = _mixed(first_B.unsqueeze(1) + positions_T * 0x9E3779B9)
    channels_I = torch.arange(I, device=device)
    hash_BTI = _mixed(hash_BT.unsqueeze(2) + channels_I * 0x85EBCA6B)
    kept_BTI = hash_BTI >= int(share * (BITS + 1))
    return input * kept_BTI.view_as(input).to(input.dtype) * (1 / (1 - share))


def _mixed(number: Tensor) -> Tensor:
    """32 mixed bits of int64 numbers; a product's upper bits, which overflow, are cut (lowbias32 of
    C. Wellons)."""
    number = number & BITS
    number = ((number ^ (number >> 16)) * 0x7FEB352D) & BITS
    number = ((number ^ (number >> 15)) * 0x846CA68B) & BITS
    return number ^ (number >> 16)
