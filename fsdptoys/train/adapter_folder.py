"""Trained adapters: merged into the final weights, and as a folder in PEFT's format.

``RUN/weights`` holds the model with W + alpha/rank · B A in place of each W, so that every command reads it as usual.
``RUN/adapter`` holds ``adapter_config.json`` and ``adapter_model.safetensors``, which ``peft`` loads onto
the base model in Hugging Face format.

GPT-2 keeps queries, keys and values in one Hugging Face tensor. Adapters of some of them become one of the sum of
their ranks, exact and with zeros outside its own rows.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdptoys.checkpoint.checksums import new_folder
from fsdptoys.checkpoint.safetensors_io import write_tensors
from fsdptoys.models import ModelConfig
from fsdptoys.models.lora import is_adapter
from fsdptoys.tune import LoRAConfig

ADAPTER_FOLDER = "adapter"
STEM = "adapter_model"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
A, B = ".lora_a.weight", ".lora_b.weight"


def merged(params: Iterator[tuple[str, Tensor]], scale: float, kept: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the model alone, with adapters added to their layers' weights.

    Args:
        params: all parameters in full, in float32 on the CPU; a layer's weight comes before its adapter.
        scale: alpha / rank.
        kept: filled with the adapters, by name.
    """
    waiting: dict[str, Tensor] = {}
    for name, param in params:
        if is_adapter(name):
            kept[name] = param
            layer = name.removesuffix(A).removesuffix(B)
            if layer + A in kept and layer + B in kept:
                weight = waiting.pop(layer)
                yield f"{layer}.weight", weight.addmm(kept[layer + B], kept[layer + A], alpha=scale)
        elif name.endswith("_proj.weight") and name.startswith("layers."):
            waiting[name.removesuffix(".weight")] = param
        else:
            yield name, param
    for layer, weight in waiting.items():
        yield f"{layer}.weight", weight


def write_adapter(folder: Path, adapters: Mapping[str, Tensor], model: ModelConfig, tune: LoRAConfig) -> None:
    """Write a folder that ``peft`` loads, atomically.

    Raises:
        ConfigError: if the folder is taken or cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[int, int, Tensor, Tensor]]] = {}
    for name in adapters:
        if not name.endswith(A):
            continue
        layer = name.removesuffix(A)
        a_RI, b_OR = adapters[layer + A], adapters[layer + B]
        shape = (b_OR.shape[0], a_RI.shape[1])
        (piece,) = model.hugging_face.pieces(f"{layer}.weight", shape)
        columns = piece.tensor_region[-1] if piece.transposed else (0, shape[0])
        total = piece.tensor_shape[-1] if piece.transposed else shape[0]
        parts.setdefault(piece.tensor.removesuffix(".weight"), []).append((columns[0], total, a_RI, b_OR))
    ranks: dict[str, int] = {}
    for layer, found in parts.items():
        blocks = []
        for first, total, _, b_OR in found:
            block = b_OR.new_zeros(total, b_OR.shape[1])
            block[first : first + len(b_OR)] = b_OR
            blocks.append(block)
        tensors[f"{PREFIX}{layer}.lora_A.weight"] = torch.cat([a_RI for _, _, a_RI, _ in found])
        tensors[f"{PREFIX}{layer}.lora_B.weight"] = torch.cat(blocks, dim=1)
        ranks[layer] = tune.rank * len(found)
    wider = {layer: rank for layer, rank in ranks.items() if rank != tune.rank}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": tune.rank,
        "lora_alpha": tune.alpha,
        "lora_dropout": tune.dropout,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in ranks}),
        "bias": "none",
        "fan_in_fan_out": model.family == "gpt2",
        # The same alpha / rank for every layer.
        "rank_pattern": wider,
        "alpha_pattern": {layer: tune.alpha * rank / tune.rank for layer, rank in wider.items()},
        "base_model_name_or_path": model.init_from,
        "inference_mode": True,
    }
    with new_folder(folder) as temporary:
        (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tensors(temporary, STEM, tensors.items())
