"""Joining the process group."""

import multiprocessing
import os
import socket
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from fsdptoys.config.compose import compose
from fsdptoys.errors import ConfigError, LostRanksError
from fsdptoys.train.distributed import process_group


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
    assert receiver.poll(60)
    message = receiver.recv()
    process.join()
    return str(message)


def test_missing_ranks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the expected message, without another rank."""
    message = message_of_a_rank(monkeypatch, RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    assert message.startswith(
        "not all 2 ranks joined the process group within launch.timeout_seconds=1 [Timed out after "
    )


def test_unreachable_or_taken_master_port_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the expected message, for a free port, and for one where something else than rank 0 listens."""
    with socket.socket() as other:
        other.bind(("localhost", 0))
        port = str(other.getsockname()[1])
        message = message_of_a_rank(monkeypatch, RANK="1", MASTER_ADDR="localhost", MASTER_PORT=port)
        assert message.startswith(
            "not all 2 ranks joined the process group within launch.timeout_seconds=1 [The client "
        )
        other.listen()
        message = message_of_a_rank(monkeypatch, RANK="0", MASTER_ADDR="localhost", MASTER_PORT=port)
        assert message == f"MASTER_PORT={port} is taken on this machine by another program; set another"
