"""What the modules of this package know of the settings and of the adapter of a model."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from ..config import ModelConfig
from ..decoder import DecoderModel


class TransformersSettings(ModelConfig, ABC):
    """Settings by which transformers builds a model."""

    @property
    @abstractmethod
    def path(self) -> str | None:
        """Folder with config.json."""

    @property
    @abstractmethod
    def config(self) -> str | None:
        """Content of config.json."""

    @property
    @abstractmethod
    def layers(self) -> int | None:
        """Number of blocks in place of the configuration's."""

    @property
    def text(self) -> str:
        """Content of config.json, which has been read."""
        assert self.config is not None, "the configuration was not checked"
        return self.config


class ModuleSettings(ModelConfig, ABC):
    """Settings of a model that is any ``nn.Module``."""

    @abstractmethod
    def blocks(self, module: Any) -> nn.ModuleList | None:
        """Return the list of blocks of a module; None if it has none."""

    @abstractmethod
    def head(self, module: Any) -> nn.Linear | None:
        """Return the last layer of a module, if ``forward`` returns what that layer returns."""

    @abstractmethod
    def flops_per_token(self, module: Any, seq_len: int) -> float | None:
        """Return the FLOPs of forward and backward per token; None if unknown."""


class TransformersBase(DecoderModel, ABC):
    """A model of transformers with the interface of this project's."""

    config: TransformersSettings
    hf: Any
    """The model of transformers, with a head of this project."""
    decoder: Any
    """The module of it that has the blocks. Its forward is called; it is not a child of this
    module."""
    hugging_face_names: dict[str, str]
    """Name of a parameter or buffer here → its name in the model of transformers."""
