"""Load balancing of experts over the whole global batch, and what there is to tell of the routing.

A model's routers know their own micro-batch only (``models/moe.py``). Here the counts of all ranks' micro-batches are
added up between forward and backward, and each router is told the gradient of the auxiliary losses, which is linear in
what it summed. With gradient accumulation a backward uses the counts of the micro-batches so far, since the later ones
are not routed yet (arXiv:2501.11873); the loss that is reported is that of the whole step.

Over the tokens of a step, padding included, and a layer's E experts:

    load balancing  E · Σ_e f_e · P_e     f_e: tokens sent to expert e over tokens; P_e: mean probability of expert e
    z-loss          mean of logsumexp(logits)²

Both are means over the layers with experts, and are added to the loss with ``model.router_aux_loss_coef`` and
``model.router_z_loss_coef``. Perfect balance makes the first K, the number of experts a token is sent to.
transformers' ``load_balancing_loss_func`` is the same for one layer; over several it adds the counts of all layers up
before it multiplies, so that two unbalanced layers can pass for balanced.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.metrics.step import RoutingMetrics
from fsdptoys.models import DecoderModel, MoEConfig, routers


class RoutingBalance:
    """What the trainer does with the routers of a model, in the order of a step.

    Args:
        model: as it was constructed, before anything wraps it.
        config: coefficients of the auxiliary losses.
        device: on which the model will run.
        local_ranks: ranks whose micro-batches this process runs in turn.
        sum_dtype: of the sums over ranks.
    """

    def __init__(
        self, model: DecoderModel, config: MoEConfig, device: torch.device, local_ranks: int, sum_dtype: torch.dtype
    ) -> None:
        self._routers = routers(model)
        self._aux_coef = config.router_aux_loss_coef
        self._z_coef = config.router_z_loss_coef
        self._top_k = config.top_k
        self._device = device
        self._local_ranks = local_ranks
        self._sum_dtype = sum_dtype

    def begin_step(self, tokens: int, loss_scale: float) -> None:
        """Start the sums of a step.

        Args:
            tokens: of the global batch, those without a label included.
            loss_scale: factor that the strategy wants on the loss.
        """
        self._tokens = tokens
        self._loss_scale = loss_scale
        n_layers, n_experts = len(self._routers), self._routers[0].n_experts
        self._counts_LE = torch.zeros(n_layers, n_experts, dtype=torch.int64, device=self._device)
        self._sums = torch.zeros(n_layers, n_experts + 1, dtype=self._sum_dtype, device=self._device)

    def before_forward(self, model: nn.Module, index: int, microbatches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Where this process runs several ranks' micro-batches in turn, route all that would run at the same time.

        Args:
            model: called with token ids_BT, labels_BT and a loss that computes nothing.
            index: of the micro-batch that comes next.
            microbatches: all of the step, as (tokens_BT, labels_BT).
        """
        if self._local_ranks == 1 or not self._aux_coef or index % self._local_ranks:
            return
        with torch.no_grad():
            for tokens_BT, labels_BT in microbatches[index : index + self._local_ranks]:
                # With labels, and a loss that is none, so that no logits are made.
                model(tokens_BT.to(self._device), labels_BT.to(self._device), _no_loss)
                self._counts_LE += self._routed()

    def before_backward(self) -> None:
        """Tell the routers their gradient, between forward and backward of a micro-batch. A collective."""
        self._sums += torch.stack([router.sums for router in self._routers])
        if self._local_ranks == 1 or not self._aux_coef:
            counts_LE = self._routed()
            if self._aux_coef:
                dist.all_reduce(counts_LE)
            self._counts_LE += counts_LE
        n_layers, n_experts = self._counts_LE.shape
        scale = self._loss_scale / n_layers / self._tokens
        # Counts are exact, and so are the bits of what is made of them, on whichever layout.
        shares_LE = self._counts_LE / (self._counts_LE.sum(1, keepdim=True) / self._top_k)
        aux_LE = shares_LE * (self._aux_coef * n_experts * scale)
        z_L1 = torch.full_like(aux_LE[:, :1], self._z_coef * scale)
        for router, grad in zip(self._routers, torch.cat([aux_LE, z_L1], dim=1), strict=True):
            router.sums_grad.copy_(grad)

    def end_step(self) -> RoutingMetrics:
        """Reduce the step to its metrics. A collective."""
        dist.all_reduce(self._sums)
        if not self._aux_coef:
            dist.all_reduce(self._counts_LE)
        means, counts_LE = self._sums.cpu().double() / self._tokens, self._counts_LE.cpu()
        probabilities_LE, z_L = means[:, :-1], means[:, -1]
        n_experts = counts_LE.shape[1]
        aux_L = n_experts * (counts_LE.double() / self._tokens * probabilities_LE).sum(1)
        loads_LE = counts_LE.double() * n_experts / counts_LE.sum(1, keepdim=True)
        shares_LE = loads_LE / n_experts
        entropies_L = -torch.special.xlogy(shares_LE, shares_LE).sum(1)
        return RoutingMetrics(
            aux_loss=aux_L.mean().item(),
            z_loss=z_L.mean().item(),
            entropy=entropies_L.mean().item() / math.log(n_experts) if n_experts > 1 else 1.0,
            max_load=loads_LE.max().item(),
            min_load=loads_LE.min().item(),
            counts=counts_LE.tolist(),
        )

    def _routed(self) -> Tensor:
        """Tokens that each expert was sent in the forward just done, int64 of (layers, experts)."""
        return torch.stack([router.counts_E for router in self._routers])


def _no_loss(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    return hidden_ND.new_zeros(())


def build_routing_balance(
    model: DecoderModel, device: torch.device, local_ranks: int, sum_dtype: torch.dtype
) -> RoutingBalance | None:
    """The balance of a model with experts; None for one without."""
    config = model.config
    return RoutingBalance(model, config, device, local_ranks, sum_dtype) if isinstance(config, MoEConfig) else None
