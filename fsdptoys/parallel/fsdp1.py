"""FSDP1: PyTorch's FullyShardedDataParallel, which flattens the parameters of a unit and shards the flat tensor.

A mesh of two axes makes it hybrid. Embedding and head are units of their own, unless they share a weight: the root then
holds both. Construction holds one unit in full at a time, since a unit is flattened before it is sharded. With bf16
parameters micro-batches are added up in bf16 before they are reduced, where FSDP2 and DDP add them in float32.
Source: https://docs.pytorch.org/docs/stable/fsdp.html, arXiv:2304.11277.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from fsdptoys.models import DecoderModel

from .fsdp import FSDP1Config, ReshardAfterForward, block_units
from .init_weights import Fill, init_buffers, shared_parameters
from .mesh import SHARD_AXIS
from .precision import DType
from .strategy import ParallelContext, Strategy, Unit, own_parameters


class FSDP1(Strategy):
    """PyTorch's FullyShardedDataParallel."""

    model: FullyShardedDataParallel

    def __init__(self, config: FSDP1Config, context: ParallelContext) -> None:
        super().__init__(context)
        self.config = config
        self.mesh = context.build_mesh()
        # The model's own parameters are views into a flat one, which keeps its offloaded gradient when theirs are None.
        self.frees_gradients = not context.cpu_offload

    def parallelize(self, model: DecoderModel, fill: Fill) -> None:
        """Wrap from the inside out; each unit is materialised, initialised, flattened and sharded in turn."""
        names = {param: name for name, param in model.named_parameters()}
        made: dict[nn.Parameter, nn.Parameter] = {}
        device = self.context.device.torch_device

        def materialise_own_parameters(module: nn.Module) -> None:
            for attribute, param in list(module.named_parameters(recurse=False)):
                if param not in made:
                    made[param] = nn.Parameter(torch.empty_like(param, device=device))
                    fill(made[param], names[param])
                setattr(module, attribute, made[param])

        shared = bool(shared_parameters(model))
        # On one rank FSDP1 gives the unreduced gradient of a shared weight, which may be bf16, to each of its names,
        # which are float32, and torch refuses that (seen with 2.13). Reducing costs one rank nothing.
        self._reduces_always = shared and self.context.world_size == 1
        init_buffers(model, device, self.config.buffer_dtype.torch)
        options = self._options() | {"param_init_fn": materialise_own_parameters}
        policy = self.config.reshard_after_forward

        def wrap(owner: nn.Module, attribute: str, **more: object) -> None:
            setattr(owner, attribute, _wrap(getattr(owner, attribute), options | more))
            made.clear()

        if not shared:
            wrap(model, "embed_tokens")
            head_policy = policy if policy is ReshardAfterForward.always else ReshardAfterForward.never
            wrap(model, "lm_head", sharding_strategy=self._sharding_strategy(head_policy))
        for index, block in enumerate(model.layers):
            for part in block_units(block, self.config.wrap):
                wrap(block, part)
            wrap(model.layers, str(index))
        self.model = _wrap(model, options)

    def _sharding_strategy(self, policy: ReshardAfterForward) -> ShardingStrategy:
        never = policy is ReshardAfterForward.never
        if self.mesh.ndim == 1:
            return ShardingStrategy.SHARD_GRAD_OP if never else ShardingStrategy.FULL_SHARD
        return ShardingStrategy._HYBRID_SHARD_ZERO2 if never else ShardingStrategy.HYBRID_SHARD

    def _options(self) -> dict[str, object]:
        config, context = self.config, self.context
        return {
            "device_mesh": self.mesh,
            "device_id": context.device.torch_device,
            "sharding_strategy": self._sharding_strategy(config.reshard_after_forward),
            "mixed_precision": MixedPrecision(
                param_dtype=None if config.param_dtype is DType.float32 else config.param_dtype.torch,
                reduce_dtype=config.reduce_dtype.torch,
                buffer_dtype=config.buffer_dtype.torch,
                # The models keep rotary angles in float32 themselves; casting inputs would round them.
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            ),
            "cpu_offload": CPUOffload(offload_params=context.cpu_offload),
            "forward_prefetch": config.forward_prefetch > 0,
            "backward_prefetch": BackwardPrefetch.BACKWARD_PRE if config.backward_prefetch else None,
            "use_orig_params": config.use_orig_params,
        }

    @contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Reduce-scatter once a step, with the last micro-batch; in the deterministic mode, after each."""
        reduces = index == count - 1 or self.context.deterministic or self._reduces_always
        with nullcontext() if reduces else self.model.no_sync():
            yield

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's part of each parameter, flattened, or of each unit's flat parameter."""
        for name, param in self.model.named_parameters():
            yield _own_name(name), param

    def units(self) -> list[Unit]:
        """FSDP1's own, the root first."""
        modules = list(FullyShardedDataParallel.fsdp_modules(self.model))
        return [
            (module, params)
            for module, params in zip(modules, own_parameters([[m] for m in modules]), strict=True)
            if params
        ]

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All-gather one unit at a time."""
        names = {module: _own_name(name + ".").rstrip(".") for name, module in self.model.named_modules()}
        units = FullyShardedDataParallel.fsdp_modules(self.model)
        # The root comes first: a child that is summoned before its root believes to be the root itself.
        for unit in units:
            prefix = f"{names[unit]}." if names[unit] else ""
            nested = tuple(
                f"{names[other]}." for other in units if other is not unit and names[other].startswith(prefix)
            )
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
                for name, param in unit.named_parameters():
                    full_name = prefix + _own_name(name)
                    if not full_name.startswith(nested) and not name.endswith("_flat_param"):
                        yield full_name, param.detach().to("cpu", torch.float32, copy=True)

    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks along the shard axis."""
        return self.mesh.get_group(SHARD_AXIS)


def _wrap(module: nn.Module, options: dict[str, object]) -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        # One rank: FSDP1 says at every unit that it will not shard, which is what was asked for.
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        return FullyShardedDataParallel(module, **options)  # type: ignore[arg-type]


def _own_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")
