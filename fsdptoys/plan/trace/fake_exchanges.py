"""Exchanges with ranks that do not exist.

The rows that a rank's experts receive depend on the router, so a trace assumes them: every rank
sends equally many rows to each, and the traced one receives ``plan.expert_imbalance`` times as many
as it sends. As it is slower than the others by this, they wait for it: its time is that of the
step.

Messages of ring attention travel on their group's stream, which the compute stream waits for where
they are used.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.loss import vocabulary
from fsdptoys.parallel import expert_parallel, gathered, ring, tensor_parallel, ulysses
from fsdptoys.plan.simulator.events import HostWaitStream

from .fake_device import replaced
from .op_costs import touched_bytes
from .op_recorder import OpRecorder


@contextmanager
def fake_exchanges(recorder: OpRecorder, imbalance: float) -> Iterator[None]:
    """Let the traced rank receive ``imbalance`` times the mean of all ranks' rows, and messages as
    large as its own."""
    replacements: list[tuple[Any, str, Any]] = [
        (expert_parallel, "read_splits", functools.partial(_read_splits, recorder, imbalance)),
        (ring, "_pass_on", functools.partial(_pass_on, recorder)),
    ]
    if recorder.device_type == "meta":  # there are no process groups

        def communicate(name: str) -> Callable[..., None]:
            return functools.partial(_communicate, recorder, name)

        replacements += [
            (ulysses, "_exchange", functools.partial(_exchange, recorder)),
            (gathered, "_all_gather", communicate("all_gather")),
            (gathered, "_reduce_scatter", communicate("reduce_scatter")),
            (expert_parallel, "dist", SimpleNamespace(all_to_all_single=communicate("all_to_all"))),
            (tensor_parallel, "_all_gather", communicate("all_gather")),
            (tensor_parallel, "_reduce_scatter", communicate("reduce_scatter")),
            (
                tensor_parallel,
                "dist",
                SimpleNamespace(all_reduce=functools.partial(_all_reduce, recorder)),
            ),
            (
                vocabulary,
                "dist",
                SimpleNamespace(
                    all_reduce=functools.partial(_all_reduce, recorder), ReduceOp=dist.ReduceOp
                ),
            ),
        ]
    with replaced(*replacements):
        yield


def _communicate(
    recorder: OpRecorder, name: str, received: Tensor, sent: Tensor, *_: Any, group: Any
) -> None:
    size = max(touched_bytes(received), touched_bytes(sent))
    recorder.communicate(name, (received, sent), size, group, asynchronous=False)


def _all_reduce(recorder: OpRecorder, tensor: Tensor, *_: Any, group: Any) -> None:
    _communicate(recorder, "all_reduce", tensor, tensor, group=group)


def _exchange(recorder: OpRecorder, sent: Tensor, group: Any) -> Tensor:
    received = torch.empty_like(sent)
    _communicate(recorder, "all_to_all", received, sent, group=group)
    return received


def _pass_on(recorder: OpRecorder, tensor: Tensor, group: Any) -> Callable[[], Tensor]:
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    wait = recorder.communicate(
        "send", (sent, received), touched_bytes(sent), group, asynchronous=True
    )

    def arrive() -> Tensor:
        nonlocal sent
        wait()
        del sent  # kept until the message has left
        return received

    return arrive


def _read_splits(
    recorder: OpRecorder, imbalance: float, splits_2N: Tensor, rows: int
) -> tuple[list[int], list[int]]:
    if recorder.device_type != "cpu":
        recorder.add(HostWaitStream(recorder.stream()))
    ranks = splits_2N.shape[1]
    return _even(rows, ranks), _even(min(round(rows * imbalance), rows * ranks), ranks)


def _even(rows: int, ranks: int) -> list[int]:
    """Rows divided as evenly as possible."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
