"""``fsdptoys plan``: predict memory and time of a run on hardware you do not have.

    fsdptoys plan model=llama2_7b plan.hardware=h200 plan.world_size=1024
    fsdptoys plan search model=llama3_8b plan.hardware=h100 plan.world_size=64
    fsdptoys plan calibrate runs/a runs/b hardware=h100 out=mine.yaml

The overrides are those of ``fsdptoys train`` on that hardware. It also chooses the same experiment,
if they name none.
"""

import copy
import functools
import json
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.config.settings import Settings, read_settings
from fsdptoys.config.sources import without_equal
from fsdptoys.device import GIB
from fsdptoys.device.profile import Hardware
from fsdptoys.errors import ConfigError
from fsdptoys.launch.launch import (
    SINGLE,
    choose_experiment,
    choose_single,
    names_training,
)
from fsdptoys.plan.calibrate import calibrate_command
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.predict import caveats, hardware_of, predict, world_size_of
from fsdptoys.plan.search.advice import advise
from fsdptoys.plan.search.frontier_plot import draw_frontier
from fsdptoys.plan.search.search import search
from fsdptoys.plan.search.switches import node_ranks_of, validate_switches
from fsdptoys.plan.search_report import print_search, search_to_dict
from fsdptoys.plan.text_report import advice_to_dict, print_prediction
from fsdptoys.utils.atomic_write import check_output
from fsdptoys.utils.signal_handlers import handle_signals

from .commands import parse, run_part
from .planned import AUTO_MEMORY, fastest_switches, with_margin


@dataclass(frozen=True)
class HypotheticalRun:
    """A run on hypothetical hardware."""

    config: Config
    """Composed, not validated yet."""
    hardware: Hardware
    world_size: int
    memory_bytes: int
    """Usable memory of a device."""
    overrides: list[str]
    """The overrides, including the chosen experiment."""


def compose_hypothetical(
    overrides: Sequence[str], *, searches: bool
) -> HypotheticalRun:
    """Compose a run for the hardware that its overrides name; a search chooses the strategy."""
    overrides = list(overrides)
    is_named = names_training(overrides)
    config = compose_config(
        [
            word
            for word in overrides
            if is_named or re.match(r"plan\.|launch\.|parallel=", word)
        ]
    )
    hardware = hardware_of(config)
    world_size = world_size_of(config, hardware)
    _check_launch(config, hardware, world_size)
    if not is_named:
        overrides.append(
            f"experiment={choose_experiment(hardware.device_type, world_size)}"
        )
        config = compose_config(overrides)
    if world_size == 1 and hardware.device_type != "cpu" and not searches:
        # As ``fsdptoys train`` does
        single = choose_single(overrides, hardware.device_type)
        if single is not None:
            overrides.append(SINGLE)
            config = single.config
    limit = config.plan.memory_gib
    memory_bytes = round(limit * GIB if limit is not None else hardware.usable_bytes)
    if searches:  # a search chooses the switches by itself
        overrides = [word for word in overrides if word != AUTO_MEMORY]
    elif AUTO_MEMORY in overrides and hardware.device_type != "cpu":
        overrides += fastest_switches(
            overrides, config, with_margin(hardware, memory_bytes), world_size
        )
        config = compose_config(overrides)
    return HypotheticalRun(config, hardware, world_size, memory_bytes, overrides)


def _check_launch(config: Config, hardware: Hardware, world_size: int) -> None:
    """Reject launch settings that contradict the hypothetical hardware."""
    launch = config.launch
    on_a_machine = config.launch.nproc_per_node
    if launch.device.value not in ("auto", hardware.device_type):
        raise ConfigError(
            f"launch.device={launch.device.value} differs from the type of "
            f"plan.hardware={hardware.name}, {hardware.device_type}; leave it out"
        )
    started = launch.nnodes * (
        on_a_machine if on_a_machine != -1 else int(hardware.devices_per_node.value)
    )
    is_set = launch.nnodes != 1 or on_a_machine != -1
    if is_set and config.plan.world_size is not None and started != world_size:
        raise ConfigError(
            f"plan.world_size={world_size} is not the {started} ranks of "
            f"launch.nnodes={launch.nnodes} and launch.nproc_per_node={on_a_machine}; leave out "
            "plan.world_size, or both of these"
        )


def plan_command(argv: Sequence[str]) -> int:
    """Run ``fsdptoys plan``; return the exit status."""
    # SIGTERM raises, so that the tracing subprocess is ended too.
    with handle_signals({signal.SIGTERM: lambda *_: sys.exit(128 + signal.SIGTERM)}):
        return _run(argv)


def _run(argv: Sequence[str]) -> int:
    if argv and "=" not in argv[0] and not argv[0].startswith("-"):
        return run_part(
            "plan",
            argv,
            {
                "search": _search,
                "calibrate": lambda argv: calibrate_command(argv, predict, Console()),
            },
        )
    options = parse("plan", argv)
    settings = read_settings(options.config, options.arguments)
    settings = settings.without("plan.predict", "plan.rows")
    settings.tell()
    with settings.name_origin():
        return _predict(settings.overrides, options.json)


def _predict(overrides: list[str], as_json: bool) -> int:
    _refuse(overrides, "plan.predict", "plan.rows")
    if any(word.partition("=")[0] == "--png" for word in overrides):
        raise ConfigError(
            "--png draws the result of a search; write fsdptoys plan search --png FILE"
        )
    run = compose_hypothetical(overrides, searches=False)
    config = copy.deepcopy(run.config)
    hardware = run.hardware
    world_size = run.world_size
    node_ranks = node_ranks_of(config, hardware, world_size)
    try:
        validate_switches(config, world_size, hardware.device_type, node_ranks)
    except ConfigError as mistake:
        # plan.world_size sets the number of hypothetical ranks
        raise ConfigError(
            str(mistake).replace("launch.nproc_per_node=", "plan.world_size=")
        ) from mistake
    if config.plan.expert_imbalance != 1 and config.mesh.ep_size == 1:
        raise ConfigError(
            f"plan.expert_imbalance={config.plan.expert_imbalance:g} is a load of ranks that "
            "split experts, of which mesh.ep_size=1 has none; leave it out or set mesh.ep_size"
        )
    prediction = predict(config, hardware, world_size)
    estimate = functools.partial(
        fast_estimate, hardware=hardware, world_size=world_size
    )
    advice = advise(run.config, estimate, prediction, run.memory_bytes, node_ranks)
    if as_json:
        limit = {
            "memory_limit_bytes": run.memory_bytes,
            "advice": advice_to_dict(advice),
        }
        print(json.dumps(prediction.to_dict() | limit, indent=2))
        return 0
    print_prediction(config, prediction, hardware, run.memory_bytes, advice, Console())
    return 0


def _search(argv: Sequence[str]) -> int:
    options = parse("plan search", argv)
    settings = read_settings(options.config, options.arguments)
    settings = settings.without("plan.predict")
    settings.tell()
    with settings.name_origin():
        return _search_settings(settings, options.json, options.png)


def _search_settings(settings: Settings, as_json: bool, png: str | None) -> int:
    _refuse(settings.overrides, "plan.predict")
    overrides = settings.overrides
    if names_training(overrides):
        overrides = without_equal(settings)
        if not names_training(overrides):
            overrides.insert(0, "experiment=null")
    run = compose_hypothetical(overrides, searches=True)
    picture = Path(png) if png is not None else None
    if picture is not None:
        check_output(picture, "--png", "plan.png", [".png"])
    result = search(
        run.config,
        run.overrides,
        run.hardware,
        run.world_size,
        run.memory_bytes,
        fast_estimate,
        host_memory_bytes=run.hardware.host_memory_bytes.value,
    )
    limits = caveats(result.best.config, run.hardware, run.world_size)
    if as_json:
        print(json.dumps(search_to_dict(result, limits), indent=2))
    else:
        print_search(result, run.config.plan.rows, limits, Console())
    if picture is not None:
        title = (
            f"{run.config.model.name} on {run.world_size} ranks, {run.hardware.title}"
        )
        draw_frontier(picture, title, result)
        print(f"fsdptoys: memory against time is drawn in {png}", file=sys.stderr)
    return 0


def _refuse(overrides: Sequence[str], *keys: str) -> None:
    """Reject settings that this command does not read."""
    readers = {"plan.predict": "fsdptoys train", "plan.rows": "fsdptoys plan search"}
    for word in overrides:
        key = word.partition("=")[0]
        if key in keys:
            raise ConfigError(f"{word} is read by {readers[key]} alone; leave it out")
