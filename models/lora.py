"""Low-rank adapters beside frozen linear layers (arXiv:2106.09685).

    y = W x + alpha / rank · B A dropout(x)        W (O, I) frozen, A (R, I), B (O, R)

A starts with PEFT's values, uniform in ±1/sqrt(I), B with zeros, so that the model starts as it
was. Dropout draws from a hash of (seed, layer, sample, position, channel) instead of a generator:
every layout of ranks and micro-batches, and the recomputation of activation checkpointing, drops
the same elements. The price: about ten integer passes over an adapter's input.

Shapes: B batch, T sequence, I and O inner and outer width, R rank.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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


class LoRALinear(Linear):
    """A frozen linear layer with an adapter; made by :func:`add_adapters`."""

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
        # Scaled where it is narrow: one pass less over the output.
        return self.multiply(input) + self.lora_b(
            self.lora_a(adapter_input) * self.scale
        )


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
    names: list[str] = []
    for name, module in model.layers.named_modules():
        if type(module) is not Linear or name.rpartition(".")[2] not in targets:
            continue
        module.__class__ = LoRALinear
        assert isinstance(module, LoRALinear)
        dtype = module.weight.dtype
        module.lora_a = Linear(
            module.in_features,
            rank,
            bias=False,
            dtype=dtype,
            device=module.weight.device,
        )
        module.lora_b = Linear(
            rank,
            module.out_features,
            bias=False,
            dtype=dtype,
            device=module.weight.device,
        )
        module.scale = alpha / rank
        module.dropout = dropout
        module.number = torch.tensor(len(names), device="cpu")
        module.samples = samples
        names.append(f"layers.{name}")
    if not names:
        raise ValueError(
            f"none of {', '.join(targets)} is a linear layer of this model's blocks"
        )
    return names


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
