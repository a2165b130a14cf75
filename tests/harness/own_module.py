"""A module of own code, with names that no model of this project has."""

import dataclasses

import torch
from torch import Tensor, nn

from fsdptoys.models import ModuleConfig

WIDTH = 16


class Block(nn.Module):
    """A causal mean, and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Add both to the residual stream."""
        counts_T1 = torch.arange(1, x_BTD.shape[1] + 1).unsqueeze(1)
        x_BTD = x_BTD + self.mean(x_BTD).cumsum(1) / counts_T1
        return x_BTD + self.mlp(x_BTD)


class Own(nn.Module):
    """Names, a root parameter and a buffer that no model of this project has."""

    def __init__(self, tied: bool, cap: float | None) -> None:
        super().__init__()
        self.config = "its own"
        self.cap = cap
        self.trunk = nn.ModuleDict(
            {
                "table": nn.Embedding(256, WIDTH),
                "stack": nn.ModuleList(Block() for _ in range(3)),
                "last": nn.LayerNorm(WIDTH),
            }
        )
        self.places = nn.Parameter(torch.randn(64, WIDTH))
        self.out = nn.Linear(WIDTH, 256, bias=False)
        self.register_buffer("factor", torch.full((1,), 0.5), persistent=False)
        if tied:
            self.out.weight = self.trunk["table"].weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits."""
        x_BTD = self.trunk["table"](tokens_BT)
        x_BTD = x_BTD + self.places[: tokens_BT.shape[1]] * self.factor
        for block in self.trunk["stack"]:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.out(self.trunk["last"](x_BTD))
        return logits_BTV if self.cap is None else logits_BTV.clamp(max=self.cap)


@dataclasses.dataclass
class OwnConfig(ModuleConfig):
    """The settings of ``Own``."""

    name: str = "own"
    tied: bool = False
    cap: float | None = None
    has_head: bool = True

    def build(self) -> nn.Module:
        """Return a plain module."""
        return Own(self.tied, self.cap)

    def head(self, module: Own) -> nn.Linear | None:
        """Return its last layer, unless switched off."""
        return module.out if self.has_head else None
