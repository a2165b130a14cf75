"""The weights in a checkpoint, for whoever wants the model alone."""

import functools
from typing import Any

import torch
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.models.huggingface import Bounds

from .choice import locate, unreadable
from .config import CheckpointConfig
from .manifest import NotWholeError, UnreadableError
from .ranks import Ranks
from .reading import read_checkpoint
from .tensors import slices
from .weights import model_config_of


class CheckpointWeights:
    """The parameters that a checkpoint holds, read one at a time; all files are held against the manifest first.

    Args:
        where: folder or URL of a checkpoint, of a run's checkpoints, or of a run, whose newest one is taken.

    Raises:
        ConfigError: if there is none, or it is not whole.

    Attributes:
        settings: of the run, as plain values.
    """

    def __init__(self, where: str) -> None:
        try:
            place = locate(CheckpointConfig(resume=where), None)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("checkpoint.resume=")) from error
        try:
            self._checkpoint = read_checkpoint(Ranks(None), place.storage, place.name)
        except NotWholeError as problem:
            raise ConfigError(f"{where}: {place.name} {problem}; name another checkpoint") from problem
        except UnreadableError as problem:
            raise ConfigError(unreadable(place.storage, problem)) from problem
        self.name = place.name
        self.settings: dict[str, Any] = _settings(self._checkpoint.facts)
        self.config = model_config_of(self.settings.get("model"), f"{where}: {place.name}", "name another checkpoint")
        with torch.device("meta"):
            model: DecoderModel = self.config.build()
        self._shapes = {name: param.shape for name, param in model.named_parameters()}
        # The experts of a stack are asked for one by one, and gate, up and down in turns.
        self._whole = functools.lru_cache(maxsize=3)(self._load)

    def read(self, name: str, region: Bounds) -> Tensor:
        """A part of a parameter."""
        return self._whole(name)[slices(region)]

    def _load(self, name: str) -> Tensor:
        whole = torch.empty(self._shapes[name])
        self._checkpoint.load({f"model.{name}": whole})
        return whole


def _settings(facts: dict[str, Any]) -> dict[str, Any]:
    settings = facts.get("config")
    return settings if isinstance(settings, dict) else {}
