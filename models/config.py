"""Settings that all model families share."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from .capabilities import ModelCapabilities
from .checks import (
    MOST_CHANNELS,
    MOST_LAYERS,
    MOST_TOKENS,
    above,
    at_least,
    check_bounds,
)
from .huggingface import HuggingFaceFormat

T = TypeVar("T", bound="ModelConfig")

ReadJSON = Callable[[Path], dict[str, Any]]


@dataclass
class ModelConfig(ABC):
    """What every model has: a shape, and a way to build it.

    The families of this package derive from ``NativeConfig``, whose fields are the shape.
    """

    family: ClassVar[str]
    """Name of the family; its YAML files start from ``base_<family>``."""
    hugging_face: ClassVar[HuggingFaceFormat | None] = None
    """The family's Hugging Face format; None if it has none, so that weights stay in our own."""

    has_presets: ClassVar[bool] = True
    """Whether a YAML file of the family describes a model without further settings."""

    name: str = ""
    """Name of the preset, for titles."""

    @property
    def capabilities(self) -> ModelCapabilities:
        """What can be done with the model; all other settings are refused."""
        return ModelCapabilities()

    @property
    @abstractmethod
    def dim(self) -> int:
        """Width of the residual stream."""

    @property
    @abstractmethod
    def n_layers(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def n_heads(self) -> int:
        """Query heads."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    @abstractmethod
    def max_seq_len(self) -> int:
        """Longest sequence for the positions, in tokens."""

    @property
    @abstractmethod
    def tie_embeddings(self) -> bool:
        """Whether token embedding and head share one weight."""

    @property
    @abstractmethod
    def init_from(self) -> str | None:
        """Folder in Hugging Face format with the initial weights; None if they are drawn."""

    def details(self) -> dict[str, Any]:
        """Settings on which the weights depend and that are no fields, by their names in the
        ``config.json`` of another library."""
        return {}

    @property
    def head_width(self) -> int:
        """Channels of a head."""
        return self.dim // self.n_heads

    @property
    def needs_its_context(self) -> bool:
        """Whether the weights belong to one ``max_seq_len``."""
        return True

    def read_files(self, read_json: ReadJSON) -> list[Path]:
        """Read the files that the settings name, once all settings are known, and return them.

        Args:
            read_json: reads an object from a bounded, regular file.

        Raises:
            ValueError: with key, value and fix.
        """
        return []

    def check(self) -> None:
        """Check what can be checked only once the settings are complete, before anything is built.

        Raises:
            ValueError: with key, value and fix.
        """
        check_bounds(self)

    def notes(self) -> list[str]:
        """Return sentences that a run says at its start."""
        return []

    def with_settings(self: T, **settings: Any) -> T:
        """Return a copy with other values of fields."""
        return dataclasses.replace(self, **settings)

    def without_gradients(self) -> list[str]:
        """Return the names of parameters that get no gradient in a backward, as far as this can be
        found without running the model."""
        return []

    def implied(self) -> dict[str, int]:
        """Values of null fields, as they follow from other fields."""
        return {}

    def is_cosmetic(self, key: str) -> bool:
        """Whether a field does not change the function that the weights compute, given the other
        settings."""
        return key in (
            "name",
            "init_std",
            "init_from",
            "router_aux_loss_coef",
            "router_z_loss_coef",
        )

    def with_layers(self, count: int) -> "ModelConfig":
        """Return the settings of a model with another number of blocks."""
        return self.with_settings(n_layers=count)

    def sequence_obstacle(self) -> str | None:
        """Why ranks cannot share its sequences, nor documents be kept apart, as a clause; None if
        they can."""
        return None

    @property
    def attends_plainly(self) -> bool:
        """Whether all its attention is one that a ring of ranks computes."""
        return True

    @property
    def shared_heads(self) -> int:
        """Query heads that ranks may share, which the number of ranks must divide."""
        return self.n_heads

    @abstractmethod
    def build(self) -> Any:
        """Construct the family's ``DecoderModel`` on the current default device (use
        ``torch.device("meta")``)."""


@dataclass
class NativeConfig(ModelConfig):
    """Shape and initialization of a model of this package; its family adds the rest."""

    dim: int = field(default=4096, metadata=at_least(1, MOST_CHANNELS))
    """Width of the residual stream."""
    n_layers: int = field(default=32, metadata=at_least(1, MOST_LAYERS))
    """Number of blocks."""
    n_heads: int = field(default=32, metadata=at_least(1, MOST_CHANNELS))
    """Query heads."""
    vocab_size: int = field(default=32000, metadata=at_least(1, 2**30))
    """Number of token ids."""
    max_seq_len: int = field(default=4096, metadata=at_least(1, MOST_TOKENS))
    """Longest sequence for the positions, in tokens."""
    norm_eps: float = field(default=1e-5, metadata=above(0, 1e6))
    """Added to the mean square, or the variance, in normalizations."""
    tie_embeddings: bool = False
    """Share one weight between the token embedding and the head."""
    init_std: float = field(default=0.02, metadata=above(0, 1e6))
    """Standard deviation of initial weights; divided by sqrt(2·n_layers) for projections into the
    residual stream."""
    init_from: str | None = None
    """Folder in Hugging Face format with the initial weights; null draws them from
    train.init_seed."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.init_from is not None and not self.init_from.strip():
            raise ValueError(
                f"model.init_from={self.init_from!r} must name a folder; set "
                "model.init_from=null to draw values"
            )
