"""Linear layers whose three products take float8 factors: settings, what refuses them, and torchao's conversion.

A product of two float8 matrices takes half the time of one in bf16 on hardware that has it (compute capability 8.9).
Each factor is scaled so that its largest element is float8's largest, cast, multiplied with sums in higher precision,
and scaled back; weights, gradients and optimizer states stay what they are elsewhere. ``tensorwise`` has one scale a
tensor, which is the fastest; ``rowwise`` one a row, which a single outlier harms less. Finding scales and casting are
passes over memory that only pay where the compiler fuses them (``train.compile=true``) and the matrices are large.

With ``train.float8_all_gather`` FSDP2 casts shards before it gathers them, which halves what travels from bf16. The
scale is that of the whole tensor, agreed on by the ranks: one all-reduce for all of them after each update, or one a
tensor where updates are deferred.

What is converted: the blocks' ``Linear`` layers both of whose dims 16 divides. Head, embedding, routers and experts are
not. On a CPU torchao rounds factors to float8 and multiplies them in float32: the numerics, without the speed.

Not covered: NPUs, FSDP1, whose flat parameters torchao does not know, and float8 in attention.
Source: https://docs.pytorch.org/ao/stable/workflows/training.html, arXiv:2209.05433
"""

import dataclasses
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn

from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.models.linear import Linear

MULTIPLE = 16
"""Divides both dims of each product's factors, or the hardware does not take them."""
CAPABILITY = (8, 9)
"""Of the first CUDA devices with float8 products."""


class Float8(Enum):
    """Whether products take float8 factors, and over what a scale is."""

    none = "none"
    tensorwise = "tensorwise"
    rowwise = "rowwise"


def check_float8(
    float8: Float8,
    all_gather: bool,
    *,
    strategy: str,
    device_type: str,
    computes_in: str,
    tokens: int,
    offloads: bool,
    in_parts: bool,
) -> None:
    """Refuse what cannot be done.

    Args:
        float8: ``train.float8``.
        all_gather: ``train.float8_all_gather``.
        strategy: the word after ``parallel=``.
        device_type: ``cuda``, ``npu`` or ``cpu``.
        computes_in: ``parallel.param_dtype``.
        tokens: of a micro-batch.
        offloads: whether shards live in host memory.
        in_parts: whether parts of blocks are units.

    Raises:
        ConfigError: naming key, value and fix.
    """
    if float8 is Float8.none:
        if all_gather:
            raise ConfigError(
                "train.float8_all_gather=true gathers what float8 products take, of which there are none; set "
                "train.float8=tensorwise"
            )
        return
    key = f"train.float8={float8.value}"
    if strategy == "fsdp1":
        raise ConfigError(
            f"{key} is not an option of parallel=fsdp1, whose flat parameters torchao does not know; set parallel=fsdp2"
        )
    if all_gather and (strategy != "fsdp2" or float8 is not Float8.tensorwise or offloads):
        raise ConfigError(
            "train.float8_all_gather=true casts FSDP2's shards on the device with one scale a tensor; set "
            "parallel=fsdp2, train.float8=tensorwise and memory.cpu_offload=false, or train.float8_all_gather=false"
        )
    if all_gather and in_parts and device_type == "cpu":
        raise ConfigError(
            "train.float8_all_gather=true leaves parallel.wrap=block_attn_mlp with units of float8 alone, which gloo "
            "does not gather; set parallel.wrap=block"
        )
    if device_type == "npu":
        raise ConfigError(f"{key} needs CUDA's float8 products, which an NPU does not have; set train.float8=none")
    if device_type == "cuda":
        if computes_in != "bfloat16":
            raise ConfigError(f"{key} replaces products of bfloat16 on a GPU; set parallel.param_dtype=bfloat16")
        if tokens % MULTIPLE:
            raise ConfigError(
                f"{key} multiplies over the tokens of a micro-batch, and train.batch_size times train.seq_len is "
                f"{tokens}, which {MULTIPLE} does not divide; set train.seq_len to a multiple of {MULTIPLE}"
            )


def check_float8_here(float8: Float8, device_type: str) -> None:
    """Refuse what this machine cannot do, which a plan for another may.

    Args:
        float8: ``train.float8``.
        device_type: ``cuda``, ``npu`` or ``cpu``.

    Raises:
        ConfigError: naming key, value and fix.
    """
    if float8 is Float8.none:
        return
    key = f"train.float8={float8.value}"
    if device_type == "cuda" and torch.cuda.get_device_capability() < CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        raise ConfigError(
            f"{key} needs a device of compute capability 8.9 or more, and this one has {found}; set train.float8=none"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"{key} needs torchao, which is not installed; pip install 'fsdptoys[torchao]' or set train.float8=none"
        )


def check_even_shards(model: DecoderModel, ranks: int) -> None:
    """Refuse shards of different sizes, which FSDP2 does not pad for who casts them before they are gathered.

    Raises:
        ConfigError: with the first such layer.
    """
    for name, module in model.layers.named_modules():
        if isinstance(module, Linear) and takes_float8(module) and module.out_features % ranks:
            raise ConfigError(
                f"train.float8_all_gather=true needs shards of one size, and {ranks} ranks do not divide the "
                f"{module.out_features} rows of layers.{name}; set mesh.fsdp_size to a number that does, or "
                "train.float8_all_gather=false"
            )


def takes_float8(module: nn.Module) -> bool:
    """Whether a module of a block is one that is converted."""
    return type(module) is Linear and not any(size % MULTIPLE for size in module.weight.shape)


def convert_to_float8(model: DecoderModel, float8: Float8, all_gather: bool, device_type: str) -> int:
    """Have the blocks' linear layers take float8 factors; before anything else is done to the blocks.

    Args:
        model: on the meta device.
        float8: whether, and with which scales.
        all_gather: whether FSDP2 is to gather float8.
        device_type: where there is no CUDA, float8 is emulated.

    Returns:
        How many layers were converted.

    Raises:
        ConfigError: if 16 divides the dims of none.
    """
    if float8 is Float8.none:
        return 0
    check_float8_here(float8, device_type)
    library = _torchao()
    config = library.Float8LinearConfig.from_recipe_name(float8.value)
    config = dataclasses.replace(config, enable_fsdp_float8_all_gather=all_gather, emulate=device_type != "cuda")
    count = 0

    def takes(module: nn.Module, name: str) -> bool:
        nonlocal count
        chosen = takes_float8(module)
        count += chosen
        return chosen

    library.convert_to_float8_training(model.layers, config=config, module_filter_fn=takes)
    if count == 0:
        raise ConfigError(
            f"train.float8={float8.value} finds no linear layer in the blocks both of whose dims {MULTIPLE} divides; "
            "set train.float8=none"
        )
    return count


def prepare_all_gathers(model: nn.Module) -> None:
    """Agree on the scales of all weights at once, since they have changed; a collective."""
    _torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def _torchao() -> Any:
    with _quiet():
        import torchao.float8
    return torchao.float8


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torchao warns of kernels that were built for another torch, none of which float8 training takes."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
