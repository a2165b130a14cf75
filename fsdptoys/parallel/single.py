"""One process: the reference for every other strategy.

``parallel.simulated_ranks=R`` runs the micro-batches of R data-parallel ranks one after another, so
that one process trains on the same global batches as R ranks with the same settings.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fsdptoys.models import DecoderModel
from fsdptoys.utils.bounds import at_least
from fsdptoys.utils.options import Effect, option

from .capabilities import Capabilities
from .config import ParallelConfig
from .float64_leaves import Float64Leaves
from .init_weights import ParamInit, init_buffers, materialize
from .precision import CastParameters, DType
from .state import unrounded
from .strategy import Strategy, UnitParams, World


class UnshardedStrategy(Strategy):
    """A strategy without shards: every rank has all parameters."""

    def __init__(self, config: ParallelConfig, world: World) -> None:
        super().__init__(config, world)
        self._over_microbatches: dict[nn.Parameter, Tensor] = {}
        self._leaves: Float64Leaves | None = None

    def shard(self, model: DecoderModel, param_init: ParamInit) -> None:
        """Materialize and initialize the same values on every rank, then wrap."""
        device = self.world.device.torch_device
        dtype = self.config.param_dtype
        materialize(model, device, param_init)
        config = self.config
        init_buffers(model, device, config.buffer_dtype.torch, config.param_dtype.torch)
        self._unwrapped = model
        # The model casts them to its dtype itself.
        if self.world.deterministic.uses_float64:
            self._leaves = Float64Leaves(model)
            dtype = DType.float32
        self.model = self._wrap(
            model
            if dtype is DType.float32
            else CastParameters(model, dtype.torch, model.float32_modules)
        )

    def _wrap(self, model: nn.Module) -> Any:
        return model

    def units(self) -> list[UnitParams]:
        """The blocks, and the modules before and after them."""
        units = unsharded_units(self._unwrapped)
        return [
            (module, [self._parameter(param) for param in params])
            for module, params in units
        ]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own parameters."""
        return (
            (name, self._parameter(param))
            for name, param in self._unwrapped.named_parameters()
        )

    def _parameter(self, param: nn.Parameter) -> nn.Parameter:
        """The float32 parameter of one of the model's."""
        return param if self._leaves is None else self._leaves.parameter(param)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The model's own parameters."""
        # not the slices of a toy's optimizer
        for (
            name,
            param,
        ) in self._unwrapped.named_parameters():
            yield name, unrounded(name, self._parameter(param).detach())

    def _add_microbatch(self, param: nn.Parameter, grad: Tensor, is_last: bool) -> None:
        """Add up a parameter's reduced gradients of a step in float32; the last one makes the sum
        its gradient."""
        earlier = self._over_microbatches.pop(param, None)
        total = grad.clone() if earlier is None else earlier.add_(grad)
        param.grad = total if is_last else None
        if not is_last:
            self._over_microbatches[param] = total


class Single(UnshardedStrategy):
    """The full model in one process."""

    def __init__(self, config: "SingleConfig", world: World) -> None:
        super().__init__(config, world)
        self.data_ranks = self.local_data_ranks = config.simulated_ranks
        self._over_ranks: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Let autograd sum gradients in float32; in the deterministic mode, over simulated ranks in
        float64."""
        yield
        if self._leaves and index == count - 1:
            self._leaves.move_gradients()
        if (
            not self.world.deterministic.reduces_each_microbatch
            or self.local_data_ranks == 1
        ):
            return
        rank = index % self.local_data_ranks
        for param in self._unwrapped.parameters():
            if param.grad is None:
                continue
            in_float64 = self._over_ranks.get(param)
            self._over_ranks[param] = (
                param.grad.double()
                if in_float64 is None
                else in_float64.add_(param.grad)
            )
            param.grad = None
            if rank == self.local_data_ranks - 1:
                self._add_microbatch(
                    param, self._over_ranks.pop(param).float(), index == count - 1
                )


@dataclass
class SingleConfig(ParallelConfig):
    """One process."""

    name: ClassVar[str] = "single"
    strategy = Single
    capabilities = Capabilities(
        deterministic=True,
        single_process=True,
        optimizer_offload=True,
        lazy_updates=True,
        optimizer_in_backward=True,
        float8=True,
        layout_mode=True,
        muon=True,
        low_bit_states=True,
        mixed_dtypes=True,
    )

    simulated_ranks: int = option(1, at_least(1, 2**16), effect=Effect.rounding)
    """Data-parallel ranks whose micro-batches the one process runs one after another."""


def unsharded_units(whole: DecoderModel) -> list[UnitParams]:
    """Units of a model without sharding."""
    tail = [whole.get_submodule(name) for name in whole.head_names]
    embedding = [whole.get_submodule(name) for name in whole.embedding_names]
    later = {
        param for module in [*whole.layers, *tail] for param in module.parameters()
    }
    first = [param for param in whole.parameters() if param not in later]
    # The embedding is the first to need a weight that it shares with the head.
    looked_up = [param for module in embedding for param in module.parameters()]
    root_params = dict.fromkeys([*first, *looked_up])
    units: list[UnitParams] = [(whole, list(root_params))]
    units += [(layer, list(layer.parameters())) for layer in whole.layers]
    rest = [
        param
        for module in tail
        for param in module.parameters()
        if param not in root_params
    ]
    return [*units, (tail[0], rest)] if tail else units
