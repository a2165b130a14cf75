"""The training loop.

``Trainer(config)`` builds model, optimizer and data in order; ``train`` takes the steps. The same code runs on every
rank and under every strategy; all differences between strategies are behind ``Strategy``. Records and checkpoints are
left to callbacks (see ``run``).
"""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.kernel_choice import find_attention_backend, put_kernels
from fsdptoys.config.schema import Config
from fsdptoys.data import BatchStream, eval_batches
from fsdptoys.device import Device
from fsdptoys.loss.objective import Objective
from fsdptoys.memory import threads_per_rank
from fsdptoys.metrics import SpikeDetector, StepMetrics, measure_memory
from fsdptoys.metrics.compilation import CompilationWatch
from fsdptoys.optim import build_optimizer
from fsdptoys.optim.config import build_schedule, set_schedule
from fsdptoys.optim.loss_scale import LossScaler, nearest_power_of_two
from fsdptoys.parallel import Fill, ParallelContext
from fsdptoys.parallel.float8 import convert_to_float8, prepare_all_gathers
from fsdptoys.patches import apply_patches
from fsdptoys.profiler import OOMContext, Profiler, explain_out_of_memory

from .build import build_readings, build_updates, loss_builder, prepare_blocks, share_sequences
from .distributed import deterministic_kernels, device_of
from .document_flops import build_document_counter
from .evaluation import held_out_loss
from .garbage import collection_between_steps
from .initial_values import InitialValues
from .microbatches import run_microbatches
from .moe_balance import build_routing_balance
from .oom_context import oom_context
from .resume import restore_position
from .skipped_steps import SkippedSteps
from .step_inputs import upload_inputs
from .step_memory import StepMemory
from .stop import Stop, StopRequest, votes_to_stop
from .text_sample import continued
from .tuning import show_samples, tune_model


class Trainer:
    """A model under a strategy, with its data, optimizer and training loop."""

    def __init__(self, config: Config, device: Device | None = None, fill: Fill | None = None) -> None:
        """Build everything that the loop needs. A collective.

        Args:
            config: validated.
            device: None for the device that the config and the local rank select.
            fill: sets initial values of parameters; None for those of the config.
        """
        self.config = config
        train, memory = config.train, config.memory
        assert train.init_seed is not None and train.data_seed is not None, "the config must have been validated"

        # 1. Device and ranks.
        self.device = device or device_of(config)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        threads = memory.cpu_threads or threads_per_rank(local_ranks)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        config.count_steps(self.world_size)  # the launcher has done so, to say it
        context = ParallelContext(
            device=self.device,
            rank=self.rank,
            world_size=self.world_size,
            mesh=config.mesh,
            deterministic=train.deterministic,
            cpu_offload=config.memory.cpu_offload,
            sum_dtype=train.sum_dtype.torch,
            timeout=timedelta(seconds=config.launch.timeout_seconds),
        )

        # 2. The model: built on the meta device, checkpointed, then sharded, allocated and initialized.
        self.patches = apply_patches(config.patches, config.parallel.name)
        with torch.device("meta"):
            model = config.model.build()
        fill = fill or InitialValues(model, config, threads).fill
        self.dropout_samples = tune_model(model, config)
        """The samples of the micro-batch, by which dropout draws; None where nothing is dropped."""
        self.flops_per_token = model.flops_per_token(train.seq_len)
        self.parameter_sizes = {name: param.numel() for name, param in model.named_parameters()}
        """Elements of each parameter; a shared one has the first of its names."""
        put_kernels(model, config.kernels)
        self.attention_backend = find_attention_backend(
            model,
            config.kernels,
            self.device.torch_device,
            config.parallel.param_dtype.torch,
            train.seq_len,
            masks=config.data.mask_documents,
        )
        """PyTorch's backend of attention; None for torch_npu's, and where PyTorch does not say."""
        matrix_names = {name for name, param in model.named_parameters() if param.ndim >= 2}
        self.block_names = {f"layers.{name}" for name, _ in model.layers.named_parameters()}
        convert_to_float8(model, train.float8, train.float8_all_gather, self.device.type)
        prepare_blocks(model, config, self.device)
        self.strategy = config.parallel.build(context)
        share_sequences(model, config, self.strategy, self.dropout_samples)
        axes, local, sum_dtype = self.strategy.mesh_axes, self.strategy.local_data_ranks, train.sum_dtype.torch
        stage, place = divmod(self.rank, axes.stage_ranks)
        self.data_rank, place = divmod(place, axes.sharing)
        self.counts_labels = place == stage == 0
        """Whether this rank counts the tokens of its sequences, which it may share with others."""
        if self.strategy.pipeline is not None:
            self.strategy.pipeline.cut(model, train.seq_len)
        self.routing = build_routing_balance(
            model, self.device.torch_device, self.strategy, sum_dtype, train.deterministic
        )
        count = sum(self.parameter_sizes.values())
        constructing = functools.partial(oom_context, config, context, 0, "construction", parameter_count=count)
        with explain_out_of_memory(self.device, constructing):
            self.strategy.parallelize(model, fill)

        # 3. Loss, optimizer and learning rate schedule.
        self.objective = Objective(train.label_smoothing, train.z_loss_coef)
        self._build_loss = loss_builder(config, self.strategy)
        self.loss_fn = self._build_loss(objective=self.objective)
        self.eval_loss_fn = self._build_loss()
        optimizer = build_optimizer(config.optim, self.strategy.trainable_parameters(), matrix_names, self.block_names)
        self.strategy.attach(optimizer)
        with explain_out_of_memory(self.device, constructing):
            self.updates = build_updates(optimizer, self.strategy, config, threads)
        self.optimizer = self.updates.optimizer
        self.schedule = build_schedule(config.optim, self.optimizer, train.steps)
        self.scaler = LossScaler(config.loss_scale) if config.parallel.param_dtype.needs_loss_scale else None
        self.skipped = SkippedSteps(self.scaler)
        self.memory = StepMemory(
            self.device, self.strategy, self.updates, on_host=memory.cpu_offload, enabled=self.rank == 0
        )

        # 4. Data: this process's share of every global batch.
        self.dataset = config.data.build(train.seq_len, config.model.vocab_size, train.data_seed)
        self.documents = build_document_counter(model, config, self.dataset)
        self.batches = BatchStream(
            self.dataset.train,
            train.batch_size,
            train.grad_accum,
            ranks=range(self.data_rank * local, (self.data_rank + 1) * local),
            data_ranks=self.strategy.data_ranks,
            seed=train.data_seed,
            fingerprint=self.dataset.fingerprint,
            workers=config.data.workers,
            files=self.dataset.sample_files(),
        )
        self.steps_done = 0
        self.spikes = SpikeDetector(config.metrics.spike_threshold)
        self.readings = build_readings(
            config, context, self.updates, self.skipped, self.spikes, self.documents, self.routing, self.flops_per_token
        )
        """Numbers of the steps taken, until they are read."""
        self.history: list[StepMetrics] = []
        """Metrics of the steps taken by this object and read."""
        self.compilation = CompilationWatch() if train.compile or config.kernels.compiles else None
        """Records compilations and their causes; None if nothing is compiled."""
        self.on_phase: Callable[[int, str], None] = lambda step, phase: None
        """Called with step and phase: data, forward, backward, optimizer, evaluation or checkpoint."""
        self.around_step: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext()
        """Returns a context for the step of that number, without the evaluation after it."""
        self._phase = "forward"

    def state_dict(self) -> dict[str, Any]:
        """Progress of the run as JSON values; with the strategy's tensors, all that a resume needs."""
        assert not self.readings.pending, "counts of steps that are not read yet would be missing"
        return {
            "step": self.steps_done,
            "data": self.batches.state_dict(),
            "global_batch": self.batches.global_batch,
            "optimizer_steps": self.updates.steps_taken,
            "spikes": self.spikes.state_dict(),
            **self.skipped.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], load: Callable[[dict[str, Tensor]], None]) -> None:
        """Resume from a ``state_dict``; ConfigError if the data or the tensors differ from the checkpoint's.

        ``load`` fills tensors, given by name, with their saved values.
        """
        restore_position(self.batches, state, self.config)
        self.strategy.load_state_tensors(self.optimizer, load)
        self._prepare_all_gathers()
        self.steps_done = state["step"]
        set_schedule(self.schedule, self.steps_done)
        self.updates.restore(state["optimizer_steps"])
        self.skipped.load_state_dict(state)
        self.spikes.load_state_dict(state["spikes"])

    def train(
        self,
        on_step: Callable[[StepMetrics], None] | None = None,
        profiler: Profiler | None = None,
        save: Callable[[Stop | None], None] | None = None,
        request: StopRequest | None = None,
    ) -> Stop:
        """Take the remaining steps, with evaluations in between, and return the reason for the end.

        Args:
            on_step: called with each step's metrics when they are read (``step_readings``), in order, on this rank.
            profiler: entered around the loop, and advanced after each step.
            save: called on all ranks when a checkpoint is due, with the stop reason if it is the last one.
            request: may ask this rank to stop, which stops all ranks.
        """
        train = self.config.train
        started = time.perf_counter()
        self.device.reset_peak_memory()
        stop = Stop("all steps done") if self.steps_done >= train.steps else None
        profiled = profiler.traces if profiler else lambda step: False
        with (
            closing(self.batches),
            deterministic_kernels(train.deterministic, self.device.type),
            collection_between_steps(train.gc_every) as collect_garbage,
            profiler or nullcontext() as watching,
        ):
            while stop is None:
                step = self.steps_done + 1
                try:
                    stop, read = self._step_and_evaluate(step, started, profiled, request)
                    self.steps_done = step
                    self._record(self.readings.finish(read), on_step)
                    if watching:
                        watching.step(step)
                    if save and self._saves_after(step, stop):
                        self._enter(step, "checkpoint")
                        save(stop)
                except BaseException:
                    with suppress(Exception):  # a device that failed may not answer, a full disk takes no record
                        self._record(self.readings.finish_done(), on_step)
                    raise
                collect_garbage(step)
            self._finish_updates()
        return stop

    def _step_and_evaluate(
        self, step: int, started: float, profiled: Callable[[int], bool], request: StopRequest | None
    ) -> tuple[Stop | None, int]:
        """Take a step, and evaluate if it is due; return a reason to stop, and the last step that is read."""
        train, readings = self.config.train, self.readings
        with explain_out_of_memory(self.device, functools.partial(self._oom_context, step)):
            with self.around_step(step), self.memory.around(step, profiled):
                self._train_step(step, started, request)
            if self.compilation:
                self.compilation.record_pass("training", step)
            last, evaluates = step == train.steps, self._evaluates_after(step)
            read = step if last or evaluates or self._saves_after(step, None) else readings.due(step)
            readings.judge(read)
            if readings.stop:
                readings.judge(read := step)
            stop = readings.stop or (Stop("all steps done") if last else None)
            hurries = stop is not None and stop.signal
            if not hurries and (evaluates or (train.eval_every and stop)):
                readings.newest.eval_loss = self._evaluate(step)
        return stop, read

    def _record(self, finished: Sequence[StepMetrics], on_step: Callable[[StepMetrics], None] | None) -> None:
        for metrics in finished:
            self.history.append(metrics.without_counts())
            if on_step:
                on_step(metrics)

    def _train_step(self, step: int, run_started: float, request: StopRequest | None = None) -> None:
        """Take one optimizer step over a global batch, and begin to copy its numbers to the host (``readings``)."""
        started, started_on_device = time.perf_counter(), self.readings.mark()
        self._enter(step, "data")
        train, strategy, device = self.config.train, self.strategy, self.device
        numbers = self.batches.sample_numbers() if self.dropout_samples else []
        batches = self.batches.next_step()
        # An accelerator that still computes earlier steps has not waited.
        data_wait_seconds = time.perf_counter() - started if self.readings.is_idle else 0.0

        # 1. The loss is the mean over valid tokens of all ranks and micro-batches: count them first.
        inputs = upload_inputs(batches, self.documents, device, self.dataset.answers_end, numbers)
        microbatches, counted = inputs.microbatches, inputs.counts
        if not self.counts_labels:
            counted.zero_()
        dist.all_reduce(counted)

        # 2. Forward and backward of each micro-batch; gradients add up.
        loss_sum, loss_fn, factor = self._zero(), self.loss_fn, strategy.loss_scale
        tokens = self.batches.global_batch * train.seq_len
        if self.scaler:
            factor = self.scaler.loss_factor(len(microbatches) * self.world_size // strategy.mesh_axes.pp)
            # Valid tokens are known on the device only; there are at most as many as tokens.
            objective = dataclasses.replace(self.objective, gradient_scale=nearest_power_of_two(factor / tokens))
            loss_fn = self._build_loss(objective=objective)
        if self.routing:
            self.routing.begin_step(tokens, factor)
        # Not ``factor / valid``, which multiplies by a rounded reciprocal.
        per_token = torch.div(torch.full_like(loss_sum, factor), counted[0].clamp(min=1)).float()

        begin, enter = (
            functools.partial(show_samples, self.dropout_samples, inputs.samples),
            functools.partial(self._enter, step),
        )
        run_microbatches(strategy, self.routing, microbatches, loss_fn, per_token, begin, enter, loss_sum)

        # 3. Clip, and reduce over ranks: the loss, whether to update, and whether to stop.
        self._enter(step, "optimizer")
        self.memory.label_gradients()
        grad_norm = self._clip(train.max_grad_norm or math.inf, strategy.loss_scale / factor)
        votes = device.upload(torch.tensor(votes_to_stop(train, request, run_started), dtype=loss_sum.dtype))
        routed = self.routing.end_step() if self.routing else None
        totals = torch.cat(
            [loss_sum.view(1), (~grad_norm.isfinite()).to(loss_sum).view(1), votes, *(routed[:1] if routed else ())]
        )
        dist.all_reduce(totals)
        sums = torch.cat([totals, grad_norm.to(totals).view(1)])
        counted = torch.cat([counted, *(routed[1:] if routed else ())])
        host_values = {
            "learning_rate": float(self.schedule.get_last_lr()[0]),
            "data_wait_seconds": data_wait_seconds,
            "loss_scale": self.scaler.scale if self.scaler else None,
        }
        taken = self.readings.add(step, sums, counted, started_on_device, host_values)
        if self.updates.skips_on_device or not self.readings.in_step:
            not_finite = ~totals[0].isfinite() | (totals[1] > 0)
            self._update(not_finite.float() if train.skip_nonfinite else None)
        elif not taken.verdict["skipped"]:
            self._update(None)
        if self._evaluates_after(step):
            self._finish_updates()  # within the step, so that their time counts in the step time
        set_schedule(self.schedule, step)
        strategy.zero_grad(self.optimizer)
        taken.ended, taken.seconds = self.readings.mark(), time.perf_counter() - started
        self.memory.end_step(step, taken.seconds)
        host_values |= measure_memory(device) | {"memory_counted_step": self.memory.counted_step}

    def _saves_after(self, step: int, stop: Stop | None) -> bool:
        checkpoint = self.config.checkpoint
        if stop is not None and (stop.gave_up or stop.signal):
            return stop.gave_up or checkpoint.on_signal
        return checkpoint.every > 0 and (stop is not None or step % checkpoint.every == 0)

    def _evaluates_after(self, step: int) -> bool:
        return self.config.train.eval_every > 0 and step % self.config.train.eval_every == 0

    def _clip(self, max_norm: float, unscale: float) -> Tensor:
        """Unscale and clip the gradients, now or in the optimizer step; return their norm before clipping."""
        return self.updates.clip(self.strategy, max_norm, unscale)

    def _update(self, skip: Tensor | None) -> None:
        """Take or begin the optimizer step, unless the backward took it already or ``skip`` is 1."""
        self.updates.step(skip)
        self._prepare_all_gathers()

    def _prepare_all_gathers(self) -> None:
        # With unit-by-unit updates, each unit's all-gather computes its own scales.
        if self.config.train.float8_all_gather and not self.updates.unit_by_unit:
            prepare_all_gathers(self.strategy.model)

    def _finish_updates(self) -> None:
        """Wait for pending updates before code other than a forward reads the parameters."""
        self.updates.finish()

    def _evaluate(self, step: int) -> float:
        """Mean loss over the first batches of the held-out split, in nats per token."""
        train = self.config.train
        assert self.dataset.eval is not None
        self._enter(step, "evaluation")
        self._finish_updates()
        axes = self.strategy.mesh_axes
        sharing = axes.pp * axes.sharing
        ranks = (self.data_rank, self.world_size // sharing)
        batches = eval_batches(self.dataset.eval, train.batch_size, train.eval_batches, *ranks)
        loss = held_out_loss(self.strategy.full_model, self.eval_loss_fn, batches, self._zero(), sharing)
        if self.compilation:
            self.compilation.record_pass("evaluation", step)
        return loss

    def sample(self) -> str | None:
        """The prompt with the model's continuation; None without a ``text_sample``. A collective if sharded."""
        text, train = self.dataset.text_sample, self.config.train
        # Compiled parts run eagerly, since each length would recompile.
        with torch.compiler.set_stance("force_eager") if self.compilation else nullcontext():
            return continued(text, self.strategy.full_model, self.device.torch_device, train) if text else None

    def _enter(self, step: int, phase: str) -> None:
        self._phase = phase
        self.on_phase(step, phase)

    def _zero(self) -> Tensor:
        """A zero for sums over tokens; in float64 their order does not change the result."""
        return torch.zeros((), dtype=self.config.train.sum_dtype.torch, device=self.device.torch_device)

    def _oom_context(self, step: int) -> OOMContext:
        params = (param for _, param in self.strategy.named_parameters())
        return oom_context(self.config, self.strategy.context, step, self._phase, params, self.updates)
