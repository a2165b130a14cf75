"""``python -m MODULE WORDS`` as forks of this process, which has imported what takes a new interpreter seconds.

For tests whose claim is what processes do, and not that an interpreter starts: each is a process of its own with the
words, variables, streams, session and signals that a new interpreter would get, and ends as one. What it has beyond
those are modules that are imported already. Other commands are started as ever.
"""

import faulthandler
import inspect
import logging
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

MOST_FILES = 4096
"""No test has more of them open."""

PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_parameters = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]


class WarmPopen(subprocess.Popen):
    """``subprocess.Popen`` that forks where it would start this very interpreter for a module."""

    def _execute_child(self, *given: Any) -> None:
        options = dict(zip(_parameters, given, strict=True))
        words = [] if isinstance(options["args"], str) else [os.fspath(word) for word in options["args"]]
        if words[:2] != [sys.executable, "-m"]:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        ready, started = os.pipe()

        def body() -> None:
            if options["start_new_session"]:
                os.setsid()
            become_interpreter([options[name] for name in ("p2cread", "c2pwrite", "errwrite")], options["env"])
            if options["cwd"] is not None:
                os.chdir(options["cwd"])
            os.write(started, b"x")
            os.closerange(3, MOST_FILES)
            run_module(words[2], words[3:])

        process = multiprocessing.get_context("fork").Process(target=body)
        process.start()
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # waited for here alone
        os.close(started)
        os.read(ready, 1)  # as the original waits for the new program
        os.close(ready)
        assert process.pid is not None
        self.pid = process.pid
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in PIPES))  # type: ignore[attr-defined]


def become_interpreter(streams: Sequence[int], environment: dict[str, str] | None) -> None:
    """Have in this fork what a new interpreter would have: streams (-1: as they are), variables, signals, no logs."""
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, signal.Handlers):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    faulthandler.disable()
    logging.getLogger().handlers.clear()
    for target, source in enumerate(streams):
        if source >= 0:
            os.dup2(source, target)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)  # not pytest's
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    measured = any(name.startswith("COVERAGE_PROCESS_") for name in os.environ)
    if not measured or os.environ.get("RANK", "0") != "0":
        sys.settrace(None)  # coverage hears the same from rank 0, and slows down what it follows
        threading.settrace(None)  # type: ignore[arg-type]


def run_module(name: str, words: Sequence[str]) -> None:
    """``python -m name words``."""
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.argv = [name, *words]
    sys.modules.pop(f"{name}.__main__", None)  # runpy warns of a second copy
    runpy.run_module(name, run_name="__main__", alter_sys=True)
