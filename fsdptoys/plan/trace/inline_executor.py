"""Worker threads' jobs, run in the calling thread."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from fsdptoys.plan.simulator.events import HostWaitWorkers

from .fake_device import Listener, replaced


class _Done(Future[Any]):
    """A finished job; reading its result would have waited for it."""

    jobs: int
    listener: Listener

    def result(self, timeout: float | None = None) -> Any:
        self.listener.add(HostWaitWorkers(self.jobs))
        return super().result(timeout)


class InlineExecutor:
    """A ``ThreadPoolExecutor`` that runs each job in the calling thread, since dispatch modes
    belong to a thread."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a job now."""
        job = _Done()
        with replaced((self._listener, "in_worker", True)):
            try:
                job.set_result(function(*args))
            except BaseException as error:
                job.set_exception(error)
        job.jobs = self._listener.worker_jobs
        job.listener = self._listener
        return job

    def map(self, function: Callable[..., Any], parts: Iterable[Any]) -> Iterator[Any]:
        """Run jobs now; wait for each result in turn."""
        futures = [self.submit(function, part) for part in parts]
        return (future.result() for future in futures)
