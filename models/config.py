"""Settings that all model families share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from .checks import MOST_CHANNELS, MOST_LAYERS, MOST_TOKENS, check_at_least_one, check_at_most, check_positive
from .huggingface import HuggingFaceFormat


@dataclass
class ModelConfig(ABC):
    """Shape and initialization of a model; its family adds the rest."""

    family: ClassVar[str]
    """Name of the family; its YAML files start from ``base_<family>``."""
    hugging_face: ClassVar[HuggingFaceFormat]
    """The family's Hugging Face format."""

    name: str = ""
    """Name of the preset, for titles."""
    dim: int = 4096
    """Width of the residual stream."""
    n_layers: int = 32
    """Number of blocks."""
    n_heads: int = 32
    """Query heads."""
    vocab_size: int = 32000
    """Number of token ids."""
    max_seq_len: int = 4096
    """Longest sequence for the positions, in tokens."""
    norm_eps: float = 1e-5
    """Added to the mean square, or the variance, in normalizations."""
    tie_embeddings: bool = False
    """Share one weight between the token embedding and the head."""
    init_std: float = 0.02
    """Standard deviation of initial weights; divided by sqrt(2·n_layers) for projections into the residual stream."""
    init_from: str | None = None
    """Folder in Hugging Face format with the initial weights; null draws them from train.init_seed."""

    def __post_init__(self) -> None:
        check_at_most(self, dim=MOST_CHANNELS, n_layers=MOST_LAYERS, n_heads=MOST_CHANNELS, vocab_size=2**30)
        check_at_most(self, max_seq_len=MOST_TOKENS, norm_eps=1e6, init_std=1e6)
        check_at_least_one(self, "dim", "n_layers", "n_heads", "vocab_size", "max_seq_len")
        check_positive(("init_std", self.init_std, 0.02), ("norm_eps", self.norm_eps, 1e-5))
        if self.init_from is not None and not self.init_from.strip():
            raise ValueError(
                f"model.init_from={self.init_from!r} must name a folder; set model.init_from=null to draw values"
            )

    def implied(self) -> dict[str, int]:
        """Values of null fields, as they follow from other fields."""
        return {}

    @property
    def needs_its_context(self) -> bool:
        """Whether the weights belong to one ``max_seq_len``."""
        return True

    def is_cosmetic(self, key: str) -> bool:
        """Whether a field does not change the function that the weights compute, given the other settings."""
        return key in ("name", "init_std", "init_from", "router_aux_loss_coef", "router_z_loss_coef")

    @abstractmethod
    def build(self) -> Any:
        """Construct the family's ``DecoderModel`` on the current default device (use ``torch.device("meta")``)."""
