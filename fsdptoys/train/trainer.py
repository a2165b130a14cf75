"""The training loop.

``Trainer(config)`` builds model, optimizer and data in order; ``train`` takes the steps. The same
code runs on every rank and under every strategy; all differences between strategies are behind
``Strategy``. Records and checkpoints are left to callbacks (see ``run``).
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.data import eval_batches
from fsdptoys.device import Device
from fsdptoys.metrics import SpikeDetector, StepMetrics
from fsdptoys.metrics.compilation import CompilationWatch
from fsdptoys.optim import build_optimizer
from fsdptoys.optim.config import build_schedule, set_schedule
from fsdptoys.optim.loss_scale import LossScaler
from fsdptoys.parallel import ParamInit
from fsdptoys.patches import apply_patches
from fsdptoys.profiler import OOMContext, Profiler, explain_out_of_memory

from .build import build_stepper, build_world
from .distributed import deterministic_kernels
from .evaluation import held_out_loss
from .forward_backward import forward_backward
from .garbage import collection_between_steps
from .gradient_scale import GradientScale, loss_builder
from .named_tensors import NamedTensors
from .oom_context import construction_context, oom_context
from .parallelize import StandIns, parallelize
from .resume import restore_position
from .skipped_steps import SkippedSteps
from .step_data import StepData
from .step_memory import StepMemory
from .step_readings import StepReadings
from .stop import Stop, Stopping, StopRequest, saves_after
from .text_sample import continued


class Trainer:
    """A model under a strategy, with its data, optimizer and training loop."""

    def __init__(
        self,
        config: Config,
        device: Device | None = None,
        param_init: ParamInit | None = None,
        stand_ins: StandIns | None = None,
    ) -> None:
        """Build everything that the loop needs. A collective.

        Args:
            config: validated.
            device: None for the device that the config and the local rank select.
            param_init: sets initial values of parameters; None for those of the config.
            stand_ins: replaces the forwards of a model in a trace.
        """
        self.config = config
        train = config.train
        self.world = build_world(config, device)
        config.count_steps(self.world.world_size)  # the launcher has done so, to say it
        self.patches = apply_patches(config.patches, config.parallel.name)

        self.built = parallelize(config, self.world, param_init, stand_ins)
        self.strategy = self.built.strategy
        scales = config.parallel.param_dtype.needs_loss_scale
        scaler = LossScaler(config.loss_scale) if scales else None
        self.scale = GradientScale(config, self.strategy, scaler)

        names = self.built.matrix_names, self.built.block_names
        optimizer = build_optimizer(
            config.optim, self.strategy.trainable_parameters(), *names
        )
        self.strategy.attach(optimizer)
        elements = sum(self.built.parameter_sizes.values())
        explain = construction_context(config, self.world, elements)
        with explain_out_of_memory(self.world.device, explain):
            self.stepper = build_stepper(optimizer, self.strategy, config)
        self.optimizer = self.stepper.optimizer
        self.schedule = build_schedule(config.optim, self.optimizer, train.steps)

        self.data = StepData(config, self.built)
        self.steps_done = 0
        self.stopping = Stopping(train)
        self.skipped = SkippedSteps(scaler)
        self.spikes = SpikeDetector(config.metrics.spike_threshold)
        self.memory = StepMemory(
            self.strategy, self.stepper, enabled=self.world.rank == 0
        )
        self.readings = StepReadings(
            config,
            self.built,
            self.skipped,
            self.spikes,
            skips_on_device=self.stepper.skips_on_device,
            documents=self.data.documents,
        )
        """Numbers of the steps taken, until they are read."""
        self.history: list[StepMetrics] = []
        """Metrics of the steps taken by this object and read."""
        self.compilation = (
            CompilationWatch() if train.compile or config.kernels.compiles else None
        )
        """Records compilations and their causes; None if nothing is compiled."""
        self.on_phase: Callable[[int, str], None] = lambda step, phase: None
        """Called with step and phase: data, forward, backward, optimizer, evaluation or
        checkpoint."""
        self.around_step: Callable[[int], AbstractContextManager[None]] = lambda step: (
            nullcontext()
        )
        """Returns a context for the step of that number, without the evaluation after it."""
        self._phase = "forward"

    def train_step(self, step: int) -> None:
        """Take one optimizer step over a global batch; ``readings`` get its numbers."""
        enter = functools.partial(self._enter, step)
        stats = self.readings.begin(step)

        # 1. The loss is the mean over valid tokens of all ranks and micro-batches.
        enter("data")
        inputs = self.data.next_step(self.readings.data_wait)
        stats.host_values["data_wait_seconds"] = inputs.wait_seconds
        dist.all_reduce(inputs.counts)
        scale = self.scale.of(
            inputs.counts[0], len(inputs.microbatches), self.data.global_tokens
        )

        # 2. Gradients of all micro-batches add up.
        loss_sum = forward_backward(self.built, inputs, scale, enter)

        # 3. Clip; agree in one all-reduce on the loss, on whether to update and whether to stop.
        enter("optimizer")
        self.memory.label_gradients()
        max_norm = self.config.train.max_grad_norm or math.inf
        grad_norm = self.stepper.clip(self.strategy, max_norm, scale.unscale)
        agreed, routing_counts = self._agree(loss_sum, grad_norm)
        counts = NamedTensors.join(
            {"inputs": inputs.counts, **routing_counts}, torch.int64
        )

        # 4. Begin to read the numbers, and update.
        stats.host_values["learning_rate"] = float(self.schedule.get_last_lr()[0])
        stats.host_values["loss_scale"] = self.scale.loss_scale
        self.readings.add(stats, agreed, grad_norm, counts)
        self.stepper.step(
            self.readings.skip(stats, agreed, self.stepper.skips_on_device)
        )
        if self._evaluates_after(step):
            self.stepper.finish()  # within the step, so that its time counts in the step time
        set_schedule(self.schedule, step)
        self.strategy.zero_grad(self.optimizer)
        self.readings.end(stats)
        self.memory.end_step(step, stats.seconds)
        stats.host_values |= self.memory.measure()

    def _agree(
        self, loss_sum: Tensor, grad_norm: Tensor
    ) -> tuple[NamedTensors, dict[str, Tensor]]:
        """Sum the numbers of a step over ranks.

        Returns:
            The sums by name (``StepStats.sums``), and the counts of experts, if there are any.
        """
        routing = self.built.routing
        votes = torch.tensor(self.stopping.votes(), dtype=loss_sum.dtype)
        sums = {
            "loss": loss_sum,
            "not_finite": ~grad_norm.isfinite(),
            "votes": self.world.device.upload(votes),
        }
        routing_sums, routing_counts = routing.end_step() if routing else ({}, {})
        agreed = NamedTensors.join(sums | routing_sums, loss_sum.dtype)
        dist.all_reduce(agreed.flat)
        return agreed, routing_counts

    def train(
        self,
        on_step: Callable[[StepMetrics], None] | None = None,
        profiler: Profiler | None = None,
        save: Callable[[Stop | None], None] | None = None,
        request: StopRequest | None = None,
    ) -> Stop:
        """Take the remaining steps, with evaluations in between, and return the reason for the end.

        Args:
            on_step: called with each step's metrics when they are read (``step_readings``), in
                order, on this rank.
            profiler: entered around the loop, and advanced after each step.
            save: called on all ranks when a checkpoint is due, with the stop reason if it is the
                last one.
            request: may ask this rank to stop, which stops all ranks.
        """
        train, device = self.config.train, self.world.device
        self.stopping = Stopping(train, request)
        device.reset_peak_memory()
        stop = Stop("all steps done") if self.steps_done >= train.steps else None
        profiled = profiler.traces if profiler else lambda step: False
        with (
            closing(self.data.batches),
            deterministic_kernels(train.deterministic, device.type),
            collection_between_steps(train.gc_every) as collect_garbage,
            profiler or nullcontext() as watching,
        ):
            while stop is None:
                step = self.steps_done + 1
                try:
                    stop, read = self._step_and_evaluate(step, profiled)
                    self.steps_done = step
                    self._record(self.readings.finish(read), on_step)
                    if watching:
                        watching.step(step)
                    if save and saves_after(self.config.checkpoint, step, stop):
                        self._enter(step, "checkpoint")
                        save(stop)
                except BaseException:
                    # A device that failed may not answer, a full disk takes no record
                    with suppress(Exception):
                        self._record(self.readings.finish_done(), on_step)
                    raise
                collect_garbage(step)
            self.stepper.finish()
        return stop

    def _step_and_evaluate(
        self, step: int, profiled: Callable[[int], bool]
    ) -> tuple[Stop | None, int]:
        """Take a step, and evaluate if it is due; return a reason to stop, and the last step that
        is read."""
        train, readings = self.config.train, self.readings
        with explain_out_of_memory(
            self.world.device, functools.partial(self._oom_context, step)
        ):
            with self.around_step(step), self.memory.around(step, profiled):
                self.train_step(step)
            if self.compilation:
                self.compilation.record_pass("training", step)
            last, evaluates = step == train.steps, self._evaluates_after(step)
            reads = last or evaluates or saves_after(self.config.checkpoint, step, None)
            read = step if reads else readings.due(step)
            readings.resolve(read)
            if readings.stop:
                readings.resolve(read := step)
            stop = readings.stop or (Stop("all steps done") if last else None)
            hurries = stop is not None and stop.signal
            if not hurries and (evaluates or (train.eval_every and stop)):
                readings.newest.eval_loss = self.evaluate(step)
        return stop, read

    def evaluate(self, step: int) -> float:
        """Mean loss over the first batches of the held-out split, in nats per token. A
        collective."""
        train, data, axes = self.config.train, self.data, self.strategy.mesh_axes
        assert data.dataset.eval is not None
        self._enter(step, "evaluation")
        self.stepper.finish()
        sharing = axes.pp * axes.sharing
        ranks = (data.data_rank, self.world.world_size // sharing)
        batches = eval_batches(
            data.dataset.eval, train.batch_size, train.eval_batches, *ranks
        )
        loss_fn = loss_builder(self.config, self.strategy)()
        loss = held_out_loss(
            self.strategy.full_model, loss_fn, batches, self.world.zero(), sharing
        )
        if self.compilation:
            self.compilation.record_pass("evaluation", step)
        return loss

    def sample(self) -> str | None:
        """The prompt with the model's continuation; None without a ``text_sample``. A collective if
        sharded."""
        text, train = self.data.dataset.text_sample, self.config.train
        if not text:
            return None
        # Compiled parts run eagerly, since each length would recompile.
        with (
            torch.compiler.set_stance("force_eager")
            if self.compilation
            else nullcontext()
        ):
            return continued(
                text, self.strategy.full_model, self.world.device.torch_device, train
            )

    def state_dict(self) -> dict[str, Any]:
        """Progress of the run as JSON values; with the strategy's tensors, all that a resume
        needs."""
        assert not self.readings.pending, (
            "counts of steps that are not read yet would be missing"
        )
        return {
            "step": self.steps_done,
            "data": self.data.batches.state_dict(),
            "global_batch": self.data.batches.global_batch,
            "optimizer_steps": self.stepper.steps_taken,
            "spikes": self.spikes.state_dict(),
            **self.skipped.state_dict(),
        }

    def load_state_dict(
        self, state: dict[str, Any], load: Callable[[dict[str, Tensor]], None]
    ) -> None:
        """Resume from a ``state_dict``; ConfigError if the data or the tensors differ from the
        checkpoint's.

        ``load`` fills tensors, given by name, with their saved values.
        """
        restore_position(self.data.batches, state, self.config)
        self.strategy.load_state_tensors(self.optimizer, load)
        self.stepper.after_update()
        self.steps_done = state["step"]
        set_schedule(self.schedule, self.steps_done)
        self.stepper.restore(state["optimizer_steps"])
        self.skipped.load_state_dict(state)
        self.spikes.load_state_dict(state["spikes"])

    def _record(
        self,
        finished: Sequence[StepMetrics],
        on_step: Callable[[StepMetrics], None] | None,
    ) -> None:
        for metrics in finished:
            self.history.append(metrics.without_counts())
            if on_step:
                on_step(metrics)

    def _evaluates_after(self, step: int) -> bool:
        return (
            self.config.train.eval_every > 0
            and step % self.config.train.eval_every == 0
        )

    def _enter(self, step: int, phase: str) -> None:
        self._phase = phase
        self.on_phase(step, phase)

    def _oom_context(self, step: int) -> OOMContext:
        params = (param for _, param in self.strategy.named_parameters())
        return oom_context(
            self.config, self.world, step, self._phase, params, self.stepper
        )
