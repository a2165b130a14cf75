"""Hardware with round numbers, for timelines by hand, and traces of small models, each made in a
process of its own."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import AttentionKind, Hardware, Quantity
from fsdptoys.metrics.prediction import Category
from fsdptoys.plan.simulator.events import Alloc, Free, Mark, Trace
from fsdptoys.plan.trace.op_costs import matmul_workspace_bytes
from fsdptoys.plan.trace.tracer import trainer_program
from tests.harness.full_trace import trace_here
from tests.harness.plan_processes import in_fresh_process

ATTENTION = {
    "cuda": AttentionKind.flash,
    "npu": AttentionKind.npu,
    "cpu": AttentionKind.cpu,
}


def imagined_hardware(device_type: str = "cuda", **values: float) -> Hardware:
    """One FLOP/s, one byte a second everywhere, no latencies and no host time; two devices in a
    machine.

    Args:
        device_type: ``cuda``, ``npu`` or ``cpu``.
        values: fields that differ.
    """
    numbers = {
        field.name: 1.0
        for field in dataclasses.fields(Hardware)
        if field.type is Quantity
    }
    numbers |= {name: 0.0 for name in numbers if name.endswith("_seconds")}
    numbers |= {"devices_per_node": 2.0, "cpu_adam_parameters_per_second": 1.0} | values
    return Hardware(
        name="imagined",
        title="Imagined",
        device_type=device_type,
        attention=ATTENTION[device_type],
        matches=(),
        peak_flops={
            "bfloat16": Quantity(1.0, "imagined"),
            "float32": Quantity(0.5, "imagined"),
        },
        **{name: Quantity(float(value), "imagined") for name, value in numbers.items()},  # type: ignore[arg-type]
    )


def only_attention_takes_time(**values: float) -> Hardware:
    """Hardware on which all layers take equally long, and all else no time."""
    rates = {
        field.name: math.inf
        for field in dataclasses.fields(Hardware)
        if field.name.endswith("_bandwidth")
    }
    return imagined_hardware(**rates | {"matmul_efficiency": math.inf} | values)


def configured(overrides: Sequence[str], world_size: int, device_type: str) -> Config:
    """A validated configuration."""
    config = compose_config(["experiment=null", *overrides])
    config.validate(world_size, device_type)
    return config


def traced(
    overrides: Sequence[str], world_size: int = 8, device_type: str = "cuda"
) -> Trace:
    """Two steps of the project's trainer; made once."""
    return _traced(tuple(sorted(overrides)), world_size, device_type)


@functools.cache
def _traced(overrides: tuple[str, ...], world_size: int, device_type: str) -> Trace:
    trace: Trace = in_fresh_process(
        trace_steps,
        configured(overrides, world_size, device_type),
        world_size,
        device_type,
    )
    return trace


def traced_on(config: Config, hardware: Hardware, world_size: int) -> Trace:
    """A trace as of ``trace``, without its child interpreter."""
    trace: Trace = in_fresh_process(_trace_on, config, hardware, world_size)
    return trace


def _trace_on(config: Config, hardware: Hardware, world_size: int) -> Trace:
    workspace_bytes = matmul_workspace_bytes(hardware)
    program = trainer_program(config, hardware)
    return trace_here(
        program,
        attention=hardware.attention,
        world_size=world_size,
        workspace_bytes=workspace_bytes,
    )


def trace_steps(config: Config, world_size: int, device_type: str) -> Trace:
    """Trace two steps of the project's trainer in this process, which cannot be used afterwards."""
    hardware = imagined_hardware(device_type)  # its numbers do not matter
    return trace_here(
        trainer_program(config, hardware),
        attention=hardware.attention,
        world_size=world_size,
    )


def live_bytes(trace: Trace, step: int, phase: str) -> dict[Category, int]:
    """Allocated bytes of each category at the start of a phase."""
    blocks: dict[int, Alloc] = {}
    for event in trace.events:
        if isinstance(event, Alloc):
            blocks[event.block] = event
        elif isinstance(event, Free):
            del blocks[event.block]
        elif event == Mark(step, phase):
            break
    live = dict.fromkeys(Category, 0)
    for block, event in blocks.items():
        live[trace.categories.get(block, event.category)] += event.bytes
    return live


def of_step(trace: Trace, kind: type, step: int = 2) -> list[Any]:
    """The events of a kind in a step."""
    chosen = []
    now = 0
    for event in trace.events:
        now = event.step if isinstance(event, Mark) else now
        if isinstance(event, kind) and now == step:
            chosen.append(event)
    return chosen


newer_torch = pytest.mark.skipif(
    tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 9),
    reason=(
        "older FSDP2 averages over two axes by NCCL alone, and older fused AdamW knows no "
        "planned device"
    ),
)
