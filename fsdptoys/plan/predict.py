"""What a run would take, from its own code: two steps traced on an imagined device, replayed in its memory and time."""

import copy
import dataclasses

from fsdptoys.config.kernel_choice import GroupedKernel
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB, Device, available_device_type
from fsdptoys.device.profile import Hardware, Quantity, list_hardware, load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.launch.hardware import profile_of_this_machine
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.models import MoEConfig
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.mesh import straddling
from fsdptoys.plan.estimate.estimate import closed_form
from fsdptoys.plan.search.switches import STRATEGIES, check_strategy, node_ranks_of
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.events import Trace
from fsdptoys.plan.simulator.replay import Replay, replay
from fsdptoys.plan.trace.extrapolate_layers import choose_depths, extrapolate
from fsdptoys.plan.trace.tracer import trace

VALIDATED_RANKS = 128
"""Most ranks of a published run that the model was held against."""

UNCALIBRATED_BAND = "published runs took 1.1 to 1.7 times as long as predicted without calibration"

HIGHER = 0.02
"""Share by which the closed form's peak must be over that of the line for all layers to be traced."""

ALARM = 0.10
"""Share by which the closed form and the trace may differ before that is told."""


def hardware_of(config: Config) -> Hardware:
    """The profile that ``plan.hardware`` names, or that of this machine's device.

    Raises:
        ConfigError: if there is none.
    """
    if config.plan.hardware != "auto":
        return load_hardware(config.plan.hardware)
    found = profile_of_this_machine()
    if found is None:
        raise ConfigError(
            f"plan.hardware=auto knows no profile of {Device(available_device_type()).name}; set plan.hardware to one "
            f"of {', '.join(list_hardware())}, or to a YAML file of your own"
        )
    return load_hardware(found)


def estimate_run(config: Config, world_size: int) -> tuple[Prediction, Hardware] | None:
    """What a run is to take, at once and by the closed form; None where it is not wanted or cannot be told.

    Args:
        config: validated, of a run on this machine.
        world_size: ranks.
    """
    unknown = config.plan.hardware == "auto" and profile_of_this_machine() is None
    if unknown or not config.plan.predict or config.parallel.name not in STRATEGIES:
        return None
    hardware = hardware_of(config)
    memory = config.memory
    if hardware.device_type == "cpu" and (memory.cpu_offload or memory.optimizer_offload):
        return None  # what is offloaded on a CPU stays where it was, which the closed form does not know
    return closed_form(config, hardware, world_size, config.plan.allocator), hardware


def world_size_of(config: Config, hardware: Hardware) -> int:
    """Ranks to plan for: those that are asked for, or one machine's."""
    if config.plan.world_size is not None:
        return config.plan.world_size
    if config.parallel.single_process:
        return 1
    on_a_machine = config.launch.nproc_per_node
    if on_a_machine == -1:
        on_a_machine = int(hardware.devices_per_node.value)
    return on_a_machine * config.launch.nnodes


class Predictor:
    """Predicts one configuration; its traces are made once, so that other hardware costs a replay only.

    Args:
        config: validated.
        hardware: whose kernels the run would call.
        world_size: ranks.
    """

    def __init__(self, config: Config, hardware: Hardware, world_size: int) -> None:
        check_strategy(config)
        self.config = config
        self.world_size = world_size
        self.depths = choose_depths(config)
        self.traces: list[Trace] = trace(config, hardware, world_size, self.depths)

    def __call__(self, hardware: Hardware) -> Prediction:
        """Replay the traces, and read the model's depth off the line through them.

        Args:
            hardware: of the kind that was traced for.
        """
        config = self.config
        replays = [
            replay(each, hardware, build_allocator(config.plan.allocator, device_type=hardware.device_type))
            for each in self.traces
        ]
        result: Replay = replays[-1]
        in_full = len(replays) == 1
        if not in_full:
            result = extrapolate(replays[0], replays[1], (self.depths[0], self.depths[1]), config.model.n_layers)
        closed = closed_form(config, hardware, self.world_size, config.plan.allocator)
        prediction = dataclasses.replace(
            closed,
            method="traced, all layers" if in_full else f"traced, {self.depths[0]} and {self.depths[1]} layers",
            memory=result.memory(closed.memory.host_bytes),
            time=result.time(),
        )
        told = (*doubts(config, hardware, self.world_size), *disagreement(prediction, closed))
        return dataclasses.replace(prediction, doubts=told)


def predict(config: Config, hardware: Hardware, world_size: int) -> Prediction:
    """Trace, replay and extrapolate; see :class:`Predictor`.

    A peak that lies elsewhere in deep models than in shallow ones is not found on a line. The closed form knows all
    layers: where its peak is the higher one, all of them are traced.
    """
    predictor = Predictor(config, hardware, world_size)
    prediction = predictor(hardware)
    closed = closed_form(config, hardware, world_size, config.plan.allocator)
    if len(predictor.depths) > 1 and closed.memory.peak_bytes > (1 + HIGHER) * prediction.memory.peak_bytes:
        config = copy.deepcopy(config)
        config.plan.exact = True
        prediction = Predictor(config, hardware, world_size)(hardware)
    return prediction


def doubts(config: Config, hardware: Hardware, world_size: int) -> tuple[str, ...]:
    """What the model does not know about this configuration, a sentence each."""
    found: list[str] = []
    if world_size > VALIDATED_RANKS:
        found.append(
            f"time beyond {VALIDATED_RANKS} ranks was held against no measurement: stragglers, congestion and "
            "failures are not modelled, so its error band is open upwards"
        )
    if config.parallel.shards_parameters:
        ranks = config.mesh.shard_ranks(world_size)
        sentence = straddling(ranks, world_size, node_ranks_of(config, hardware, world_size))
        if sentence is not None:
            found.append(f"{sentence}; here each group is taken to begin where a machine does")
    limit = config.plan.memory_gib
    if limit is not None and limit * GIB > hardware.usable_bytes:
        found.append(
            f"plan.memory_gib={limit:g} is over the {hardware.usable_bytes / GIB:.2f} GiB that {hardware.name} leaves "
            "the allocator"
        )
    quantities = {field.name: getattr(hardware, field.name) for field in dataclasses.fields(hardware)}
    assumed = [
        name
        for name, quantity in quantities.items()
        if isinstance(quantity, Quantity) and quantity.source.startswith("assumed")
    ]
    sizes = [name for name in assumed if name.endswith("_bytes")]
    rates = [name for name in assumed if name not in sizes]
    if sizes:
        found.append(
            f"plan.hardware={hardware.name} assumes {', '.join(sizes)}; set plan.memory_gib to what your devices leave"
        )
    if rates:
        found.append(
            f"plan.hardware={hardware.name} assumes {', '.join(rates)}; {UNCALIBRATED_BAND}, and fsdptoys plan "
            "calibrate replaces rates by measurements"
        )
    if config.parallel.flattens_parameters or config.memory.optimizer_offload:
        found.append("two steps are traced, and what is reserved here may grow in a third: up to 2% seen")
    if config.train.compile:
        found.append("train.compile=true is predicted as if nothing were compiled: an upper bound of time and memory")
    if config.data.mask_documents:
        found.append("how long documents are is not known: attention is taken to be over whole sequences")
    if config.train.float8 is not Float8.none:
        found.append(
            f"train.float8={config.train.float8.value} is predicted as if products and gathers were in bfloat16: an "
            "upper bound of time where the compiler fuses the casts, and short of the casts' scratch memory"
        )
    known = ("torch", "auto", GroupedKernel.looped.value)
    unmeasured = [f"{key}={name}" for key, name in config.kernels.names().items() if name not in known]
    if unmeasured:
        found.append(
            f"kernels.{{{', '.join(unmeasured)}}} are taken to touch each tensor once, to keep what their sources "
            "say, and to take no scratch: no device has measured them here"
        )
    if config.optim.low_bit_format:
        found.append(
            f"optim.state_dtype={config.optim.low_bit_format} is taken to be updated in two compiled kernels, with "
            "the scratch that the compiler makes on a CPU: no other device has measured it here"
        )
    if isinstance(config.model, MoEConfig):
        found.append("experts are taken to be sent equally many tokens: an idle or a busy one costs time")
        one_by_one = config.kernels.grouped_matmul is GroupedKernel.looped
        one_by_one |= hardware.device_type == "npu" and config.kernels.grouped_matmul is not GroupedKernel.npu
        if one_by_one:
            found.append("experts are taken as one product, where they are multiplied singly: a lower bound of time")
    if config.data.reads_files:
        found.append("reading the data is taken to cost nothing")
    return tuple(found)


def disagreement(traced: Prediction, closed: Prediction) -> tuple[str, ...]:
    """Where two ways to the same number differ by more than ``ALARM``, a sentence each."""
    found: list[str] = []
    for what, unit, read in (
        ("peak memory", "GiB", lambda each: each.memory.peak_bytes / GIB),
        ("reserved memory", "GiB", lambda each: each.memory.reserved_bytes / GIB),
        ("the step", "s", lambda each: each.time.step_seconds),
    ):
        of_trace, of_formula = read(traced), read(closed)
        if of_trace and abs(of_formula / of_trace - 1) > ALARM:
            found.append(
                f"the closed form gives {of_formula:.3g} {unit} for {what}, the trace {of_trace:.3g} {unit}: "
                f"{of_formula / of_trace - 1:+.0%}, so be careful with either"
            )
    return tuple(found)
