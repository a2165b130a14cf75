"""Exchanges with ranks that do not exist.

The rows that a rank's experts receive depend on the router, so a trace assumes them: every rank
sends equally many rows to each, and the traced one receives ``plan.expert_imbalance`` times as many
as it sends. As it is slower than the others by this, they wait for it: its time is that of the
step.

Messages of ring attention travel on their group's stream, which the compute stream waits for where
they are used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    fake = _FakeExchanges(recorder, imbalance)
    replacements: list[tuple[Any, str, Any]] = [
        (expert_parallel, "read_splits", fake.read_splits),
        (ring, "_pass_on", fake.pass_on),
    ]
    if recorder.device_type == "meta":  # there are no process groups
        all_to_all = SimpleNamespace(all_to_all_single=fake.collective("all_to_all"))
        all_reduce = SimpleNamespace(all_reduce=fake.all_reduce, ReduceOp=dist.ReduceOp)
        replacements += [
            (ulysses, "_exchange", fake.exchange),
            (gathered, "all_gather", fake.collective("all_gather")),
            (gathered, "reduce_scatter", fake.collective("reduce_scatter")),
            (expert_parallel, "dist", all_to_all),
            (tensor_parallel, "all_gather", fake.collective("all_gather")),
            (tensor_parallel, "reduce_scatter", fake.collective("reduce_scatter")),
            (tensor_parallel, "dist", all_reduce),
            (vocabulary, "dist", all_reduce),
        ]
    with replaced(*replacements):
        yield


@dataclass
class _FakeExchanges:
    recorder: OpRecorder
    imbalance: float

    def collective(self, name: str) -> Callable[..., None]:
        def communicate(received: Tensor, sent: Tensor, *_: Any, group: Any) -> None:
            size = max(touched_bytes(received), touched_bytes(sent))
            self.recorder.exchanges.communicate(
                name, (received, sent), size, group, asynchronous=False
            )

        return communicate

    def all_reduce(self, tensor: Tensor, *_: Any, group: Any) -> None:
        self.collective("all_reduce")(tensor, tensor, group=group)

    def exchange(self, sent: Tensor, group: Any) -> Tensor:
        received = torch.empty_like(sent)
        self.collective("all_to_all")(received, sent, group=group)
        return received

    def pass_on(self, tensor: Tensor, group: Any) -> Callable[[], Tensor]:
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        wait = self.recorder.exchanges.communicate(
            "send", (sent, received), touched_bytes(sent), group, asynchronous=True
        )

        def arrive() -> Tensor:
            nonlocal sent
            wait()
            del sent  # kept until the message has left
            return received

        return arrive

    def read_splits(self, splits_2N: Tensor, rows: int) -> tuple[list[int], list[int]]:
        if self.recorder.device_type != "cpu":
            self.recorder.add(HostWaitStream(self.recorder.stream()))
        ranks = splits_2N.shape[1]
        received = min(round(rows * self.imbalance), rows * ranks)
        return _even(rows, ranks), _even(received, ranks)


def _even(rows: int, ranks: int) -> list[int]:
    """Rows divided as evenly as possible."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
