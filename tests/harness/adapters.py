"""Models with drawn adapters, and their folders."""

from pathlib import Path

import torch
from torch import Tensor, nn

from fsdptoys.checkpoint.adapter_export import write_adapter
from fsdptoys.models import DecoderModel
from fsdptoys.models.lora import Samples, add_adapters, is_adapter

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
RANK = 4
ALPHA = 6.0


def adapted(model: DecoderModel, targets: list[str] = TARGETS) -> DecoderModel:
    add_adapters(model, targets, RANK, ALPHA, 0.0, Samples(0))
    return model


def draw_adapters(model: DecoderModel) -> dict[str, Tensor]:
    torch.manual_seed(3)
    adapters = {
        name: param for name, param in model.named_parameters() if is_adapter(name)
    }
    for param in adapters.values():
        nn.init.normal_(param, 0.0, 0.2)
    return {name: param.detach() for name, param in adapters.items()}


def write_own(path: Path, model: DecoderModel, adapters: dict[str, Tensor]) -> None:
    write_adapter(path, adapters, model.config, rank=RANK, alpha=ALPHA, dropout=0.0)
