"""Processes that trace skeletons one after the other, since a process that traces cannot be used otherwise.

Each lives as long as this one and keeps PyTorch's caches: a skeleton takes 0.2 s, a process's start 4 s. The two
depths of an extrapolation are traced concurrently. ``python -m fsdptoys.plan.estimate.tracing_process`` answers pickled
requests from stdin on stdout.
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
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from typing import IO, Any

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import AttentionKind, Hardware
from fsdptoys.errors import ConfigError
from fsdptoys.plan.simulator.events import Trace
from fsdptoys.plan.trace import fake_device
from fsdptoys.plan.trace.tracer import DEVICE_TYPES, tracing_environment

from .skeleton import Layout, trace_skeleton

COLLECTED = 20  # Requests from one garbage collection to the next

Request = tuple[Config, Hardware, AttentionKind, int, list[Layout]]


def traced(requests: Sequence[Request]) -> list[Trace]:
    """Trace skeletons concurrently.

    Args:
        requests: configuration, hardware, kind of attention, number of ranks, layouts of the segments.

    Raises:
        ConfigError: of the run itself.
        RuntimeError: for any other failure, with the process's traceback.
    """
    device_type = DEVICE_TYPES[requests[0][2]]
    processes = [_process(device_type, place, os.getpid()) for place in range(len(requests))]
    with ThreadPool(len(requests)) as pool:
        answers = pool.starmap(_ask, zip(processes, requests, strict=True))
    for answer in answers:
        if not isinstance(answer, Trace):
            kind, message = answer
            raise kind(message)
    return answers


@functools.cache
def _process(device_type: str, place: int, owner: int) -> "tuple[subprocess.Popen[bytes], IO[bytes]]":
    command = [sys.executable, "-m", "fsdptoys.plan.estimate.tracing_process", device_type]
    pipe, errors = subprocess.PIPE, tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=tracing_environment())
    atexit.register(process.kill)
    return process, errors


def _ask(traces: "tuple[subprocess.Popen[bytes], IO[bytes]]", request: Request) -> Any:
    process, errors = traces
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError, EOFError):
        pickle.dump(request, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        return pickle.load(process.stdout)
    _process.cache_clear()
    if process.wait() == -signal.SIGKILL:
        return ConfigError, "the tracing process was killed, most likely for lack of host memory; free memory"
    errors.seek(0)
    return RuntimeError, f"the tracing process ended with status {process.returncode}:\n{errors.read().decode()}"


def main(device_type: str) -> None:
    """Answer requests until stdin is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    gc.disable()
    count = world_size = 0
    while True:
        try:
            config, hardware, attention, ranks, layouts = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any
        try:
            if ranks != world_size:
                fake_device.install(device_type, ranks)
                world_size = ranks
            answer = trace_skeleton(config, hardware, attention, layouts)
        except ConfigError as mistake:
            answer = ConfigError, str(mistake)
        except Exception:
            answer = RuntimeError, f"the trainer could not be traced:\n{traceback.format_exc()}"
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()
        count += 1
        if count == 1:
            gc.freeze()
        elif count % COLLECTED == 0:
            gc.collect()


if __name__ == "__main__":
    main(sys.argv[1])
