"""Messages between stages of a pipeline with one rank that exists.

``torch.distributed.pipelining`` sends and receives by public functions, which are replaced here:
received tensors have no values, and the events of a trace say which messages were issued together.
As NCCL does for a group that is bound to a device, all messages of a rank have one stream, the
group's own.

A stage has forwards and backwards of several micro-batches in one phase of the step, so that the
phases by which blocks of memory get their purpose begin here. All micro-batches have the tokens of
the first: their places are numbers of fake tensors. Before the first step stages agree on how they
know the shapes of messages (a private function of torch 2.13); they were given all, which a trace
states instead of asking ranks that do not exist.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.models.stages import Stage
from fsdptoys.parallel.pipeline import PipelinedModel

from .fake_device import replaced
from .op_recorder import OpRecorder


class FakeWork:
    """Messages under way, which hold their tensors until something waits for them."""

    def __init__(
        self,
        recorder: OpRecorder,
        parts: Sequence[tuple[bool, Tensor, int]],
        group: Any,
    ) -> None:
        self._parts = parts
        self._wait = recorder.exchanges.exchange(parts, group)

    def wait(self, *_: Any) -> bool:
        """Let the current stream wait."""
        self._wait()
        self._parts = ()
        return True


@contextmanager
def fake_stages(recorder: OpRecorder) -> Iterator[None]:
    """Let a stage's messages be recorded instead of sent."""
    from torch.distributed.pipelining import (  # takes a second to import
        _utils,
        schedules,
    )

    def isend(tensor: Tensor, *, group: Any, tag: int, group_dst: int) -> FakeWork:
        return FakeWork(recorder, [(True, tensor, group_dst)], group)

    def irecv(tensor: Tensor, *, group: Any, tag: int, group_src: int) -> FakeWork:
        return FakeWork(recorder, [(False, tensor, group_src)], group)

    def batch_isend_irecv(ops: Sequence[dist.P2POp]) -> list[FakeWork]:
        parts = [(op.op is isend, op.tensor, op.group_peer) for op in ops]
        return [FakeWork(recorder, parts, ops[0].group)]

    run_stage = PipelinedModel.run_stage

    def run_first(
        pipelined: PipelinedModel,
        stage: Stage,
        modules: nn.Module,
        received: Tensor,
        number: Tensor,
    ) -> Tensor:
        recorder.storages.begin_phase("forward")
        out = run_stage(pipelined, stage, modules, received, torch.tensor(0))
        recorder.storages.begin_phase("backward")
        return out

    def agree(_: Any, stages: Sequence[Any], *__: Any) -> None:
        for stage in stages:
            stage._inference_mode = _utils.InferenceMode.STATIC

    functions = {"isend": isend, "irecv": irecv, "batch_isend_irecv": batch_isend_irecv}
    # An operation's function is compared with those of the module that defines them.
    owners = (dist, dist.distributed_c10d)
    replacements: list[tuple[Any, str, Any]] = [
        (owner, name, function)
        for owner in owners
        for name, function in functions.items()
    ]
    if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
        replacements.append((schedules._PipelineSchedule, "_warmup_p2p", agree))
    with replaced(*replacements, (PipelinedModel, "run_stage", run_first)):
        yield
