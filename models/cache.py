"""Keys and values that a model's attentions have seen, so that a token that follows is all that is read.

Each attention keeps its own, rotated and normalised as they were used. One that sees only its own chunk keeps no more
than the chunk that is not yet full. Not covered: rows of different lengths in a batch, and taking tokens back.

Shapes: B batch, T sequence, G key/value heads, K width of a head.
"""

import torch
from torch import Tensor, nn


class KeyValueCache:
    """What a model remembers of the tokens it was given with this; those of the next call follow them.

    Deliberately no dataclass: wrappers of modules that cast their inputs make copies of dataclasses.
    """

    length: int
    """Tokens that the whole model has seen, which is the position of the next."""

    def __init__(self) -> None:
        self.length = 0
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(self, attention: nn.Module, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that an attention has kept, with those of new tokens after them."""
        if attention not in self._kept:
            return k_BGTK, v_BGTK
        kept_k, kept_v = self._kept[attention]
        return torch.cat((kept_k, k_BGTK), dim=2), torch.cat((kept_v, v_BGTK), dim=2)

    def keep(self, attention: nn.Module, k_BGTK: Tensor, v_BGTK: Tensor, count: int) -> None:
        """Keep the last ``count`` of an attention's keys and values."""
        first = k_BGTK.shape[2] - count
        self._kept[attention] = (k_BGTK[:, :, first:], v_BGTK[:, :, first:])
