"""Try a user's loss on a few random tokens before a run starts.

A loss that mixes tokens would change with the number of ranks, micro-batches and chunks; one that
returns a mean would train with other gradients. Neither raises an exception, so both are found
here. A loss must also run on tensors without values: the planner has no others, and on an
accelerator a loss that reads values would wait for the device.
"""

import torch
from torch import Tensor

from fsdptoys.errors import ConfigError

from .config import LossConfig
from .objective import IGNORE_INDEX
from .own import OwnLoss

TOKENS = 6
WIDTH = 4
TOLERANCE = 1e-4
"""Relative difference between a loss of some tokens and the same of more tokens."""


def check_own_loss(config: LossConfig, vocab_size: int) -> None:
    """Try a user's loss on random tokens.

    Raises:
        ConfigError: if it fails, returns something else than losses, mixes tokens, or reads values.
    """
    own = OwnLoss.of(config)
    if own is None:
        return
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(TOKENS, WIDTH, generator=generator)
    weight_VD = torch.randn(vocab_size, WIDTH, generator=generator)
    labels_N = torch.randint(vocab_size, (TOKENS,), generator=generator)
    labels_N[1] = IGNORE_INDEX
    try:
        all_tokens = _loss_sum(own, hidden_ND, weight_VD, labels_N)
        halves = [
            _loss_sum(own, hidden_ND[rows], weight_VD, labels_N[rows])
            for rows in (slice(0, 2), slice(2, TOKENS))
        ]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"loss={own.name} failed on {TOKENS} random tokens ({_describe(error)}); correct it, "
            "or set loss=cross_entropy"
        ) from error
    parts = torch.stack(halves).sum()
    if not all_tokens.isfinite():
        raise ConfigError(
            f"loss={own.name} gives {float(all_tokens)} for {TOKENS} random tokens; correct it, or "
            "set loss=cross_entropy"
        )
    if not torch.isclose(all_tokens, parts, rtol=TOLERANCE, atol=TOLERANCE):
        raise ConfigError(
            f"loss={own.name} gives {float(all_tokens):.6g} for {TOKENS} tokens together and "
            f"{float(parts):.6g} in two parts, so it would depend on ranks and chunks; compute the "
            "loss of each token from its own logits, without a mean over tokens"
        )
    try:
        _loss_sum(own, hidden_ND.to("meta"), weight_VD.to("meta"), labels_N.to("meta"))
    except Exception as error:
        raise ConfigError(
            f"loss={own.name} cannot run on tensors without values ({_describe(error)}), so it "
            "cannot be planned and would stall an accelerator; use torch.where instead of "
            "conditions and .item(), and make tensors on the device of the logits"
        ) from error


def _loss_sum(
    own: OwnLoss, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor
) -> Tensor:
    """Return the loss of some tokens, after a backward."""
    hidden_ND = hidden_ND.clone().requires_grad_()
    if own.takes_hidden_states:
        loss = own.sum_over_head(hidden_ND, weight_VD, labels_N)
    else:
        loss = own.losses(hidden_ND @ weight_VD.t(), labels_N).sum()
    loss.backward()
    return loss.detach()


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
