"""``python -m MODULE WORDS`` as forks of this process, which has already done the slow imports.

For tests of the behavior of processes, not of interpreter startup: each is a separate process with
the arguments, variables, streams, session and signals of a new interpreter, and exits like one. The
only difference are the imported modules. Other commands start as usual.
"""

import importlib
import inspect
import multiprocessing
import multiprocessing.process
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    subprocess_handler,
)

from fsdptoys.launch.forked_process import MOST_FILES, become_interpreter, run_module

PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
SLOW_IMPORTS = (
    *(
        "fsdptoys.launch.launch",
        "fsdptoys.train.run",
        "fsdptoys.metrics.figures",
        "matplotlib.figure",
    ),
    *(
        "fsdptoys.parallel.fsdp1",
        "fsdptoys.parallel.fsdp2",
        "fsdptoys.checkpoint.sharded_io",
    ),
)
_parameters = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]


def start_warm(patch: pytest.MonkeyPatch) -> None:
    """Replace ``python -m`` processes of this process and of its launchers by forks with the
    imports already done."""
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    patch.setattr(subprocess, "Popen", WarmPopen)
    patch.setattr(subprocess_handler, "Popen", WarmPopen)


class WarmPopen(subprocess.Popen):
    """``subprocess.Popen`` that forks where it would start this very interpreter for a module."""

    def _execute_child(self, *args: Any) -> None:
        options = dict(zip(_parameters, args, strict=True))
        argv = (
            []
            if isinstance(options["args"], str)
            else [os.fspath(word) for word in options["args"]]
        )
        if argv[1:2] == ["-u"]:  # as torchrun starts its ranks
            del argv[1]
        if argv[:2] != [sys.executable, "-m"]:
            super()._execute_child(*args)  # type: ignore[misc]
            return
        ready, started = os.pipe()

        def body() -> None:
            if options["start_new_session"]:
                os.setsid()
            streams = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            become_measured_interpreter(
                streams, dict(os.environ) if options["env"] is None else options["env"]
            )
            if options["cwd"] is not None:
                os.chdir(options["cwd"])
            if options["preexec_fn"] is not None:
                options["preexec_fn"]()
            os.write(started, b"x")
            os.closerange(3, MOST_FILES)
            run_module(argv[2], argv[3:])

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


def become_measured_interpreter(
    streams: Sequence[int], environment: Mapping[str, str]
) -> None:
    """Give this fork the state of a new interpreter, these streams (-1: unchanged), and coverage of
    rank 0."""
    for target, source in enumerate(streams):
        if source >= 0:
            os.dup2(source, target)
    become_interpreter(environment)
    measured = any(name.startswith("COVERAGE_PROCESS_") for name in os.environ)
    if not measured or os.environ.get("RANK", "0") != "0":
        # rank 0 covers the same lines, and coverage slows down its process
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
