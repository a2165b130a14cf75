"""Folders of tiny transformers models, as transformers itself writes them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdptoys.checkpoint import HuggingFaceFolder, named_weights, write_hugging_face
from fsdptoys.checkpoint.safetensors_io import slices
from fsdptoys.models import DecoderModel, TransformersConfig, stored_buffers
from fsdptoys.models.huggingface import Bounds
from fsdptoys.parallel.init_weights import init_buffers, materialize
from tests.harness.foreign_families import tiny_config
from tests.harness.transformers_oracle import import_transformers

CPU = torch.device("cpu")


def build_original(family: str, **settings: Any) -> Any:
    """transformers' own model, with values of its own in every weight and stored buffer."""
    transformers = import_transformers()
    tree = tiny_config(family, **settings)
    config = transformers.CONFIG_MAPPING[family].from_dict(tree)
    torch.manual_seed(1)
    original = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32
    )
    with torch.no_grad():
        for tensor in original.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * 0.1)
    return original.eval()


def write_original(folder: Path, family: str, **settings: Any) -> Any:
    """Write a folder of several files, and return its model."""
    original = build_original(family, **settings)
    original.save_pretrained(folder, max_shard_size="60KB")
    return original


def config_of(folder: Path) -> TransformersConfig:
    """The settings of a model of transformers, also of a family that this project has."""
    config = HuggingFaceFolder(folder).model_config("transformers")
    assert isinstance(config, TransformersConfig)
    return config


def load(folder: Path) -> DecoderModel:
    """The adapter with the weights of a folder."""
    source = HuggingFaceFolder(folder)
    with torch.device("meta"):
        model: DecoderModel = config_of(folder).build()
    source.check(model)
    materialize(model, CPU, source.fill)
    init_buffers(model, CPU, torch.float32)
    for buffer in stored_buffers(model):
        source.fill(buffer.tensor, buffer.name)
    return model.eval()


def write(
    folder: Path, model: DecoderModel, dtype: torch.dtype = torch.float32
) -> None:
    weights = dict(named_weights(model))

    def read(name: str, region: Bounds) -> Tensor:
        return weights[name].detach()[slices(region)]

    write_hugging_face(folder, model.config, read, dtype)
