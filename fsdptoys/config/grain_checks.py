"""Check the settings of ``train.deterministic=layout`` before the launch."""

import math
from typing import TYPE_CHECKING

from fsdptoys.device import float64_collectives
from fsdptoys.errors import ConfigError, UnusedKeyError
from fsdptoys.parallel.float8 import Float8

if TYPE_CHECKING:
    from .schema import Config

DEFAULT_GRAINS = 8


def check_grains(config: "Config", device_type: str) -> None:
    """Refuse settings under which sums by grains would depend on the layout, or cannot run.

    Raises:
        ConfigError: naming key, value and fix.
    """
    train, parallel, memory = config.train, config.parallel, config.memory
    if not train.deterministic.covers_layouts:
        if train.grains != DEFAULT_GRAINS:
            raise UnusedKeyError(
                f"train.grains={train.grains} does nothing as set; set train.deterministic=layout or leave it out"
            )
        return

    def refuse(setting: str, reason: str, fix: str) -> None:
        raise ConfigError(f"{setting} {reason}, which train.deterministic=layout rules out; set {fix}")

    if not parallel.sums_grains:
        refuse(f"parallel={parallel.name}", "does not sum gradients in float64 once a step", "parallel=fsdp2")
    if train.seq_len % train.grains:
        fitting = math.gcd(train.seq_len, train.grains)
        raise ConfigError(
            f"train.grains={train.grains} must divide train.seq_len={train.seq_len}; set train.grains={fitting}"
        )
    if not float64_collectives(device_type):
        refuse(f"launch.device={device_type}", "has no collectives of float64", "train.deterministic=false")
    if train.compile:
        refuse("train.compile=true", "rounds by the sizes that it compiles for", "train.compile=false")
    if train.float8 is not Float8.none:
        refuse(f"train.float8={train.float8.value}", "scales by the largest number of a batch", "train.float8=none")
    if parallel.param_dtype.needs_loss_scale:
        dtype = parallel.param_dtype.value
        refuse(
            f"parallel.param_dtype={dtype}",
            "scales the loss by the number of ranks and micro-batches",
            "parallel.param_dtype=bfloat16",
        )
    for operation, name in config.kernels.names().items():
        if name in ("compiled", "npu", "flex"):
            refuse(f"kernels.{operation}={name}", "rounds by the sizes of its inputs", f"kernels.{operation}=torch")
    if memory.optimizer_in_backward and not parallel.shards_parameters:
        refuse(
            "memory.optimizer_in_backward=true",
            f"needs gradients in the backward, and parallel={parallel.name} adds float64 ones up until its end",
            "parallel=fsdp2 or memory.optimizer_in_backward=false",
        )
