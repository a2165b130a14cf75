"""Run test modules in forks of one process that has imported and collected everything.

- An interpreter with torch takes 2 to 4 CPU seconds to start; a fork takes 0.05. So each module
  gets a process of its
  own: threads, devices, variables and caches of one module do not reach another.
- Every test has a time limit, kept by the parent, which a blocked test cannot disturb. At the limit
  the parent reports the stacks of the test's process and of its forks, and where other child
  processes wait, and kills them. The test fails; the rest of its module runs in a new fork.
- A process that dies (a signal, ``os._exit``) fails the test that it ran, and no other.

pytest-xdist does not serve: its workers have threads, and the tests fork ranks.

``--times FILE`` writes CPU seconds and wall seconds of every test. The CPU time of a child process
counts when its parent has waited for it. A module's fixtures count for its first test.
"""

import ctypes
import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from .processes import (
    STACK_SIGNAL,
    describe_tree,
    kill_tree,
    load_factor,
    request_stacks,
)

LIMIT_SECONDS = 600.0
"""Time limit of a test on an idle machine; ``@pytest.mark.limit(seconds)`` replaces it."""

EXIT_SECONDS = 120.0  # limit of a worker's exit after its last test
PR_SET_PDEATHSIG = 1  # Linux ends a worker with its parent


def spent() -> tuple[float, float]:
    """Return CPU seconds of this process and its ended children, and the wall clock."""
    times = os.times()
    return (
        times.user + times.system + times.children_user + times.children_system,
        time.monotonic(),
    )


def spent_since(start: tuple[float, float]) -> list[float]:
    """Return CPU seconds and wall seconds since a result of ``spent``."""
    return [now - then for now, then in zip(spent(), start, strict=True)]


class _Forwarder:
    """In a worker: sends reports to the parent."""

    def __init__(self, config: pytest.Config, sender: Any) -> None:
        self.config = config
        self.sender = sender

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(
            config=self.config, report=report
        )
        self.sender.send(("report", data))


def _run_items(
    session: pytest.Session, items: list[pytest.Item], sender: Any, stacks: Any
) -> None:
    os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which ends the workers
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    capture = session.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:  # forks share the offset of the parent's files
        capture.stop_global_capturing()
        capture.start_global_capturing()
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    session.config.pluginmanager.unregister(name="terminalreporter")
    session.config.pluginmanager.register(_Forwarder(session.config, sender))
    for item, following in itertools.zip_longest(items, items[1:]):
        since = spent()
        sender.send(("start", item.nodeid))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        sender.send(("end", spent_since(since)))
        if session.shouldfail or session.shouldstop:
            break
    sender.send(("done", None))
    if capture is not None:
        capture.stop_global_capturing()


def _without_runner(stacks: str) -> str:
    """Leave out the frames of pytest and of this file, which are the same in every stack."""
    runner = (
        "_pytest/",
        "pluggy/",
        "/pytest/__main__.py",
        "frozen runpy",
        "/multiprocessing/",
        "harness/workers.py",
    )
    return "\n".join(
        line for line in stacks.splitlines() if not any(part in line for part in runner)
    )


class _Worker:
    """In the parent: one fork, which runs items of one module."""

    def __init__(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        self.items = deque(items)
        self.current: pytest.Item | None = None
        self.last: pytest.Item | None = None
        self.finished = False
        self.stacks = tempfile.TemporaryFile("a+")  # noqa: SIM115  # open as long as the worker runs
        self.receiver, sender = multiprocessing.Pipe(duplex=False)
        context: Any = multiprocessing.get_context("fork")
        self.process = context.Process(
            target=_run_items, args=(session, items, sender, self.stacks)
        )
        self.process.start()
        sender.close()
        self.since = time.monotonic()

    @property
    def limit(self) -> float:
        """Seconds until the present test, or the exit, counts as hanging."""
        if self.current is None:
            return EXIT_SECONDS if self.finished else LIMIT_SECONDS
        marker = self.current.get_closest_marker("limit")
        return float(marker.args[0]) if marker else LIMIT_SECONDS

    def hangs(self) -> bool:
        """Whether the limit has passed, for this load of the machine."""
        waited = time.monotonic() - self.since
        return waited > self.limit and waited > self.limit * load_factor()

    def read_stacks(self) -> str:
        """Kill the processes, and return where they were."""
        pid = self.process.pid
        tree = describe_tree(pid)
        request_stacks(pid)
        kill_tree(pid)
        self.stacks.seek(0)
        return f"{tree}\n{_without_runner(self.stacks.read())}"


class WorkersPlugin:
    """Replaces pytest's loop over the tests.

    Args:
        count: workers at a time.
        slow: parts of the paths of modules to start first, longest first.
        times: file for the times.
    """

    def __init__(self, count: int, slow: tuple[str, ...], times: Path | None) -> None:
        self.count = count
        self.slow = slow
        self.times = times
        self.started = spent()

    def add_times(self, cpu: float, wall: float, name: str) -> None:
        """Append a line to the file of times."""
        if self.times is not None:
            with self.times.open("a", encoding="utf-8") as file:
                file.write(f"{cpu:.2f}\t{wall:.2f}\t{name}\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all modules, ``count`` at a time."""
        if (
            session.testsfailed
            and not session.config.option.continue_on_collection_errors
        ):
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        if session.config.option.collectonly:
            return True
        self.add_times(*spent_since(self.started), "(imports, collection)")
        groups = [
            list(items)
            for _, items in itertools.groupby(session.items, lambda item: item.path)
        ]
        queue = deque(sorted(groups, key=self._order))
        workers: dict[Any, _Worker] = {}
        try:
            while workers or (queue and not (session.shouldfail or session.shouldstop)):
                while (
                    queue
                    and len(workers) < self.count
                    and not (session.shouldfail or session.shouldstop)
                ):
                    worker = _Worker(session, queue.popleft())
                    workers[worker.receiver] = worker
                for receiver in multiprocessing.connection.wait(
                    list(workers), timeout=1.0
                ):
                    if not self._take(session, workers[receiver]):
                        self._end(session, queue, workers.pop(receiver))
                for receiver in [
                    receiver for receiver, worker in workers.items() if worker.hangs()
                ]:
                    worker = workers.pop(receiver)
                    why = (
                        f"no end after {time.monotonic() - worker.since:.0f} "
                        f"s\n{worker.read_stacks()}"
                    )
                    self._end(session, queue, worker, why)
        finally:
            for worker in workers.values():
                kill_tree(worker.process.pid)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _order(self, items: list[pytest.Item]) -> int:
        path = items[0].nodeid
        return next(
            (number for number, part in enumerate(self.slow) if part in path),
            len(self.slow),
        )

    def _take(self, session: pytest.Session, worker: _Worker) -> bool:
        """Take one message; return False at the end of the worker's pipe."""
        try:
            kind, content = worker.receiver.recv()
        except (EOFError, OSError):
            return False
        hook = session.config.hook
        if kind == "start":
            worker.current = worker.items.popleft()
            worker.since = time.monotonic()
        elif kind == "report":
            report = hook.pytest_report_from_serializable(
                config=session.config, data=content
            )
            hook.pytest_runtest_logreport(report=report)
        elif kind == "end":
            self.add_times(*content, worker.current.nodeid)
            worker.last, worker.current, worker.since = (
                worker.current,
                None,
                time.monotonic(),
            )
        else:
            worker.finished = True
        return True

    def _end(
        self,
        session: pytest.Session,
        queue: deque[list[pytest.Item]],
        worker: _Worker,
        why: str | None = None,
    ) -> None:
        """Wait for a worker's exit, report how its test failed if it did not end, and queue the
        tests left to run."""
        process = worker.process
        process.join(0 if why else EXIT_SECONDS)
        if why is None and process.exitcode is None:
            why = (
                f"the process did not exit after its last test\n{worker.read_stacks()}"
            )
        process.join()
        if why is None and not worker.finished:
            code = process.exitcode
            how = signal.Signals(-code).name if code < 0 else f"status {code}"
            why = f"the process of the test ended with {how}"
        item = worker.current or (worker.last if worker.finished else None)
        if why is not None:
            if item is None:  # before its first test
                item = worker.items.popleft()
            self._report_failure(session, item, why)
        worker.receiver.close()
        worker.stacks.close()
        if worker.items:
            queue.appendleft(list(worker.items))

    def _report_failure(
        self, session: pytest.Session, item: pytest.Item, why: str
    ) -> None:
        keywords = {name: 1 for name in item.keywords}
        report = pytest.TestReport(
            item.nodeid, item.location, keywords, "failed", why, "call"
        )
        session.config.hook.pytest_runtest_logreport(report=report)
