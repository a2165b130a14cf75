"""Run a function on several ranks forked from a warm parent: a process group in a tenth of a
second.

For comparisons of many short runs; training itself goes through torch's elastic launcher. The
parent must not have started threads or touched an accelerator, so keep ``OMP_NUM_THREADS=1`` there.
"""

import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # by the first model or optimizer
import torch.distributed as dist
import torch.distributed.fsdp  # with these in the parent, no rank takes a second to import them

from fsdptoys.train.object_collectives import use_json

GROUP_TIMEOUT = timedelta(minutes=30)
"""Of a collective. A rank that ends closes its connections, so the others wait for a hanging rank
only."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    start: str = "fork",
    prepare: Callable[[], None] | None = None,
    limit_seconds: float | None = None,
    while_waiting: Callable[[], None] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh process group.

    Args:
        world_size: ranks.
        function: called in each rank; its result must be picklable.
        args: need not be picklable, unless ``start`` is another.
        device: decides the backend of the group.
        start: ``fork``; ``forkserver`` or ``spawn`` where the parent may have touched the
            accelerator.
        prepare: called in each rank before it joins the group; need not be picklable, unless
            ``start`` is another.
        limit_seconds: longest wait for the results; None for any.
        while_waiting: called about once a second in this process.

    Returns:
        The results in order of rank.

    Raises:
        RuntimeError: with the traceback of the first rank that failed, and the ranks that a signal
            had ended by then (of two, the one that is left reports a lost connection); the others
            are ended.
        TimeoutError: after ``limit_seconds``; the ranks are ended.
    """
    context: Any = multiprocessing.get_context(start)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=run_rank,
                args=(
                    rank,
                    world_size,
                    f"{folder}/store",
                    device,
                    pipes[rank][1],
                    prepare,
                    function,
                    args,
                ),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            receivers = [receiver for receiver, _ in pipes]
            return _collect(receivers, limit_seconds, while_waiting)
        except RuntimeError as error:
            raise RuntimeError(f"{error}{_ended_by_signals(processes)}") from None
        except TimeoutError:
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.join(
                    0.0 if process.exitcode is None and _failed(processes) else 30.0
                )
                if process.is_alive():
                    process.kill()
                    process.join()


def run_rank(
    rank: int,
    world_size: int,
    store: str,
    device: str,
    results: Connection,
    prepare: Callable[[], None] | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Join the process group as one rank, call ``function(*args)``, and send whether it succeeded
    and its result."""
    # The parent's objects stay for good; scanning them again takes a fifth of the time.
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        if prepare is not None:
            prepare()
        use_json()  # as every rank of a run
        joined = dist.FileStore(store, world_size)
        dist.init_process_group(
            torch.distributed.get_default_backend_for_device(device),
            store=joined,
            rank=rank,
            world_size=world_size,
            timeout=GROUP_TIMEOUT,
        )
        # Gloo fails on a rank if another one ends before the first has connected to it.
        joined.set(f"joined {rank}", "")
        joined.wait([f"joined {other}" for other in range(world_size)], GROUP_TIMEOUT)
        # The process ends here without leaving the interpreter, so there is nothing to destroy.
        results.send((True, function(*args)))
    except BaseException:
        results.send((False, f"rank {rank}: {traceback.format_exc()}"))
        raise SystemExit(1) from None


def _collect(
    receivers: list[Connection],
    limit_seconds: float | None,
    while_waiting: Callable[[], None] | None,
) -> list[Any]:
    results: dict[int, Any] = {}
    started = time.monotonic()
    beat = None if limit_seconds is None and while_waiting is None else 1.0
    while len(results) < len(receivers):
        waiting = [
            receiver for rank, receiver in enumerate(receivers) if rank not in results
        ]
        ready = wait(waiting, beat)
        for rank, receiver in enumerate(receivers):
            if receiver not in ready:
                continue
            try:
                succeeded, result = receiver.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word") from None
            if not succeeded:
                raise RuntimeError(result)
            results[rank] = result
        if while_waiting is not None:
            while_waiting()
        if limit_seconds is not None and time.monotonic() - started > limit_seconds:
            raise TimeoutError(f"the ranks took longer than {limit_seconds:g} s")
    return [results[rank] for rank in range(len(receivers))]


def _ended_by_signals(processes: list[Any]) -> str:
    # A process closes its pipes and its sentinel a little before it has an exit code.
    ending = wait([process.sentinel for process in processes], 1.0)
    signals = {}
    for rank, process in enumerate(processes):
        if process.sentinel in ending:
            process.join()
            if process.exitcode < 0:
                signals[rank] = signal.Signals(-process.exitcode).name
    return "".join(
        f"\nrank {rank} was ended by {name}" for rank, name in signals.items()
    )


def _failed(processes: list[Any]) -> bool:
    return any(process.exitcode not in (None, 0) for process in processes)
