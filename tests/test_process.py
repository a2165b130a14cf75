"""This process as a rank: its group."""

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from fsdptoys.compose import compose
from fsdptoys.errors import LostRanksError
from fsdptoys.process import process_group


def join(answers: Connection) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    config = compose(["launch.timeout_seconds=1", "launch.device=cpu"]).config
    try:
        with process_group(config):
            answers.send("joined")
    except LostRanksError as error:
        answers.send(str(error))
    os._exit(0)


def test_rank_that_waits_for_others_in_vain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: one rank of two, over the real store."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=join, args=(sender,))
    process.start()
    assert receiver.poll(60)
    told = receiver.recv()
    process.join()
    assert told.startswith("not all 2 ranks joined the process group within launch.timeout_seconds=1 [Timed out after ")
