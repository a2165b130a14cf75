"""A launched worker process: its input from the launcher, its error file, and its exit.

A worker's exception goes into the error file named by the launcher, in the format of torch's
elastic launcher plus the exact time and whether a restart could help. Data that must survive a
restart is in the launcher's folder.
"""

import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError, GivenUpError, LostRanksError, LostWorkerError
from fsdptoys.profiler import ExplainedOutOfMemoryError, is_out_of_memory
from fsdptoys.train.launch_env import LAUNCHED, launch_folder
from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.parent_death import end_with_parent
from fsdptoys.utils.text import one_line, printable

from .hardware import FoundHardware, hardware_environment
from .launch_folder import LaunchFolder

REQUEST_FILE = "request"  # in the launcher's folder, with the composed run


@dataclass(frozen=True)
class WorkerRequest:
    """A validated run, passed from the launcher to its workers; composing it again would take each
    a second."""

    config: Config
    hardware: FoundHardware
    local_ranks: int
    world_size: int

    def environment(self) -> dict[str, str]:
        """Return the variables, not in the environment yet, that this machine's hardware needs in a
        worker."""
        device_type = self.hardware.device_type
        cores = self.hardware.cores
        timeout = self.config.launch.timeout_seconds
        deterministic = bool(self.config.train.deterministic)
        return hardware_environment(
            device_type, self.local_ranks, cores, deterministic, os.environ, timeout
        )


def make_launch_folder(request: WorkerRequest | None) -> LaunchFolder:
    """Make the launcher's folder, with the run for the workers; ConfigError if it cannot be
    written."""
    folder = None
    try:
        folder = LaunchFolder()
        if request is not None:
            (folder.path / REQUEST_FILE).write_bytes(pickle.dumps(request))
    except OSError as error:
        if folder is not None:
            folder.remove()
        raise ConfigError(
            f"the launcher cannot write its temporary folder ({error.strerror or error}); set "
            "TMPDIR to a folder that can be written, on a disk with room"
        ) from error
    return folder


def read_request() -> WorkerRequest | None:
    """Read the run that our launcher has passed to this process; None if the parent is not our
    launcher."""
    folder = launch_folder()
    if (
        os.environ.get(LAUNCHED) != str(os.getppid())
        or folder is None
        or not (folder / REQUEST_FILE).exists()
    ):
        return None
    request = pickle.loads((folder / REQUEST_FILE).read_bytes())
    assert isinstance(request, WorkerRequest)
    return request


def run_as_worker(work: Callable[[], None]) -> int:
    """Do the work of one rank and return 0; record its exception in the launcher's error file, or
    print it.

    A failure ends the process here, since leaving the interpreter may wait for other ranks.
    """
    _end_with_launcher()
    ErrorHandler().initialize()
    try:
        work()
    except Exception as failure:
        error = explain_elsewhere(failure)
        # The messages of these name the phase of the run.
        explained = isinstance(
            error, (ExplainedOutOfMemoryError, LostRanksError, LostWorkerError)
        )
        alone = isinstance(error, (ConfigError, GivenUpError))
        message = (
            f"fsdptoys: {error}"
            if alone
            else str(error)
            if explained
            else traceback.format_exc()
        )
        rank = os.environ.get("RANK", "0")
        try:
            _record(
                Path(os.environ["TORCHELASTIC_ERROR_FILE"]), int(rank), error, message
            )
        except (
            KeyError,
            OSError,
        ):
            # without our launcher or torchrun, or with a full disk
            sentence = message if alone else f"fsdptoys: rank {rank} failed:\n{message}"
            print(printable(sentence, sys.stderr), file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if isinstance(error, ConfigError) else 1)
    return 0


def explain_elsewhere(error: Exception) -> Exception:
    """Return an out-of-memory error that no phase has explained as one sentence; return others
    unchanged."""
    if isinstance(error, ExplainedOutOfMemoryError) or not is_out_of_memory(error):
        return error
    on_host = isinstance(error, MemoryError) or not isinstance(
        error, torch.OutOfMemoryError
    )
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" in {last[0].name}" if last else ""
    reason = one_line(error) or "no reason given"
    explained = ExplainedOutOfMemoryError(
        f"{'host' if on_host else 'device'} memory ran out{where} ({reason}); set fewer ranks on "
        "this machine, a smaller model, train.batch_size or train.seq_len, or data that takes "
        "less memory"
    )
    return explained.with_traceback(error.__traceback__)


def _record(path: Path, rank: int, error: Exception, message: str) -> None:
    """Write ``ErrorHandler``'s record with nanoseconds; separate fields for messages shown without
    a rank."""
    now_ns = time.time_ns()
    extra = {
        "py_callstack": message,
        "timestamp": str(now_ns // 10**9),
        "time_ns": now_ns,
        "rank": rank,
        "config_error": str(error) if isinstance(error, ConfigError) else None,
        "given_up": str(error) if isinstance(error, GivenUpError) else None,
        # These repeat after a restart.
        "final": isinstance(
            error, (ConfigError, ExplainedOutOfMemoryError, GivenUpError)
        ),
    }
    # Atomic, since a partial record would hide the failure.
    message = f"{type(error).__name__}: {error}"
    write_atomically(
        path, json.dumps({"message": {"message": message, "extraInfo": extra}})
    )


def _end_with_launcher() -> None:
    launcher = os.environ.get(LAUNCHED, "")
    if not launcher.isdecimal():
        return
    ask_the_kernel = end_with_parent(int(launcher), signal.SIGKILL)
    if ask_the_kernel is not None:
        ask_the_kernel()
