"""``python -m MODULE ARGV`` as a fork of this process, which saves the seconds of importing torch
again.

The fork gets the arguments, variables, session and signals of a new interpreter, plus the modules
already imported. The parent must not have computed with several threads: OpenMP's do not survive a
fork (https://github.com/pytorch/pytorch/issues/17199).
"""

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from fsdptoys.utils.console_stream import reopen_streams

MOST_FILES = 4096  # upper bound of the parent's open file descriptors


class ForkedProcess:
    """A module run in a fork, with the part of ``subprocess.Popen``'s interface that torch's agent
    uses."""

    def __init__(
        self, module: str, argv: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        def body() -> None:
            os.setsid()
            os.write(started, b"x")
            os.closerange(3, MOST_FILES)
            become_interpreter(environment)
            # The current directory may hold files that shadow modules imported later.
            shadowing = {""}
            # deleted since the parent started
            with contextlib.suppress(FileNotFoundError):
                shadowing.add(os.getcwd())
            sys.path[:] = [folder for folder in sys.path if folder not in shadowing]
            run_module(module, argv)

        ready, started = os.pipe()
        self._process = multiprocessing.get_context("fork").Process(target=body)
        self._process.start()
        # Only ``wait`` may wait for it.
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        os.close(started)
        os.read(ready, 1)  # its process group exists from here on
        os.close(ready)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, the negative number of the signal that killed it, or None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Return ``returncode``."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait up to ``timeout`` seconds for the process to end, or raise TimeoutExpired; return
        ``returncode``."""
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status


def become_interpreter(environment: Mapping[str, str]) -> None:
    """Reset variables, signals, streams and log handlers to those of a new interpreter."""
    # Never collect the parent's objects: a collected file would close its descriptor, which is
    # another file's now.
    gc.freeze()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, signal.Handlers):
            signal.signal(
                number,
                signal.default_int_handler
                if number == signal.SIGINT
                else signal.SIG_DFL,
            )
    faulthandler.disable()
    logging.getLogger().handlers.clear()
    reopen_streams()
    os.environ.clear()
    os.environ.update(environment)


def run_module(name: str, argv: Sequence[str]) -> None:
    """Run a module as ``python -m name argv`` does."""
    sys.path[:0] = [
        folder
        for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if folder
    ]
    sys.argv = [name, *argv]
    sys.modules.pop(f"{name}.__main__", None)  # runpy warns of a second copy
    runpy.run_module(name, run_name="__main__", alter_sys=True)
