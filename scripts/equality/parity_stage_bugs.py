"""Bugs of pipelines for ``parity_bugs``: each function returns a context in which ranks are forked.

Pipelines make these mistakes easy: a loss divided too late, micro-batches that are not counted, a
norm without some stages, activations of another micro-batch.
"""

from typing import Any
from unittest import mock

from torch import Tensor, nn

from fsdptoys.models.stages import Stage
from fsdptoys.parallel.pipeline import PipelinedModel, Step
from fsdptoys.parallel.strategy import Strategy
from fsdptoys.utils.dtensor import local_tensor


def divide_after_the_backward() -> Any:
    """The last stage divides its gradients by the valid tokens after its backward, too late for the
    other stages."""
    train_step = PipelinedModel.train_step

    def divide_later(self: PipelinedModel, step: Step) -> None:
        train_step(self, step)
        if any(stage.predicts for stage in self.pipeline.stages.values()):
            for param in self.model.parameters():
                assert param.grad is not None
                local_tensor(param.grad).mul_(step.per_token)

    undivided = mock.Mock(side_effect=lambda loss, index: loss.squeeze(0))
    return mock.patch.multiple(
        PipelinedModel, train_step=divide_later, scaled_loss=undivided
    )


def keep_the_last_micro_batch() -> Any:
    """Only the last micro-batch of a step has gradients."""
    scaled_loss = PipelinedModel.scaled_loss

    def of_the_last(self: PipelinedModel, loss: Tensor, index: Tensor) -> Tensor:
        assert self.step is not None
        return scaled_loss(self, loss, index) * float(
            int(index) == len(self.step.microbatches) - 1
        )

    return mock.patch.object(PipelinedModel, "scaled_loss", of_the_last)


def forget_other_stages_in_the_norm() -> Any:
    """Each stage clips by the norm of its own gradients."""
    total_norm = Strategy.total_norm

    def of_own_stage(self: Strategy, norms: list[Tensor]) -> Tensor:
        with mock.patch.object(self, "pipeline", None):
            return total_norm(self, norms)

    return mock.patch.object(Strategy, "total_norm", of_own_stage)


def send_another_micro_batch() -> Any:
    """Stages after the first get the hidden states of the micro-batch before."""
    run_stage = PipelinedModel.run_stage

    def of_the_next(
        self: PipelinedModel,
        stage: Stage,
        modules: nn.Module,
        received: Tensor,
        index: Tensor,
    ) -> Tensor:
        assert self.step is not None
        if not stage.embeds:
            index = (index + 1) % len(self.step.microbatches)
        return run_stage(self, stage, modules, received, index)

    return mock.patch.object(PipelinedModel, "run_stage", of_the_next)
