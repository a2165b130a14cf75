"""Optimizer offload for a training loop of your own."""

import torch
from torch import nn

from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.utils.dtensor import local_tensor

from .bucketed_optimizer import BucketedOptimizer
from .config import MemoryConfig, OffloadSchedule, OffloadStateDType
from .optimizer_offload import offload_optimizer


class OptimizerOffload(BucketedOptimizer):
    """Keeps the states of an optimizer in host memory, and streams them through the device in each
    step.

        optimizer = OptimizerOffload(torch.optim.AdamW(model.parameters()), model)

    It is used like the optimizer itself. Parameters have the same bits as without it, except with
    bfloat16 states. The model may be plain, under DDP, or sharded by ``fully_shard``.

    Args:
        optimizer: AdamW or SGD of PyTorch, or another element-wise one, before its first step.
        model: has the parameters of the optimizer.
        bucket_mib: states that move at a time, in MiB.
        state_dtype: float32 or bfloat16, in which the states are kept.
        overlap: copy neighboring buckets during each update.
        seed: of stochastic rounding with bfloat16 states.
        rank: of the shards, so that ranks round differently; replicas need the same one.

    Raises:
        ConfigError: for an optimizer that has taken steps, or parameters on several devices.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        bucket_mib: int = 256,
        state_dtype: torch.dtype = torch.float32,
        overlap: bool = True,
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        if optimizer.state:
            raise ConfigError(
                "OptimizerOffload takes an optimizer before its first step; build it anew, then "
                "load its states into OptimizerOffload"
            )
        params = [
            param for group in optimizer.param_groups for param in group["params"]
        ]
        devices = {local_tensor(param).device for param in params}
        if len(devices) != 1:
            raise ConfigError(
                f"OptimizerOffload takes parameters on one device, not on {len(devices)}; move the "
                "model to one"
            )
        (device,) = devices
        names = {item.torch: item for item in OffloadStateDType}
        if state_dtype not in names:
            raise ConfigError(
                f"state_dtype={state_dtype} must be one of {', '.join(map(str, names))}"
            )
        schedule = OffloadSchedule.pipelined if overlap else OffloadSchedule.serial
        memory = MemoryConfig(
            optimizer_offload=True,
            offload_schedule=schedule,
            offload_bucket_mib=bucket_mib,
            offload_state_dtype=names[state_dtype],
        )
        units = [(model, params)]
        bucketed = offload_optimizer(
            optimizer,
            units,
            memory,
            device=Device(device.type, device.index or 0),
            model=model,
            schedule=schedule,
            seed=seed,
            rank=rank,
        )
        super().__init__(
            optimizer, units, bucketed.buckets, bucketed.executor, model=model
        )
