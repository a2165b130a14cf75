"""Pipeline parallelism: ``mesh.pp_size`` blocks of ranks have consecutive layers each, and pass
micro-batches on.

A stage (``models.stages``) receives hidden states of a micro-batch, runs its blocks and sends the
result; in the backward, gradients of hidden states go the other way. A rank sends to the rank at
the same position in the next stage: B·t·D numbers per micro-batch and direction. FSDP would gather
the parameters instead. Stages wait at the beginning and the end of a step; the schedule decides for
how long, and how many micro-batches are in flight:

- gpipe: all forwards, then all backwards (arXiv:1811.06965);
- 1f1b: as soon as the last stage has a micro-batch, forwards and backwards alternate
  (arXiv:1806.03377, 2006.09503);
- interleaved: 1f1b over two stages on each rank, stage s on rank s mod N, so that waits are half as
  long (arXiv:2104.04473);
- zero_bubble: the same with a backward in two parts, gradients of hidden states first, so that
  those of weights fill the waits (arXiv:2401.10241).

``torch.distributed.pipelining`` executes them and calls ``StageModule``. All stages of a rank are
parts of one model. Its FSDP2 units stay gathered from their first forward to the end of the step,
and reduce their gradients once, after the last backward. The loss is divided before the backward,
as without stages. Not covered: skip connections; overlap of the reduction with backwards.

Shapes: B sequences of a micro-batch, T tokens, t = T / (cp · tp) of this rank's part, D width, V
vocabulary.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.models import DecoderModel, KeyValueCache
from fsdptoys.models.layers import LossFn
from fsdptoys.models.stage_split import keep_stages, split_model
from fsdptoys.models.stages import Stage

from .mesh import Axes


class PipelineSchedule(Enum):
    """Order of forwards and backwards of a step's micro-batches."""

    gpipe = "gpipe"
    """All forwards, then all backwards."""
    # a value is typed as its name, and no identifier begins with a digit
    locals()["1f1b"] = "1f1b"
    """Forwards and backwards in turn: at most as many micro-batches in flight as stages."""
    interleaved = "interleaved"
    """1f1b over two stages on each rank: waits half as long, twice the transfers."""
    zero_bubble = "zero_bubble"
    """interleaved, with gradients of weights computed while a stage would wait."""

    @property
    def stages_per_rank(self) -> int:
        """Stages of each rank."""
        return (
            2
            if self in (PipelineSchedule.interleaved, PipelineSchedule.zero_bubble)
            else 1
        )


@dataclass
class Step:
    """Inputs of a step, and the sum of its losses."""

    microbatches: Sequence[tuple[Tensor, Tensor]]
    loss_fn: LossFn
    per_token: Tensor
    """Factor on the loss before the backward."""
    around: Callable[[nn.Module], AbstractContextManager[None]]
    """Entered around each forward of a stage, with its modules."""
    loss_sum: Tensor


class Pipeline:
    """The stages of this rank, and the transfers between ranks.

    Args:
        schedule: of training steps.
        groups: the ranks at this rank's place of all blocks, in the order of the blocks; and those
            of its own block.
        axes: of the mesh.
        dtypes: of hidden states, and of the loss.
        device: of this rank.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        axes: Axes,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
    ) -> None:
        self.group, self.stage_group = groups
        self.dtype, self.loss_dtype = dtypes
        self.device = device
        self.sharing = axes.sharing
        self.rank = self.group.rank()
        self.ranks = self.group.size()
        self.count = self.ranks * schedule.stages_per_rank
        """Stages of the model."""
        self.stages: dict[int, Stage] = {}
        """Index → stage of this rank."""
        self.owners: dict[str, int] = {}
        """Name of each parameter of the full model → its rank in the group."""
        self.shapes: dict[str, torch.Size] = {}
        """Name of each parameter of the full model → its shape."""
        self.schedule = schedule
        self.divide: Callable[[DecoderModel, int, int], list[Stage]] = split_model
        """Divides the layers of a model among a number of stages, for a length of sequences."""
        self.fixed_shape: tuple[int, int, int] | None = None
        """Shape of hidden states between stages where tokens do not say it."""

    def cut(self, model: DecoderModel, seq_len: int) -> None:
        """Drop all parts of a full model that other ranks have."""
        self.shapes = {name: param.shape for name, param in model.named_parameters()}
        stages = self.divide(model, self.count, seq_len)
        for name in self.shapes:
            self.owners[name] = next(
                self.owner(index)
                for index, stage in enumerate(stages)
                if stage.has(name)
            )
        self.stages = {
            index: stages[index] for index in range(self.rank, self.count, self.ranks)
        }
        keep_stages(model, list(self.stages.values()))

    def owner(self, index: int) -> int:
        """Rank in the group of a stage."""
        return index % self.ranks

    def peer(self, index: int) -> int:
        """Global rank of a stage, at this rank's place."""
        return dist.get_global_rank(self.group, self.owner(index))

    def broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        """A tensor of a rank of the group. A collective of the group."""
        tensor = tensor.contiguous()
        dist.broadcast(
            tensor, src=dist.get_global_rank(self.group, owner), group=self.group
        )
        return tensor

    def gather(self, own: list[Any]) -> list[Any]:
        """The lists of all ranks of the group, one after the other. A collective of the group."""
        lists: list[Any] = [None] * self.ranks
        dist.all_gather_object(lists, own, group=self.group)
        return list(itertools.chain.from_iterable(lists))

    def share_parameters(
        self, own: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """All parameters of the full model on the CPU, in its order, from this rank's. A collective
        of the group."""
        for name, owner in self.owners.items():
            tensor = torch.empty(self.shapes[name], device=self.device)
            if owner == self.rank:
                own_name, full = next(own)
                assert own_name == name, "a stage's parameters are in another order"
                tensor.copy_(full)
            yield name, self.broadcast(tensor, owner).cpu()

    def hidden_shape(
        self, tokens_BT: Tensor, dim: int, in_full: bool
    ) -> tuple[int, int, int]:
        """(B, t, D) of the hidden states sent between stages; (B, T, D) if ``in_full``."""
        if self.fixed_shape is not None:
            return self.fixed_shape
        B, T = tokens_BT.shape
        return B, T if in_full else T // self.sharing, dim


class PipelinedModel(nn.Module):
    """The stages of all ranks as one model: a forward without gradients, or one training step."""

    def __init__(self, model: DecoderModel, pipeline: Pipeline) -> None:
        super().__init__()
        self.model = model
        self.pipeline = pipeline
        self._schedule: Any = None
        self.step: Step | None = None

    @torch.no_grad()
    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        loss_fn: LossFn | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Logits on all ranks; with labels the loss, on the ranks of the last stage, and zero on
        others. A collective.

        Arguments are those of ``DecoderModel.forward``; only ranks that share sequences, or have
        other stages, may have the same ones.
        """
        pipeline = self.pipeline
        config = self.model.config
        shape = pipeline.hidden_shape(tokens_BT, config.dim, in_full=labels_BT is None)
        output = torch.zeros((), device=pipeline.device)
        sends = []
        for index, stage in pipeline.stages.items():
            hidden_BtD = None
            if not stage.embeds:
                hidden_BtD = torch.empty(
                    shape, dtype=pipeline.dtype, device=pipeline.device
                )
                dist.recv(
                    hidden_BtD, src=pipeline.peer(index - 1), group=pipeline.group
                )
            out = self.model(
                tokens_BT, labels_BT, loss_fn, cache, stage=stage, hidden_BTD=hidden_BtD
            )
            if stage.predicts:
                output = out
            else:
                sends.append(
                    dist.isend(
                        out.contiguous(),
                        dst=pipeline.peer(index + 1),
                        group=pipeline.group,
                    )
                )
        for send in sends:
            assert send is not None
            send.wait()
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        if labels_BT is not None:
            return output
        last = pipeline.owner(pipeline.count - 1)
        if pipeline.rank != last:
            output = torch.empty(
                *tokens_BT.shape,
                config.vocab_size,
                dtype=pipeline.dtype,
                device=pipeline.device,
            )
        return pipeline.broadcast(output, last)

    def train_step(self, step: Step) -> None:
        """Forward and backward of a step's micro-batches; gradients are reduced. A collective.

        Only ranks of the last stage add to the losses.
        """
        self.step = step
        count = len(step.microbatches)
        if self._schedule is None:
            self._schedule = self._build_schedule(count)
        model: Any = self.model
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        indices = torch.arange(count)
        stages = self.pipeline.stages.values()
        inputs = (indices,) if any(stage.embeds for stage in stages) else ()
        target = {"target": indices} if any(stage.predicts for stage in stages) else {}
        self._schedule.step(*inputs, index=indices, **target)
        reduce_gradients(model)
        self.step = None

    def run_stage(
        self, stage: Stage, modules: nn.Module, received: Tensor, index: Tensor
    ) -> Tensor:
        """One stage's forward of the micro-batch at ``index``: hidden states, or the loss with one
        element."""
        step = self.step
        assert step is not None
        tokens_BT, labels_BT = step.microbatches[int(index)]
        hidden_BtD = None if stage.embeds else received
        with step.around(modules):
            output: Tensor = self.model(
                tokens_BT, labels_BT, step.loss_fn, stage=stage, hidden_BTD=hidden_BtD
            )
        if not stage.predicts:
            return output
        step.loss_sum += output.detach()
        return output.unsqueeze(0)

    def scaled_loss(self, loss: Tensor, index: Tensor) -> Tensor:
        """The loss as the backward begins with it."""
        assert self.step is not None
        return loss.squeeze(0) * self.step.per_token

    def _build_schedule(self, count: int) -> Any:
        from torch.distributed import pipelining

        assert self.step is not None
        pipeline = self.pipeline
        kinds = PipelineSchedule
        shape = pipeline.hidden_shape(
            self.step.microbatches[0][0], self.model.config.dim, in_full=False
        )
        # Given shapes spare a first forward that would find them, with collectives and routing of
        # its own.
        hidden = torch.empty(
            shape, dtype=pipeline.dtype, device="meta", requires_grad=True
        )
        loss = torch.empty(
            1, dtype=pipeline.loss_dtype, device="meta", requires_grad=True
        )
        stages = [
            pipelining.PipelineStage(
                StageModule(self, stage),
                index,
                pipeline.count,
                pipeline.device,
                input_args=torch.empty(1, dtype=torch.int64, device="meta")
                if stage.embeds
                else hidden,
                output_args=loss if stage.predicts else hidden,
                group=pipeline.group,
            )
            for index, stage in pipeline.stages.items()
        ]
        for stage in stages:
            finish = functools.partial(
                _then_accumulate, stage.backward_weight_one_chunk, self.model
            )
            stage.backward_weight_one_chunk = finish  # type: ignore[method-assign]
        single: dict[PipelineSchedule, Any] = {
            kinds.gpipe: pipelining.ScheduleGPipe,
            kinds("1f1b"): pipelining.Schedule1F1B,
        }
        options: dict[str, Any] = {
            "n_microbatches": count,
            "loss_fn": self.scaled_loss,
            "scale_grads": False,
        }
        if pipeline.schedule in single:
            return single[pipeline.schedule](stages[0], **options)
        interleaved = pipeline.schedule is kinds.interleaved
        schedule: Any = (
            pipelining.ScheduleInterleaved1F1B
            if interleaved
            else pipelining.ScheduleInterleavedZeroBubble
        )
        return schedule(stages, **options)


class StageModule(nn.Module):
    """One stage as the schedules call it; its parameters are those of the stage."""

    def __init__(self, pipelined: PipelinedModel, stage: Stage) -> None:
        super().__init__()
        self.parts = nn.ModuleList(stage.modules(pipelined.model))
        self.stage = stage
        # A bound method, since a module would be a child with all stages' parameters
        self._run = pipelined.run_stage

    def forward(self, received: Tensor, index: Tensor) -> Tensor:
        """Run the micro-batch at ``index`` on hidden states of the stage before; the first stage
        ignores them."""
        return self._run(self.stage, self.parts, received, index)


def reduce_gradients(model: Any) -> None:
    """Reduce the gradients that FSDP2 has accumulated, and free its gathered parameters, after the
    last backward.

    The schedules' backwards are several, and none knows that it is the last of a unit, so that no
    hook of FSDP2 may reduce.
    """
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    end_backward(model)


def end_backward(model: Any) -> None:
    """Do what FSDP2 does at the end of a backward: accumulate, in the dtype of reductions, or
    reduce.

    Private API, which ``torch.distributed.pipelining`` calls for this too; tried with torch 2.7 and
    2.13.
    """
    model._get_fsdp_state()._root_post_backward_final_callback()


def _then_accumulate(
    backward_weights: Callable[..., None], model: nn.Module, *args: Any, **options: Any
) -> None:
    """Accumulate in the reduce dtype after a weight-only backward, which bypasses FSDP2's hooks."""
    backward_weights(*args, **options)
    end_backward(model)
