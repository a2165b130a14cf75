"""Heartbeats: the position of a rank, and the ranks missing from a collective or from the process
group."""

import multiprocessing
import os
import re
import resource
import signal
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsdptoys.train.heartbeat as heartbeat_module
from fsdptoys.config.compose import compose
from fsdptoys.errors import ConfigError, LostRanksError
from fsdptoys.train.distributed import process_group
from fsdptoys.train.heartbeat import (
    LOST_PEER,
    RECORD_BYTES,
    TIMED_OUT,
    HeartbeatWriter,
    describe_last_heartbeats,
    explain_lost_ranks,
    heartbeat_path,
    read_heartbeats,
)
from tests.harness.processes import wait_until
from tests.harness.ranks import run_ranks

SECONDS = 3.0  # of the collective that times out


def write(
    folder: Path, rank: int, *beats: tuple[int, str], start: str | None = None
) -> None:
    """Write heartbeats of a rank, by default of this start of the run."""
    heartbeat = HeartbeatWriter(folder, rank)
    if start is not None:
        heartbeat._fixed["start"] = start
    for step, phase in beats:
        heartbeat.beat(step, phase)
        assert heartbeat_path(folder, rank).stat().st_size == RECORD_BYTES
    heartbeat.close()


def test_heartbeat_round_trips(tmp_path: Path) -> None:
    """Oracle: the written values; all records have one size."""
    write(
        tmp_path / "beats",
        3,
        (1, "forward"),
        (120, "forward"),
        (120, "a phase of a very long name " * 9),
    )
    sign = read_heartbeats(tmp_path / "beats")[3]
    assert (sign.rank, sign.step, sign.beat, sign.pid) == (3, 120, 1, os.getpid())
    assert sign.host == socket.gethostname()[:64] and abs(sign.time - time.time()) < 60


def test_damaged_heartbeat_files_are_ignored(tmp_path: Path) -> None:
    """Oracle: the one complete record; others are copies or torn; a torn one is still valid
    JSON."""
    for rank in range(4):
        write(tmp_path, rank, (1234, "forward"))
    whole = heartbeat_path(tmp_path, 0).read_bytes()
    heartbeat_path(tmp_path, 1).write_bytes(
        heartbeat_path(tmp_path, 1).read_bytes().replace(b"1234", b"1299")
    )
    heartbeat_path(tmp_path, 2).write_bytes(whole[:50])
    heartbeat_path(tmp_path, 3).write_bytes(b"")
    heartbeat_path(tmp_path, 4).write_bytes(b"[1]\xff")
    heartbeat_path(tmp_path, 5).write_bytes(whole)
    assert list(read_heartbeats(tmp_path)) == [0]


def write_until_ended(folder: Path) -> None:
    heartbeat = HeartbeatWriter(folder, 0)
    for step in range(1, 10_000_000):
        heartbeat.beat(step, "odd" if step % 2 else "even, and longer")


def test_concurrent_reader_sees_only_complete_records(tmp_path: Path) -> None:
    """Oracle: another process writes as fast as it can; each record read is consistent, and records
    are in order."""
    write(tmp_path, 0, (0, "even, and longer"))
    writer = multiprocessing.get_context("fork").Process(
        target=write_until_ended, args=(tmp_path,)
    )
    writer.start()
    try:
        wait_until(
            lambda: read_heartbeats(tmp_path)[0].step > 0,
            "its first record",
            [writer.pid],
        )  # type: ignore[list-item]
        signs = [
            sign for _ in range(2000) for sign in read_heartbeats(tmp_path).values()
        ]
    finally:
        writer.kill()
        writer.join()
    assert {(sign.step % 2, sign.phase) for sign in signs} == {
        (0, "even, and longer"),
        (1, "odd"),
    }
    assert [sign.step for sign in signs] == sorted(sign.step for sign in signs)


MESSAGES = [
    (
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to "
        "complete"
    ),
    (
        "[gloo/transport/tcp/unbound_buffer.cc:133] Timed out waiting 2000ms for send operation to "
        "complete"
    ),
    "Wait timeout",
    "wait timeout after 2000ms, keys: /default_pg/0//cpu//0/1",
    "Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
        "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
    ),
    (
        "[Rank 5] Watchdog caught collective operation timeout: WorkHCCL(SeqNum=11, "
        "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600196 milliseconds before timing out."
    ),
    (
        "EI0002: The wait execution of the Notify register times out. Reason: The Notify register "
        "has not received the Notify record from remote rank [4]."
    ),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_timeout_messages_are_recognized(message: str) -> None:
    """Oracle: gloo's messages in torch 2.7.1 and 2.13.0, seen; the stores' and NCCL's, from their
    sources; torch_npu's and HCCL's, from reports on hiascend.com (forum, and CANN's description of
    EI0002).
    """
    assert TIMED_OUT.search(message) and not LOST_PEER.search(message)


def lose_ranks(folder: Path, how: str) -> str:
    """Rank 0's message when ranks 1, 2 and 3 do not join its collective."""
    rank = dist.get_rank()
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    if rank != 3 or how == "together":
        write(folder, rank, (7, "forward"), (7, "backward"), (7, "forward"))
    if rank == 0 or how == "together":
        write(
            folder,
            rank,
            (7, "forward"),
            (7, "backward"),
            (7, "forward"),
            (7, "backward"),
        )
    pid = 0
    if rank == 1 and how in ("SIGKILL", "SIGSTOP"):
        # This process would read its own heartbeat as alive, so another process stands for it
        pid = os.fork()
        if pid == 0:
            HeartbeatWriter(folder, 1).beat(7, "forward")
            os.kill(os.getpid(), signal.Signals[how])
        # It is dead, and its status has not been read yet.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    dist.barrier()
    timeout_file = folder / "seen"
    if rank:
        wait_until(timeout_file.exists, "the timeout of rank 0")
        if pid:
            os.kill(pid, signal.SIGKILL)
        return ""
    try:
        with explain_lost_ranks(folder, rank, 4, {"launch.timeout_seconds": SECONDS}):
            dist.all_reduce(torch.ones(()), group=group)
    except LostRanksError as error:
        return str(error)
    finally:
        timeout_file.touch()
    return "no error"


@pytest.mark.parametrize(
    "how, expected",
    [
        (
            "late",
            r"^a collective timed out \(launch.timeout_seconds=3\); this rank is in step 7 "
            r"\(backward\); rank 1 did not arrive; its last heartbeat is of step 7 \(forward\), "
            r"\d+ s ago, pid \d+ on \S+; rank 2 did not arrive; .*; "
            r"no heartbeat of rank 3 \[.*Timed out waiting 3000ms",
        ),
        (
            "SIGKILL",
            r"; rank 1 has ended; its last heartbeat is of step 7 \(forward\), "
            r"\d+ s ago, pid \d+ on \S+; rank 2 did",
        ),
        (
            "SIGSTOP",
            r"; rank 1 is stopped \(SIGSTOP\); its last heartbeat is of step 7 \(forward\), "
            r"\d+ s ago, pid",
        ),
        (
            "together",
            r"; the last heartbeat of all 4 ranks is of step 7 \(backward\): "
            r"the network .* hangs within",
        ),
    ],
)
def test_ranks_missing_from_a_collective_are_named(
    tmp_path: Path, how: str, expected: str
) -> None:
    """Oracle: the missing ranks, in phases that repeat within a step, under gloo's real timeout."""
    # A rank of an earlier start of the run was further on
    write(tmp_path, 3, (9, "forward"), start="another")
    message = run_ranks(4, lose_ranks, tmp_path, how)[0]
    assert re.search(expected, message), message


def test_other_errors_propagate_unchanged(tmp_path: Path) -> None:
    """Oracle: the error itself."""
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with (
        pytest.raises(RuntimeError) as caught,
        explain_lost_ranks(tmp_path, 0, 1, {"launch.timeout_seconds": 600}),
    ):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("milliseconds", "option"),
    [(600000, "launch"), (7200000, "checkpoint"), (5, "launch")],
)
def test_timeout_is_named_by_its_option_behind_other_errors(
    tmp_path: Path, milliseconds: int, option: str
) -> None:
    """Oracle: the option with the value in gloo's message; pipelines wrap that error in another
    one."""
    limits = {"launch.timeout_seconds": 600.0, "checkpoint.timeout_seconds": 7200.0}
    limit = limits[f"{option}.timeout_seconds"]
    says = rf"^a collective timed out \({option}\.timeout_seconds={limit:g}\); "
    with (
        pytest.raises(LostRanksError, match=says),
        explain_lost_ranks(tmp_path, 0, 1, limits),
    ):
        try:
            raise RuntimeError(
                f"Timed out waiting {milliseconds}ms for recv operation to complete"
            )
        except RuntimeError as error:
            raise RuntimeError("failed to run forward") from error


def test_last_heartbeats_cover_only_the_requested_workers(tmp_path: Path) -> None:
    """Oracle: the expected message; a record of another start of the run is not in it."""
    for rank, (step, start) in enumerate(
        [(5, "now"), (4, "now"), (5, "now"), (9, "before")]
    ):
        write(tmp_path, rank, (step, "forward"), start=start)
    sentence = describe_last_heartbeats(tmp_path, {0: os.getpid(), 3: -1}) or ""
    assert re.sub(r"\d+ s ago", "N s ago", sentence) == (
        "last heartbeats: rank 1 in step 4 (forward) N s ago, ranks 0, 2 in step 5 (forward) N s "
        "ago"
    )
    assert describe_last_heartbeats(tmp_path, {0: -1}) is None


def test_full_disk_does_not_end_a_run(tmp_path: Path) -> None:
    """Oracle: the system's own limit on file sizes, set to zero."""
    heartbeat = HeartbeatWriter(tmp_path, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        heartbeat.beat(1, "forward")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    heartbeat.close()
    assert read_heartbeats(tmp_path) == {}


def test_symbolic_link_in_place_of_a_heartbeat_is_replaced(tmp_path: Path) -> None:
    """Oracle: the content of the link's target."""
    (tmp_path / "precious").write_text("precious")
    heartbeat_path(tmp_path, 0).symlink_to("precious")
    write(tmp_path, 0, (1, "forward"))
    assert (tmp_path / "precious").read_text() == "precious" and 0 in read_heartbeats(
        tmp_path
    )


@pytest.mark.parametrize(
    "change",
    [
        {"pid": 2**40},
        {"pid": -1},
        {"pid": "1"},
        {"step": "2"},
        {"time": None},
        {"host": "a\x1b[2J"},
        {"phase": 3},
        {},
    ],
)
def test_invalid_heartbeat_is_ignored(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """Oracle: the same record unchanged, which is read; checksums are of the file's content."""
    record = {
        "rank": 0,
        "host": "h",
        "pid": 1,
        "start": "s",
        "step": 1,
        "phase": "p",
        "beat": 0,
        "time": 1.0,
    }
    heartbeat_path(tmp_path, 0).write_bytes(heartbeat_module._encode(record | change))
    assert bool(read_heartbeats(tmp_path)) == (not change)


def join(answers: Connection) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    config = compose(["launch.timeout_seconds=1", "launch.device=cpu"]).config
    try:
        with process_group(config):
            answers.send("joined")
    except (LostRanksError, ConfigError) as error:
        answers.send(str(error))
    os._exit(0)


def message_of_a_rank(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    """The error message of one of two ranks, over the real store."""
    for name, value in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=join, args=(sender,))
    process.start()
    sender.close()
    message = str(receiver.recv())
    process.join()
    return message


def test_missing_ranks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the expected message, without another rank."""
    message = message_of_a_rank(
        monkeypatch, RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0"
    )
    assert message.startswith(
        "not all 2 ranks joined the process group within launch.timeout_seconds=1 [Timed out after "
    )


def test_unreachable_or_taken_master_port_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the expected message, for a free port, and for one where something else than rank 0
    listens."""
    with socket.socket() as other:
        other.bind(("localhost", 0))
        port = str(other.getsockname()[1])
        message = message_of_a_rank(
            monkeypatch, RANK="1", MASTER_ADDR="localhost", MASTER_PORT=port
        )
        assert message.startswith(
            "not all 2 ranks joined the process group within launch.timeout_seconds=1 [The client "
        )
        other.listen()
        message = message_of_a_rank(
            monkeypatch, RANK="0", MASTER_ADDR="localhost", MASTER_PORT=port
        )
        assert (
            message
            == f"MASTER_PORT={port} is taken on this machine by another program; set another"
        )
