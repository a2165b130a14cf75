"""The tracing process: ``python -m fsdptoys.plan.trace.trace_process FOLDER`` answers the request in FOLDER.

It imports the modules of a run and forks once per depth, as many at a time as there are cores, each with its own device
and process group. An answer is a trace or an error; the parent reports a fork that dies.
"""

import dataclasses
import multiprocessing
import pickle
import sys
import traceback
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fsdptoys.config.schema import Config
from fsdptoys.device import available_cores
from fsdptoys.device.profile import Hardware
from fsdptoys.errors import ConfigError

from .op_costs import matmul_workspace_bytes
from .tracer import ANSWER, REQUEST, trace_here, trainer_program


def main(folder: Path) -> None:
    """Answer the request in a folder."""
    with open(folder / REQUEST, "rb") as file:
        config, hardware, world_size, depths = pickle.load(file)
    fork = multiprocessing.get_context("fork")
    running: dict[int, BaseProcess] = {}
    for index, n_layers in enumerate(depths):
        if len(running) == available_cores():
            wait([process.sentinel for process in running.values()])
            running = {other: process for other, process in running.items() if process.is_alive()}
        path = folder / ANSWER.format(index)
        running[index] = fork.Process(target=answer_one, args=(path, config, hardware, world_size, n_layers))
        running[index].start()
    for process in multiprocessing.active_children():
        process.join()


def answer_one(path: Path, config: Config, hardware: Hardware, world_size: int, n_layers: int) -> None:
    """Trace one depth and write the answer."""
    answer: object
    try:
        model = dataclasses.replace(config.model, n_layers=n_layers)
        program = trainer_program(dataclasses.replace(config, model=model), hardware)
        workspace_bytes = matmul_workspace_bytes(hardware)
        attention = hardware.attention
        answer = trace_here(program, attention=attention, world_size=world_size, workspace_bytes=workspace_bytes)
    except ConfigError as mistake:
        answer = (ConfigError, str(mistake))
    except BaseException:
        answer = (RuntimeError, f"the trainer could not be traced:\n{traceback.format_exc()}")
    with open(path, "wb") as file:
        pickle.dump(answer, file, protocol=pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
