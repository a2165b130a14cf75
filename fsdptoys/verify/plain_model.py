"""A model as its own code builds it: where it computes, without the meta device, shards or hooks.

It has the initial values that a run draws or reads. Routers get the gradients of their auxiliary
losses from a formula here, over the micro-batches that a group of ranks would run at once
(``train.moe_balance`` has the losses).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdptoys.config.kernel_choice import put_kernels
from fsdptoys.config.schema import Config
from fsdptoys.models import (
    DecoderModel,
    MoEConfig,
    NativeModel,
    TransformersConfig,
    routers,
)
from fsdptoys.models.foreign.build import build_causal_lm
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
        self.module: Any
        described, self.module, names = _construct(config, dtype)
        self._names = names
        self._params = {
            name: self.module.get_parameter(names[name])
            for name, _ in described.named_parameters()
        }
        self._buffers = {
            name: self.module.get_buffer(names[name])
            for name, _ in described.named_buffers()
        }
        self.module.to(device)
        if dtype is torch.float64:
            self.module.double()
            choose_experts: Any = getattr(
                self.module, "set_experts_implementation", None
            )
            if choose_experts is not None:
                # transformers' grouped matmul has no float64
                choose_experts("eager")
        values = InitialValues(described, config, threads=1)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        self.masters: dict[str, nn.Parameter] = {}
        """The parameters that an optimizer updates."""
        for name, param in self._params.items():
            master = torch.empty(param.shape)
            values.fill(master, name)
            self.masters[name] = nn.Parameter(master.to(device, wide))
        self.balance = (
            PlainBalance(self.module, config.model)
            if isinstance(config.model, MoEConfig)
            else None
        )

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits_BTV of the model's own forward."""
        output: Any = self.module(tokens_BT)
        logits_BTV: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits_BTV

    def keep_documents_apart(self, end: int) -> None:
        """Mask attention between documents, which an id ends."""
        assert isinstance(self.module, DecoderModel), "the configuration was validated"
        self.module.document_end = end

    def buffers(self) -> NamedTensors:
        """The buffers, under the names that they have in a run."""
        names = {name: self._names[name] for name in self._buffers}
        return [(name, self.module.get_buffer(path)) for name, path in names.items()]

    @torch.no_grad()
    def load(self) -> None:
        """Copy the masters into the model, rounded to its dtype."""
        for name, param in self._params.items():
            param.copy_(self.masters[name])

    @torch.no_grad()
    def take_gradients(self) -> dict[str, Tensor]:
        """Return the gradients in the masters' dtype, and free them; zeros where there are none."""
        grads = {}
        for name, param in self._params.items():
            master = self.masters[name]
            grads[name] = (
                torch.zeros_like(master)
                if param.grad is None
                else param.grad.to(master.dtype)
            )
            param.grad = None
        return grads


def _construct(
    config: Config, dtype: torch.dtype
) -> tuple[DecoderModel, nn.Module, dict[str, str]]:
    """Return the model that a run describes, the one that its own code builds on the CPU, and names
    of parameters and buffers of the first → those of the second."""
    is_lower = dtype is torch.bfloat16
    if isinstance(config.model, TransformersConfig):
        with torch.device("meta"):
            described = config.model.build()
        module = build_causal_lm(config.model, dtype if is_lower else torch.float32)
        module.config.use_cache = False
        return described, module, described.hugging_face_names
    assert config.train.init_seed is not None, "the config must have been validated"
    torch.manual_seed(config.train.init_seed)
    model: DecoderModel = config.model.build()
    if isinstance(model, NativeModel):
        put_kernels(model, config.kernels)
        init_buffers(model, torch.device("cpu"), config.parallel.buffer_dtype.torch)
    if is_lower:
        for param in model.parameters():
            param.data = param.data.to(dtype)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    # An own nn.Module is called itself, without what shows it to strategies
    own_module: nn.Module = getattr(model, "module", model)
    return model, own_module, {name: name for name, _ in tensors}


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
