"""``python -m MODULE WORDS`` as a fork of this process, which has imported what takes a new interpreter seconds.

The fork is a process of its own with the words, variables, session and signals that a new interpreter would get, and
ends as one; what it has beyond those are modules that are imported already. The parent must not have computed with
several threads: OpenMP's do not survive a fork (https://github.com/pytorch/pytorch/issues/17199).
"""

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

MOST_FILES = 4096
"""No parent has more of them open."""


class ForkedProcess:
    """A module run in a fork, as far as it can be treated like a ``subprocess.Popen``.

    Args:
        module: what ``python -m`` would be given.
        words: its command line.
        environment: all of it.
    """

    def __init__(self, module: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        def body() -> None:
            os.setsid()
            os.write(started, b"x")
            os.closerange(3, MOST_FILES)
            become_interpreter(environment)
            # The current directory may hold anything under the name of what is imported later.
            sys.path[:] = [folder for folder in sys.path if folder not in ("", _current_folder())]
            run_module(module, words)

        ready, started = os.pipe()
        self._process = multiprocessing.get_context("fork").Process(target=body)
        self._process.start()
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]  # waited for here alone
        os.close(started)
        os.read(ready, 1)  # a signal to its group finds one
        os.close(ready)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, minus the signal that killed it, or None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The same when it has ended.

        Args:
            timeout: seconds.

        Raises:
            subprocess.TimeoutExpired: if it has not ended by then.
        """
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status


def _current_folder() -> str:
    """The current folder; empty where it has been deleted since the parent started."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def become_interpreter(environment: Mapping[str, str]) -> None:
    """Have in this fork what a new interpreter would have: variables, signals, streams, no logs."""
    # What the parent had stays for good: a file that is collected here would close its number, which is another's now.
    gc.freeze()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, signal.Handlers):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    faulthandler.disable()
    logging.getLogger().handlers.clear()
    reopen_streams()
    os.environ.clear()
    os.environ.update(environment)


def run_module(name: str, words: Sequence[str]) -> None:
    """``python -m name words``."""
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.argv = [name, *words]
    sys.modules.pop(f"{name}.__main__", None)  # runpy warns of a second copy
    runpy.run_module(name, run_name="__main__", alter_sys=True)
