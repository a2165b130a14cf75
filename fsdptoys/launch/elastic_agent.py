"""Torch's elastic agent, extended to report pids and failures, so that it can run in a thread.

Torch terminates the other workers in the call in which it finds a failed one. So this agent looks
at the workers first, and calls torch only to close them. Closing waits up to 30 seconds for workers
to end. Tested with torch 2.7 and 2.13.
"""

import contextlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.agent.server import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
)
from torch.distributed.elastic.rendezvous import RendezvousStateError

from .forked_process import ForkedProcess


class EndedError(Exception):
    """All workers have ended, and no new ones may start."""


class Watcher(Protocol):
    """Receives the agent's callbacks, from the agent's thread; owns the signal handlers."""

    def before_start(self) -> None:
        """Workers are about to start; ``EndedError`` prevents it."""

    def after_start(self, pids: dict[int, int]) -> None:
        """Workers have started, with these process ids by rank."""

    def closing(self) -> AbstractContextManager[None]:
        """Context of a call that terminates the remaining workers, and waits for their end."""

    def after_failure(self, failures: dict[int, ProcessFailure]) -> None:
        """All workers have ended, after these failures by rank; ``EndedError`` prevents a
        restart."""


class Agent(LocalElasticAgent):
    """Torch's agent with callbacks to a watcher.

    With ``forks``, workers are forks of this process instead of new interpreters; their arguments
    start with ``-m``.
    """

    def __init__(
        self,
        watcher: Watcher,
        spec: WorkerSpec,
        logs_specs: DefaultLogsSpecs,
        forks: bool,
    ) -> None:
        super().__init__(spec, logs_specs)
        self._watcher = watcher
        self._forks = forks

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._watcher.before_start()
        with _forked_workers() if self._forks else contextlib.nullcontext():
            pids = super()._start_workers(worker_group)
        self._watcher.after_start(
            {
                worker.global_rank: pids[worker.local_rank]
                for worker in worker_group.workers
            }
        )
        return pids

    def _assign_worker_ranks(self, *args: Any, **options: Any) -> list[Any]:
        try:
            return super()._assign_worker_ranks(*args, **options)
        except (ValueError, LookupError, TypeError) as error:
            # It reads values that other machines, or strangers, have put into the store.
            raise RendezvousStateError(
                "the numbers of the ranks in the store are not those of this run"
            ) from error

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._pcontext is not None
        statuses = [exit_status(pid) for pid in self._pcontext.pids().values()]
        if None in statuses and not any(statuses):
            return RunResult(state=WorkerState.HEALTHY)
        with self._watcher.closing():
            result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._watcher.after_failure(result.failures)
        return result

    def _shutdown(self, *args: Any, **options: Any) -> None:
        with self._watcher.closing():
            super()._shutdown(*args, **options)


class _ForkedHandler(SubprocessHandler):
    """Torch's worker handle, with a fork instead of a new interpreter."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        assert args[1] == "-m", args
        return ForkedProcess(args[2], args[3:], env)


@contextlib.contextmanager
def _forked_workers() -> Iterator[None]:
    """Have torch start workers as forks of this process."""
    make_handler = multiprocessing_api.get_subprocess_handler
    multiprocessing_api.get_subprocess_handler = _ForkedHandler  # type: ignore[assignment]
    try:
        yield
    finally:
        multiprocessing_api.get_subprocess_handler = make_handler


def group_runs(group: int) -> bool:
    """Return whether a process group has any process left; a leader counts until the agent has
    reaped it."""
    try:
        os.killpg(group, 0)
    except (
        ProcessLookupError,
        PermissionError,
    ):
        # PermissionError: macOS, for a dead leader
        return False
    return True


def runs(pid: int) -> bool:
    """Return whether a child process still runs; leaves reaping it to the agent."""
    return exit_status(pid) is None


def exit_status(pid: int) -> int | None:
    """Return a child's exit status, or the number of the signal that ended it; None while it runs.

    Leaves reaping it to the agent; 0 for one that the agent has reaped.
    """
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return ended.si_status if ended else None


def import_environment(present: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which workers import this package, whatever the current directory
    holds."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {"PYTHONSAFEPATH": "1"}  # Python 3.10 ignores it
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [root, present.get("PYTHONPATH")])
        )
    return environment
