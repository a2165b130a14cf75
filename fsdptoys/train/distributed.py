"""Process group, device and deterministic kernels of this rank."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdptoys.config.schema import Config
from fsdptoys.device import KINDS, Device, available_device_type
from fsdptoys.errors import ConfigError, LostRanksError
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.precision import DType

from .heartbeat import lost_message
from .launch_env import check_interface, open_rank_store
from .object_collectives import use_json


@contextmanager
def process_group(config: Config) -> Iterator[None]:
    """Initialize the process group from torchrun's environment variables, unless one exists
    already.

    LostRanksError if not all ranks join in time, or the node of rank 0 does not answer; ConfigError
    if MASTER_PORT is taken, or gloo's network interface does not exist.
    """
    if dist.is_initialized():
        yield
        return
    device = device_of(config)
    check_interface()
    use_json()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    timeout = timedelta(seconds=config.launch.timeout_seconds)
    try:
        store = open_rank_store(world_size)
        if store is not None:
            store.set_timeout(timeout)
        dist.init_process_group(
            device.backend,
            store=store,
            rank=int(os.environ.get("RANK", 0)),
            world_size=world_size,
            timeout=timeout,
            device_id=device.bound_device,
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"MASTER_PORT={os.environ['MASTER_PORT']} is taken on this machine by another "
                "program; set another"
            ) from error
        # Unreachable hosts raise another error than missing ranks.
        unanswered = isinstance(error, dist.DistNetworkError) and "timed out" in str(
            error
        )
        if not unanswered and lost_message(error) is None:
            raise
        raise LostRanksError(
            f"not all {world_size} ranks joined the process group within "
            f"launch.timeout_seconds={config.launch.timeout_seconds:g} "
            f"[{str(error).splitlines()[0]}]"
        ) from error
    try:
        yield
    finally:
        # After an exception the other ranks may hang in a collective, for which destroying would
        # wait.
        if sys.exc_info()[0] is None:
            # gloo's threads need the GIL to free the tensors of the last collective. Destroying the
            # group (or ending the interpreter) before that deadlocks: seen with torch 2.13 as a
            # hang or "terminate called". A barrier gives them time, and holds no tensors itself.
            dist.barrier(device_ids=device.barrier_devices)
            dist.destroy_process_group()


@contextmanager
def deterministic_kernels(
    deterministic: Deterministic | bool, device_type: str
) -> Iterator[None]:
    """Make PyTorch use deterministic kernels within this context, if ``deterministic``.

    PyTorch then also fills uninitialized memory, which would take a fifth of a step of the many
    small matmuls of ``layout``, and is left out there.
    """
    if not deterministic:
        yield
        return
    options: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
    )
    filled = options.fill_uninitialized_memory
    # For processes not started by our launcher: cuBLAS reads its variable with the first handle,
    # HCCL with the first group. Without cuBLAS's variable PyTorch refuses deterministic matmuls.
    kind = KINDS.get(device_type)  # None for the planner's stand-in
    for name, value in (kind.deterministic_variables if kind else {}).items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    options.fill_uninitialized_memory = (
        filled and not Deterministic(deterministic).covers_layouts
    )
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        options.fill_uninitialized_memory = filled


def device_of(config: Config) -> Device:
    """The device of this rank; ConfigError if it does not exist, or lacks bfloat16 where the model
    computes in it."""
    chosen = config.launch.device.value
    device_type = available_device_type() if chosen == "auto" else chosen
    device = Device(device_type, int(os.environ.get("LOCAL_RANK", 0)))
    if config.parallel.param_dtype is DType.bfloat16 and not device.supports_bfloat16():
        raise ConfigError(
            f"parallel.param_dtype=bfloat16 cannot run on {device.name}, which has no bfloat16; "
            "set parallel.param_dtype=float32"
        )
    return device
