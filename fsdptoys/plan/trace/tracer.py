"""Traces the project's trainer, or any program, on a device that does not exist.

The traced trainer is the one that trains. Two steps are traced: in the first one FSDP learns the order of its units and
the optimizer allocates its states. Parameters have memory but no values; tokens are synthetic; evaluation, checkpoints,
profiling and compilation are left out.

A process that traces cannot be used otherwise (``fake_device``), so ``trace`` starts one: ``python -m
fsdptoys.plan.trace.tracer FOLDER`` answers the request in FOLDER. It forks once per job, as many at a time as there
are cores. An answer is a trace or an error; the parent reports a fork that dies.
"""

import copy
import dataclasses
import functools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdptoys.checkpoint import CheckpointConfig
from fsdptoys.config.schema import Config
from fsdptoys.data import SyntheticConfig
from fsdptoys.device import available_cores
from fsdptoys.device.profile import AttentionKind, Hardware
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import Category
from fsdptoys.models import MoEConfig, npu_kernels
from fsdptoys.models.layers import LMHead
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.precision import CastParameters
from fsdptoys.plan.simulator.events import Trace
from fsdptoys.profiler import DebugConfig, ProfileConfig
from fsdptoys.train.trainer import Trainer

from . import fake_device
from .fake_device import PlannedDevice, registers_devices, torch_device_type
from .fake_exchanges import fake_exchanges
from .fake_kernels import planned_kernels, replace_kernels
from .fake_stages import fake_stages
from .fake_tensors import fake_tensors
from .op_costs import attention_of, matmul_workspace_bytes
from .op_recorder import OpRecorder

REQUEST, ANSWER = "request.pickle", "answer-{}.pickle"  # Files of the tracing process; an answer for each job
STEPS = 2
TIMEOUT_SECONDS = 1800.0

DEVICE_TYPES = {kind: "cuda" if kind.on_cuda else kind.value for kind in AttentionKind}
"""Kind of attention → its device type."""

Program = Callable[[OpRecorder], None]


def trace(config: Config, hardware: Hardware, world_size: int, n_layers: Sequence[int]) -> list[Trace]:
    """Trace rank 0 of a validated run at several depths; see :func:`trace_all`."""
    models = [dataclasses.replace(config.model, n_layers=depth) for depth in n_layers]
    return trace_all([(dataclasses.replace(config, model=model), 0) for model in models], hardware, world_size)


def trace_all(jobs: Sequence[tuple[Config, int]], hardware: Hardware, world_size: int) -> list[Trace]:
    """Trace a rank of each of several validated runs, in a process of its own.

    A ConfigError of the run itself is raised here; any other failure is a RuntimeError with the process's traceback.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / REQUEST).write_bytes(pickle.dumps((list(jobs), hardware, world_size)))
        stderr = _run([sys.executable, "-m", "fsdptoys.plan.trace.tracer", name], tracing_environment())
        return [_read_answer(folder / ANSWER.format(index), stderr) for index in range(len(jobs))]


def tracing_environment() -> dict[str, str]:
    """Environment of a tracing process: without real devices, nor a torch_npu that takes the fake device's place."""
    hidden = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return os.environ | hidden | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _read_answer(path: Path, stderr: str) -> Trace:
    """The child's trace, or its failure as an exception."""
    try:
        answer = pickle.loads(path.read_bytes())
    except FileNotFoundError:
        if stderr.strip():
            raise RuntimeError(f"the tracing process ended without an answer:\n{stderr}") from None
        killed = "the trace was killed before its end, most likely for lack of host memory"
        raise ConfigError(f"{killed}; set plan.exact=false, or free memory") from None
    if isinstance(answer, Trace):
        return answer
    kind, message = answer
    raise kind(message)


def _run(command: list[str], environment: dict[str, str]) -> str:
    """Run a command and return its standard error; its process group ends with this call."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        return process.communicate(timeout=TIMEOUT_SECONDS)[1]
    except subprocess.TimeoutExpired as late:
        fix = "set plan.exact=false, or plan fewer layers"
        raise ConfigError(f"the trace took over {TIMEOUT_SECONDS:g} s; {fix}") from late
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def trace_here(
    program: Program, *, attention: AttentionKind, world_size: int, workspace_bytes: int = 0, rank: int = 0
) -> Trace:
    """Trace a program up to its last mark in this process, which cannot be used afterwards."""
    fake_device.install(DEVICE_TYPES[attention], world_size, rank)
    return record(program, attention=attention, workspace_bytes=workspace_bytes)


def trace_depth(config: Config, hardware: Hardware, n_layers: int) -> Trace:
    """Trace a run with that many layers, in a process with its fake device."""
    model = dataclasses.replace(config.model, n_layers=n_layers)
    program = trainer_program(dataclasses.replace(config, model=model), hardware)
    return record(program, attention=attention_of(config, hardware), workspace_bytes=matmul_workspace_bytes(hardware))


def record(program: Program, *, attention: AttentionKind, workspace_bytes: int = 0) -> Trace:
    """Trace a program as ``trace_here``, in a process with its fake device."""
    recorder = OpRecorder(torch_device_type(DEVICE_TYPES[attention]), attention, workspace_bytes)
    with replace_kernels(attention, recorder), fake_tensors(recorder.device_type), recorder.watch():
        program(recorder)
        return recorder.finish()


def trainer_program(config: Config, hardware: Hardware, steps: int = STEPS) -> Program:
    """Steps of the project's trainer as a program to trace; settings outside a step are ignored."""

    def run(recorder: OpRecorder) -> None:
        device = PlannedDevice(hardware.device_type, hardware.title, int(hardware.memory_bytes.value))
        recorder.mark(0, "construction")
        trainer = Trainer(_steps_only(config, steps), device, fill=lambda param, name: None)
        recorder.objects = functools.partial(_known, trainer)
        trainer.on_phase = recorder.mark
        if isinstance(trainer.strategy.model, DistributedDataParallel) and not trainer.strategy.model._comm_hooks:
            if device.is_accelerator and not registers_devices():
                raise ConfigError(
                    f"plan.exact=true cannot trace PyTorch's DDP with torch {torch.__version__}, whose reducer needs "
                    "the device's own code; set plan.exact=false or install torch 2.9 or newer"
                )
            trainer.strategy.model.register_comm_hook(None, _all_reduce)
        for module in trainer.strategy.model.modules():
            if isinstance(module, LMHead):
                _watch_head(module, recorder)
        trainer.around_step = functools.partial(_ended, recorder)
        with fake_exchanges(recorder, config.plan.expert_imbalance), fake_stages(recorder):
            trainer.train()

    return run


@contextmanager
def _ended(recorder: OpRecorder, step: int) -> Iterator[None]:
    """Mark the end of a step where the host has launched it; its numbers may be read later."""
    yield
    recorder.mark(step, "end")


def _steps_only(config: Config, steps: int) -> Config:
    train = dataclasses.replace(config.train, steps=steps, eval_every=0, max_seconds=None, compile=False)
    train.float8, train.float8_all_gather = Float8.none, False
    if train.deterministic.covers_layouts and isinstance(config.model, MoEConfig):
        # Shapes of its matmuls are numbers of tokens, which fake tensors do not have.
        train.deterministic, train.slices = Deterministic.false, 1
    memory = copy.copy(config.memory)
    # One thread: a replay cannot show the gain of several.
    memory.checkpointing_budget, memory.cpu_threads = None, 1
    data = SyntheticConfig(eval_samples=0, mask_documents=config.data.mask_documents)
    model = dataclasses.replace(config.model, init_from=None)
    off = {
        "kernels": planned_kernels(config),
        "checkpoint": CheckpointConfig(),
        "profile": ProfileConfig(),
        "debug": DebugConfig(),
    }
    return dataclasses.replace(config, train=train, memory=memory, data=data, model=model, **off)  # type: ignore[arg-type]


def _known(trainer: Trainer) -> Iterator[tuple[Category, Tensor]]:
    """Tensors whose purpose the trainer's parts know."""
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
        yield Category.buffers, npu_kernels.causal_mask(trainer.device.torch_device)
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


def _watch_head(head: LMHead, recorder: OpRecorder) -> None:
    """Categorize allocations in the head's forward and backward as logits and loss."""

    def begin(_: nn.Module, args: tuple[Any, ...]) -> None:
        recorder.enter_region(Category.logits)
        if isinstance(args[0], Tensor) and args[0].requires_grad:
            args[0].register_hook(end)

    def end(*_: Any) -> None:
        recorder.enter_region(None)

    head.register_forward_pre_hook(begin)
    head.register_forward_hook(end, always_call=True)


def main(folder: Path) -> None:
    """Answer the request in a folder."""
    jobs, hardware, world_size = pickle.loads((folder / REQUEST).read_bytes())
    fork = multiprocessing.get_context("fork")
    running: list[BaseProcess] = []
    for index, (config, rank) in enumerate(jobs):
        if len(running) == available_cores():
            wait([process.sentinel for process in running])
            running = [process for process in running if process.is_alive()]
        path = folder / ANSWER.format(index)
        running.append(fork.Process(target=answer_one, args=(path, config, hardware, world_size, rank)))
        running[-1].start()
    for process in multiprocessing.active_children():
        process.join()


def answer_one(path: Path, config: Config, hardware: Hardware, world_size: int, rank: int = 0) -> None:
    """Trace one rank of a run and write the answer."""
    answer: object
    try:
        attention, workspace = attention_of(config, hardware), matmul_workspace_bytes(hardware)
        answer = trace_here(
            trainer_program(config, hardware),
            attention=attention,
            world_size=world_size,
            workspace_bytes=workspace,
            rank=rank,
        )
    except ConfigError as mistake:
        answer = (ConfigError, str(mistake))
    except BaseException:
        answer = (RuntimeError, f"the trainer could not be traced:\n{traceback.format_exc()}")
    with open(path, "wb") as file:
        pickle.dump(answer, file, protocol=pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
