"""Processes that trace one request after the other, since a process that traces cannot be used
otherwise.

They live as long as this one and keep PyTorch's caches: a skeleton takes 0.3 s. One process forks
the workers, and ends with the first of them that ends. It is a fork of this process. Where a fork
could not trace it is a new interpreter, which imports everything again in 3 s: ``python -m
fsdptoys.plan.trace.tracing_process DEVICE_TYPE READ WRITE ...`` reads pickled requests and writes
answers, on a pair of descriptors for each worker.
"""

import atexit
import functools
import gc
import multiprocessing
import multiprocessing.process
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import IO, Any, Protocol

import torch

from fsdptoys.device import available_device_type
from fsdptoys.errors import ConfigError
from fsdptoys.plan.simulator.events import Trace

from . import fake_device
from .tracer import tracing_environment

WORKERS = 2  # The two depths of an extrapolation are traced concurrently
COLLECTED = 20  # Requests from one garbage collection to the next

# A rank, a function of a module and its arguments
Request = tuple[int, Callable[..., Trace], tuple[Any, ...]]


@dataclass
class _Worker:
    requests: IO[bytes]
    answers: IO[bytes]


class _Parent(Protocol):
    """The process that forks the workers."""

    pid: int

    def wait(self) -> int:
        """Wait for its end; return its exit status, or the negative number of the signal that
        killed it."""

    def kill(self) -> None:
        """Kill it."""


@dataclass
class _Process:
    parent: "_Parent"
    errors: IO[bytes]
    workers: list[_Worker]


def traced(device_type: str, world_size: int, requests: Sequence[Request]) -> list[Trace]:
    """Trace requests in a world of fake devices, ``WORKERS`` at a time.

    Raises:
        ConfigError: of the run itself.
        RuntimeError: for any other failure, with the process's traceback.
    """
    if not requests:
        return []
    process = start_tracing(device_type)
    answers: list[Any] = []
    with ThreadPool(WORKERS) as pool:
        for start in range(0, len(requests), WORKERS):
            together = zip(process.workers, requests[start : start + WORKERS], strict=False)
            answers += pool.starmap(
                _ask, [(worker, (world_size, *request)) for worker, request in together]
            )
    if None in answers:
        answers = [_loss(process)]
    for answer in answers:
        if not isinstance(answer, Trace):
            kind, message = answer
            raise kind(message)
    return answers


def start_tracing(device_type: str) -> _Process:
    """Start the processes that trace for a type of device, before this one has used autograd;
    once."""
    return _process(device_type, os.getpid())


@functools.cache
def _process(device_type: str, owner: int) -> _Process:
    ours: list[_Worker] = []
    theirs: list[int] = []
    for _ in range(WORKERS):
        (read, requests), (answers, write) = os.pipe(), os.pipe()
        ours.append(_Worker(os.fdopen(requests, "wb"), os.fdopen(answers, "rb")))
        theirs += [read, write]
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
    parent: _Parent
    if can_fork():
        parent = _Fork(device_type, errors.fileno(), theirs, ours)
    else:
        command = [
            sys.executable,
            "-m",
            "fsdptoys.plan.trace.tracing_process",
            device_type,
            *map(str, theirs),
        ]
        parent = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=tracing_environment(),
            pass_fds=theirs,
        )
    atexit.register(parent.kill)
    for descriptor in theirs:
        os.close(descriptor)
    return _Process(parent, errors, ours)


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


class _Fork:
    """A fork of this process that forks the workers."""

    def __init__(
        self, device_type: str, errors: int, theirs: list[int], ours: list[_Worker]
    ) -> None:
        def body() -> None:
            for worker in ours:
                worker.requests.close()
                worker.answers.close()
            for stream in (1, 2):
                os.dup2(errors, stream)
            torch.set_num_threads(1)
            main(device_type, theirs)

        self._process = multiprocessing.get_context("fork").Process(target=body)
        self._process.start()
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]  # waited for only here
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.kill = self._process.kill

    def wait(self) -> int:
        """Wait for its end, and return its exit status."""
        self._process.join()
        status = self._process.exitcode
        assert status is not None
        return status


def _ask(worker: _Worker, request: Any) -> Any:
    """The answer, or None if the worker is lost."""
    with suppress(BrokenPipeError, EOFError):
        pickle.dump(request, worker.requests, protocol=pickle.HIGHEST_PROTOCOL)
        worker.requests.flush()
        return pickle.load(worker.answers)
    return None


def _loss(process: _Process) -> tuple[type[Exception], str]:
    _process.cache_clear()
    status = process.parent.wait()
    if status == -signal.SIGKILL:
        return (
            ConfigError,
            "the tracing process was killed, most likely for lack of host memory; free memory",
        )
    process.errors.seek(0)
    message = f"the tracing process ended with status {status}:\n{process.errors.read().decode()}"
    return RuntimeError, message


def main(device_type: str, descriptors: Sequence[int]) -> None:
    """Fork the workers, and end as the first of them does."""
    workers = []
    for place in range(0, len(descriptors), 2):
        worker = os.fork()
        if worker == 0:
            requests, answers = descriptors[place : place + 2]
            for other in set(descriptors) - {requests, answers}:
                os.close(other)
            answer(device_type, os.fdopen(requests, "rb"), os.fdopen(answers, "wb"))
            return
        workers.append(worker)
    for descriptor in descriptors:
        os.close(descriptor)
    ended, status = os.wait()
    for other in set(workers) - {ended}:
        os.kill(other, signal.SIGKILL)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


def answer(device_type: str, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until they end."""
    gc.disable()
    gc.freeze()
    count, place = 0, (0, 0)
    while True:
        try:
            ranks, rank, function, arguments = pickle.load(requests)
        except EOFError:
            return
        made: Any
        try:
            if (ranks, rank) != place:
                fake_device.install(device_type, ranks, rank)
                place = ranks, rank
            made = function(*arguments)
        except ConfigError as mistake:
            made = ConfigError, str(mistake)
        except Exception:
            made = RuntimeError, f"the trainer could not be traced:\n{traceback.format_exc()}"
        pickle.dump(made, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()
        count += 1
        if count == 1:
            gc.freeze()
        elif count % COLLECTED == 0:
            gc.collect()


if __name__ == "__main__":
    main(sys.argv[1], list(map(int, sys.argv[2:])))
