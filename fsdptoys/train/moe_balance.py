"""Auxiliary losses of MoE routers over the global batch, and routing metrics.

A router sees its own micro-batch only (``models/moe.py``). ``RoutingBalance`` sums the expert
counts of all ranks between forward and backward and gives each router the gradient of the auxiliary
losses, which are linear in the router's sums. With gradient accumulation a backward uses the counts
of the micro-batches so far, since later ones are not routed yet (arXiv:2501.11873); the reported
losses cover the full step. With ``train.deterministic=layout`` gradients do not depend on the
micro-batches; one more forward of each routes the full step first.

Over the tokens of a step, padding included, and a layer's E experts:

    load balancing  E · Σ_e f_e · P_e     f_e: tokens sent to expert e / tokens;
                                          P_e: mean probability of expert e
    z-loss          mean of logsumexp(logits)²

Both are averaged over the MoE layers and weighted with ``model.router_aux_loss_coef`` and
``model.router_z_loss_coef``. Under perfect balance the first equals K, the number of experts per
token. transformers' ``load_balancing_loss_func`` is the same for one layer; for several it sums the
counts over layers before it multiplies, so two unbalanced layers can look balanced.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.metrics.step import RoutingMetrics
from fsdptoys.models import DecoderModel, MoEConfig, Router, routers
from fsdptoys.parallel import Strategy


class RoutingBalance:
    """Balances the routers of a model; methods are listed in the order in which a step calls them.

    Args:
        model: of MoE blocks, or this rank's part of them; split, and not yet sharded.
        strategy: of the model.
    """

    def __init__(self, model: DecoderModel, strategy: Strategy) -> None:
        config = model.config
        world = strategy.world
        pipeline = strategy.pipeline
        assert isinstance(config, MoEConfig)
        layers = [
            layer for layer in range(config.n_layers) if config.has_experts(layer)
        ]
        blocks = dict(model.layers.named_children())
        self._rows: dict[Router, int] = {}
        """Routers of this rank → their places among those of the full model."""
        for row, layer in enumerate(layers):
            if str(layer) in blocks:
                self._rows |= dict.fromkeys(routers(blocks[str(layer)]), row)
        self._n_layers = len(layers)
        self._n_experts = config.n_experts
        self._top_k = config.top_k
        self._aux_coef = config.router_aux_loss_coef
        self._z_coef = config.router_z_loss_coef
        self._stage_group = pipeline.stage_group if pipeline else None
        self._pipe_group = pipeline.group if pipeline else None
        self._device = world.device.torch_device
        self._sum_dtype = world.sum_dtype
        self._local_ranks = strategy.local_data_ranks
        """Simulated ranks whose micro-batches this process runs in turn."""
        self._routes_first = world.deterministic.covers_layouts and self._aux_coef != 0
        """Whether all micro-batches of a step are routed before its first backward."""
        self._counted = False
        """Whether ``before_forward`` has counted the next micro-batch."""

    def begin_step(self, tokens: int, loss_scale: float) -> None:
        """Reset the sums, for a global batch of ``tokens`` (with or without labels) and the factor
        on the loss."""
        self._tokens = tokens
        self._loss_scale = loss_scale
        n_layers = self._n_layers
        n_experts = self._n_experts
        self._counts_LE = torch.zeros(
            n_layers, n_experts, dtype=torch.int64, device=self._device
        )
        self._sums = torch.zeros(
            n_layers, n_experts + 1, dtype=self._sum_dtype, device=self._device
        )

    def before_forward(
        self,
        model: nn.Module,
        index: int,
        microbatches: Sequence[tuple[Tensor, Tensor]],
        begin: Callable[[int], None] = lambda index: None,
    ) -> None:
        """Route the micro-batches that real ranks would run concurrently, or first, before one of
        them runs.

        Costs one more forward per micro-batch of the step, if this process simulates several ranks
        or the full step is routed first; ``index`` is that of the next micro-batch. ``begin`` is
        called with that of each before its forward. A collective.
        """
        together = len(microbatches) if self._routes_first else self._local_ranks
        self._counted = together > 1 and self._aux_coef != 0
        if not self._counted or index % together:
            return
        counts_LE = torch.zeros_like(self._counts_LE)
        with torch.no_grad():
            for micro_batch, (tokens_BT, labels_BT) in enumerate(
                microbatches[index : index + together], index
            ):
                begin(micro_batch)
                # Labels and an empty loss avoid the computation of logits.
                model(tokens_BT.to(self._device), labels_BT.to(self._device), _no_loss)
                for router, row in self._rows.items():
                    counts_LE[row] += router.counts_E
        if self._routes_first:
            dist.all_reduce(counts_LE, group=self._stage_group)
        self._counts_LE += counts_LE

    @contextmanager
    def around_stage(self, modules: nn.Module) -> Iterator[None]:
        """Balance the routers of a stage around its forward of one of several micro-batches. A
        collective."""
        stage_routers = routers(modules)
        for router in stage_routers:
            router.renew_gradient()
        yield
        if stage_routers:
            self.before_backward(stage_routers)

    def before_backward(self, stage_routers: Sequence[Router] | None = None) -> None:
        """Set the gradients of all routers, or of consecutive ones, between forward and backward. A
        collective."""
        stage_routers = list(self._rows) if stage_routers is None else stage_routers
        rows = slice(self._rows[stage_routers[0]], self._rows[stage_routers[-1]] + 1)
        self._sums[rows] += torch.stack([router.sums for router in stage_routers])
        if not self._counted:
            counts_LE = torch.stack([router.counts_E for router in stage_routers])
            if self._aux_coef:
                dist.all_reduce(counts_LE, group=self._stage_group)
            self._counts_LE[rows] += counts_LE
        counts_LE = self._counts_LE[rows]
        scale = self._loss_scale / self._n_layers / self._tokens
        # Counts are exact integers, so these values have the same bits on any layout.
        shares_LE = counts_LE / (counts_LE.sum(1, keepdim=True) / self._top_k)
        aux_LE = shares_LE * (self._aux_coef * self._n_experts * scale)
        z_L1 = torch.full_like(aux_LE[:, :1], self._z_coef * scale)
        for router, grad in zip(
            stage_routers, torch.cat([aux_LE, z_L1], dim=1), strict=True
        ):
            router.sums_grad.copy_(grad)

    def end_step(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return sums over this rank (``routing``), which the caller adds up over ranks, and counts
        over all ranks (``experts``).

        A collective without auxiliary loss, with which the counts are added up already.
        """
        if not self._aux_coef:
            dist.all_reduce(self._counts_LE)
        elif self._pipe_group is not None:
            dist.all_reduce(self._counts_LE, group=self._pipe_group)
        return {"routing": self._sums}, {"experts": self._counts_LE}

    def metrics(self, sums: Tensor, counts: Tensor) -> RoutingMetrics:
        """Compute the metrics of a step from the results of ``end_step`` over all ranks, on the
        host."""
        n_layers = self._n_layers
        means = sums.view(n_layers, -1).double() / self._tokens
        counts_LE = counts.view(n_layers, -1)
        probabilities_LE = means[:, :-1]
        z_L = means[:, -1]
        n_experts = counts_LE.shape[1]
        aux_L = n_experts * (counts_LE.double() / self._tokens * probabilities_LE).sum(
            1
        )
        loads_LE = counts_LE.double() * n_experts / counts_LE.sum(1, keepdim=True)
        shares_LE = loads_LE / n_experts
        entropies_L = -torch.special.xlogy(shares_LE, shares_LE).sum(1)
        return RoutingMetrics(
            aux_loss=aux_L.mean().item(),
            z_loss=z_L.mean().item(),
            entropy=entropies_L.mean().item() / math.log(n_experts)
            if n_experts > 1
            else 1.0,
            max_load=loads_LE.max().item(),
            min_load=loads_LE.min().item(),
            counts=counts_LE.tolist(),
        )


def _no_loss(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    return hidden_ND.new_zeros(())
