"""A loss that a user has written, and its gradient for a chunk of tokens.

Autograd differentiates the user's function. The chunked loss keeps its form: the gradient of a
chunk's logits takes their place, and the three matmuls follow as for the cross entropy. The price
beside the built-in one are float32 copies of a chunk's logits, as many as the function makes.

Shapes: N tokens, C tokens of a chunk, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdptoys.errors import ConfigError

from .config import CrossEntropyConfig, LossConfig
from .head_logits import head_logits
from .objective import IGNORE_INDEX


@dataclass(frozen=True)
class OwnLoss:
    """A user's loss, with checks of what it returns."""

    name: str
    """The word after ``loss=``."""
    function: Callable[..., Tensor]
    takes_hidden_states: bool = False

    @classmethod
    def of(cls, config: LossConfig) -> "OwnLoss | None":
        """Build the loss of a run; None for the built-in one.

        Raises:
            ConfigError: if it has parameters, which nothing would train.
        """
        if isinstance(config, CrossEntropyConfig):
            return None
        function = config.build()
        if isinstance(function, nn.Module) and list(function.parameters()):
            raise ConfigError(
                f"loss={config.name} has parameters, which nothing would train; register its "
                "fixed tensors as buffers"
            )
        return cls(config.name, function, config.takes_hidden_states)

    def losses(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        """Return the loss of each token, 0 where the label is ``IGNORE_INDEX``; float32.

        Raises:
            ConfigError: if the function returns anything else than N losses with a gradient.
        """
        ignored_N = labels_N == IGNORE_INDEX
        losses_N = self.function(logits_NV, labels_N.masked_fill(ignored_N, 0))
        self._check(losses_N, tuple(labels_N.shape), logits_NV.requires_grad)
        return losses_N.float().masked_fill(ignored_N, 0.0)

    def sum_over_head(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor | None,
        labels_N: Tensor,
        bias_V: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return the sum of a function that computes the logits itself, as a float32 scalar.

        Raises:
            ConfigError: for a head that is more than a matrix, which the function would not apply.
        """
        if weight_VD is None or bias_V is not None or softcap is not None:
            raise ConfigError(
                f"loss={self.name} takes hidden states, and the model's head is more than a "
                "matrix; write a loss of logits, with takes_hidden_states=False"
            )
        loss = self.function(hidden_ND, weight_VD, labels_N)
        self._check(loss, (), hidden_ND.requires_grad or weight_VD.requires_grad)
        return loss.float()

    def _check(self, loss: object, shape: tuple[int, ...], trains: bool) -> None:
        expectation = (
            f"a tensor of {shape[0]} losses, one for each token; leave out its mean or sum"
            if shape
            else "a scalar, the sum over the tokens with a label"
        )
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"loss={self.name} returned {type(loss).__name__}; return {expectation}"
            )
        if tuple(loss.shape) != shape or not loss.is_floating_point():
            raise ConfigError(
                f"loss={self.name} returned {loss.dtype} of shape {tuple(loss.shape)}; return "
                f"{expectation}"
            )
        if trains and torch.is_grad_enabled() and not loss.requires_grad:
            raise ConfigError(
                f"loss={self.name} returned a loss without a gradient; compute it from the logits "
                "by differentiable operations, without detach"
            )


def own_loss_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor | None,
    labels_N: Tensor,
    own: OwnLoss,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """A user's loss of ``head_logits`` summed over valid labels, as a float32 scalar.

    Makes the full logits, and leaves gradients to autograd.
    """
    logits_NV = head_logits(hidden_ND, weight_VD, bias_V, softcap)
    return own.losses(logits_NV.float(), labels_N).sum()


def own_gradient_(
    logits_CV: Tensor,
    labels_C: Tensor,
    own: OwnLoss,
    gradient_scale: float,
    *,
    gradient: bool,
) -> Tensor:
    """Return the loss of each row, and replace its logits by the gradient of that loss.

    Args:
        logits_CV: any floating dtype.
        labels_C: classes, or ``IGNORE_INDEX`` for rows without loss and gradient.
        own: the loss.
        gradient_scale: factor on the gradients.
        gradient: whether to compute the gradient; without it the logits stay.
    """
    values_CV = logits_CV.float()
    if not gradient:
        return own.losses(values_CV, labels_C)
    values_CV = values_CV.detach().requires_grad_()
    with torch.enable_grad():
        losses_C = own.losses(values_CV, labels_C)
    upstream_C = torch.full_like(losses_C, gradient_scale)
    (gradient_CV,) = torch.autograd.grad(losses_C, values_CV, upstream_C)
    logits_CV.copy_(gradient_CV)
    return losses_C.detach()
