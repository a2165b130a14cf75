"""Fresh processes for fake devices: none can be installed after autograd or a trace has run."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

FRESH = multiprocessing.get_context("forkserver")
"""Forks a process that has imported things and done nothing."""
FRESH.set_forkserver_preload(["fsdptoys.config.compose", "scripts.validate_plan"])


def _forget_server() -> None:
    forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]


# Ranks forked by later tests start servers of their own, and must not contact this one.
os.register_at_fork(after_in_child=_forget_server)


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process of its own; return its result, or raise its traceback as a RuntimeError."""
    receiver, sender = FRESH.Pipe(duplex=False)
    measured = any(name.startswith("COVERAGE_PROCESS_") for name in os.environ)
    process = FRESH.Process(target=_answer, args=(sender, measured, function, args))
    process.start()
    sender.close()
    succeeded, result = receiver.recv()
    process.join()
    if not succeeded:
        raise RuntimeError(result)
    return result


def _answer(sender: Connection, measured: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not measured:
        sys.settrace(None)
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
