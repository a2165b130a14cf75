"""The ranks of this machine: start, watch, signal, restart and end them.

PyTorch's elastic agent runs in a thread, and calls back for each start and failure. The main thread
handles signals and kills ranks that do not end. ``supervisor`` says which signal does what.
"""

import contextlib
import dataclasses
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import LaunchConfig

from fsdptoys.train.launch_env import RESTARTS
from fsdptoys.train.stop import SAME_REQUEST_SECONDS, STOP_SIGNALS
from fsdptoys.utils.signal_handlers import handle_signals
from fsdptoys.utils.text import print_status

from .elastic_agent import Agent, EndedError, group_runs, runs
from .exit_record import write_exit_record
from .failures import (
    FirstFailure,
    first_failure,
    make_exit_record,
    own_failure_is_recorded,
)
from .hardware import is_out_of_files, too_few_files
from .rendezvous import LocalRendezvous, describe_rendezvous_error, make_rendezvous

SHUTDOWN_SECONDS = 5  # workers still running so long after the signal are killed
OTHERS_SECONDS = 1.0
"""A rank that lost others is not the first failure; the others get so long to record theirs before
they are ended."""
GROUP_SECONDS = 1.0
"""Child processes of a killed rank get so long to end by themselves before they are killed."""
POLL_SECONDS = 0.1

FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
"""May arrive twice for one request; a second Ctrl-C is meant."""
END_SIGNALS = (signal.SIGHUP, signal.SIGQUIT)  # kill all workers at once


class LocalRanks:
    """The ranks of this machine, shared by the agent's thread and the main thread."""

    def __init__(
        self,
        folder: Path,
        launch: LaunchConfig,
        token: bytes | None,
        command: Sequence[str],
        forks: bool,
    ) -> None:
        self.folder = folder
        self.launch = launch
        self.command = command
        self.forks = forks
        self._token = token
        # Signals and the time of each; None: the agent is done.
        self._events: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pids: dict[int, int] = {}  # of this start, by rank
        self._killed: set[int] = set()
        # ranks that still ran when the agent ended them
        self._terminated: set[int] = set()
        self._starts = self._failed_starts = 0
        self._starting = False
        # set while the agent may be waiting for workers to end
        self._busy_since: float | None = None
        self._stop: int | None = None  # signal that asked the workers to stop
        self._end: int | None = None  # signal that killed them
        self._failures: dict[int, ProcessFailure] = {}
        self._first: FirstFailure | None = None
        self._succeeded = False
        self._error: Exception | None = None
        self._rendezvous: LocalRendezvous | None = None
        self._agent = threading.Thread(
            target=self._run_agent, name="elastic agent", daemon=True
        )

    # In the main thread.

    def handling_signals(self) -> AbstractContextManager[None]:
        """Return a context in which this process's signals go to the workers."""
        numbers = {*STOP_SIGNALS, *END_SIGNALS}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
            numbers.remove(signal.SIGHUP)
        return handle_signals(dict.fromkeys(numbers, self._note))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._events.put((number, time.monotonic()))

    def run(self) -> tuple[int, str | None]:
        """Start the workers and wait for them; return an exit status and a final message, if
        any."""
        agent = self._agent
        agent.start()
        stopped_at = 0.0
        while agent.is_alive():
            try:
                event = self._events.get(timeout=POLL_SECONDS)
            except queue.Empty:
                self._kill_what_hangs()
                continue
            if event is None:
                agent.join()
                continue
            number, received_at = event
            if number in STOP_SIGNALS and self._stop is None:
                stopped_at = received_at
                self._pass_on(number)
            elif (
                number in FORWARDED and received_at - stopped_at < SAME_REQUEST_SECONDS
            ):
                continue
            else:
                self._end = number
                self._kill(self._pids)
            if self._end is not None:
                # Without workers, the agent may be waiting for another node and is left behind.
                waits = self.launch.min_nodes > 1 and not (self._pids or self._starting)
                agent.join(POLL_SECONDS if waits else SHUTDOWN_SECONDS)
                break
        status, message = self._outcome()
        write_exit_record(
            make_exit_record(status, message, self._end or self._stop, self._first)
        )
        return status, message

    @property
    def ended(self) -> bool:
        """Whether a signal has killed the workers."""
        return self._end is not None

    @property
    def left_behind(self) -> bool:
        """Whether the agent or its polling thread still runs, as when waiting for another node."""
        return self._agent.is_alive() or (
            self._rendezvous is not None and self._rendezvous.hangs
        )

    def _pass_on(self, number: int) -> None:
        with self._lock:
            self._stop = number
            if not self._pids:
                self._end = number  # no worker has started, so none can stop cleanly
            # A starting interpreter answers SIGINT with a traceback.
            passed = signal.SIGTERM if number == signal.SIGINT else number
            for pid in self._pids.values():
                if runs(pid):
                    os.kill(pid, passed)

    def _kill(self, ranks: Mapping[int, int]) -> None:
        groups = []  # each worker leads a group that includes its loader's processes
        with self._lock:
            for rank, pid in ranks.items():
                if runs(pid):
                    self._killed.add(rank)
                    groups.append(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + GROUP_SECONDS
        while groups and time.monotonic() < deadline:
            time.sleep(0.02)
            groups = [group for group in groups if group_runs(group)]
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def _kill_what_hangs(self) -> None:
        since = self._busy_since
        if since is not None and time.monotonic() - since > SHUTDOWN_SECONDS:
            self._kill(self._pids)

    def _outcome(self) -> tuple[int, str | None]:
        if self._end is not None:
            return 128 + self._end, _stopped(self._end)
        if self._succeeded:
            # A shell goes on with its next command after status 0.
            return (
                (128 + signal.SIGINT, _stopped(signal.SIGINT))
                if self._stop == signal.SIGINT
                else (0, None)
            )
        if self._failures:
            first = self._first = first_failure(
                self._failures, self.folder, self._killed, self._terminated
            )
            if self._stop is not None and (
                first.of_others or first.stopped or self._died_of_the_request()
            ):
                return 128 + self._stop, _stopped(self._stop)
            if first.stopped:
                return first.status, first.message()
            most = self.launch.max_restarts
            used_up = most and self._failed_starts == most and not first.final
            message = first.message(
                f", after {most} of {most} restarts" if used_up else ""
            )
            return first.status, message + first.post_mortem(self._pids, self.folder)
        if self._error is None:
            return 1, "another machine ended the run; its output says why"
        if is_out_of_files(self._error):
            return 2, too_few_files()
        if isinstance(self._error, RendezvousError) or not self._starts:
            return 2, describe_rendezvous_error(self._error, self.launch)
        raise self._error

    def _died_of_the_request(self) -> bool:
        """Return whether the stop signal ended ranks that could not stop cleanly yet, without any
        other failure."""
        assert self._stop is not None
        expected = {
            -self._stop,
            128 + self._stop,
            -signal.SIGTERM,
            128 + signal.SIGTERM,
        }
        return all(
            failure.exitcode in expected or rank in self._killed
            for rank, failure in self._failures.items()
            if failure.error_file == "<N/A>"
        ) and not list(self.folder.glob("**/error.json"))

    # In the agent's thread.

    def _run_agent(self) -> None:
        handler = None
        try:
            launch = self.launch
            handler = self._rendezvous = make_rendezvous(
                launch, self.folder, self._token
            )
            # torch 2.7 has no NUMA binding; newer versions set its default in LaunchConfig.
            names = {field.name for field in dataclasses.fields(WorkerSpec)}
            options: dict[str, Any] = (
                {"numa_options": launch.numa_options} if "numa_options" in names else {}
            )
            spec = WorkerSpec(
                role=launch.role,
                local_world_size=launch.nproc_per_node,
                rdzv_handler=handler,
                entrypoint=sys.executable,
                args=tuple(self.command),
                max_restarts=launch.max_restarts,
                monitor_interval=POLL_SECONDS,
                local_addr=launch.local_addr,
                **options,
            )
            result = Agent(
                self, spec, DefaultLogsSpecs(log_dir=str(self.folder)), self.forks
            ).run()
            self._succeeded = result is not None and not result.is_failed()
        except EndedError:
            pass
        except Exception as error:
            self._error = error
        finally:
            if handler is not None:
                handler.shutdown()
            self._events.put(None)

    def before_start(self) -> None:
        """Note that workers are about to start; ``EndedError`` prevents it."""
        if self._stop is not None or self._end is not None:
            raise EndedError
        if self._starts > self._failed_starts:
            print_status(
                "another node restarted its workers; restarting those of this node"
            )
        if self._starts == 0 and self.launch.min_nodes > 1 and self._token is None:
            print_status(
                "no launch.rdzv_token_file is set, so any machine of this network can join or "
                "stop the run"
            )
        os.environ[RESTARTS] = str(self._starts)
        self._starts += 1
        self._starting = True
        for path in self.folder.glob("**/error.json"):
            path.unlink()

    def after_start(self, pids: dict[int, int]) -> None:
        """Note that workers have started, with these process ids by rank."""
        with self._lock:
            self._pids = pids
            self._starting = False
            self._killed = set()
            self._terminated = set()
            if self._stop is not None or self._end is not None:
                raise EndedError  # the agent ends them; none is in its training loop yet

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Return a context in which the agent ends ranks, and waits for their end.

        They get time before it to record a failure of their own.
        """
        deadline = time.monotonic() + OTHERS_SECONDS
        while (
            own_failure_is_recorded(self.folder) is False
            and self._running()
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        self._terminated |= self._running()
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = None

    def _running(self) -> set[int]:
        return {rank for rank, pid in self._pids.items() if runs(pid)}

    def after_failure(self, failures: dict[int, ProcessFailure]) -> None:
        """Note these failures by rank, when all workers have ended; ``EndedError`` prevents a
        restart."""
        self._failures = failures
        again = (
            self._failed_starts < self.launch.max_restarts
            and self._stop is None
            and self._end is None
        )
        if not again or not failures:
            raise EndedError
        first = first_failure(failures, self.folder, self._killed, self._terminated)
        if first.final:
            raise EndedError
        self._failed_starts += 1
        message = "; ".join(
            [first.in_short, *first.hung_ranks(self._pids, self.folder)]
        )
        with self._lock:
            self._pids = {}
        self._failures = {}
        count = f"({self._failed_starts} of {self.launch.max_restarts})"
        print_status(f"{message}; restarting {count}")


def _stopped(number: int) -> str:
    return f"stopped by {signal.Signals(number).name}; all workers have ended"
