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

import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.device import Device
from fsdptoys.memory import BucketedOptimizer
from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.compilation import CompilationWatch
from fsdptoys.optim.config import build_schedule, set_schedule
from fsdptoys.parallel import ParamInit
from fsdptoys.parallel.state import ReadStates
from fsdptoys.patches import apply_patches
from fsdptoys.profiler import Profiler, explain_out_of_memory

from .build import build_stepper, build_world
from .callbacks import Callbacks, chosen_callbacks
from .distributed import deterministic_kernels
from .evaluation import held_out_losses
from .forward_backward import forward_backward
from .garbage import collection_between_steps
from .gradient_scale import GradientScale
from .oom_context import oom_context
from .parallelize import StandIns, parallelize
from .resume import restore_position
from .step_data import StepData
from .step_memory import StepMemory
from .step_readings import StepReadings
from .stop import Stop, Stopping, StopRequest, evaluates_after, saves_after


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
        self.world = build_world(config, device)
        config.count_steps(self.world.world_size)  # the launcher has done so, to say it
        self.patches = apply_patches(config.patches, config.parallel.name)
        self.parallel_model = parallelize(config, self.world, param_init, stand_ins)
        self.strategy = self.parallel_model.strategy
        self.scale = GradientScale(config, self.strategy)
        self.stepper = build_stepper(config, self.parallel_model)
        self.optimizer = self.stepper.optimizer
        self.schedule = build_schedule(config.optim, self.optimizer, config.train.steps)
        self.data = StepData(config, self.parallel_model)

        self.steps_done = 0
        self.callbacks = Callbacks(chosen_callbacks(config))
        self.stopping = Stopping(config.train, self.callbacks)
        self.readings = StepReadings(
            config,
            self.parallel_model,
            self.stopping,
            self.scale.scaler,
            self.data.documents,
            skips_on_device=self.stepper.skips_on_device,
        )
        """Numbers of the steps taken, until they are read."""
        self.history: list[StepMetrics] = []
        """Metrics of the steps taken by this object and read."""
        self.memory = StepMemory(
            self.strategy, self.stepper, enabled=self.world.rank == 0
        )
        compiles = config.train.compile or config.kernels.compiles
        self.compilation = CompilationWatch() if compiles else None
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
        dist.all_reduce(inputs.counts)
        scale = self.scale.of(inputs, self.data.global_tokens)

        # 2. Gradients of all micro-batches add up.
        loss_sum = forward_backward(self.parallel_model, inputs, scale, enter)

        # 3. Clip; agree in one all-reduce on the loss, on whether to update and whether to stop.
        enter("optimizer")
        self.memory.label_gradients()
        max_norm = self.config.train.max_grad_norm or math.inf
        grad_norm = self.stepper.clip(self.strategy, max_norm, scale.unscale)
        stats.host_values = {
            "data_wait_seconds": inputs.wait_seconds,
            "learning_rate": float(self.schedule.get_last_lr()[0]),
            "loss_scale": self.scale.loss_scale,
        }
        skip = self.readings.agree(stats, inputs.counts, loss_sum, grad_norm)

        # 4. Update.
        self.stepper.step(skip)
        if evaluates_after(self.config.train, step):
            self.stepper.finish()  # within the step, so that its time counts in the step time
        set_schedule(self.schedule, step)
        self.strategy.zero_grad(self.optimizer)
        self.readings.end(stats)
        self.memory.end_step(step, stats.seconds)
        stats.host_values |= self.memory.measure()

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
        train = self.config.train
        device = self.world.device
        self.stopping.begin(self.steps_done, request)
        device.reset_peak_memory()
        traces = profiler.traces if profiler else lambda step: False
        with (
            closing(self.data.batches),
            deterministic_kernels(train.deterministic, device.type),
            collection_between_steps(train.gc_every) as collect_garbage,
            profiler or nullcontext(),
        ):
            while self.stopping.stop is None:
                step = self.steps_done + 1
                try:
                    last_read = self._step_and_evaluate(step, traces)
                    self.steps_done = step
                    self._record(self.readings.finish(last_read), on_step)
                    if profiler:
                        profiler.step(step)
                    if save and saves_after(
                        self.config.checkpoint, step, self.stopping.stop
                    ):
                        self._enter(step, "checkpoint")
                        save(self.stopping.stop)
                except BaseException:
                    # A device that failed may not answer, a full disk takes no record
                    with suppress(Exception):
                        self._record(self.readings.finish_done(), on_step)
                    raise
                collect_garbage(step)
            self.stepper.finish()
        return self.stopping.stop

    def _step_and_evaluate(self, step: int, traces: Callable[[int], bool]) -> int:
        """Take a step, and evaluate if it is due; return the last step that is read."""
        with explain_out_of_memory(
            self.world.device,
            lambda: oom_context(
                self.config, self.strategy, self.stepper, step, self._phase
            ),
        ):
            with self.around_step(step), self.memory.around(step, traces):
                self.train_step(step)
            if self.compilation:
                self.compilation.record_pass("training", step)
            last_read = self.readings.read_after(step)
            if evaluates_after(self.config.train, step, self.stopping.stop):
                newest = self.readings.newest
                newest.eval_loss, newest.eval_own_loss = self.evaluate(step)
        return last_read

    def evaluate(self, step: int) -> tuple[float, float | None]:
        """Mean cross entropy over the first batches of the held-out split, in nats per token, and
        that of a user's loss; None without one. A collective."""
        self._enter(step, "evaluation")
        self.stepper.finish()
        loss_fns = [self.scale.plain_loss()]
        if self.scale.has_own_loss:
            loss_fns.append(self.scale.loss_fn)
        losses = held_out_losses(self.strategy, loss_fns, self.data.eval_batches())
        if self.compilation:
            self.compilation.record_pass("evaluation", step)
        return losses[0], losses[1] if self.scale.has_own_loss else None

    def state_dict(self) -> dict[str, Any]:
        """Progress of the run as JSON values; with the strategy's tensors, all that a resume
        needs."""
        return {
            "step": self.steps_done,
            "data": self.data.batches.state_dict(),
            "global_batch": self.data.batches.global_batch,
            "optimizer_steps": self.stepper.steps_taken,
            "callbacks": self.callbacks.state_dict(),
            **self.readings.state_dict(),
        }

    def load_state_dict(
        self,
        state: dict[str, Any],
        load: Callable[[dict[str, Tensor]], None],
        read_states: ReadStates = dict,
    ) -> None:
        """Resume from a ``state_dict``; ConfigError if the data or the tensors differ from the
        checkpoint's.

        ``load`` fills tensors, given by name, with their saved values; ``read_states`` as for
        ``Strategy.load_state_tensors``.
        """
        restore_position(self.data.batches, state, self.config)
        if isinstance(self.optimizer, BucketedOptimizer):
            read_states = dict  # it has all of its states; ``load`` refuses others
        self.strategy.load_state_tensors(self.optimizer, load, read_states)
        self.stepper.after_update()
        self.steps_done = state["step"]
        set_schedule(self.schedule, self.steps_done)
        self.stepper.restore(state["optimizer_steps"])
        self.readings.load_state_dict(state)

    def _record(
        self,
        steps: Sequence[StepMetrics],
        on_step: Callable[[StepMetrics], None] | None,
    ) -> None:
        for metrics in steps:
            try:
                metrics.added.update(self.callbacks.after_step(metrics))
            finally:  # a step that has been taken is recorded, whatever a callback does
                self.history.append(metrics.without_counts())
                if on_step:
                    on_step(metrics)

    def follow_phases(self, hook: Callable[[int, str], None]) -> None:
        """Call ``hook`` after what ``on_phase`` calls already."""
        before = self.on_phase

        def on_phase(step: int, phase: str) -> None:
            before(step, phase)
            hook(step, phase)

        self.on_phase = on_phase

    def _enter(self, step: int, phase: str) -> None:
        self._phase = phase
        self.on_phase(step, phase)
