"""Replays of traces of the full trainer, for models that are not put together from traces of parts.

The blocks of such a model are not this project's, so nothing stands in for a part of it: each
number of layers and micro-batches is traced with all contents, in seconds rather than a tenth of
one.
"""

import copy
import dataclasses
from collections.abc import Sequence

import torch

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware
from fsdptoys.errors import ConfigError
from fsdptoys.parallel import SingleConfig
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.events import Trace
from fsdptoys.plan.simulator.replay import Replay, replay
from fsdptoys.plan.trace import tracing_process
from fsdptoys.plan.trace.op_costs import attention_of, matmul_workspace_bytes
from fsdptoys.plan.trace.tracer import DEVICE_TYPES, record, trainer_program

from .pipeline import Part


def full_replays(
    config: Config, hardware: Hardware, world_size: int, parts: Sequence[Part]
) -> list[Replay]:
    """Replay two steps of each part, traced with all its contents.

    Raises:
        ConfigError: if the model cannot be traced.
    """
    requests = []
    for part in parts:
        deep = copy.copy(config)
        deep.model = config.model.with_layers(part.n_layers)
        deep.train = dataclasses.replace(config.train, grad_accum=part.micro_batches)
        if isinstance(config.parallel, SingleConfig):
            # In turn, as micro-batches
            deep.parallel = dataclasses.replace(config.parallel, simulated_ranks=1)
        requests.append((0, trace_run, (deep, hardware)))
    device_type = DEVICE_TYPES[attention_of(config, hardware)]
    try:
        traces = tracing_process.traced(device_type, world_size, requests)
    except RuntimeError as failure:
        name = config.model.name or config.model.family
        reason = str(failure).strip().rpartition("\n")[2]
        raise ConfigError(
            f"model={name} cannot be traced without values ({reason}); train it for a few steps, "
            "which measures its memory and time"
        ) from failure
    return [
        replay(
            trace,
            hardware,
            build_allocator(config.plan.allocator, device_type=hardware.device_type),
        )
        for trace in traces
    ]


def trace_run(config: Config, hardware: Hardware) -> Trace:
    """Trace two steps of a run, in a process that traces."""
    with torch.device("meta"):
        config.model.build()  # imports packages with operators that a trace replaces
    return record(
        trainer_program(config, hardware),
        attention=attention_of(config, hardware),
        workspace_bytes=matmul_workspace_bytes(hardware),
    )
