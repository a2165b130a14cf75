"""Traces of all layers of the trainer, on every rank of a pipeline: the oracle of the planner's
estimates.

The traced trainer is the one that trains, with the real model and nothing that stands in for a part
of it. Each trace is made in a process of its own: ``python -m tests.harness.full_trace FOLDER``
answers the request in FOLDER.
"""

import multiprocessing
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from fsdptoys.config.schema import Config
from fsdptoys.device import available_cores
from fsdptoys.device.profile import AttentionKind, Hardware
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import Prediction, StagePrediction
from fsdptoys.plan.estimate.pipeline import layers_of_ranks
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.events import Trace
from fsdptoys.plan.simulator.replay import Replay, replay
from fsdptoys.plan.trace import fake_device
from fsdptoys.plan.trace.op_costs import attention_of, matmul_workspace_bytes
from fsdptoys.plan.trace.tracer import (
    DEVICE_TYPES,
    Program,
    record,
    tracing_environment,
    trainer_program,
)
from tests.harness.multi_rank_replay import replay_together

# Files of the tracing process; an answer for each job
REQUEST = "request.pickle"
ANSWER = "answer-{}.pickle"


def predict_in_full(config: Config, hardware: Hardware, world_size: int) -> Prediction:
    """Predict a validated run from full traces: the rank that reserves most, and the time of the
    busiest."""
    ranks = config.mesh.pp_size
    traces = trace_all(
        [(config, rank * world_size // ranks) for rank in range(ranks)],
        hardware,
        world_size,
    )
    allocators = [
        build_allocator(config.plan.allocator, device_type=hardware.device_type)
        for _ in traces
    ]
    if ranks == 1:
        replays = [replay(traces[0], hardware, allocators[0])]
    else:
        replays = list(replay_together(traces, hardware, allocators))
    memory = max(
        replays, key=lambda replayed: replayed.memory().reserved_bytes
    ).memory()
    time = max(replays, key=lambda replayed: replayed.time().compute_seconds).time()
    train = config.train
    axes = config.parallel.axes(world_size, config.mesh)
    micro_batches = train.grad_accum * getattr(config.parallel, "simulated_ranks", 1)
    tokens = train.batch_size * train.seq_len * micro_batches * axes.data_ranks
    with torch.device("meta"):
        flops_per_token = config.model.build().flops_per_token(train.seq_len)
    peak_flops = hardware.peak_flops.get(config.parallel.param_dtype.value)
    return Prediction(
        method="traced in full",
        hardware=hardware.name,
        world_size=world_size,
        tokens_per_step=tokens,
        model_flops_per_step=tokens / world_size * flops_per_token,
        peak_flops=peak_flops.value if peak_flops else None,
        memory=memory,
        time=time,
        device_type=hardware.device_type,
        stages=stage_predictions(config, replays) if ranks > 1 else (),
    )


def stage_predictions(
    config: Config, replays: Sequence[Replay]
) -> tuple[StagePrediction, ...]:
    """Memory and time of each pipeline rank."""
    stages = []
    for layers, replayed in zip(layers_of_ranks(config), replays, strict=True):
        memory = replayed.memory()
        time = replayed.time()
        stages.append(
            StagePrediction(
                layers,
                memory.peak_bytes,
                memory.reserved_bytes,
                time.compute_seconds,
                time.stage_seconds,
            )
        )
    return tuple(stages)


def trace_all(
    jobs: Sequence[tuple[Config, int]], hardware: Hardware, world_size: int
) -> list[Trace]:
    """Trace a rank of each of several validated runs, in a process of its own.

    A ConfigError of the run itself is raised here; any other failure is a RuntimeError with the
    process's traceback.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / REQUEST).write_bytes(pickle.dumps((list(jobs), hardware, world_size)))
        stderr = run_tracer([sys.executable, "-m", "tests.harness.full_trace", name])
        return [
            read_answer(folder / ANSWER.format(index), stderr)
            for index in range(len(jobs))
        ]


def run_tracer(command: list[str]) -> str:
    """Run a command and return its standard error."""
    process = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=tracing_environment(),
    )
    return process.stderr


def read_answer(path: Path, stderr: str = "") -> Trace:
    """Return the trace in an answer, or raise its failure."""
    if not path.exists():
        raise RuntimeError(f"the tracing process ended without an answer:\n{stderr}")
    answer = pickle.loads(path.read_bytes())
    if isinstance(answer, Trace):
        return answer
    kind, message = answer
    raise kind(message)


def trace_here(
    program: Program,
    *,
    attention: AttentionKind,
    world_size: int,
    workspace_bytes: int = 0,
    rank: int = 0,
) -> Trace:
    """Trace a program up to its last mark in this process, which cannot be used afterwards."""
    fake_device.install(DEVICE_TYPES[attention], world_size, rank)
    return record(program, attention=attention, workspace_bytes=workspace_bytes)


def trace_run(
    config: Config, hardware: Hardware, world_size: int, rank: int = 0
) -> Trace:
    """Trace a rank of a run as :func:`trace_here`."""
    return trace_here(
        trainer_program(config, hardware),
        attention=attention_of(config, hardware),
        world_size=world_size,
        workspace_bytes=matmul_workspace_bytes(hardware),
        rank=rank,
    )


def main(folder: Path) -> None:
    """Answer the request in a folder, with as many processes at a time as there are cores."""
    jobs, hardware, world_size = pickle.loads((folder / REQUEST).read_bytes())
    fork = multiprocessing.get_context("fork")
    running: list[BaseProcess] = []
    for index, (config, rank) in enumerate(jobs):
        if len(running) == available_cores():
            wait([process.sentinel for process in running])
            running = [process for process in running if process.is_alive()]
        path = folder / ANSWER.format(index)
        running.append(
            fork.Process(
                target=answer_one, args=(path, config, hardware, world_size, rank)
            )
        )
        running[-1].start()
    for process in multiprocessing.active_children():
        process.join()


def answer_one(
    path: Path, config: Config, hardware: Hardware, world_size: int, rank: int = 0
) -> None:
    """Trace one rank of a run and write the answer."""
    answer: object
    try:
        answer = trace_run(config, hardware, world_size, rank)
    except ConfigError as mistake:
        answer = (ConfigError, str(mistake))
    except BaseException:
        answer = (
            RuntimeError,
            f"the trainer could not be traced:\n{traceback.format_exc()}",
        )
    with open(path, "wb") as file:
        pickle.dump(answer, file, protocol=pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
