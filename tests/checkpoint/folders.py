"""Small folders in Hugging Face format for the tests of this folder."""

from pathlib import Path

import torch
from torch import Tensor

from fsdptoys.checkpoint import MAX_FILE_BYTES, HuggingFaceFolder, ReadRegion, Written, write_hugging_face
from fsdptoys.checkpoint.safetensors_io import slices
from fsdptoys.models import DecoderModel, ModelConfig
from fsdptoys.models.huggingface import Bounds


def build(config: ModelConfig) -> DecoderModel:
    """A model with values far from those of its initialization."""
    torch.manual_seed(0)
    model = config.build()
    model.init_buffers(torch.device("cpu"))
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    return model


def build_empty(config: ModelConfig) -> DecoderModel:
    """A model full of NaN."""
    model = config.build()
    model.init_buffers(torch.device("cpu"))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    return model


def regions_of(model: DecoderModel) -> ReadRegion:
    parameters = dict(model.named_parameters())

    def read(name: str, region: Bounds) -> Tensor:
        return parameters[name].detach()[slices(region)]

    return read


def write(
    folder: Path, model: DecoderModel, dtype: torch.dtype = torch.float32, max_file_bytes: int = MAX_FILE_BYTES
) -> Written:
    return write_hugging_face(folder, model.config, regions_of(model), dtype, max_file_bytes)


def load(folder: Path) -> DecoderModel:
    """The model that a folder holds."""
    source = HuggingFaceFolder(folder)
    model = build_empty(source.model_config())
    source.check(model)
    for name, param in model.named_parameters():
        source.fill(param, name)
    return model
