"""Text that a model goes on with, one token a forward: slow, but right under every strategy.

All ranks run the same forwards and draw from generators with the same seed, so that a sharded model gathers its
parameters as in training and every rank gets the same tokens. There is no key/value cache.
"""

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(model: nn.Module, prompt_T: Tensor, count: int, context: int, temperature: float, seed: int) -> Tensor:
    """Continue a prompt.

    Args:
        model: called with tokens of shape (1, T) on the prompt's device, returns logits of shape (1, T, V).
        prompt_T: at least one token id, int64.
        count: tokens to add.
        context: tokens that the model sees at most.
        temperature: divides the logits; 0 takes the likeliest token.
        seed: of the draws.

    Returns:
        The prompt and what follows, int64 of shape (T + count,); shorter where the model's logits are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens_T = prompt_T
    for _ in range(count):
        logits_V = model(tokens_T[-context:].unsqueeze(0))[0, -1].double().cpu()
        if not logits_V.isfinite().all():
            break
        if temperature == 0:
            token = logits_V.argmax(keepdim=True)
        else:
            # The largest logit becomes 0, so that no temperature is too low to divide by.
            odds_V = torch.softmax((logits_V - logits_V.max()) / temperature, dim=-1)
            token = torch.multinomial(odds_V, 1, generator=generator)
        tokens_T = torch.cat([tokens_T, token.to(tokens_T.device)])
    return tokens_T
