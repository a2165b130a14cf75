"""Processes that trace one request after the other, since a process that traces cannot be used otherwise.

They live as long as this one and keep PyTorch's caches: a skeleton takes 0.3 s, a process's start 4 s. So one process
imports everything, forks the workers, and ends with the first of them that ends. ``python -m
fsdptoys.plan.trace.tracing_process DEVICE_TYPE READ WRITE ...`` reads pickled requests and writes answers, on a pair of
descriptors for each worker.
"""

import atexit
import functools
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import IO, Any

from fsdptoys.errors import ConfigError
from fsdptoys.plan.simulator.events import Trace

from . import fake_device
from .tracer import tracing_environment

WORKERS = 2  # The two depths of an extrapolation are traced concurrently
COLLECTED = 20  # Requests from one garbage collection to the next

Request = tuple[int, Callable[..., Trace], tuple[Any, ...]]  # A rank, a function of a module and its arguments


@dataclass
class _Worker:
    requests: IO[bytes]
    answers: IO[bytes]


@dataclass
class _Process:
    parent: "subprocess.Popen[bytes]"
    errors: IO[bytes]
    workers: list[_Worker]


def traced(device_type: str, world_size: int, requests: Sequence[Request]) -> list[Trace]:
    """Trace requests in a world of fake devices, ``WORKERS`` at a time.

    Raises:
        ConfigError: of the run itself.
        RuntimeError: for any other failure, with the process's traceback.
    """
    process = _process(device_type, os.getpid())
    answers: list[Any] = []
    with ThreadPool(WORKERS) as pool:
        for start in range(0, len(requests), WORKERS):
            together = zip(process.workers, requests[start : start + WORKERS], strict=False)
            answers += pool.starmap(_ask, [(worker, (world_size, *request)) for worker, request in together])
    if None in answers:
        answers = [_loss(process)]
    for answer in answers:
        if not isinstance(answer, Trace):
            kind, message = answer
            raise kind(message)
    return answers


@functools.cache
def _process(device_type: str, owner: int) -> _Process:
    ours, theirs = [], []
    for _ in range(WORKERS):
        (read, requests), (answers, write) = os.pipe(), os.pipe()
        ours.append(_Worker(os.fdopen(requests, "wb"), os.fdopen(answers, "rb")))
        theirs += [read, write]
    command = [sys.executable, "-m", "fsdptoys.plan.trace.tracing_process", device_type, *map(str, theirs)]
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
    parent = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=tracing_environment(), pass_fds=theirs
    )
    for descriptor in theirs:
        os.close(descriptor)
    atexit.register(parent.kill)
    return _Process(parent, errors, ours)


def _ask(worker: _Worker, request: Any) -> Any:
    """The answer, or None if the worker is lost."""
    with suppress(BrokenPipeError, EOFError):
        pickle.dump(request, worker.requests, protocol=pickle.HIGHEST_PROTOCOL)
        worker.requests.flush()
        return pickle.load(worker.answers)
    return None


def _loss(process: _Process) -> tuple[type[Exception], str]:
    _process.cache_clear()
    if process.parent.wait() == -signal.SIGKILL:
        return ConfigError, "the tracing process was killed, most likely for lack of host memory; free memory"
    process.errors.seek(0)
    message = f"the tracing process ended with status {process.parent.returncode}:\n{process.errors.read().decode()}"
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
