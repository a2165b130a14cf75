"""Linear layers with float8 matmuls: settings, checks, and torchao's conversion.

A float8 matmul takes half the time of a bf16 one from compute capability 8.9 on. Each operand is
scaled so that its largest element is float8's largest, cast, multiplied with sums in higher
precision, and scaled back. ``tensorwise`` has one scale per tensor, which is fastest; ``rowwise``
one per row, which limits the damage of an outlier. Scaling and casting pay only where the compiler
fuses them (``train.compile=true``) and the matrices are large.

With ``train.float8_all_gather`` FSDP2 casts shards before it gathers them, which halves the traffic
of bf16. The scale is that of the full tensor: one all-reduce for all tensors after each update, or
one per tensor where updates are deferred.

The blocks' ``Linear`` layers are converted if 16 divides both dims; head, embedding, routers and
experts are not. On a CPU torchao emulates the numerics, without the speed.

Not covered: NPUs; float8 in attention; FSDP1 (torchao does not know its flat parameters).
Source: https://docs.pytorch.org/ao/stable/workflows/training.html, arXiv:2209.05433
"""

import dataclasses
import logging
from enum import Enum
from typing import Any

import torch
from torch import nn

from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.models.layers import Linear
from fsdptoys.utils.torchao import torchao_fault

MULTIPLE = 16
"""Must divide both dims of each operand, as the hardware requires."""
CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with float8 matmuls."""


class Float8(Enum):
    """Scales of float8 matmul operands; none for bf16 or float32 matmuls."""

    none = "none"
    tensorwise = "tensorwise"
    rowwise = "rowwise"


def check_float8_here(float8: Float8, device_type: str) -> None:
    """Check that this node's device and packages support float8; predictions for other hardware
    skip this."""
    if float8 is Float8.none:
        return
    key = f"train.float8={float8.value}"
    if device_type == "cuda" and torch.cuda.get_device_capability() < CAPABILITY:
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        raise ConfigError(
            f"{key} needs a device of compute capability 8.9 or more, and this one has "
            f"{capability}; set train.float8=none"
        )
    fault = torchao_fault()
    if fault is not None:
        raise ConfigError(
            f"{key} needs torchao, which {fault}, or set train.float8=none"
        )


def uneven_shards(model: DecoderModel, ranks: int) -> str | None:
    """Return a sentence on shards of different sizes, which FSDP2 does not pad if they are cast
    before the gather."""
    for name, module in model.layers.named_modules():
        if (
            isinstance(module, Linear)
            and takes_float8(module)
            and module.out_features % ranks
        ):
            return (
                f"train.float8_all_gather=true needs shards of one size, and {ranks} ranks do "
                f"not divide the {module.out_features} rows of layers.{name}; set mesh.fsdp_size "
                "to a number that does, or train.float8_all_gather=false"
            )
    return None


def takes_float8(module: nn.Module) -> bool:
    """Whether a module of a block is converted."""
    return type(module) is Linear and not any(
        size % MULTIPLE for size in module.weight.shape
    )


def convert_to_float8(
    model: DecoderModel, float8: Float8, all_gather: bool, device_type: str
) -> int:
    """Convert the blocks' linear layers to float8 matmuls, emulated without CUDA; return the number
    of layers.

    Call it on the meta device, before any other change to the blocks.

    Raises:
        ConfigError: if 16 divides the dims of none.
    """
    if float8 is Float8.none:
        return 0
    check_float8_here(float8, device_type)
    library = _torchao()
    config = library.Float8LinearConfig.from_recipe_name(float8.value)
    config = dataclasses.replace(
        config, enable_fsdp_float8_all_gather=all_gather, emulate=device_type != "cuda"
    )
    count = sum(map(takes_float8, model.layers.modules()))
    if count == 0:
        raise ConfigError(
            f"train.float8={float8.value} finds no linear layer in the blocks both of whose dims "
            f"{MULTIPLE} divides; set train.float8=none"
        )
    library.convert_to_float8_training(
        model.layers,
        config=config,
        module_filter_fn=lambda module, _: takes_float8(module),
    )
    return count


def prepare_all_gathers(model: nn.Module) -> None:
    """Agree on the scales of all updated weights at once. A collective."""
    _torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def _torchao() -> Any:
    disabled = logging.root.manager.disable
    # ABI warnings about prebuilt kernels, which float8 training does not use
    logging.disable(logging.WARNING)
    try:
        import torchao.float8
    finally:
        logging.disable(disabled)
    return torchao.float8
