"""A model as its own code builds it: on the device where it computes, without the meta device, shards
or hooks.

It has the initial values that a run draws or reads. Routers get the gradients of their auxiliary
losses from a formula here, over the micro-batches that a group of ranks would run at once
(``train.moe_balance`` has the losses).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fsdptoys.config.kernel_choice import put_kernels
from fsdptoys.config.schema import Config
from fsdptoys.models import DecoderModel, MoEConfig, routers
from fsdptoys.parallel.init_weights import init_buffers
from fsdptoys.train.initial_values import InitialValues

from .measure import NamedTensors


class PlainModel:
    """A full model on one device.

    Args:
        config: of a run of one process, validated.
        device: where it computes.
        dtype: of the computation; parameters are kept in float32, or in float64 with it.
    """

    def __init__(
        self, config: Config, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.module: DecoderModel = config.model.build()
        put_kernels(self.module, config.kernels)
        values = InitialValues(self.module, config, threads=1)
        for name, param in self.module.named_parameters():
            values.fill(param, name)
        init_buffers(
            self.module, torch.device("cpu"), config.parallel.buffer_dtype.torch
        )
        self.module.to(device)
        if dtype is torch.float64:
            self.module.double()
        self.masters = {
            name: nn.Parameter(param.detach().clone())
            for name, param in self.module.named_parameters()
        }
        """The parameters that an optimizer updates."""
        if dtype is torch.bfloat16:
            self.module.bfloat16()
            # Buffers keep their precision
            init_buffers(self.module, device, config.parallel.buffer_dtype.torch)
        self.balance = (
            PlainBalance(self.module, config.model)
            if isinstance(config.model, MoEConfig)
            else None
        )

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits_BTV of the model's own forward."""
        logits_BTV: Tensor = self.module(tokens_BT)
        return logits_BTV

    def buffers(self) -> NamedTensors:
        """The buffers by name."""
        return self.module.named_buffers()

    @torch.no_grad()
    def load(self) -> None:
        """Copy the masters into the model, rounded to its dtype."""
        for name, param in self.module.named_parameters():
            param.copy_(self.masters[name])

    @torch.no_grad()
    def take_gradients(self) -> dict[str, Tensor]:
        """Return the gradients in the masters' dtype, and free them; zeros where there are none."""
        grads = {}
        for name, param in self.module.named_parameters():
            master = self.masters[name]
            grads[name] = (
                torch.zeros_like(master)
                if param.grad is None
                else param.grad.to(master.dtype)
            )
            param.grad = None
        return grads


class PlainBalance:
    """Auxiliary losses of routers over micro-batches that count together."""

    def __init__(self, module: nn.Module, config: MoEConfig) -> None:
        self._routers = routers(module)
        self._config = config

    def begin_step(self, tokens: int) -> None:
        """Forget the counts of the step before; ``tokens`` are those of the global batch."""
        self._tokens = tokens
        device = self._routers[0].weight.device
        self._counts_LE = torch.zeros(
            len(self._routers), self._config.n_experts, dtype=torch.int64, device=device
        )

    @torch.no_grad()
    def count(self, model: PlainModel, batches: Sequence[Tensor]) -> None:
        """Route micro-batches, and add their tokens to the counts of each expert."""
        for tokens_BT in batches:
            model.logits(tokens_BT)
            self._counts_LE += torch.stack(
                [router.counts_E for router in self._routers]
            )

    @contextmanager
    def gradients(self, dtype: torch.dtype) -> Iterator[None]:
        """Set the gradients of the sums of a forward, for the backward within."""
        config = self._config
        counts_LE = self._counts_LE
        per_layer = 1 / len(self._routers) / self._tokens
        tokens_L1 = counts_LE.sum(1, keepdim=True) / config.top_k
        shares_LE = counts_LE / tokens_L1
        scale = config.router_aux_loss_coef * config.n_experts * per_layer
        aux_LE = shares_LE * scale
        z_L1 = torch.full_like(aux_LE[:, :1], config.router_z_loss_coef * per_layer)
        grads = torch.cat([aux_LE, z_L1], dim=1)
        for router, grad in zip(self._routers, grads, strict=True):
            router.sums_grad.copy_(grad)
        yield
