"""Batches made ahead of the loop by PyTorch's ``DataLoader`` in background processes.

The loader's samples are whole steps, numbered by the position of their first sample, so that a
worker needs no state. Workers are forked by a ``forkserver``, not by the rank: a fork would copy
the locks of the rank's threads (gloo, NCCL) in any state, and perhaps a CUDA context. The cost: the
first step waits for the server to import PyTorch.
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
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fsdptoys.errors import ConfigError, LostWorkerError
from fsdptoys.utils.text import one_line

from .dataset import Samples
from .permutation import EndlessShuffle

STEPS_AHEAD = 2  # steps that each worker prefetches

NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)

RANK_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that the rank handles, though a terminal or a scheduler may send them to all
processes."""

PRELOADED = ["torch.utils.data", "numpy", "fsdptoys.data"]
"""Imported once by the server and shared by its workers."""


SHARED_MEMORY = "/dev/shm"

LONGEST_TEMPORARY_FOLDER = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Bytes of its path, out of the 107 of a socket's path on Linux."""

# pages of shared memory for the loader's semaphores, and for those of each worker
PAGES = (
    16,
    8,
)


def check_shared_memory(
    workers: int, step_bytes: int, local_ranks: int, mount: str = SHARED_MEMORY
) -> None:
    """Check that the workers' sockets and prefetched batches fit; the latter only if ``mount`` has
    shared memory.

    ``workers`` are those of each rank, ``step_bytes`` one rank's batches of a step, ``local_ranks``
    this node's ranks.
    """
    if not workers:
        return
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > LONGEST_TEMPORARY_FOLDER:
        raise ConfigError(
            f"data.workers={workers} needs sockets in the temporary folder {folder}, whose path "
            f"may have {LONGEST_TEMPORARY_FOLDER} bytes for that; set TMPDIR to a shorter one or "
            "data.workers=0"
        )
    if not os.path.isdir(mount):
        return
    system = os.statvfs(mount)
    free_bytes = system.f_bavail * system.f_frsize
    semaphores = (PAGES[0] + PAGES[1] * workers) * system.f_frsize
    # One step more than are prefetched: the loop holds one while its worker makes the next.
    needed_bytes = local_ranks * ((workers * STEPS_AHEAD + 1) * step_bytes + semaphores)
    if needed_bytes > free_bytes:
        free = free_bytes / 2**20
        needed = needed_bytes / 2**20
        problem = (
            f"has {free:.4g} MiB free, and {local_ranks} ranks need {needed:.4g} MiB"
        )
        raise ConfigError(_no_shared_memory(workers, problem, mount))


def _no_shared_memory(workers: int, problem: str, mount: str = SHARED_MEMORY) -> str:
    return (
        f"data.workers={workers} passes batches through {mount}, which {problem}; set "
        f"data.workers=0, or give {mount} more memory (docker run --shm-size)"
    )


class StepReader:
    """Makes the batches of any step for this process's ranks; runs in the rank, or pickled in each
    worker."""

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        microbatches: int,
        ranks: range,
        data_ranks: int,
        seed: int,
    ) -> None:
        assert len(samples) > 0
        assert all(0 <= rank < data_ranks for rank in ranks)
        self.samples = samples
        self.batch_size = batch_size
        # samples of a step, over all ranks
        self.stride = microbatches * data_ranks * batch_size
        self._firsts = [
            (microbatch * data_ranks + rank) * batch_size
            for microbatch in range(microbatches)
            for rank in ranks
        ]
        self._shuffle = EndlessShuffle(len(samples), seed)

    def numbers(self, position: int) -> list[Tensor]:
        """Numbers of the samples of a step from a position on, over all ranks: int64 (B,) for each
        micro-batch."""
        return [
            position + first + torch.arange(self.batch_size) for first in self._firsts
        ]

    def read(self, position: int) -> Tensor:
        """Tokens and labels of the step from a position on, int64 (micro-batches · own ranks, 2, B,
        T)."""
        numbers = torch.cat(self.numbers(position)).tolist()
        if not self.samples.endless:
            numbers = [self._shuffle[number] for number in numbers]
        rows = [self.samples[number] for number in numbers]
        step = np.array(rows, np.int64).reshape(
            len(self._firsts), self.batch_size, 2, -1
        )
        return torch.from_numpy(np.ascontiguousarray(step.swapaxes(1, 2)))


class StepPrefetcher:
    """Consecutive steps from the one at ``position`` on, prefetched by background
    processes."""

    def __init__(self, reader: StepReader, position: int, workers: int) -> None:
        others = set(multiprocessing.active_children())
        # Processes started here inherit the blocked signals from their first instruction on.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, RANK_SIGNALS)
        try:
            resource_tracker.ensure_running()
            # As many semaphores as the loader creates: its failure half-way prints a traceback from
            # its destructor.
            semaphores = [
                multiprocessing.get_context("forkserver").Event()
                for _ in range(1 + 2 * workers)
            ]
            del semaphores
            # The tracker's start unblocks some
            signal.pthread_sigmask(signal.SIG_BLOCK, RANK_SIGNALS)
            with warnings.catch_warnings():
                # More workers than cores help where they wait for a disk or a network.
                warnings.filterwarnings(
                    "ignore", "This DataLoader will create", UserWarning
                )
                self._steps: Iterator[Any] = iter(_loader(reader, position, workers))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise ConfigError(
                _no_shared_memory(workers, f"takes no more ({error.strerror or error})")
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        self._workers = [
            child for child in multiprocessing.active_children() if child not in others
        ]
        # At exit, before multiprocessing waits for children that ignore its SIGTERM. Not by atexit,
        # whose functions multiprocessing's processes do not run.
        self._at_exit = util.Finalize(None, self.close, exitpriority=10)

    def next(self) -> Tensor:
        """The next step's batches; ConfigError from the reader, LostWorkerError if a worker has
        ended."""
        try:
            step = next(self._steps)
        except (RuntimeError, OSError, EOFError):
            # A worker serves its tensors itself, so its end may show as a broken connection.
            ended = wait([worker.sentinel for worker in self._workers], timeout=1.0)
            pids = [
                str(worker.pid) for worker in self._workers if worker.sentinel in ended
            ]
            if not pids:
                raise
            raise LostWorkerError(
                f"a data worker has ended (pid {', '.join(pids)}): it was killed, or there was "
                "too little host memory or shared memory (/dev/shm); data.workers=0 reads "
                "without workers"
            ) from None
        if isinstance(step, str):
            raise ConfigError(step)
        return step

    def close(self) -> None:
        """Kill the workers; may be called twice."""
        self._at_exit.cancel()
        # the loader's iterator ends its workers when it is deleted
        self._steps = iter(())
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers = []


def _loader(reader: StepReader, position: int, workers: int) -> "DataLoader[Any]":
    context = multiprocessing.get_context("forkserver")
    # Before Python 3.10.9 and 3.11.1 the fork server unpickles messages of any local user
    # (CVE-2022-42919).
    util.abstract_sockets_supported = False  # type: ignore[misc]
    context.set_forkserver_preload(PRELOADED)
    return DataLoader(
        _Steps(reader, workers),
        batch_size=None,
        sampler=itertools.count(position, reader.stride),
        num_workers=workers,
        prefetch_factor=STEPS_AHEAD,
        worker_init_fn=_prepare_worker,
        multiprocessing_context=context,
        # the loader draws a seed, which must not change the run's random numbers
        generator=torch.Generator(),
    )


class _Steps(Dataset[Any]):
    """The reader as a ``Dataset``; a ConfigError is returned as text and raised by
    ``StepPrefetcher.next``."""

    def __init__(self, reader: StepReader, workers: int) -> None:
        self._reader = reader
        self._workers = workers

    def __getitem__(self, position: int) -> Tensor | str:
        try:
            step = self._reader.read(position)
        except ConfigError as mistake:
            return str(mistake)
        try:
            # The loader does it in a thread whose failure is lost: the loop would wait forever.
            return step.share_memory_()
        except (RuntimeError, OSError) as error:
            return _no_shared_memory(
                self._workers, f"takes no more ({one_line(error)})"
            )


def _prepare_worker(index: int) -> None:
    for number in RANK_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def end_with_parent() -> None:
    """End this process with its parent, which it would outlive as a child of the server or with a
    queue of tasks."""
    threading.Thread(
        target=_wait_for_parent, name="end-with-parent", daemon=True
    ).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # Of this process alone: its tensors' socket
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    os._exit(1)
