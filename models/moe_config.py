"""Settings of families with experts, and the feed-forwards that they build."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from .checks import MOST_EXPERTS, MOST_HIDDEN, at_least
from .moe import MoE, Scores
from .rotary import RotaryConfig


@dataclass
class MoEConfig(RotaryConfig):
    """Settings of a family with experts."""

    shares_an_expert: ClassVar[bool] = False
    """Whether every token also goes through an expert of ``expert_ffn_dim`` without routing."""

    n_experts: int = field(default=128, metadata=at_least(1, MOST_EXPERTS))
    """Experts of a layer."""
    top_k: int = field(default=8, metadata=at_least(1, MOST_EXPERTS))
    """Experts of each token."""
    expert_ffn_dim: int = field(default=768, metadata=at_least(1, MOST_HIDDEN))
    """Width of an expert's hidden layer."""
    moe_every: int = field(default=1, metadata=at_least(1))
    """Every N-th block has experts; the others have one feed-forward of ``ffn_dim``."""
    router_aux_loss_coef: float = field(default=0.0, metadata=at_least(0, 1e6))
    """Weight of the load-balancing loss, a mean over the layers with experts.

    The load is counted over all ranks. With ``train.grad_accum`` above 1 it covers the
    micro-batches so far, and with ``train.deterministic=layout`` the global batch.
    """
    router_z_loss_coef: float = field(default=0.0, metadata=at_least(0, 1e6))
    """Weight of the router's z-loss, a mean over tokens and over the layers with experts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.n_experts:
            raise ValueError(
                f"model.top_k={self.top_k} is more than model.n_experts={self.n_experts}; "
                f"set model.top_k={self.n_experts}"
            )
        if self.moe_every > self.n_layers:
            raise ValueError(
                f"model.moe_every={self.moe_every} leaves none of the model.n_layers="
                f"{self.n_layers} blocks with experts; set model.moe_every=1"
            )

    @property
    def scores(self) -> Scores:
        """Weights of the chosen experts."""
        return Scores.softmax

    def is_cosmetic(self, key: str) -> bool:
        """Also the width of feed-forwards if all blocks have experts."""
        return super().is_cosmetic(key) or (
            key == "ffn_dim" and self.has_experts_everywhere()
        )

    def has_experts_everywhere(self) -> bool:
        """Whether no block has a feed-forward of ``ffn_dim``."""
        return self.moe_every == 1

    def has_experts(self, layer: int) -> bool:
        """Whether a block has experts."""
        return (layer + 1) % self.moe_every == 0

    def feed_forward(self, layer: int) -> nn.Module:
        """Construct experts, or a feed-forward without any."""
        if not self.has_experts(layer):
            return super().feed_forward(layer)
        width = self.expert_ffn_dim
        shared_ffn_dim = width if self.shares_an_expert else 0
        return MoE(
            self.dim, width, self.n_experts, self.top_k, self.scores, shared_ffn_dim
        )
