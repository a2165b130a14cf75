"""Steps' batches made ahead of the loop, by PyTorch's ``DataLoader`` in background processes.

The loader's samples are whole steps, numbered by the place of their first sample, so that its order is counting and a
worker needs no state. Workers are forked by a server that is started for them (``forkserver``), not by the rank: a rank
has threads, gloo's or NCCL's among them, whose locks a fork would copy in whatever state they are, memory that a
network card writes to, and perhaps a CUDA context; and no child may use that. The price is that the first step waits
for the server to import PyTorch, once for each rank.

Not covered: memory pinned in the background, and evaluation, whose batches are read in place.
"""

import errno
import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator
from multiprocessing import resource_tracker, util
from multiprocessing.connection import wait
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fsdptoys.errors import ConfigError, LostWorkerError
from fsdptoys.utils.text import one_line

STEPS_AHEAD = 2
"""Steps that each worker has ready or is about to make."""

NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)

UNHEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that are the rank's to answer, though a terminal or a scheduler may send them to all processes at once."""

PRELOADED = ["torch.utils.data", "numpy", "fsdptoys.data"]
"""Imported once by the server and shared by its workers."""


class ReadsSteps(Protocol):
    """What makes the batches of a step; is pickled once for each worker."""

    stride: int
    """Places from one step to the next."""

    def read(self, place: int) -> Tensor:
        """All batches of the step that begins at a place, as one tensor."""


SHARED_MEMORY = "/dev/shm"

LONGEST_TEMPORARY_FOLDER = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Bytes of its path, from the 107 that Linux takes for a socket's; others take a few less."""

PAGES = 16, 8
"""Of shared memory for the loader's semaphores, and for those of each worker."""


def check_shared_memory(workers: int, step_bytes: int, local_ranks: int, place: str = SHARED_MEMORY) -> None:
    """Check that workers can be reached, and that the batches they make ahead fit into the shared memory.

    Args:
        workers: processes of each rank.
        step_bytes: of the batches of one rank's step.
        local_ranks: ranks of this machine.
        place: where the system has its shared memory; without it nothing is checked.

    Raises:
        ConfigError: naming key, value and fix.
    """
    if not workers:
        return
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > LONGEST_TEMPORARY_FOLDER:
        raise ConfigError(
            f"data.workers={workers} needs sockets in the temporary folder {folder}, whose path may have "
            f"{LONGEST_TEMPORARY_FOLDER} bytes for that; set TMPDIR to a shorter one or data.workers=0"
        )
    if not os.path.isdir(place):
        return
    system = os.statvfs(place)
    free_bytes = system.f_bavail * system.f_frsize
    semaphores = (PAGES[0] + PAGES[1] * workers) * system.f_frsize
    # One more step than there are ahead: the loop holds one while its worker makes the next.
    needed_bytes = local_ranks * ((workers * STEPS_AHEAD + 1) * step_bytes + semaphores)
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"data.workers={workers} passes batches through {place}, which has {free_bytes / 2**20:.4g} MiB free, and "
            f"{local_ranks} ranks need {needed_bytes / 2**20:.4g} MiB; set data.workers=0, or give {place} more memory "
            "(docker run --shm-size)"
        )


def _no_shared_memory(workers: int, reason: str) -> str:
    return (
        f"data.workers={workers} passes batches through {SHARED_MEMORY}, which takes no more ({reason}); set "
        f"data.workers=0, or give {SHARED_MEMORY} more memory (docker run --shm-size)"
    )


class StepsAhead:
    """Steps from a place on, one after the other.

    Args:
        reader: what the workers do.
        place: of the first step.
        workers: background processes.
    """

    def __init__(self, reader: ReadsSteps, place: int, workers: int) -> None:
        others = set(multiprocessing.active_children())
        # What is started here inherits that these signals wait, from before its first instruction on.
        unheard = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
        try:
            resource_tracker.ensure_running()
            # As many semaphores as the loader makes: its own failure half-way prints a traceback from its destructor.
            semaphores = [multiprocessing.get_context("forkserver").Event() for _ in range(1 + 2 * workers)]
            del semaphores
            signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)  # starting the tracker has taken away some of them
            with warnings.catch_warnings():
                # More workers than cores are of use where they wait for a disk or a network.
                warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
                self._steps: Iterator[Any] = iter(_loader(reader, place, workers))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise ConfigError(_no_shared_memory(workers, error.strerror or str(error))) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unheard)
        self._workers = [child for child in multiprocessing.active_children() if child not in others]
        # At exit, before multiprocessing waits for children that its own SIGTERM does not reach; atexit would not do,
        # which processes of multiprocessing do not run.
        self._at_exit = util.Finalize(None, self.close, exitpriority=10)

    def next(self) -> Tensor:
        """The next step's batches.

        Raises:
            ConfigError: the one that reading them raised.
            LostWorkerError: if a worker has ended.
        """
        try:
            step = next(self._steps)
        except (RuntimeError, OSError, EOFError):
            # A worker's tensors are handed over by the worker itself, so its end may show as a connection that breaks.
            ended = wait([worker.sentinel for worker in self._workers], timeout=1.0)
            pids = [str(worker.pid) for worker in self._workers if worker.sentinel in ended]
            if not pids:
                raise
            raise LostWorkerError(
                f"a data worker has ended (pid {', '.join(pids)}): it was killed, or there was too little host memory "
                "or shared memory (/dev/shm); data.workers=0 reads without workers"
            ) from None
        if isinstance(step, str):
            raise ConfigError(step)
        return step

    def close(self) -> None:
        """End the workers, whatever they are doing; may be called twice."""
        self._at_exit.cancel()
        self._steps = iter(())  # the loader's iterator ends its workers when nobody holds it any more
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers = []


def _loader(reader: ReadsSteps, place: int, workers: int) -> "DataLoader[Any]":
    context = multiprocessing.get_context("forkserver")
    # Python before 3.10.9 and 3.11.1 has the fork server unpickle what any local user sends (CVE-2022-42919).
    util.abstract_sockets_supported = False  # type: ignore[misc]
    context.set_forkserver_preload(PRELOADED)
    return DataLoader(
        _Steps(reader, workers),
        batch_size=None,
        sampler=itertools.count(place, reader.stride),
        num_workers=workers,
        collate_fn=_as_it_is,
        prefetch_factor=STEPS_AHEAD,
        worker_init_fn=_prepare_worker,
        multiprocessing_context=context,
        generator=torch.Generator(),  # the loader draws a seed, which must not come from the run's own numbers
    )


class _Steps(Dataset[Any]):
    """The reader as ``DataLoader`` wants it; a mistake is handed over as its sentence, to be raised in its turn."""

    def __init__(self, reader: ReadsSteps, workers: int) -> None:
        self._reader = reader
        self._workers = workers

    def __getitem__(self, place: int) -> Tensor | str:
        try:
            step = self._reader.read(place)
        except ConfigError as mistake:
            return str(mistake)
        try:
            # The loader would do it in a thread of its own, whose failure no one receives: the loop would wait forever.
            return step.share_memory_()
        except (RuntimeError, OSError) as error:
            return _no_shared_memory(self._workers, one_line(error))


def _as_it_is(step: Any) -> Any:
    return step


def _prepare_worker(index: int) -> None:
    for number in UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """Have this process end with the one that it works for, which a server or a queue of tasks would outlive."""
    threading.Thread(target=_wait_for_parent, name="end-with-parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)  # of this process alone: the socket its tensors go through
    os._exit(1)
