"""Stop requests: recorded by the rank that receives them; a second one takes effect immediately."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdptoys.train import stop
from fsdptoys.train.stop import STOP_SIGNALS, StopRequest
from tests.harness.disks import in_child
from tests.harness.processes import wait_until
from tests.harness.ranks import run_ranks


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_first_signal_is_recorded_and_repeats_within_a_second_are_ignored(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the received signal; the previous handlers are restored."""
    assert stop.SAME_REQUEST_SECONDS == 1.0
    monkeypatch.setattr(stop, "SAME_REQUEST_SECONDS", 1000.0)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with StopRequest() as request:
        assert request.received is None
        for sent in (number, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), sent)
        wait_until(lambda: request.received is not None, "the request")
    assert request.received == number.name
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    assert not [
        thread for thread in threading.enumerate() if thread.name == "stop request"
    ]


def request_and_kill_self() -> None:
    with StopRequest():
        pass
    kill_self()


@pytest.mark.parametrize(
    "body", [kill_self, request_and_kill_self], ids=["before", "after"]
)
def test_signal_outside_training_ends_the_process(body: object) -> None:
    """Oracle: the exit code of a process killed by the signal."""
    assert in_child(body) == -signal.SIGTERM  # type: ignore[arg-type]


def hang(folder: Path) -> None:
    """Rank 0 waits for rank 1, which sends it two signals."""
    stop.SAME_REQUEST_SECONDS = 0.0
    pid = folder / "pid"
    recorded = folder / "recorded"
    with StopRequest() as request:
        if dist.get_rank() == 0:

            def record() -> None:
                wait_until(lambda: request.received is not None, "the first signal")
                recorded.touch()

            pid.write_text(str(os.getpid()))
            threading.Thread(target=record).start()
        dist.barrier()
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(()))  # which rank 1 never joins
        number = int(pid.read_text())
        os.kill(number, signal.SIGUSR1)
        wait_until(recorded.exists, "the first signal")
        assert state(number) != "Z", "the first signal ended it"
        os.kill(number, signal.SIGTERM)
        wait_until(
            lambda: state(number) == "Z", "the end by the second signal", [number]
        )


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_second_signal_ends_a_rank_inside_a_collective(tmp_path: Path) -> None:
    """Oracle: the exit of the rank, which waits in gloo's C++ for one that never joins."""
    with pytest.raises(RuntimeError, match="rank 0 died without a word"):
        run_ranks(2, hang, tmp_path)
    assert (tmp_path / "recorded").exists()


def test_signals_of_a_forked_child_do_not_reach_the_parent() -> None:
    """Oracle: a child forked in the loop, like a data loader's, dies of SIGTERM; the parent records
    its own signal."""
    with StopRequest() as request:
        assert in_child(kill_self) == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: request.received is not None, "the request")
    assert request.received == "SIGUSR1"
