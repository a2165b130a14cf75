"""Processes for fake devices: none can be installed after autograd or a trace has run."""

import multiprocessing
import multiprocessing.process
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fsdptoys.plan.trace import tracing_process
from fsdptoys.plan.trace.tracer import tracing_environment
from tests.harness import full_trace

FORK = multiprocessing.get_context("fork")
FORK_SERVER = multiprocessing.get_context("forkserver")
"""Forks a process that has imported things and done nothing, where this one has no zygote."""
FORK_SERVER.set_forkserver_preload(
    ["fsdptoys.config.compose", "tests.harness.full_trace"]
)
EXIT_SECONDS = 120.0


def _forget_server() -> None:
    forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]


# Ranks forked by later tests start servers of their own, and must not contact this one.
os.register_at_fork(after_in_child=_forget_server)


class Zygote:
    """A fork of this process, from before its first computation, that forks on request.

    A fork takes 0.05 CPU seconds, a new interpreter with torch 4.
    """

    def __init__(self) -> None:
        self._channel, other_end = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._process = FORK.Process(target=_serve, args=(other_end, self._channel))
        self._process.start()
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]  # ends with the channel
        other_end.close()

    def fork(
        self, function: Callable[..., None], *args: Any, descriptors: Sequence[int]
    ) -> int:
        """Call ``function(copies of the descriptors, *args)`` in a new process; return its
        number."""
        socket.send_fds(self._channel, [pickle.dumps((function, args))], descriptors)
        return int(self._channel.recv(64))

    def wait(self, pid: int) -> int:
        """Wait for a process, and return its exit status."""
        self._channel.send(pickle.dumps((pid, None)))
        return int(self._channel.recv(64))

    def close(self) -> None:
        """End the tracing processes and the zygote."""
        tracing_process._workers.cache_clear()  # closes the pipes of their requests
        self._channel.close()
        self._process.join(EXIT_SECONDS)


def _serve(channel: socket.socket, other_end: socket.socket) -> None:
    other_end.close()
    processes: dict[int, Any] = {}
    while True:
        request, descriptors, *_ = socket.recv_fds(channel, 2**20, 32)
        if not request:
            for process in processes.values():
                process.join()
            return
        subject, args = pickle.loads(request)
        if isinstance(subject, int):
            processes[subject].join()
            channel.send(str(processes[subject].exitcode).encode())
            continue
        process = FORK.Process(target=subject, args=(descriptors, *args))
        process.start()
        processes[process.pid] = process
        channel.send(str(process.pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


zygotes: list[Zygote] = []
"""The zygote of this process, if there is one."""


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process of its own; return its result, or raise its traceback as a
    RuntimeError."""
    receiver, sender = FORK.Pipe(duplex=False)
    measured = any(name.startswith("COVERAGE_PROCESS_") for name in os.environ)
    if zygotes:
        zygotes[-1].fork(
            _answer_to_descriptor,
            measured,
            function,
            args,
            descriptors=[sender.fileno()],
        )
    else:
        FORK_SERVER.Process(
            target=_answer, args=(sender, measured, function, args)
        ).start()
    sender.close()
    succeeded, result = receiver.recv()
    if not succeeded:
        raise RuntimeError(result)
    return result


def _answer_to_descriptor(descriptors: Sequence[int], *request: Any) -> None:
    _answer(Connection(os.dup(descriptors[0]), readable=False), *request)


def _answer(
    sender: Connection,
    measured: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    if not measured:
        sys.settrace(None)
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))


def run_tracer(command: Sequence[str]) -> str:
    """Do what ``full_trace.run_tracer`` does, without an interpreter."""
    in_fresh_process(full_trace.main, Path(command[-1]))
    return ""


class ForkedWorker:
    """What ``tracing_process`` uses of a process, without an interpreter."""

    exitcode: int

    def __init__(
        self,
        forks: bool,
        device_type: str,
        pipe: Connection,
        errors_path: str,
        _: object,
    ) -> None:
        self.pid = zygotes[-1].fork(
            _trace, device_type, errors_path, descriptors=[pipe.fileno()]
        )

    def join(self) -> None:
        """Wait for the end of the process."""
        self.exitcode = zygotes[-1].wait(self.pid)


def _trace(descriptors: Sequence[int], device_type: str, errors_path: str) -> None:
    os.environ.update(tracing_environment())
    if not any(name.startswith("COVERAGE_PROCESS_") for name in os.environ):
        sys.settrace(None)
    tracing_process.serve(
        device_type, Connection(os.dup(descriptors[0])), errors_path, ()
    )
