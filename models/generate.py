"""Text that a model goes on with: one token a forward, which reads the tokens before from a key-value cache.

All ranks run the same forwards and draw from generators with the same seed, so that a sharded model gathers its
parameters as in training and every rank gets the same tokens.

Once there are more tokens than the model may see, each forward reads the last of them anew: every position has moved,
and with it what all layers have kept. That is slow, and exact.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .cache import KeyValueCache

PROMPT_TOKENS = 1024
"""Of a prompt that are read at a time, since there are logits for each: 0.5 GiB in float32 for 128,256 ids."""


@dataclass(frozen=True)
class Draw:
    """How a token is chosen from the logits of its place."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Only so many of the likeliest tokens are drawn from; None for all."""
    top_p: float = 1.0
    """Only the fewest of the likeliest tokens that have this probability together are drawn from."""
    seed: int = 0
    """Of the draws."""

    def choose(self, logits_V: Tensor, generator: torch.Generator) -> Tensor:
        """The next token, int64 of shape (1,).

        Args:
            logits_V: finite, on the CPU.
            generator: to draw from.
        """
        if self.temperature == 0:
            return logits_V.argmax(keepdim=True)
        # The largest logit becomes 0, so that no temperature is too low to divide by.
        scaled_V = (logits_V - logits_V.max()) / self.temperature
        if self.top_k is not None and self.top_k < len(scaled_V):
            likeliest = scaled_V.topk(self.top_k).indices
            scaled_V = torch.full_like(scaled_V, -torch.inf).index_copy(0, likeliest, scaled_V[likeliest])
        odds_V = torch.softmax(scaled_V, dim=-1)
        if self.top_p < 1:
            sorted_V, order_V = odds_V.sort(descending=True, stable=True)
            before_V = sorted_V.cumsum(0) - sorted_V
            odds_V = odds_V.index_fill(0, order_V[before_V >= self.top_p], 0.0)
        return torch.multinomial(odds_V, 1, generator=generator)


@torch.no_grad()
def generate(
    model: nn.Module, prompt_T: Tensor, count: int, context: int, draw: Draw, end: Collection[int] = ()
) -> Tensor:
    """Continue a prompt.

    Args:
        model: called with tokens of shape (1, T) on the prompt's device and ``cache``, returns logits of (1, T, V).
        prompt_T: at least one token id, int64.
        count: tokens to add.
        context: tokens that the model sees at most.
        draw: how tokens are chosen.
        end: ids that are the last of a text.

    Returns:
        The prompt and what follows, int64 of shape (T + count,); shorter after an ``end``, and where the model's logits
        are not finite.
    """
    generator = torch.Generator().manual_seed(draw.seed)
    tokens_T = prompt_T
    cache, unread_T = KeyValueCache(), prompt_T[-context:]
    seen = 0
    for _ in range(count):
        if seen + len(unread_T) > context:
            cache, unread_T, seen = KeyValueCache(), tokens_T[-context:], 0
        for piece_T in unread_T.split(PROMPT_TOKENS):
            logits_BTV = model(piece_T.unsqueeze(0), cache=cache)
        seen += len(unread_T)
        logits_V = logits_BTV[0, -1].double().cpu()
        if not logits_V.isfinite().all():
            break
        token = draw.choose(logits_V, generator)
        unread_T = token.to(tokens_T.device)
        tokens_T = torch.cat([tokens_T, unread_T])
        if int(token) in end:
            break
    return tokens_T
