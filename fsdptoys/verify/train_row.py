"""What the ranks of a row do: train with the run's own trainer, and compare as they go."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer

from .judge import Figures
from .measure import Array, Key, Measure, NamedTensors
from .tensors import buffers, gradients, parameters


def train_row(
    config: Config, reference: Mapping[Key, Array], in_folder: bool
) -> Figures | None:
    """Train on the ranks that this one belongs to; rank 0 returns what they measured.

    Args:
        config: of the row, validated.
        reference: tensors of the plain loop.
        in_folder: write and read a run directory as ``fsdptoys train`` does, to resume from a
            checkpoint; else no file is touched.
    """
    trainer = Trainer(config)
    trainer.memory.enabled = False  # costs a tenth of a short step
    recorder = Recorder(trainer, reference)
    if in_folder:
        Run(trainer).run()
    else:
        trainer.train()
    return recorder.finish()


def save_checkpoints(config: Config) -> None:
    """Train, and leave checkpoints in the run directory."""
    Run(Trainer(config)).run()


class Recorder:
    """Compares the tensors of a trainer before and after each update.

    Args:
        trainer: before its first step.
        reference: tensors of the plain loop.
    """

    def __init__(self, trainer: Trainer, reference: Mapping[Key, Array]) -> None:
        self._trainer = trainer
        self._reference = reference
        self._measure = Measure(reference, trainer.world.device.torch_device)
        trainer.follow_phases(self._enter)
        trainer.around_step = self._around
        if not trainer.config.checkpoint.resumes:
            self._add(0, "initial value of", parameters(trainer))
        self._add_buffers(0)

    def _enter(self, step: int, phase: str) -> None:
        if phase == "optimizer":
            with gradients(self._trainer) as grads:
                self._add(step, "gradient of", self._in_full(step, grads))

    def _in_full(self, step: int, grads: NamedTensors) -> NamedTensors:
        """Leave out gradients in other shapes, which some toys keep."""
        for name, grad in grads:
            expected = self._reference.get((step, f"gradient of {name}"))
            if expected is not None and grad.shape == expected.shape:
                yield name, grad

    @contextmanager
    def _around(self, step: int) -> Iterator[None]:
        yield
        # Waiting for deferred updates would hide one that comes too late.
        is_deferred = self._trainer.stepper.unit_by_unit
        if not is_deferred and step < self._trainer.config.train.steps:
            self._add(step, "parameter", parameters(self._trainer))

    def finish(self) -> Figures | None:
        """Compare the final parameters; rank 0 returns all figures. A collective."""
        steps = self._trainer.config.train.steps
        self._add(steps, "parameter", parameters(self._trainer))
        self._add_buffers(steps)
        sums = self._measure.total()
        history = self._trainer.history
        if dist.get_rank() > 0:
            return None
        return Figures(
            [step.loss for step in history], [step.grad_norm for step in history], sums
        )

    def _add(self, step: int, kind: str, tensors: NamedTensors) -> None:
        self._measure.add(step, self._labeled(step, kind, tensors))

    def _labeled(
        self, step: int, kind: str, tensors: NamedTensors
    ) -> Iterable[tuple[str, Tensor]]:
        for name, tensor in tensors:
            label = f"{kind} {name}"
            if (step, label) not in self._reference:
                raise RuntimeError(f"the plain loop has no {label}")
            yield label, tensor

    def _add_buffers(self, step: int) -> None:
        expected = [
            (name, buffer)
            for name, buffer in buffers(self._trainer)
            if (step, f"buffer {name}") in self._reference
        ]
        self._add(step, "buffer", expected)


def silence(folder: Path) -> None:
    """Write what this rank prints into a file of the folder."""
    log = os.open(
        folder / f"rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
