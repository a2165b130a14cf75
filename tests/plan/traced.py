"""Traces of small models, each made in a fork of this process, since a process that has traced is spent."""

import dataclasses
import functools
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from fsdptoys.compose import compose_config
from fsdptoys.config import Config
from fsdptoys.plan.tracing import trace_here, trainer_program
from fsdptoys.simulator.events import Alloc, Category, Free, Mark, Trace
from fsdptoys.simulator.hardware import AttentionKind, Hardware, Quantity

ATTENTION = {"cuda": AttentionKind.flash, "npu": AttentionKind.npu, "cpu": AttentionKind.cpu}


def hardware(device_type: str) -> Hardware:
    """Hardware of which nothing but its kind matters."""
    numbers: dict[str, Any] = {field.name: Quantity(1.0, "none") for field in dataclasses.fields(Hardware)}
    names = {"name": "any", "title": "any", "matches": ("any",), "peak_flops": {}}
    return Hardware(**numbers | names | {"device_type": device_type, "attention": ATTENTION[device_type]})


def configured(words: Sequence[str], world_size: int, device_type: str) -> Config:
    """A validated configuration."""
    config = compose_config(["experiment=null", *words])
    config.validate(world_size, device_type)
    return config


def in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a fork of this process; its exception's traceback as a RuntimeError."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run(sender: Connection) -> None:
        try:
            sender.send((True, function(*args)))
        except BaseException:
            sender.send((False, traceback.format_exc()))

    process = context.Process(target=run, args=(sender,))
    process.start()
    sender.close()
    succeeded, result = receiver.recv()
    process.join()
    if not succeeded:
        raise RuntimeError(result)
    return result


def traced(words: Sequence[str], world_size: int = 8, device_type: str = "cuda") -> Trace:
    """Two steps of the project's trainer; made once."""
    return _traced(tuple(sorted(words)), world_size, device_type)


@functools.cache
def _traced(words: tuple[str, ...], world_size: int, device_type: str) -> Trace:
    config = configured(words, world_size, device_type)
    program = trainer_program(config, hardware(device_type))
    trace: Trace = in_fork(lambda: trace_here(program, attention=ATTENTION[device_type], world_size=world_size))
    return trace


def live_bytes(trace: Trace, step: int, phase: str) -> dict[Category, int]:
    """Bytes of each category that are allocated when a phase begins."""
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
