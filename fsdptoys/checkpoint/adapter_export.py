"""Trained adapters out of a model: merged into the weights that they adapt, and as a folder that
``peft`` loads (``adapter_folder``).

Shapes: O and I outer and inner width of a layer, R rank of its adapter.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdptoys.models import DecoderModel, ModelConfig
from fsdptoys.models.lora import LinearLayer, is_adapter, linear_layers
from fsdptoys.models.nf4 import NAME, Codebook, is_packed, unpack
from fsdptoys.utils.sealed_folder import new_folder

from .adapter_folder import (
    CONFIG_FILE,
    PREFIX,
    STEM,
    THEIR_A,
    THEIR_B,
    A,
    AdapterLocation,
    B,
    locate_adapter,
)
from .checksums import CHECKSUMS_FILE
from .safetensors_io import write_tensors

ADAPTER_FOLDER = "adapter"


def merged(
    params: Iterator[tuple[str, Tensor]],
    scale: float,
    adapters: dict[str, Tensor],
    layers: Mapping[str, LinearLayer],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the model alone, with adapters added to their layers' weights.

    Args:
        params: all parameters, as of ``Strategy.full_parameters``; a weight comes before its
            adapter.
        scale: alpha / rank.
        adapters: filled with the adapters, by name.
        layers: those that have adapters.
    """
    waiting: dict[str, Tensor] = {}
    codebook = Codebook()
    codebook.materialize(torch.device("cpu"))
    for name, param in params:
        if is_adapter(name):
            adapters[name] = param
            layer = name.removesuffix(A).removesuffix(B)
            if layer + A in adapters and layer + B in adapters:
                weight = waiting.pop(layer)
                if layers[layer].transposed:
                    weight = weight.mT
                weight = weight.addmm(
                    adapters[layer + B], adapters[layer + A], alpha=scale
                )
                if layers[layer].transposed:
                    weight = weight.mT
                yield f"{layer}.weight", weight
        elif is_packed(name):
            # Rounded as in the forward.
            weight = unpack(param, codebook.pairs, param.dtype).float()
            waiting[name.removesuffix(NAME)] = weight
        elif name.removesuffix(".weight") in layers:
            waiting[name.removesuffix(".weight")] = param
        else:
            yield name, param
    for layer, weight in waiting.items():
        yield f"{layer}.weight", weight


def write_adapter(
    folder: Path,
    adapters: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    rank: int,
    alpha: float,
    dropout: float,
) -> None:
    """Write a folder that ``peft`` loads, atomically.

    Args:
        folder: to make.
        adapters: A and B of every layer, by our names, in full.
        config: of the base.
        rank: of every adapter.
        alpha: their scale is alpha / rank.
        dropout: recorded for a later training.

    Raises:
        ConfigError: if the folder is taken or cannot be written.
    """
    with torch.device("meta"):
        model: DecoderModel = config.build()
    linears = linear_layers(model)
    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[AdapterLocation, Tensor, Tensor]]] = {}
    for name in adapters:
        if name.endswith(A):
            layer = name.removesuffix(A)
            a_RI = adapters[layer + A]
            b_OR = adapters[layer + B]
            location = locate_adapter(model, layer, linears[layer])
            parts.setdefault(location.module, []).append((location, a_RI, b_OR))
    ranks: dict[str, int] = {}
    for module, layers in parts.items():
        blocks = []
        for location, _, b_OR in layers:
            block = b_OR.new_zeros(location.total, b_OR.shape[1])
            block[slice(*location.rows)] = b_OR
            blocks.append(block)
        tensors[module + THEIR_A] = torch.cat([a_RI for _, a_RI, _ in layers])
        tensors[module + THEIR_B] = torch.cat(blocks, dim=1)
        ranks[module.removeprefix(PREFIX)] = rank * len(layers)
    wider = {module: wide for module, wide in ranks.items() if wide != rank}
    tree: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        # Names in full, since PEFT adapts every module that ends with one of them.
        "target_modules": sorted(ranks),
        "bias": "none",
        "fan_in_fan_out": any(layer.transposed for layer in linears.values())
        or config.family == "gpt2",
        # The same alpha / rank for every layer.
        "rank_pattern": wider,
        "alpha_pattern": {
            module: alpha * wide / rank for module, wide in wider.items()
        },
        "base_model_name_or_path": config.init_from,
        "inference_mode": True,
    }
    with new_folder(folder, CHECKSUMS_FILE) as temporary:
        (temporary / CONFIG_FILE).write_text(
            json.dumps(tree, indent=2) + "\n", encoding="utf-8"
        )
        write_tensors(temporary, STEM, tensors.items())
