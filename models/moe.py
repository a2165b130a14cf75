"""Mixtures of experts: a router that sends each token to a few of many feed-forwards, and the block
around both.

Auxiliary losses over the global batch keep a router from sending everything to the same experts;
but a model knows no ranks. So the router records its token counts per expert and the sums that the
losses are functions of, and the trainer fills in the gradient by these sums before the backward:
both losses are linear in the sums once the global counts are known, so nothing else leaves the
block.

    load balancing (arXiv:2101.03961, arXiv:2501.11873):  E · Σ_e f_e · P_e, where f_e is the share
        of tokens sent to expert e (their sum is K) and P_e the mean of its probability; no gradient
        flows through f
    z-loss (arXiv:2202.08906):                            mean of logsumexp(logits)²

Not covered: capacity limits (no token is dropped), bias-based balancing. Experts may be split over
ranks from outside (``Experts.dispatch``).

Shapes: N tokens, D width, E experts, K experts of a token.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .exchange import Split
from .experts import Dispatch
from .initial import Initial, residual
from .layers import SwiGLU, matmul_flops
from .ops import Layer, leave_uncompiled


class Scores(Enum):
    """Weights of the chosen experts as a function of a router's logits."""

    softmax = "softmax"
    """Softmax over all experts."""
    normalized_softmax = "normalized_softmax"
    """Softmax over all experts, divided by the sum of the chosen."""
    sigmoid = "sigmoid"
    """Sigmoid of each logit; scales an expert's input rather than its output (Llama 4)."""


class Router(Layer):
    """Chooses experts and their weights for each token.

    Args:
        dim: width of the residual stream.
        n_experts: experts to choose from.
        top_k: experts of each token.
        scores: weights as a function of logits.
    """

    split = Split.replicated
    counts_E: Tensor
    """After a forward: tokens of each expert, int64."""
    sums: Tensor
    """After a forward: the sum of each expert's probability over the tokens, and of logsumexp²: of
    shape (E + 1,)."""
    sums_grad: Tensor
    """Gradient of the training loss by ``sums``; read in the backward, so it may be filled after
    the forward."""

    def __init__(self, dim: int, n_experts: int, top_k: int, scores: Scores) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        self.n_experts = n_experts
        self.top_k = top_k
        self.scores = scores

    # Uncompiled: it gets its gradient between forward and backward. Compiled with a low budget, it
    # would read the buffer's older value from the forward (torch 2.13).
    @leave_uncompiled
    def forward(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts as experts_NK, int64, and their weights_NK in the dtype of the
        input."""
        weight_ED = self.exchange.sum_gradient(self.weight)
        experts_NK, weights_NK, sums = self.ops.route(hidden_ND, weight_ED, self.score)
        return experts_NK, self.finish(experts_NK, weights_NK, sums).to(hidden_ND.dtype)

    def score(self, logits_NE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return experts_NK, weights_NK, and the terms of each token in the ``sums``: (N, E) and
        (N), in float32."""
        if self.scores is Scores.sigmoid:
            chosen_NK, experts_NK = logits_NE.topk(self.top_k, dim=-1)
            weights_NK = chosen_NK.float().sigmoid()
            # Sigmoids over their sum, without underflow.
            probabilities_NE = F.logsigmoid(logits_NE.float()).softmax(-1)
        else:
            probabilities_NE = F.softmax(logits_NE, dim=-1, dtype=torch.float32)
            weights_NK, experts_NK = probabilities_NE.topk(self.top_k, dim=-1)
            if self.scores is Scores.normalized_softmax:
                weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return (
            experts_NK,
            weights_NK,
            probabilities_NE,
            logits_NE.float().logsumexp(-1).square(),
        )

    def finish(self, experts_NK: Tensor, weights_NK: Tensor, sums: Tensor) -> Tensor:
        """Record the choice, and return the weights; their backward gives ``sums`` its gradient."""
        self._remember(experts_NK, sums.detach())
        if torch.is_grad_enabled():
            weights_NK = _WithGradient.apply(weights_NK, sums, self.sums_grad)
        return weights_NK

    def own_flops(self, seq_len: int) -> float:
        """FLOPs of its matmul."""
        return matmul_flops(self.weight.numel(), self.weight.requires_grad)

    def renew_gradient(self) -> None:
        """Give the next forward a gradient of its own, where the backwards of earlier ones are yet
        to come."""
        if getattr(self, "sums_grad", None) is not None:
            self.sums_grad = torch.zeros_like(self.sums_grad)

    @torch.no_grad()
    def _remember(self, experts_NK: Tensor, sums: Tensor) -> None:
        # Neither bincount nor one_hot: both sync with the device.
        experts_E = torch.arange(self.n_experts, device=experts_NK.device)
        self.counts_E = (experts_NK.unsqueeze(-1) == experts_E).sum((0, 1))
        self.sums = sums
        if (
            getattr(self, "sums_grad", None) is None
            or self.sums_grad.device != sums.device
        ):
            self.sums_grad = torch.zeros_like(sums)


class _WithGradient(torch.autograd.Function):
    """Identity on ``carrier`` that gives ``sums`` the gradient ``sums_grad``, read in the
    backward."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, sums: Tensor, sums_grad: Tensor) -> Tensor:
        ctx.sums_grad = sums_grad
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.sums_grad.clone(), None


class Experts(Layer):
    """Stacked gated feed-forwards (``experts``)."""

    dispatch: Dispatch | None = None
    """In place of ``apply_experts`` where other ranks have some of the experts."""
    initial: Mapping[str, Initial] = {"down_proj": residual}

    def __init__(self, dim: int, ffn_dim: int, n_experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, 2 * ffn_dim, dim))
        self.down_proj = nn.Parameter(torch.empty(n_experts, dim, ffn_dim))

    @leave_uncompiled
    def forward(
        self,
        hidden_ND: Tensor,
        experts_NK: Tensor,
        weights_NK: Tensor,
        *,
        scale_input: bool = False,
    ) -> Tensor:
        """Weighted sum of each token's experts: ``sum_k w_nk · down(silu(gate(x_n)) · up(x_n))``.

        Args:
            hidden_ND: input, in the dtype of the parameters.
            experts_NK: ids of each token's experts, int64, distinct within a token.
            weights_NK: their weights, in the dtype of ``hidden_ND``.
            scale_input: scale an expert's input by its weight rather than its output (Llama 4).

        Returns:
            (N, D), in the dtype of ``hidden_ND`` even under autocast.

        Raises:
            ValueError: if dtypes differ, or an id is not below E.
        """
        return self.ops.experts(
            hidden_ND,
            experts_NK,
            weights_NK,
            self.gate_up_proj,
            self.down_proj,
            self.dispatch,
            scale_input,
        )


class MoE(Layer):
    """A router, its experts, and optionally a shared expert.

    Args:
        dim: width of the residual stream.
        ffn_dim: width of each expert's hidden layer.
        n_experts: experts to choose from.
        top_k: experts of each token.
        scores: weights as a function of the router's logits.
        shared_ffn_dim: hidden width of the shared expert; 0 for none.
    """

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        n_experts: int,
        top_k: int,
        scores: Scores,
        shared_ffn_dim: int = 0,
    ) -> None:
        super().__init__()
        self.router = Router(dim, n_experts, top_k, scores)
        self.shared_expert = SwiGLU(dim, shared_ffn_dim) if shared_ffn_dim else None
        self.experts = Experts(dim, ffn_dim, n_experts)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Apply to the last dim; any leading shape."""
        hidden_ND = hidden_BTD.flatten(0, -2)
        experts_NK, weights_NK = self.router(hidden_ND)
        # Before the experts, with which the backward then starts: FSDP2 gathers a unit of experts
        # at that point, and would gather it once more if the shared expert's backward had
        # recomputed the block first. The view adds up the gradients of both of its projections
        # first, as where the shared expert is a unit.
        shared_ND = (
            self.shared_expert(hidden_ND.view_as(hidden_ND))
            if self.shared_expert is not None
            else None
        )
        scale_input = self.router.scores is Scores.sigmoid
        out_ND = self.experts(
            hidden_ND, experts_NK, weights_NK, scale_input=scale_input
        )
        if shared_ND is not None:
            out_ND = shared_ND + out_ND
        return out_ND.view_as(hidden_BTD)

    def own_flops(self, seq_len: int) -> float:
        """FLOPs of a token's routed experts."""
        return matmul_flops(
            self.active_expert_parameters, self.experts.down_proj.requires_grad
        )

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts."""
        return sum(param.numel() for param in self.experts.parameters())

    @property
    def active_expert_parameters(self) -> int:
        """Parameters of one token's experts."""
        return self.expert_parameters // self.router.n_experts * self.router.top_k


def routers(model: nn.Module) -> Sequence[Router]:
    """All routers of a model, in the order of its blocks."""
    return [module for module in model.modules() if isinstance(module, Router)]
