"""The training loop, to be read from top to bottom like a recipe.

``Trainer(config)`` prepares everything in the order in which it happens; ``run`` takes the steps. The same code runs
under every strategy: what differs is behind ``Strategy``, and nothing here asks which one it has.

Every rank runs the same page. Rank 0 alone has a recorder, which prints and writes.
"""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .checkpoint import WEIGHTS_FOLDER, open_init_from, save_weights
from .config import Config
from .data import BatchStream, TextConfig, TextDataset, eval_batches
from .device import Device, available_device_type, float64_collectives
from .memory import IGNORE_INDEX, apply_checkpointing, cross_entropy_sum
from .metrics import Recorder, StepMetrics, environment, step_metrics
from .optim import build_optimizer, build_schedule
from .parallel import ParallelContext, seeded
from .parallel.precision import DType
from .routing import build_routing_balance
from .sampling import generate


def train(config: Config) -> "Trainer":
    """Train as ``config`` says, in this process as one of the ranks that the environment names.

    Args:
        config: validated for the world size in the environment.

    Returns:
        The trainer after its last step, with the history of all steps.
    """
    with process_group(config):
        trainer = Trainer(config)
        trainer.run()
        return trainer


@contextmanager
def process_group(config: Config) -> Iterator[None]:
    """Join the ranks that the environment names (as torchrun sets it), unless a process group is up already."""
    if dist.is_initialized():
        yield
        return
    device = _device(config)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group(
        device.backend,
        rank=int(os.environ.get("RANK", 0)),
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        timeout=timedelta(seconds=config.launch.timeout_seconds),
        device_id=device.torch_device if device.is_accelerator else None,
    )
    try:
        yield
    finally:
        # After an exception the other ranks may hang in a collective; destroying would wait for them.
        if sys.exc_info()[0] is None:
            # gloo's threads need the interpreter to free the tensors of the last collective. A group that is destroyed
            # before they did (or an interpreter that ends) waits for them while they wait for it: seen with torch
            # 2.13 as a hang or "terminate called". Waiting for the others lets them; a barrier has no tensors.
            dist.barrier()
            dist.destroy_process_group()


class Trainer:
    """One run: a model under a strategy, its data, its optimizer, and the loop over them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        train = config.train
        assert train.init_seed is not None and train.data_seed is not None, "the config must have been validated"

        # 1. Where we run.
        self.device = _device(config)
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
        with torch.device("meta"):
            model = config.model.build()
        self.flops_per_token = model.flops_per_token(train.seq_len)
        self.parameter_count = model.parameter_counts().total
        matrix_names = {name for name, param in model.named_parameters() if param.ndim >= 2}
        apply_checkpointing(config.memory, model.layers)
        self.strategy = config.parallel.build(context)
        local = self.strategy.local_data_ranks
        self.routing = build_routing_balance(model, self.device.torch_device, local)
        self.strategy.parallelize(
            model,
            open_init_from(model).fill if config.model.init_from else seeded(model.init_rows, train.init_seed),
        )

        # 3. What updates it.
        self.optimizer = build_optimizer(config.optim, self.strategy.named_parameters(), matrix_names)
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

    def run(self) -> None:
        """Take the steps, evaluate, keep the weights, sample, and leave the run directory behind."""
        with self._recorder() if self.rank == 0 else nullcontext() as recorder:
            stop_reason = self.train(recorder.step if recorder else None)
            sample = None
            try:
                if self.config.checkpoint.final_weights:
                    self._save_weights(recorder)
                sample = self._sample()
            finally:
                # A disk that is too full for weights must not cost the results too.
                if recorder:
                    recorder.finish(stop_reason, sample)

    def train(self, on_step: Callable[[StepMetrics], None] | None = None) -> str:
        """Take the steps, with evaluations in between, and say why they ended.

        Args:
            on_step: called after each step, on this rank.
        """
        train = self.config.train
        started = time.perf_counter()
        self.device.reset_peak_memory()
        with deterministic_kernels(train.deterministic):
            for step in range(1, train.steps + 1):
                metrics, out_of_time = self._train_step(step, started)
                last = out_of_time or step == train.steps
                if train.eval_every and (last or step % train.eval_every == 0):
                    metrics = dataclasses.replace(metrics, eval_loss=self._evaluate())
                self.history.append(metrics.without_counts())
                if on_step:
                    on_step(metrics)
                if out_of_time and step < train.steps:
                    return f"train.max_seconds={train.max_seconds:g} reached"
        return "all steps done"

    def _train_step(self, step: int, run_started: float) -> tuple[StepMetrics, bool]:
        """One optimizer step over a global batch, and whether any rank is out of time after it."""
        started = time.perf_counter()
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
                loss = strategy.model(tokens_BT.to(device), labels_BT.to(device), cross_entropy_sum)
                if self.routing:
                    self.routing.before_backward()
                (loss * (strategy.loss_scale / max(1, valid))).backward()
            loss_sum += loss.detach()
        out_of_time = train.max_seconds is not None and time.perf_counter() - run_started > train.max_seconds
        totals = torch.stack([loss_sum, torch.full_like(loss_sum, out_of_time)])
        dist.all_reduce(totals)

        # 3. Clip and update.
        grad_norm = strategy.clip_grad_norm(train.max_grad_norm or math.inf)
        learning_rate = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
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

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Mean loss over the first batches of the held-out part, in nats a token."""
        train, device = self.config.train, self.device.torch_device
        assert self.dataset.eval is not None
        self.strategy.model.eval()
        loss_sum, valid = self._zero(), self._zero()
        for tokens_BT, labels_BT in eval_batches(
            self.dataset.eval, train.batch_size, train.eval_batches, self.rank, self.world_size
        ):
            loss_sum += self.strategy.model(tokens_BT.to(device), labels_BT.to(device), cross_entropy_sum)
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

    def _recorder(self) -> Recorder:
        references = {
            "unigram entropy of the data": self.dataset.unigram_entropy_nats,
            "conditional entropy of the data": self.dataset.conditional_entropy_nats,
        }
        return Recorder(
            self.config.metrics,
            title=f"{self.config.model.name}-{self.config.parallel.name}",
            config_tree=self.config.to_dict(),
            environment=environment(self.device, self.world_size, sys.argv),
            steps=self.config.train.steps,
            references={label: nats for label, nats in references.items() if nats is not None},
        )


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Let PyTorch choose deterministic kernels only, and leave its settings as they were."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    # cuBLAS reads this when its first handle is made; without it PyTorch refuses deterministic matrix products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def _device(config: Config) -> Device:
    chosen = config.launch.device.value
    device_type = available_device_type() if chosen == "auto" else chosen
    return Device(device_type, int(os.environ.get("LOCAL_RANK", 0)))
