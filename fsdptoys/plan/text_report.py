"""Text output of ``fsdptoys plan``, for a terminal of 80 columns or a pipe, and the same as JSON.

A GiB is 2**30 bytes. Numbers are of one rank unless stated otherwise.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware
from fsdptoys.metrics.prediction import Prediction, TimePrediction
from fsdptoys.plan.page_text import (
    gib_text,
    print_caveats,
    print_heading,
    print_line,
    print_model,
    print_table,
    ranks_text,
    seconds_text,
)
from fsdptoys.plan.search.advice import Advice
from fsdptoys.plan.search.ranking import traits
from fsdptoys.utils.tables import print_grid

BAR = 24  # Characters of the longest bar


def print_prediction(
    config: Config,
    prediction: Prediction,
    hardware: Hardware,
    memory_bytes: float,
    advice: Sequence[Advice],
    console: Console,
) -> None:
    """Print the prediction of a validated configuration."""
    _print_header(config, prediction, hardware, console)
    _print_memory(prediction, hardware, memory_bytes, console)
    _print_communication(prediction.time, console)
    _print_time(prediction, console)
    _print_stages(prediction, console)
    print_caveats(prediction.caveats, console)
    if advice:
        _print_advice(advice, prediction.memory.reserved_bytes <= memory_bytes, console)


def advice_to_dict(advice: Sequence[Advice]) -> list[dict[str, Any]]:
    """Advice as JSON values."""
    rows = [asdict(change) for change in advice]
    return [{"words": row.pop("overrides"), **row} for row in rows]


def _print_header(
    config: Config, prediction: Prediction, hardware: Hardware, console: Console
) -> None:
    train = config.train
    parallel = config.parallel
    mesh = config.mesh
    print_model(config, console)
    print_line(
        f"{ranks_text(prediction.world_size)} on {hardware.title}; {prediction.method}",
        console,
    )
    parts = ["full parameters on each rank"]
    shards = mesh.shard_ranks(prediction.world_size)
    replicas = mesh.stage_ranks(prediction.world_size) // shards
    if parallel.capabilities.shards_parameters and shards > 1:
        parts = [f"shards over {ranks_text(shards)}"]
        if replicas > 1:
            parts.append(f"{replicas} replicas")
    for name, ranks in (
        ("sequences", mesh.cp_size),
        ("experts", mesh.ep_size),
        ("features", mesh.tp_size),
        ("layers", mesh.pp_size),
    ):
        if ranks > 1:
            parts.append(f"{name} over {ranks}")
    parts.append(parallel.param_dtype.value)
    switches = f"; {', '.join(traits(config))}" if traits(config) else ""
    print_line(f"{parallel.name}: {', '.join(parts)}{switches}", console)
    accumulated = f" x {train.grad_accum} micro-batches" if train.grad_accum > 1 else ""
    per_rank = f"{train.batch_size} x {train.seq_len:,} tokens{accumulated}"
    sharing_ranks = mesh.cp_size * mesh.tp_size * mesh.pp_size
    sharers = f"{sharing_ranks} ranks" if sharing_ranks > 1 else "rank"
    print_line(
        f"{per_rank} per {sharers}, {prediction.tokens_per_step:,} tokens per step",
        console,
    )


def _print_memory(
    prediction: Prediction, hardware: Hardware, memory_bytes: float, console: Console
) -> None:
    memory = prediction.memory
    stages = prediction.stages
    largest = (
        max(range(len(stages)), key=lambda index: stages[index].reserved_bytes)
        if stages
        else 0
    )
    print_heading(
        f"Memory of pipeline rank {largest}, the largest"
        if stages
        else "Memory of a rank",
        console,
    )
    left = memory_bytes - memory.reserved_bytes
    verdict = f"fits in {gib_text(memory_bytes)}, {gib_text(left)} left"
    if left < 0:
        verdict = (
            f"does not fit in {gib_text(memory_bytes)}, {gib_text(-left)} too much"
        )
    rows = [
        ("end of step", gib_text(memory.end_bytes), "allocated"),
        (
            "peak",
            gib_text(memory.peak_bytes),
            f"allocated, in the {memory.peak_phase} phase",
        ),
        ("reserved", gib_text(memory.reserved_bytes), verdict),
    ]
    if memory.host_bytes:
        ranks = min(prediction.world_size, round(hardware.devices_per_node.value))
        rows.append(
            (
                "host",
                gib_text(memory.host_bytes),
                f"{gib_text(ranks * memory.host_bytes)} per node",
            )
        )
    print_grid(rows, "lrl", console)
    _bars(
        "At the peak",
        {category.value: size for category, size in memory.categories.items()},
        console,
    )
    _bars("Reserved by stream", memory.streams, console)


def _print_communication(time: TimePrediction, console: Console) -> None:
    rows = [("", "axis", "ranks", "calls", "sent", "time")]
    for volume in sorted(time.volumes, key=lambda volume: -volume.seconds):
        counts = f"{volume.group_size:,}", f"{volume.calls:,}"
        rows.append(
            (
                volume.collective,
                volume.axis,
                *counts,
                gib_text(volume.bytes),
                seconds_text(volume.seconds),
            )
        )
    if time.volumes:
        print_table("Communication in a step", rows, "llrrrr", console)


def _print_time(prediction: Prediction, console: Console) -> None:
    time = prediction.time
    stages = prediction.stages
    busiest = (
        max(range(len(stages)), key=lambda index: stages[index].compute_seconds)
        if stages
        else 0
    )
    print_heading(
        f"Time of a step on pipeline rank {busiest}, the busiest"
        if stages
        else "Time of a step",
        console,
    )
    parts = [("step", time.step_seconds), ("computing", time.compute_seconds)]
    kinds = sorted(time.kinds.items(), key=lambda item: -item[1])
    parts += [(f"  {kind}", seconds) for kind, seconds in kinds if seconds]
    parts += [
        ("waiting for communication", time.exposed_communication_seconds),
        ("waiting for transfers", time.exposed_transfer_seconds),
        ("waiting for the host", time.host_seconds),
    ]
    parts += (
        [("waiting for other pipeline ranks", time.stage_seconds)] if stages else []
    )
    rows = [
        (name, seconds_text(seconds), f"{seconds / time.step_seconds:.1%}")
        for name, seconds in parts
    ]
    print_grid(rows, "lrr", console)
    ranks = prediction.world_size
    mfu = (
        f"; MFU {prediction.mfu:.1%}"
        if prediction.mfu is not None
        else "; MFU unknown: no peak for this dtype"
    )
    per_device = (
        f", {prediction.tokens_per_second / ranks:,.0f} per device" if ranks > 1 else ""
    )
    console.print()
    print_line(
        f"{prediction.tokens_per_second:,.0f} tokens/s{per_device}{mfu}", console
    )


def _print_stages(prediction: Prediction, console: Console) -> None:
    rows = [("rank", "layers", "peak", "reserved", "computing", "bubble", "")]
    step = prediction.time.step_seconds
    for index, stage in enumerate(prediction.stages):
        memory = gib_text(stage.peak_bytes), gib_text(stage.reserved_bytes)
        waits = seconds_text(stage.wait_seconds), f"{stage.wait_seconds / step:.1%}"
        rows.append(
            (
                str(index),
                stage.layers,
                *memory,
                seconds_text(stage.compute_seconds),
                *waits,
            )
        )
    if prediction.stages:
        print_table("Pipeline ranks", rows, "llrrrrr", console)


def _print_advice(advice: Sequence[Advice], fits: bool, console: Console) -> None:
    heading = "Largest savings; no two changes make it fit, so try fsdptoys plan search"
    if fits or any(one.fits for one in advice):
        heading = "Faster settings" if fits else "Changes that make it fit"
    rows = [("reserved", "tokens/s", "change", "type")]
    for one in advice:
        speed = f"{one.tokens_per_second:,.0f}", f"{one.speed_change:+.1%}"
        rows.append((gib_text(one.reserved_bytes), *speed, " ".join(one.overrides)))
    print_table(heading, rows, "rrrl", console)


def _bars(heading: str, sizes: dict[str, int], console: Console) -> None:
    sizes = {name: size for name, size in sizes.items() if size}
    if not sizes:
        return
    print_heading(heading, console)
    mark = "#" if console.options.ascii_only else "█"
    most = max(sizes.values())
    total = sum(sizes.values())
    rows = [
        (name, gib_text(size), f"{size / total:.1%}", mark * round(BAR * size / most))
        for name, size in sorted(sizes.items(), key=lambda item: -item[1])
    ]
    print_grid(rows, "lrrl", console)
