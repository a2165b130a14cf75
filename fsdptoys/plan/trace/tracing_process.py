"""Processes that trace one request after the other, since a process that traces cannot be used
otherwise.

They live as long as this one and keep PyTorch's caches: a skeleton takes 0.3 s. They are forks of
this process. Where a fork could not trace they are new interpreters, which import everything again
in 3 s.
"""

import functools
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import torch

from fsdptoys.device import available_device_type
from fsdptoys.errors import ConfigError
from fsdptoys.imports import load_imports
from fsdptoys.plan.simulator.events import Trace

from . import fake_device
from .fake_device import replaced
from .tracer import tracing_environment

WORKERS = 2  # The two depths of an extrapolation are traced concurrently
COLLECTED = 20  # Requests from one garbage collection to the next

# A rank, a function of a module and its arguments
Request = tuple[int, Callable[..., Trace], tuple[Any, ...]]


@dataclass
class Worker:
    """A process that traces."""

    process: BaseProcess
    pipe: Connection
    errors: IO[bytes]  # File with what it has printed


def traced(
    device_type: str, world_size: int, requests: Sequence[Request]
) -> list[Trace]:
    """Trace requests in a world of fake devices, ``WORKERS`` at a time.

    Raises:
        ConfigError: of the run itself.
        RuntimeError: for any other failure, with the process's traceback.
    """
    answers: list[Any] = []
    for start in range(0, len(requests), WORKERS):
        batch = requests[start : start + WORKERS]
        workers = start_tracing(device_type)[: len(batch)]
        for worker, request in zip(workers, batch, strict=True):
            with suppress(OSError):  # of a lost worker, which does not answer
                worker.pipe.send((world_size, *request))
        answers += map(_answer_of, workers)
    for answer in answers:
        if not isinstance(answer, Trace):
            kind, message = answer
            raise kind(message)
    return answers


def start_tracing(device_type: str) -> list[Worker]:
    """Start the processes that trace for a type of device, before this one has used autograd;
    once."""
    return _workers(device_type, os.getpid())


@functools.cache
def _workers(device_type: str, owner: int) -> list[Worker]:
    forks = can_fork()
    workers: list[Worker] = []
    for _ in range(WORKERS):
        own_end, process_end = multiprocessing.Pipe()
        errors = tempfile.NamedTemporaryFile()  # noqa: SIM115  # lives as long as the process
        # A fork closes our ends, so that it ends with this process.
        inherited = [own_end, *(worker.pipe for worker in workers)] if forks else []
        process = start_worker(forks, device_type, process_end, errors.name, inherited)
        process_end.close()
        workers.append(Worker(process, own_end, errors))
    return workers


def start_worker(
    forks: bool,
    device_type: str,
    pipe: Connection,
    errors_path: str,
    inherited: list[Connection],
) -> BaseProcess:
    """Start a process that answers: a fork, or a new interpreter."""
    context: ForkContext | SpawnContext = multiprocessing.get_context("spawn")
    if forks:
        context = multiprocessing.get_context("fork")
    arguments = (device_type, pipe, errors_path, inherited)
    process = context.Process(target=serve, args=arguments, daemon=True)
    # A new interpreter would import the main module by this name.
    unnamed = (sys.modules["__main__"], "__spec__", SimpleNamespace(name="__main__"))
    with replaced(unnamed), mock.patch.dict(os.environ, tracing_environment()):
        process.start()
    return process


def can_fork() -> bool:
    """Whether a fork of this process can trace: no driver, thread or engine of autograd survives
    one, and torch_npu would take the place of the fake device.

    Autograd starts its engine's threads, one for each type of device that is registered then, in
    the first backward. The number of nodes that this thread has made is private API of PyTorch,
    tried with torch 2.13.
    """
    is_alone = (
        sys.platform == "linux"
        and threading.active_count() == 1
        and available_device_type() == "cpu"
        and "torch_npu" not in sys.modules
    )
    nodes = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return is_alone and nodes is not None and nodes() == 0


def _answer_of(worker: Worker) -> Any:
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):  # also in the middle of an answer
        _workers.cache_clear()
    worker.process.join()
    status = worker.process.exitcode
    if status == -signal.SIGKILL:
        raise ConfigError(
            "the tracing process was killed, most likely for lack of host memory; free memory"
        )
    printed = worker.errors.read().decode()
    raise RuntimeError(f"the tracing process ended with status {status}:\n{printed}")


def serve(
    device_type: str,
    pipe: Connection,
    errors_path: str,
    inherited: Sequence[Connection],
) -> None:
    """Answer requests until they end."""
    # The parent ends it by this signal at its own end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for connection in inherited:
        connection.close()
    descriptor = os.open(errors_path, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    load_imports()  # before requests with classes of the user's code are unpickled
    torch.set_num_threads(1)
    gc.disable()
    gc.freeze()
    count = 0
    installed = (0, 0)
    while True:
        try:
            ranks, rank, function, arguments = pipe.recv()
        except EOFError:
            return
        answer: Any
        try:
            if (ranks, rank) != installed:
                fake_device.install(device_type, ranks, rank)
                installed = ranks, rank
            answer = function(*arguments)
        except ConfigError as mistake:
            answer = ConfigError, str(mistake)
        except Exception:
            answer = (
                RuntimeError,
                f"the trainer could not be traced:\n{traceback.format_exc()}",
            )
        pipe.send(answer)
        count += 1
        if count == 1:
            gc.freeze()
        elif count % COLLECTED == 0:
            gc.collect()
