"""The trainer's steps around the contents of a model's units, traced once for all contents.

The trainer of a full trace builds the configured model, strategy and optimizer, but the forward of
each segment (embedding, block, head) is a stand-in that computes nothing (``stand_ins``).
``splice`` inserts the contents.

Sequences have ``TOKENS`` tokens, a prime: sizes divisible by it are proportional to the tokens of a
micro-batch. So a trace serves all batches and lengths.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware
from fsdptoys.memory import GradientCheckpointing
from fsdptoys.parallel import DDPConfig, gradient_norms
from fsdptoys.parallel.config import ReducingConfig
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.toy_ddp import ToyDDPConfig
from fsdptoys.plan.simulator.events import Trace
from fsdptoys.plan.trace.fake_device import registers_devices, replaced
from fsdptoys.plan.trace.op_recorder import OpRecorder
from fsdptoys.plan.trace.tracer import record, trainer_program

from .stand_ins import TOKENS, Layout, Segments


def trace_skeleton(
    config: Config, hardware: Hardware, attention: Any, layouts: Sequence[Layout]
) -> Trace:
    """Trace a configuration as ``reduced`` returns it, with a layout for each segment, in a process
    that traces."""

    def program(recorder: OpRecorder) -> None:
        segments = Segments(config, recorder, layouts)
        # One of the host's norms rather than hundreds
        with replaced((gradient_norms, "CPU_NORM_ELEMENTS", 2**62)):
            trainer_program(config, hardware, stand_ins=segments)(recorder)

    return record(program, attention=attention)


def reduced(config: Config, inner_units: bool) -> Config:
    """The configuration without settings that only the contents of units depend on."""
    config = copy.copy(config)
    memory = copy.copy(config.memory)
    train = copy.copy(config.train)
    train.batch_size = 1
    train.seq_len = TOKENS
    train.gc_every = 0
    train.callbacks = []  # own code, which a prediction does not call
    train.label_smoothing = train.z_loss_coef = 0.0
    # One reduction a step as without, of forwards that stand-ins replace
    if train.deterministic.covers_layouts:
        train.deterministic = Deterministic.false
        train.slices = 1
    if (
        memory.gradient_checkpointing is not GradientCheckpointing.none
        and not memory.activation_offload
    ):
        # Recomputation runs the hooks of units within a block.
        memory.gradient_checkpointing = GradientCheckpointing[
            ("none", "full")[inner_units]
        ]
    if memory.gradient_checkpointing is GradientCheckpointing.none:
        memory.checkpointing_every = 1
        memory.checkpointing_start_index = 0
    memory.chunk_loss = False
    memory.chunk_tokens = "auto"
    memory.checkpointing_save = ["mm"]
    if isinstance(config.parallel, ReducingConfig):
        config.parallel = dataclasses.replace(
            config.parallel, context=type(config.parallel).context
        )
    if type(config.parallel) is DDPConfig and not registers_devices():
        # PyTorch's reducer needs the device's own code; the toy has the same buckets.
        config.parallel = ToyDDPConfig(**vars(config.parallel))
    # Ranks that share sequences are among the shards
    config.mesh = dataclasses.replace(config.mesh, cp_size=1)
    config.memory = memory
    config.train = train
    return config
