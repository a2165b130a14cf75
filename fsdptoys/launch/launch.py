"""From one command to N ranks: compose the run for this machine's hardware and start its
workers."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fsdptoys.config.choices import list_defaults
from fsdptoys.config.compose import Composition, compose
from fsdptoys.config.launch_config import DeviceChoice, LaunchConfig
from fsdptoys.config.plan_config import PlanConfig
from fsdptoys.config.schema import Config
from fsdptoys.device import available_device_type
from fsdptoys.device.profile import load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.imports import import_options
from fsdptoys.parallel.float8 import check_float8_here
from fsdptoys.parallel.mesh import HYBRID, NODE, straddling
from fsdptoys.utils.text import counted, one_line, print_status, value_text

from .hardware import FoundHardware, find_hardware
from .supervisor import run_workers
from .worker import WorkerRequest

CPU_RANKS = 2  # on a machine without an accelerator: the smallest number that shards
MOST_RANKS_PER_CORE = 32
MOST_RANKS = 2**24
SINGLE = "parallel=single"
AUTO = "auto"  # The file of ``memory`` whose switches the planner chooses
NAMES_TRAINING = re.compile(r"[+~]*((experiment|model|data|tune)=|(model|data|tune)\.)")
"""Overrides that name an experiment, or a part of one: an experiment chosen by the hardware would
make the rest another training on other hardware."""

TOLD_DEFAULTS = (
    "train.seq_len",
    "train.steps",
    "train.batch_size",
    "optim.lr",
    "parallel.param_dtype",
)
"""Options whose values are printed where nobody typed them."""

AS_TORCHRUN = "start the ranks with torchrun, or unset RANK and WORLD_SIZE"


@dataclass(frozen=True)
class ResolvedRun:
    """A validated run, ready to start."""

    composition: Composition
    hardware: FoundHardware
    local_ranks: int
    world_size: int
    overrides: list[str]
    """Including the chosen experiment, strategy and device."""
    strategy_chosen: bool = False
    """Whether the number of ranks decided the strategy."""
    by_hardware: bool = False
    """Whether the hardware decided the experiment."""

    def request(self) -> WorkerRequest:
        """Return the run for its workers."""
        return WorkerRequest(
            self.composition.config, self.hardware, self.local_ranks, self.world_size
        )


def resolve_run(
    overrides: Sequence[str],
    present: Mapping[str, str],
    choose_preset: Callable[
        [str, str, int], list[str]
    ] = lambda experiment, device_type, world_size: [experiment],
    choose_switches: Callable[
        [Sequence[str], Config, str, int, int], list[str]
    ] = lambda *_: [],
) -> ResolvedRun:
    """Compose and validate the run of a command line on this machine's hardware.

    ConfigError for the first mistake.

    Args:
        overrides: as typed; the hardware decides the experiment if none of them names a part of
            one.
        present: the environment; torchrun's variables set the number of ranks where present.
        choose_preset: returns the overrides of a command line without any, given an experiment's
            override, a device type and the number of ranks; the CLI passes the planner's choice.
        choose_switches: returns overrides to append to those with ``memory=auto``, given all
            overrides, the configuration composed from them, the device type, and the numbers of
            ranks in all and on this machine.
    """
    overrides = list(overrides)
    by_hardware = not names_training(overrides)
    composition = compose(overrides)
    launch = composition.config.launch
    single_process = composition.config.parallel.capabilities.single_process
    hardware = find_hardware(launch.device)
    check_threads(present)
    if "RANK" in present and "WORLD_SIZE" in present:
        world_size, local_ranks = _read_ranks(present)
    else:
        local_ranks = ranks_on_this_machine(launch, hardware, single_process)
        world_size = local_ranks * launch.nnodes
    has_overrides = bool(overrides)
    if by_hardware:  # by the number of ranks
        experiment = f"experiment={choose_experiment(hardware.device_type, world_size)}"
        overrides = (
            [experiment, *overrides]
            if has_overrides
            else choose_preset(experiment, hardware.device_type, world_size)
        )
        composition = compose(overrides)
    # A preset is chosen together with its strategy.
    single = (
        choose_single(overrides, hardware.device_type)
        if has_overrides and hardware.devices and world_size == 1
        else None
    )
    if single is not None:
        overrides = [*overrides, SINGLE]
        composition = single
    if composition.choices["memory"] == AUTO:
        more = choose_switches(
            overrides, composition.config, hardware.device_type, world_size, local_ranks
        )
        if more:
            overrides = [*overrides, *more]
            composition = compose(overrides)
    overrides.append(f"launch.device={hardware.device_type}")
    if any("${" in word for word in overrides):
        # A reference to launch.device has its final value
        composition = compose(overrides)
    composition.config.launch.device = DeviceChoice(hardware.device_type)
    if composition.config.mesh.fsdp_size in (NODE, HYBRID):
        _check_machines(present, composition.config.mesh.fsdp_size)
    check_plan_settings(composition.config.plan, hardware.device_type)
    composition.config.validate(world_size, hardware.device_type, local_ranks)
    check_float8_here(composition.config.train.float8, hardware.device_type)
    return ResolvedRun(
        composition,
        hardware,
        local_ranks,
        world_size,
        overrides,
        single is not None,
        by_hardware,
    )


def names_training(overrides: Sequence[str]) -> bool:
    """Return whether a command line names its experiment or a part of it, so that the hardware does
    not choose one."""
    return any(map(NAMES_TRAINING.match, overrides))


def choose_single(overrides: Sequence[str], device_type: str) -> Composition | None:
    """Compose the run of one rank without sharding; None if ``overrides`` name a strategy or need
    another one.

    FSDP2 would copy every parameter in the forward and in the backward, and every gradient, on the
    compute stream.
    """
    if any(word.startswith("parallel=") for word in overrides):
        return None
    try:
        checked = compose([*overrides, SINGLE])
        checked.config.validate(1, device_type, 1)
        return compose([*overrides, SINGLE])
    except ConfigError:  # such as memory.cpu_offload=true, or an option of FSDP2
        return None


def check_plan_settings(plan: PlanConfig, device_type: str) -> None:
    """Reject settings that only ``fsdptoys plan`` reads, and a hardware profile of another device
    type."""
    if plan.hardware != "auto":
        if not plan.predict:
            raise ConfigError(
                f"plan.hardware={plan.hardware} does nothing with plan.predict=false; leave out "
                "one of them"
            )
        if (imagined := load_hardware(plan.hardware).device_type) != device_type:
            raise ConfigError(
                f"plan.hardware={plan.hardware} is of type {imagined}, and this run is on "
                f"{device_type}; leave it out, or ask fsdptoys plan"
            )
    for name in ("world_size", "memory_gib", "rows"):
        value = getattr(plan, name)
        default = getattr(PlanConfig(), name)
        if value != default:
            raise ConfigError(
                f"plan.{name}={value_text(value, quote=True)} is for fsdptoys plan and does "
                "nothing in a run; leave it out"
            )


def check_threads(present: Mapping[str, str]) -> None:
    """Check that OMP_NUM_THREADS lists numbers above 0; PyTorch would reject others only in the
    ranks, and OpenMP ends a process if it cannot create its threads."""
    value = present.get("OMP_NUM_THREADS", "").strip()
    level = r"\s*0*[1-9]\d{0,2}\s*"
    if value and not re.fullmatch(f"{level}(,{level})*", value, re.ASCII):
        raise ConfigError(
            f"OMP_NUM_THREADS={one_line(value)} in the environment must be a number of threads, "
            "1 to 999; unset it, which gives each rank its share of the cores"
        )


def _read_ranks(present: Mapping[str, str]) -> tuple[int, int]:
    """Return the launcher's number of ranks on all nodes and on this one; wrong ones would wait
    forever."""
    world_size = _read_rank_variable(present, "WORLD_SIZE", 1, MOST_RANKS)
    local_ranks = world_size
    if "LOCAL_WORLD_SIZE" in present:
        local_ranks = _read_rank_variable(present, "LOCAL_WORLD_SIZE", 1, world_size)
    _read_rank_variable(present, "RANK", 0, world_size - 1)
    if world_size > 1 or "LOCAL_RANK" in present:
        _read_rank_variable(present, "LOCAL_RANK", 0, local_ranks - 1)
    return world_size, local_ranks


def check_master(present: Mapping[str, str]) -> None:
    """Check that the environment names one rendezvous address for several ranks."""
    if present.get("WORLD_SIZE", "1") == "1":
        return
    if not present.get("MASTER_ADDR", "").strip():
        raise ConfigError(
            f"MASTER_ADDR=nothing in the environment must name the machine of rank 0; {AS_TORCHRUN}"
        )
    _read_rank_variable(present, "MASTER_PORT", 1, 2**16 - 1)


def _read_rank_variable(
    present: Mapping[str, str], name: str, least: int = 0, most: int = MOST_RANKS
) -> int:
    value = present.get(name, "")
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or not least <= int(value) <= most:
        raise ConfigError(
            f"{name}={one_line(value) or 'nothing'} in the environment must be a number from "
            f"{least} to {most}; {AS_TORCHRUN}"
        )
    return int(value)


def _check_machines(present: Mapping[str, str], size: str) -> None:
    """Reject ranks of unknown placement over nodes, and nodes with different numbers of ranks."""
    if present.get("WORLD_SIZE", "1") == "1":
        return
    if "LOCAL_WORLD_SIZE" not in present:
        raise ConfigError(
            f"mesh.fsdp_size={size} needs to know the ranks of each machine, and "
            "LOCAL_WORLD_SIZE is not set with WORLD_SIZE; start the ranks with torchrun, or set "
            "mesh.fsdp_size to a number"
        )
    if "GROUP_WORLD_SIZE" in present:  # torchrun's number of machines
        machines, here, all_ranks = (
            _read_rank_variable(present, name)
            for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        )
        if machines * here != all_ranks:
            raise ConfigError(
                f"mesh.fsdp_size={size} needs equally many ranks on each machine, and {machines} "
                f"machines, this one with {here} ranks, have {all_ranks} together; give torchrun "
                "the same --nproc-per-node on each, or set mesh.fsdp_size=-1"
            )


def choose_experiment(device_type: str, world_size: int) -> str:
    """Return the experiment of a command line that names none."""
    return (
        "cpu_text"
        if device_type == "cpu"
        else "llama2_7b"
        if world_size >= 8
        else "llama3_1b"
    )


def ranks_on_this_machine(
    launch: LaunchConfig, hardware: FoundHardware, single: bool
) -> int:
    """Return the ranks to start here; ConfigError for more than the devices or cores carry."""
    ranks = launch.nproc_per_node
    if ranks == -1:
        return 1 if single else hardware.devices or CPU_RANKS
    if hardware.devices and ranks > hardware.devices:
        raise ConfigError(
            f"launch.nproc_per_node={ranks} is over the number of {hardware.device_type} devices "
            f"of this machine, {hardware.devices}; set launch.nproc_per_node={hardware.devices}"
        )
    if not hardware.devices and ranks > MOST_RANKS_PER_CORE * hardware.cores:
        raise ConfigError(
            f"launch.nproc_per_node={ranks} is over {MOST_RANKS_PER_CORE} for each of "
            f"{hardware.cores} cores; set launch.nproc_per_node={hardware.cores}"
        )
    return ranks


def describe_run(run: ResolvedRun, environment: Mapping[str, str]) -> str:
    """Describe the found hardware and the run in one line, with the settings that nobody typed."""
    hardware = run.hardware
    choices = run.composition.choices
    summary = (
        f"found {hardware.devices} × {hardware.name}, {counted(hardware.cores, 'core')}"
    )
    if not hardware.devices:
        is_set = available_device_type() != "cpu"
        reason = "using the CPU as set" if is_set else "found no accelerator"
        summary = f"{reason}, {counted(hardware.cores, 'core')} ({hardware.name})"
    defaults = list_defaults() | {"model": None, "data": None}
    chosen = [
        f"{group}={choices[group]}"
        for group in ("experiment", "model", "data", "memory", "mesh")
        if choices[group] != defaults[group]
    ]
    running = (
        f"running {' '.join(chosen)} with {choices['parallel']} on "
        f"{counted(run.world_size, 'rank')}"
    )
    variables = [f"{name}={value}" for name, value in environment.items()]
    return "; ".join(
        [summary, ", ".join([running, *variables]), *_describe_defaults(run)]
    )


def _describe_defaults(run: ResolvedRun) -> list[str]:
    """Describe the settings that the command line left open."""
    experiment = run.composition.choices["experiment"]
    if run.by_hardware:
        return [
            f"experiment={experiment}: the default of this hardware, since neither model nor data "
            "are named"
        ]
    keys = {word.lstrip("+").partition("=")[0] for word in run.overrides}
    settings = []
    for key in TOLD_DEFAULTS if experiment is None else ():
        value = operator.attrgetter(key)(run.composition.config)
        # A run that tunes a model counts its steps from its data later
        if key not in keys and value != -1:
            text = f"{value:,}" if isinstance(value, int) else value_text(value)
            settings.append(f"{key.partition('.')[2]} {text}")
    return [f"{', '.join(settings)}: the defaults on every machine"] if settings else []


def print_run(run: ResolvedRun, environment: Mapping[str, str]) -> None:
    """Print the found hardware and the chosen run."""
    print_status(describe_run(run, environment), stdout=True)
    if run.strategy_chosen:
        print_status(
            f"{SINGLE} since one rank has no ranks to shard over; type parallel=fsdp2 for FSDP2",
            stdout=True,
        )
    config = run.composition.config
    for note in config.model.notes():
        print_status(note, stdout=True)
    if config.parallel.capabilities.shards_parameters:
        size = config.mesh.shard_ranks(run.world_size)
        if (sentence := straddling(size, run.world_size, run.local_ranks)) is not None:
            print_status(sentence, stdout=True)


def launch(run: ResolvedRun) -> int:
    """Print the run, start its workers and wait for them; return an exit status."""
    request = run.request()
    environment = request.environment()
    forks = run.hardware.device_type == "cpu"
    print_run(run, environment)
    argv = ["train", *import_options(), *run.overrides]
    return run_workers(
        "fsdptoys",
        argv,
        run.local_ranks,
        request.config.launch,
        environment,
        request,
        forks,
    )
