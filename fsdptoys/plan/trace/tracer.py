"""Record two steps of the project's trainer, or any program, on a device that does not exist.

The recorded trainer is the one that trains. In the first step FSDP learns the order of its units
and the optimizer allocates its states. Parameters have memory but no values; tokens are synthetic;
evaluation, checkpoints, profiling and compilation are left out. A process that records cannot be
used otherwise (``fake_device``): ``tracing_process`` has such processes.
"""

import copy
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdptoys.checkpoint import CheckpointConfig
from fsdptoys.config.schema import Config
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.device.profile import AttentionKind, Hardware
from fsdptoys.metrics.prediction import Category
from fsdptoys.models import MoEConfig, npu_kernels
from fsdptoys.models.foreign.head import TransformersHead
from fsdptoys.models.layers import LMHead
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.precision import CastParameters
from fsdptoys.plan.simulator.events import Trace
from fsdptoys.profiler import DebugConfig, ProfileConfig
from fsdptoys.train.parallelize import StandIns
from fsdptoys.train.trainer import Trainer

from .fake_device import PlannedDevice, registers_devices, torch_device_type
from .fake_exchanges import fake_exchanges
from .fake_kernels import planned_kernels, replace_kernels
from .fake_stages import fake_stages
from .fake_tensors import fake_tensors
from .op_recorder import OpRecorder

STEPS = 2

DEVICE_TYPES = {kind: "cuda" if kind.on_cuda else kind.value for kind in AttentionKind}
"""Kind of attention → its device type."""

Program = Callable[[OpRecorder], None]


def tracing_environment() -> dict[str, str]:
    """Environment of a tracing process: without real devices, nor a torch_npu that takes the fake
    device's place."""
    hidden = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    return os.environ | hidden | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def record(
    program: Program, *, attention: AttentionKind, workspace_bytes: int = 0
) -> Trace:
    """Record a program up to its last mark, in a process with a fake device."""
    recorder = OpRecorder(
        torch_device_type(DEVICE_TYPES[attention]), attention, workspace_bytes
    )
    with (
        replace_kernels(attention, recorder),
        fake_tensors(recorder.device_type),
        recorder.watch(),
    ):
        program(recorder)
        return recorder.finish()


def trainer_program(
    config: Config, hardware: Hardware, stand_ins: StandIns | None = None
) -> Program:
    """Return two steps of the project's trainer as a program to trace; settings outside a step are
    ignored."""

    def run(recorder: OpRecorder) -> None:
        device = PlannedDevice(
            hardware.device_type, hardware.title, int(hardware.memory_bytes.value)
        )
        recorder.mark(0, "construction")
        trainer = Trainer(
            _steps_only(config),
            device,
            param_init=lambda param, name: None,
            stand_ins=stand_ins,
        )
        recorder.objects = functools.partial(_known_tensors, trainer)
        trainer.on_phase = recorder.mark
        if (
            isinstance(trainer.strategy.model, DistributedDataParallel)
            and not trainer.strategy.model._comm_hooks
        ):
            if device.is_accelerator and not registers_devices():
                raise RuntimeError(
                    f"torch {torch.__version__} cannot trace PyTorch's DDP: its reducer is the "
                    "device's"
                )
            trainer.strategy.model.register_comm_hook(None, _all_reduce)
        for module in trainer.strategy.model.modules():
            if isinstance(module, (LMHead, TransformersHead)):
                _watch_head(module, recorder)
        trainer.around_step = functools.partial(_ended, recorder)
        stages = fake_stages(recorder) if config.mesh.pp_size > 1 else nullcontext()
        with fake_exchanges(recorder, config.plan.expert_imbalance), stages:
            trainer.train()

    return run


@contextmanager
def _ended(recorder: OpRecorder, step: int) -> Iterator[None]:
    """Mark the end of a step where the host has launched it; its numbers may be read later."""
    yield
    recorder.mark(step, "end")


def _steps_only(config: Config) -> Config:
    train = dataclasses.replace(
        config.train, steps=STEPS, eval_every=0, max_seconds=None, compile=False
    )
    train.float8 = Float8.none
    train.float8_all_gather = False
    if train.deterministic.covers_layouts and isinstance(config.model, MoEConfig):
        # Shapes of its matmuls are numbers of tokens, which fake tensors do not have.
        train.deterministic = Deterministic.false
        train.slices = 1
    memory = copy.copy(config.memory)
    # One thread: a replay cannot show the gain of several.
    memory.checkpointing_budget = None
    memory.cpu_threads = 1
    data = SyntheticConfig(eval_samples=0, mask_documents=config.data.mask_documents)
    model = config.model.with_settings(init_from=None)
    return dataclasses.replace(
        config,
        train=train,
        memory=memory,
        data=data,
        model=model,
        kernels=planned_kernels(config),
        checkpoint=CheckpointConfig(),
        profile=ProfileConfig(),
        debug=DebugConfig(),
    )


def _known_tensors(trainer: Trainer) -> Iterator[tuple[Category, Tensor]]:
    """Yield tensors with the purpose that the trainer's parts know."""
    for _, param in trainer.strategy.named_parameters():
        yield Category.parameters, param
        if param.grad is not None:
            yield Category.gradients, param.grad
        for state in trainer.optimizer.state.get(param, {}).values():
            if isinstance(state, Tensor):
                yield Category.optimizer_states, state
    for buffer in trainer.strategy.model.buffers():
        yield Category.buffers, buffer
    if npu_kernels.causal_mask.cache_info().currsize:
        yield (
            Category.buffers,
            npu_kernels.causal_mask(trainer.world.device.torch_device),
        )
    for module in trainer.strategy.model.modules():
        if isinstance(module, CastParameters):
            for copied in module._copies.values():
                yield Category.gathered_parameters, copied


def _all_reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's default reduction; its C++ code cannot read a Python future."""
    dist.all_reduce(bucket.buffer(), async_op=True)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _watch_head(head: nn.Module, recorder: OpRecorder) -> None:
    """Categorize allocations in the head's forward and backward as logits and loss."""

    def begin(_: nn.Module, args: tuple[Any, ...]) -> None:
        recorder.storages.region = Category.logits
        if isinstance(args[0], Tensor) and args[0].requires_grad:
            args[0].register_hook(end)

    def end(*_: Any) -> None:
        recorder.storages.region = None

    head.register_forward_pre_hook(begin)
    head.register_forward_hook(end, always_call=True)
