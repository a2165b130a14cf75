"""Key-value cache: a forward reads only the tokens that follow those already seen.

Each attention keeps its keys and values rotated and normalized. Attention within chunks keeps at
most the current chunk. Not covered: rows of different lengths in a batch, and removing tokens.

Shapes: B batch, T sequence, G key/value heads, K width of a head.
"""

import torch
from torch import Tensor, nn


class KeyValueCache:
    """Keys and values of the tokens seen so far; the next call's tokens follow them.

    Not a dataclass, since module wrappers that cast their inputs copy dataclasses.
    """

    length: int
    """Tokens seen by the full model: the position of the next."""

    def __init__(self) -> None:
        self.length = 0
        self._keys_and_values: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._tokens_BT: Tensor | None = None

    def add_tokens(self, tokens_BT: Tensor) -> Tensor:
        """All tokens so far, for a model that keeps no keys and values."""
        if self._tokens_BT is not None:
            tokens_BT = torch.cat((self._tokens_BT, tokens_BT), dim=1)
        self._tokens_BT = tokens_BT
        self.length = tokens_BT.shape[1]
        return tokens_BT

    def extend(
        self, attention: nn.Module, k_BGTK: Tensor, v_BGTK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """An attention's kept keys and values, followed by those of new tokens."""
        if attention not in self._keys_and_values:
            return k_BGTK, v_BGTK
        past_k, past_v = self._keys_and_values[attention]
        return torch.cat((past_k, k_BGTK), dim=2), torch.cat((past_v, v_BGTK), dim=2)

    def keep(
        self, attention: nn.Module, k_BGTK: Tensor, v_BGTK: Tensor, count: int
    ) -> None:
        """Keep the last ``count`` of an attention's keys and values."""
        first = k_BGTK.shape[2] - count
        self._keys_and_values[attention] = (k_BGTK[:, :, first:], v_BGTK[:, :, first:])
