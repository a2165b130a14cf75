"""A trained model without its strategy."""

import torch

from fsdptoys.models import DecoderModel
from fsdptoys.train.trainer import Trainer


def plain_model(trainer: Trainer) -> DecoderModel:
    """The trainer's model as a plain module in this process."""
    config = trainer.config.model
    model = config.build()
    model.init_buffers(torch.device("cpu"))
    with torch.no_grad():
        for name, param in trainer.strategy.full_parameters():
            model.get_parameter(name).copy_(param)
    return model
