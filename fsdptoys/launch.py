"""From one command to N ranks: finds the hardware, sets its environment, and starts the workers.

PyTorch's own elastic launcher (what torchrun is made of) starts, watches and ends the workers, so nothing here handles
processes. A worker writes its exception into the error file that the launcher names; this side picks the one that came
first and shows it once. Ctrl-C and SIGTERM end all workers at once. Restarts after a failure are not covered.
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher

from .compose import Composition, compose
from .config import DeviceChoice, LaunchConfig
from .device import Device, available_cores, available_device_type, device_count
from .errors import ConfigError
from .parallel import SingleConfig
from .profiler import ExplainedOutOfMemoryError

CPU_RANKS = 2
"""Ranks on a machine without accelerator: the fewest that shard."""

MOST_RANKS_PER_CORE = 32

SHUTDOWN_SECONDS = 5
"""Workers that ignore the signal for so long are killed."""

LAUNCHED = "FSDPTOYS_LAUNCHED"
"""Set for workers that this module starts, whose command has printed already what it found."""

LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|socket closed|remote process exited|communicator was aborted", re.I
)
"""What a rank says whose collective broke because another rank was gone."""


@dataclass(frozen=True)
class Hardware:
    """What this machine has for this run."""

    device_type: str
    devices: int
    """Accelerators; 0 where the run uses the CPU."""
    name: str
    """Name of the device as its maker gave it."""
    cores: int
    """CPU cores that this process may use."""


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start."""

    composition: Composition
    hardware: Hardware
    local_ranks: int
    world_size: int
    words: list[str]
    """The overrides, with the chosen experiment and device among them."""


def find_hardware(choice: DeviceChoice) -> Hardware:
    """Find the devices to run on.

    Raises:
        ConfigError: if the chosen kind is not there.
    """
    found = available_device_type()
    device_type = found if choice is DeviceChoice.auto else choice.value
    cores = available_cores()
    if device_type == "cpu":
        return Hardware("cpu", 0, Device("cpu").name, cores)
    devices = device_count(device_type)
    if devices == 0:
        raise ConfigError(
            f"launch.device={device_type} finds no such device on this machine; set launch.device={found}"
        )
    return Hardware(device_type, devices, str(torch.get_device_module(device_type).get_device_name(0)), cores)


def hardware_environment(
    device_type: str, local_ranks: int, cores: int, deterministic: bool, present: Mapping[str, str]
) -> dict[str, str]:
    """Environment variables that the hardware wants and that must stand before a worker starts.

    Args:
        device_type: ``cuda``, ``npu`` or ``cpu``.
        local_ranks: ranks on this machine.
        cores: CPU cores for all of them.
        deterministic: whether the same bits are asked for.
        present: the environment so far; what it sets is left as it is.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // local_ranks))}
    # Segments that grow keep a sharded model's ever-changing sizes from fragmenting the reserved memory. The name for
    # all devices, PYTORCH_ALLOC_CONF, is unknown to torch 2.7 and ignored by 2.9.1 on CUDA
    # (https://github.com/pytorch/pytorch/issues/183387); torch_npu refuses both names at once.
    if device_type in ("cuda", "npu") and "PYTORCH_ALLOC_CONF" not in present:
        wanted[f"PYTORCH_{device_type.upper()}_ALLOC_CONF"] = "expandable_segments:True"
    if device_type == "cuda" and deterministic:
        # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return {name: value for name, value in wanted.items() if name not in present}


def plan_run(words: Sequence[str], present: Mapping[str, str]) -> Plan:
    """Compose and validate the run that a command line asks for, on this machine's hardware.

    Args:
        words: overrides as typed; where no experiment is among them, the hardware decides.
        present: the environment; where torchrun has set its variables, its numbers count.

    Raises:
        ConfigError: for the first mistake.
    """
    # How many ranks there will be decides the experiment, so what decides the ranks is read first.
    settings = compose([word for word in words if re.match(r"(launch\.|(parallel|experiment)=)", word)]).config
    hardware = find_hardware(settings.launch.device)
    if "RANK" in present and "WORLD_SIZE" in present:
        world_size = _read_rank_variable(present, "WORLD_SIZE")
        local_ranks = _read_rank_variable(present, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in present else world_size
        _read_rank_variable(present, "RANK")
        if world_size > 1:
            _read_rank_variable(present, "LOCAL_RANK")
    else:
        local_ranks = _ranks_on_this_machine(settings.launch, hardware, isinstance(settings.parallel, SingleConfig))
        world_size = local_ranks * settings.launch.nnodes
    words = list(words)
    if not any(word.startswith("experiment=") for word in words):
        words.append(f"experiment={choose_experiment(hardware.device_type, world_size)}")
    words.append(f"launch.device={hardware.device_type}")
    composition = compose(words)
    composition.config.validate(world_size, hardware.device_type)
    return Plan(composition, hardware, local_ranks, world_size, words)


def _read_rank_variable(present: Mapping[str, str], name: str) -> int:
    value = present.get(name, "")
    if not value.isdecimal():
        raise ConfigError(
            f"{name}={value or 'nothing'} in the environment must be a number, as torchrun sets it; start the ranks "
            "with torchrun, or unset RANK and WORLD_SIZE"
        )
    return int(value)


def choose_experiment(device_type: str, world_size: int) -> str:
    """The experiment for a command that names none."""
    if device_type == "cpu":
        return "cpu_text"
    return "llama2_7b" if world_size >= 8 else "llama3_1b"


def _ranks_on_this_machine(launch: LaunchConfig, hardware: Hardware, single: bool) -> int:
    ranks = launch.nproc_per_node
    if ranks == -1:
        return 1 if single else hardware.devices or CPU_RANKS
    if hardware.devices and ranks > hardware.devices:
        raise ConfigError(
            f"launch.nproc_per_node={ranks} is over the number of {hardware.device_type} devices of this machine, "
            f"{hardware.devices}; set launch.nproc_per_node={hardware.devices}"
        )
    if not hardware.devices and ranks > MOST_RANKS_PER_CORE * hardware.cores:
        raise ConfigError(
            f"launch.nproc_per_node={ranks} is over {MOST_RANKS_PER_CORE} for each of {hardware.cores} cores; "
            f"set launch.nproc_per_node={hardware.cores}"
        )
    return ranks


def describe(plan: Plan, environment: Mapping[str, str]) -> str:
    """One line of what was found and chosen."""
    hardware, choices = plan.hardware, plan.composition.choices
    cores = f"{hardware.cores} core{'s' * (hardware.cores != 1)}"
    if hardware.devices:
        found = f"found {hardware.devices} × {hardware.name}, {cores}"
    else:
        found = f"found no accelerator, {cores} ({hardware.name})"
        if available_device_type() != "cpu":
            found = f"told to use the CPU, {cores} ({hardware.name})"
    experiment = f"experiment={choices['experiment']} " if choices["experiment"] else ""
    ranks = f"{plan.world_size} rank{'s' * (plan.world_size != 1)}"
    running = (
        f"running {experiment}model={choices['model']} data={choices['data']} with {choices['parallel']} on {ranks}"
    )
    return "; ".join([found, ", ".join([running, *(f"{name}={value}" for name, value in environment.items())])])


def launch(plan: Plan) -> int:
    """Start the workers of a plan, print what was found, and wait for their end; returns an exit status."""
    config = plan.composition.config
    environment = hardware_environment(
        plan.hardware.device_type, plan.local_ranks, plan.hardware.cores, config.train.deterministic, os.environ
    )
    print(f"fsdptoys: {describe(plan, environment)}", flush=True)
    return run_workers(
        "fsdptoys",
        ["train", *plan.words],
        plan.local_ranks,
        nnodes=config.launch.nnodes,
        rdzv_endpoint=config.launch.rdzv_endpoint,
        environment=environment,
    )


def run_workers(
    module: str,
    arguments: Sequence[str],
    local_ranks: int,
    *,
    nnodes: int = 1,
    rdzv_endpoint: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run ``python -m module arguments`` once for each rank of this machine, and wait for all of them.

    Args:
        module: what each worker runs.
        arguments: its command line.
        local_ranks: workers on this machine.
        nnodes: machines that meet at ``rdzv_endpoint``.
        rdzv_endpoint: host:port; None on one machine.
        environment: added to the workers' environment.

    Returns:
        0 after success, 1 after a worker's exception, 2 after a ``ConfigError``, 128 plus its number after a signal.
    """
    os.environ.update({**_import_environment(os.environ), **(environment or {}), LAUNCHED: "1"})
    _quieten_elastic()
    folder = tempfile.mkdtemp(prefix="fsdptoys-")
    options: dict[str, Any] = {"shutdown_timeout": SHUTDOWN_SECONDS}
    known = {field.name for field in dataclasses.fields(launcher.LaunchConfig)}  # torch 2.7 has no such timeout
    config = launcher.LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=local_ranks,
        run_id="fsdptoys" if nnodes > 1 else uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=rdzv_endpoint or "localhost:0",
        local_addr="localhost" if nnodes == 1 else None,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **{name: value for name, value in options.items() if name in known},
    )
    with _signals_restored():
        try:
            launcher.elastic_launch(config, sys.executable)("-m", module, *arguments)
            return 0
        except ChildFailedError as error:
            status, told = first_failure(error, Path(folder))
        except RendezvousError as error:
            status, told = (
                2,
                f"launch.rdzv_endpoint={rdzv_endpoint} is no place to meet ({error}); set it to a host:port",
            )
        except (SignalException, KeyboardInterrupt) as error:
            received = error.sigval if isinstance(error, SignalException) else signal.SIGINT
            status, told = 128 + received, f"stopped by {signal.Signals(received).name}; all workers have ended"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a worker that was ended may have left the cursor hidden
    print(f"fsdptoys: {told}", file=sys.stderr, flush=True)
    return status


def run_as_worker(work: Callable[[], None]) -> int:
    """Do the work of one rank; its exception is recorded for whoever started it, or printed if nobody asked for it.

    Returns:
        An exit status; a failure ends the process here, since leaving the interpreter may wait for other ranks.
    """
    handler = ErrorHandler()
    handler.initialize()
    try:
        work()
    except Exception as error:
        mistake = isinstance(error, ConfigError)
        told = f"fsdptoys: {error}" if mistake else traceback.format_exc()
        if isinstance(error, ExplainedOutOfMemoryError):
            told = str(error)  # it says what was being done
        rank = os.environ.get("RANK", "0")
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            _record(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), int(rank), error, told)
        else:
            print(told if mistake else f"fsdptoys: rank {rank} failed:\n{told}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if mistake else 1)
    return 0


def _record(path: Path, rank: int, error: Exception, told: str) -> None:
    """Write what ``ErrorHandler`` would, with a finer time and our own words for a mistake in the configuration."""
    now_ns = time.time_ns()
    extra = {"py_callstack": told, "timestamp": str(now_ns // 10**9), "time_ns": now_ns, "rank": rank}
    extra |= {"config_error": str(error) if isinstance(error, ConfigError) else None}
    path.write_text(json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}))


def first_failure(error: ChildFailedError, folder: Path) -> tuple[int, str]:
    """Find the failure that made the others fail.

    Args:
        error: what the elastic launcher raised.
        folder: where the workers' error files lie; ranks that were ended before the launcher saw them fail count too.

    Returns:
        The exit status and what to tell.
    """
    records = [json.loads(path.read_text())["message"] for path in folder.glob("**/error.json")]
    ours = [record for record in records if "rank" in record["extraInfo"]]
    ours.sort(key=lambda record: (bool(LOST_PEER.search(record["message"])), record["extraInfo"]["time_ns"]))
    silent = {rank: failure for rank, failure in error.failures.items() if failure.error_file == "<N/A>"}
    # Ranks that still ran were sent SIGTERM by the launcher itself.
    ended = {rank: failure for rank, failure in silent.items() if failure.exitcode != -signal.SIGTERM}
    if ours and not (ended and LOST_PEER.search(ours[0]["message"])):
        extra = ours[0]["extraInfo"]
        if extra["config_error"]:
            return 2, extra["config_error"]
        return 1, f"rank {extra['rank']} failed:\n{extra['py_callstack'].rstrip()}"
    rank, failure = min((ended or silent or error.failures).items())
    if failure.exitcode >= 0:
        return 1, f"rank {rank} ended with status {failure.exitcode} and left no traceback"
    reason = ", as the system does where host memory runs out" if failure.exitcode == -signal.SIGKILL else ""
    return 1, f"rank {rank} was ended by {failure.signal_name()}{reason}"


def _import_environment(present: Mapping[str, str]) -> dict[str, str]:
    """Let workers import this very package, whatever the current directory holds."""
    root = str(Path(__file__).resolve().parents[1])
    wanted = {"PYTHONSAFEPATH": "1"}  # Python 3.10 ignores it
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        wanted["PYTHONPATH"] = os.pathsep.join(filter(None, [root, present.get("PYTHONPATH")]))
    return wanted


def _quieten_elastic() -> None:
    """Leave the launcher's own log to those who ask for it with LOGLEVEL; what matters of it is told here."""
    if "LOGLEVEL" not in os.environ:
        logger = logging.getLogger("torch.distributed.elastic")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Put back the handlers that the elastic launcher replaces and leaves behind."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
