"""Text generation: one token per forward, which reads the earlier tokens from a key-value cache.

All ranks run the same forwards and draw from generators with the same seed, so a sharded model
gathers its parameters as in training and every rank gets the same tokens.

Beyond the context length, each forward recomputes the last tokens without the cache, since every
position has moved: exact, but slow.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .cache import KeyValueCache

PROMPT_TOKENS = 1024
"""Prompt tokens per forward, since each has logits: 0.5 GiB in float32 for 128,256 ids."""


@dataclass(frozen=True)
class Draw:
    """Sampling of a token from its logits."""

    temperature: float = 1.0
    """Divides the logits; 0 for greedy decoding."""
    top_k: int | None = None
    """Sample from the K likeliest tokens; None for all."""
    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens with this total probability."""
    seed: int = 0
    """Seed of the draws."""

    def choose(self, logits_V: Tensor, generator: torch.Generator) -> Tensor:
        """The next token, int64 of shape (1,).

        Args:
            logits_V: finite, on the CPU.
            generator: to draw from.
        """
        if self.temperature == 0:
            return logits_V.argmax(keepdim=True)
        # The largest logit becomes 0, so that a low temperature cannot overflow.
        scaled_V = (logits_V - logits_V.max()) / self.temperature
        if self.top_k is not None and self.top_k < len(scaled_V):
            likeliest = scaled_V.topk(self.top_k).indices
            scaled_V = torch.full_like(scaled_V, -torch.inf).index_copy(
                0, likeliest, scaled_V[likeliest]
            )
        odds_V = torch.softmax(scaled_V, dim=-1)
        if self.top_p < 1:
            sorted_V, order_V = odds_V.sort(descending=True, stable=True)
            before_V = sorted_V.cumsum(0) - sorted_V
            odds_V = odds_V.index_fill(0, order_V[before_V >= self.top_p], 0.0)
        return torch.multinomial(odds_V, 1, generator=generator)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_T: Tensor,
    count: int,
    context: int,
    draw: Draw,
    end: Collection[int] = (),
) -> Tensor:
    """Continue a prompt.

    Args:
        model: called with tokens of shape (1, T) on the prompt's device and ``cache``, returns
            logits of (1, T, V).
        prompt_T: at least one token id, int64.
        count: tokens to add.
        context: most tokens that the model sees.
        draw: sampling.
        end: ids that end a text.

    Returns:
        The prompt and its continuation, int64 of shape (T + count,); shorter after an ``end``, or
        where logits are not finite.
    """
    generator = torch.Generator().manual_seed(draw.seed)
    tokens_T = prompt_T
    cache = KeyValueCache()
    unread_T = prompt_T[-context:]
    read_tokens = 0
    for _ in range(count):
        if read_tokens + len(unread_T) > context:
            cache = KeyValueCache()
            unread_T = tokens_T[-context:]
            read_tokens = 0
        for piece_T in unread_T.split(PROMPT_TOKENS):
            logits_BTV = model(piece_T.unsqueeze(0), cache=cache)
        read_tokens += len(unread_T)
        logits_V = logits_BTV[0, -1].double().cpu()
        if not logits_V.isfinite().all():
            break
        token = draw.choose(logits_V, generator)
        unread_T = token.to(tokens_T.device)
        tokens_T = torch.cat([tokens_T, unread_T])
        if int(token) in end:
            break
    return tokens_T
