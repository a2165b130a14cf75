"""Stop requests: recorded by the rank that receives them; a second one takes effect immediately."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdptoys.train.stop import STOP_SIGNALS, StopRequest
from scripts.ranks import run_ranks


def exit_code_of_fork(work: Callable[[], None]) -> int:
    """Exit code of ``work`` in a fork of this process."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def await_request(request: StopRequest) -> None:
    deadline = time.monotonic() + 20
    while request.received is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_first_signal_is_recorded_and_repeats_within_a_second_are_ignored(number: signal.Signals) -> None:
    """Oracle: the received signal; the previous handlers are restored."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with StopRequest() as request:
        assert request.received is None
        for sent in (number, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), sent)
        await_request(request)
    assert request.received == number.name
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    assert not [thread for thread in threading.enumerate() if thread.name == "stop request"]


def test_signal_outside_training_ends_the_process() -> None:
    """Oracle: the exit code of a process killed by the signal, before and after the loop."""

    def before() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def after() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with StopRequest():
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    assert [exit_code_of_fork(before), exit_code_of_fork(after)] == [-signal.SIGTERM] * 2


def hang(folder: Path) -> str | None:
    rank = dist.get_rank()
    with StopRequest() as request:
        dist.barrier()
        (folder / str(rank)).write_text(str(os.getpid()))
        dist.barrier()
        if rank == 0:
            dist.all_reduce(torch.ones(()))  # which rank 1 never joins
        pid = int((folder / "0").read_text())
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1.3)
        assert "Z" not in state(pid), "the first signal ended it"
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while "Z" not in state(pid):
            assert time.monotonic() < deadline, "the second signal did not end it"
            time.sleep(0.01)
        return request.received


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_second_signal_ends_a_rank_inside_a_collective(tmp_path: Path) -> None:
    """Oracle: the exit of the rank, which waits in gloo's C++ for one that never joins."""
    with pytest.raises(RuntimeError, match="rank 0 died without a word"):
        run_ranks(2, hang, tmp_path)


def test_signals_of_a_forked_child_do_not_reach_the_parent() -> None:
    """Oracle: a child forked in the loop, like a data loader's, dies of SIGTERM, and its parent continues."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with StopRequest() as request:
            code = exit_code_of_fork(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(20)))  # type: ignore[arg-type, func-returns-value]
            time.sleep(0.1)
            assert (code, request.received) == (-signal.SIGTERM, None)
            os.kill(os.getpid(), signal.SIGTERM)
            await_request(request)
    finally:
        signal.signal(signal.SIGTERM, before)
