"""The training loop, to be read from top to bottom like a recipe.

``Trainer(config)`` prepares everything in the order in which it happens; ``run`` takes the steps. The same code runs
under every strategy: what differs is behind ``Strategy``, and nothing here asks which one it has.

Every rank runs the same page. Rank 0 alone has a recorder, which prints and writes.
"""

import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from .checkpoint import WEIGHTS_FOLDER, open_init_from, save_weights
from .config import Config
from .data import BatchStream, TextConfig, TextDataset, eval_batches
from .device import float64_collectives
from .memory import (
    IGNORE_INDEX,
    ActivationOffload,
    BucketedOptimizer,
    CPUOffloadExecutor,
    Objective,
    Workers,
    build_loss,
    checkpoint_blocks,
    compile_blocks,
    cpu_threads,
    offload_optimizer,
    overlap_cpu_offload,
    threads_per_rank,
)
from .metrics import PROFILE_FOLDER, Recorder, StepMetrics, environment, step_metrics
from .models import DecoderModel
from .optim import build_optimizer, build_schedule
from .parallel import ParallelContext, seeded
from .parallel.precision import DType
from .patches import apply_patches
from .process import deterministic_kernels, device_of, process_group
from .profiler import Profiler, Situation, explain_out_of_memory
from .routing import build_routing_balance
from .sampling import generate
from .situation import situation


def train(config: Config) -> "Trainer":
    """Train as ``config`` says, in this process as one of the ranks that the environment names.

    Args:
        config: validated for the world size in the environment.

    Returns:
        The trainer after its last step, with the history of all steps.
    """
    with process_group(config):
        trainer = Trainer(config)
        try:
            trainer.run()
        finally:
            trainer.patches.undo()
        return trainer


class Trainer:
    """One run: a model under a strategy, its data, its optimizer, and the loop over them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        train, memory = config.train, config.memory
        assert train.init_seed is not None and train.data_seed is not None, "the config must have been validated"

        # 1. Where we run.
        self.device = device_of(config)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self._cpu_threads = memory.cpu_threads or threads_per_rank(local_ranks)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        context = ParallelContext(
            device=self.device,
            rank=self.rank,
            world_size=self.world_size,
            mesh=config.mesh,
            deterministic=train.deterministic,
            cpu_offload=config.memory.cpu_offload,
        )

        # 2. The model: a plan without memory, then checkpointing, then sharding, memory and initial values.
        self.patches = apply_patches(config.patches, config.parallel.name)
        with torch.device("meta"):
            model = config.model.build()
        self.flops_per_token = model.flops_per_token(train.seq_len)
        self.parameter_count = model.parameter_counts().total
        matrix_names = {name for name, param in model.named_parameters() if param.ndim >= 2}
        self._prepare_blocks(model)
        self.strategy = config.parallel.build(context)
        local = self.strategy.local_data_ranks
        self.routing = build_routing_balance(model, self.device.torch_device, local)
        fill = open_init_from(model).fill if config.model.init_from else seeded(model.init_rows, train.init_seed)
        constructing = functools.partial(
            situation,
            config,
            self.world_size,
            self.rank,
            0,
            "construction",
            on_cpu=not self.device.is_accelerator,
            parameter_count=self.parameter_count,
        )
        with explain_out_of_memory(self.device, constructing):
            self.strategy.parallelize(model, fill)

        # 3. What is minimised, and what updates it.
        chunks = (
            memory.chunk_loss,
            None if memory.chunk_tokens == "auto" else int(memory.chunk_tokens),
            memory.chunk_grad_dtype,
        )
        self.loss_fn = build_loss(*chunks, Objective(train.label_smoothing, train.z_loss_coef))
        self.eval_loss_fn = build_loss(*chunks)
        optimizer = build_optimizer(config.optim, self.strategy.named_parameters(), matrix_names)
        with explain_out_of_memory(self.device, constructing):
            self.optimizer = self._offload(optimizer)
        self.schedule = build_schedule(config.optim, self.optimizer, train.steps)

        # 4. What it learns from: this process's share of every global batch.
        self.dataset = config.data.build(train.seq_len, config.model.vocab_size, train.data_seed)
        self.batches = BatchStream(
            self.dataset.train,
            train.batch_size,
            train.grad_accum,
            ranks=range(self.rank * local, (self.rank + 1) * local),
            data_ranks=self.strategy.data_ranks,
            seed=train.data_seed,
            fingerprint=self.dataset.fingerprint,
        )
        self.history: list[StepMetrics] = []
        self._phase = "forward"

    def _prepare_blocks(self, model: DecoderModel) -> None:
        """Checkpoint and compile the blocks, in this order, before anything wraps them."""
        memory, train = self.config.memory, self.config.train
        checkpoint_blocks(
            model.layers,
            memory.gradient_checkpointing,
            start_index=memory.checkpointing_start_index,
            every=memory.checkpointing_every,
            save=memory.checkpointing_save,
            offload=ActivationOffload(self.device.torch_device) if memory.activation_offload else None,
        )
        if train.compile:
            compile_blocks(
                model.layers, memory.checkpointing_budget, inner_hooks=self.config.parallel.hooks_parts_of_blocks
            )

    def _offload(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the optimizer's states, or all its work, take place elsewhere, if that is asked for."""
        memory, strategy = self.config.memory, self.strategy
        if memory.optimizer_offload:
            assert self.config.train.init_seed is not None
            return offload_optimizer(
                optimizer,
                strategy.units(),
                memory,
                device=self.device,
                model=strategy.model,
                schedule=memory.offload_schedule,
                seed=self.config.train.init_seed,
                rank=self.rank,
                units_ahead=strategy.units_ahead,
                gather_after=strategy.gather_after,
            )
        if memory.cpu_offload_executor is CPUOffloadExecutor.overlapped:
            return overlap_cpu_offload(
                optimizer,
                strategy.units(),
                model=strategy.model,
                threads=self._cpu_threads,
                units_ahead=strategy.units_ahead,
                on_updated=strategy.mirror_parameters(),
                device=self.device,
            )
        return optimizer

    def run(self) -> None:
        """Take the steps, evaluate, keep the weights, sample, and leave the run directory behind."""
        with self._recorder() if self.rank == 0 else nullcontext() as recorder:
            profiler = self._profiler(recorder)
            stop_reason = self.train(recorder.step if recorder else None, profiler)
            sample = None
            try:
                if self.config.checkpoint.final_weights:
                    self._save_weights(recorder)
                sample = self._sample()
            finally:
                # A disk that is too full for weights must not cost the results too.
                if recorder:
                    recorder.finish(stop_reason, sample, profiler.summary_markdown())

    def train(self, on_step: Callable[[StepMetrics], None] | None = None, profiler: Profiler | None = None) -> str:
        """Take the steps, with evaluations in between, and say why they ended.

        Args:
            on_step: called after each step, on this rank.
            profiler: a ``Profiler`` that is told of each step.
        """
        train = self.config.train
        started = time.perf_counter()
        self.device.reset_peak_memory()
        with deterministic_kernels(train.deterministic), profiler or nullcontext() as watching:
            for step in range(1, train.steps + 1):
                with explain_out_of_memory(self.device, functools.partial(self._situation, step)):
                    metrics, out_of_time = self._train_step(step, started)
                    last = out_of_time or step == train.steps
                    if self._evaluates_after(step) or (train.eval_every and last):
                        metrics = dataclasses.replace(metrics, eval_loss=self._evaluate())
                self.history.append(metrics.without_counts())
                if on_step:
                    on_step(metrics)
                if watching:
                    watching.step(step)
                if last:
                    break
            self._finish_updates()
        return "all steps done" if step == train.steps else f"train.max_seconds={train.max_seconds:g} reached"

    def _train_step(self, step: int, run_started: float) -> tuple[StepMetrics, bool]:
        """One optimizer step over a global batch, and whether any rank is out of time after it."""
        started = time.perf_counter()
        self._phase = "forward"
        train, strategy, device = self.config.train, self.strategy, self.device.torch_device
        microbatches = self.batches.next_step()

        # 1. The loss is the mean over the valid tokens of all ranks and micro-batches, so count them first.
        counted = torch.tensor(sum(int((labels_BT != IGNORE_INDEX).sum()) for _, labels_BT in microbatches))
        counted = counted.to(device)
        dist.all_reduce(counted)
        valid = int(counted.item())

        # 2. Forward and backward of each micro-batch; gradients add up.
        loss_sum = self._zero()
        if self.routing:
            local_tokens = sum(tokens_BT.numel() for tokens_BT, _ in microbatches)
            self.routing.begin_step(local_tokens * self.world_size, strategy.loss_scale)
        for index, (tokens_BT, labels_BT) in enumerate(microbatches):
            if self.routing:
                self.routing.before_forward(strategy.model, index, microbatches)
            with strategy.microbatch(index, len(microbatches)):
                self._phase = "forward"
                loss = strategy.model(tokens_BT.to(device), labels_BT.to(device), self.loss_fn)
                if self.routing:
                    self.routing.before_backward()
                self._phase = "backward"
                (loss * (strategy.loss_scale / max(1, valid))).backward()
            loss_sum += loss.detach()
        out_of_time = train.max_seconds is not None and time.perf_counter() - run_started > train.max_seconds
        totals = torch.stack([loss_sum, torch.full_like(loss_sum, out_of_time)])
        dist.all_reduce(totals)

        # 3. Clip and update.
        self._phase = "optimizer"
        learning_rate = float(self.schedule.get_last_lr()[0])
        grad_norm = self._clip_and_update(train.max_grad_norm or math.inf)
        if self._evaluates_after(step):
            self._finish_updates()  # in the evaluation they would be counted nowhere
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=strategy.frees_gradients)
        routing = self.routing.end_step() if self.routing else None
        self.device.synchronize()
        seconds = time.perf_counter() - started

        loss, ranks_out_of_time = totals.tolist()
        metrics = step_metrics(
            step=step,
            loss=loss / max(1, valid),
            grad_norm=grad_norm.item(),
            learning_rate=learning_rate,
            step_time_seconds=seconds,
            valid_tokens=valid,
            flops_per_token=self.flops_per_token,
            world_size=self.world_size,
            device=self.device,
            # The published peaks are those of bfloat16.
            peak_flops=self.device.peak_flops if self.config.parallel.param_dtype is DType.bfloat16 else None,
            routing=routing,
        )
        return metrics, ranks_out_of_time > 0

    def _evaluates_after(self, step: int) -> bool:
        return self.config.train.eval_every > 0 and step % self.config.train.eval_every == 0

    def _clip_and_update(self, max_norm: float) -> Tensor:
        """Take the optimizer's step, or begin it, and return the norm of the gradients before clipping."""
        strategy, optimizer = self.strategy, self.optimizer
        on_cpu = self.config.memory.cpu_offload_executor is CPUOffloadExecutor.native and self.config.memory.cpu_offload
        with cpu_threads(self._cpu_threads) if on_cpu else nullcontext():
            if isinstance(optimizer, BucketedOptimizer):
                map_parts = optimizer.executor.map if isinstance(optimizer.executor, Workers) else map
                grad_norm = strategy.clip_grad_norm(max_norm, optimizer.scale_gradients, map_parts)
            else:
                grad_norm = strategy.clip_grad_norm(max_norm)
            optimizer.step()
        return grad_norm

    def _finish_updates(self) -> None:
        """Have the parameters as the last step left them, before anything but a forward reads them."""
        if isinstance(self.optimizer, BucketedOptimizer):
            self.optimizer.finish_updates()

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Mean loss over the first batches of the held-out part, in nats a token."""
        train, device = self.config.train, self.device.torch_device
        assert self.dataset.eval is not None
        self._phase = "evaluation"
        self._finish_updates()
        self.strategy.model.eval()
        loss_sum, valid = self._zero(), self._zero()
        for tokens_BT, labels_BT in eval_batches(
            self.dataset.eval, train.batch_size, train.eval_batches, self.rank, self.world_size
        ):
            loss_sum += self.strategy.model(tokens_BT.to(device), labels_BT.to(device), self.eval_loss_fn)
            valid += int((labels_BT != IGNORE_INDEX).sum())
        dist.all_reduce(loss_sum)
        dist.all_reduce(valid)
        self.strategy.model.train()
        return loss_sum.item() / max(1.0, valid.item())

    def _sample(self) -> str | None:
        """The prompt and what the model goes on with, where the data is text and a sample is asked for."""
        train, data = self.config.train, self.config.data
        if not isinstance(data, TextConfig) or data.sample_tokens == 0:
            return None
        assert isinstance(self.dataset, TextDataset) and train.sample_seed is not None
        prompt = torch.from_numpy(self.dataset.encode(data.sample_prompt)).to(self.device.torch_device)
        self.strategy.model.eval()
        tokens = generate(
            self.strategy.model, prompt, data.sample_tokens, train.seq_len, data.sample_temperature, train.sample_seed
        )
        self.strategy.model.train()
        return self.dataset.decode(tokens.cpu().numpy())

    def _save_weights(self, recorder: Recorder | None) -> None:
        """Write the trained weights from rank 0, which all ranks give their parts of."""
        parameters = self.strategy.full_parameters()
        if recorder:
            save_weights(recorder.run_dir / WEIGHTS_FOLDER, parameters)
        else:
            for _ in parameters:
                pass

    def _zero(self) -> Tensor:
        """A sum that is exact enough not to depend on the order of its terms, where the device has float64."""
        dtype = torch.float64 if float64_collectives(self.device.type) else torch.float32
        return torch.zeros((), dtype=dtype, device=self.device.torch_device)

    def _situation(self, step: int) -> Situation:
        params = (param for _, param in self.strategy.named_parameters())
        return situation(self.config, self.world_size, self.rank, step, self._phase, params, self.optimizer)

    def _profiler(self, recorder: Recorder | None) -> Profiler:
        """Every chosen rank writes into the run directory, of which rank 0 alone knows the name."""
        profile, folder = self.config.profile, None
        if profile.enabled or profile.snapshot:
            told = [recorder.run_dir / PROFILE_FOLDER if recorder else None]
            dist.broadcast_object_list(told, device=self.device.torch_device)
            folder = told[0]
        message = recorder.message if recorder else functools.partial(print, f"rank {self.rank}:", flush=True)
        return Profiler(profile, self.device, self.rank, folder, message=message)

    def _recorder(self) -> Recorder:
        references = {
            "unigram entropy of the data": self.dataset.unigram_entropy_nats,
            "conditional entropy of the data": self.dataset.conditional_entropy_nats,
        }
        return Recorder(
            self.config.metrics,
            title=f"{self.config.model.name}-{self.config.parallel.name}",
            config_tree=self.config.to_dict(),
            environment=environment(self.device, self.world_size, sys.argv)
            | {"patches_of_pytorch": dict(self.patches.report) or "none"},
            steps=self.config.train.steps,
            references={label: nats for label, nats in references.items() if nats is not None},
        )
