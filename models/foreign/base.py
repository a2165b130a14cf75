"""What the modules of this package know of the settings and of the adapter of a model."""

from abc import ABC, abstractmethod
from typing import Any

from ..config import ModelConfig
from ..decoder import DecoderModel


class TransformersSettings(ModelConfig, ABC):
    """Settings by which transformers builds a model."""

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
