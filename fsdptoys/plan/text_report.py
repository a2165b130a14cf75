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
from fsdptoys.plan.page import Page, gib_text, ranks_text, seconds_text
from fsdptoys.plan.search.advice import Advice
from fsdptoys.plan.search.ranking import traits

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
    page = Page(console)
    _print_header(config, prediction, hardware, page)
    _print_memory(prediction, hardware, memory_bytes, page)
    _print_communication(prediction.time, page)
    _print_time(prediction, page)
    _print_stages(prediction, page)
    page.caveats(prediction.caveats)
    if advice:
        _print_advice(advice, prediction.memory.reserved_bytes <= memory_bytes, page)


def advice_to_dict(advice: Sequence[Advice]) -> list[dict[str, Any]]:
    """Advice as JSON values."""
    rows = [asdict(change) for change in advice]
    return [{"words": row.pop("overrides"), **row} for row in rows]


def _print_header(
    config: Config, prediction: Prediction, hardware: Hardware, page: Page
) -> None:
    train = config.train
    parallel = config.parallel
    mesh = config.mesh
    page.model(config)
    ranks = ranks_text(prediction.world_size)
    page.line(f"{ranks} on {hardware.title}; {prediction.method}")
    parts = ["full parameters on each rank"]
    shards = mesh.shard_ranks(prediction.world_size)
    replicas = mesh.stage_ranks(prediction.world_size) // shards
    if parallel.capabilities.shards_parameters and shards > 1:
        parts = [f"shards over {ranks_text(shards)}"]
        if replicas > 1:
            parts.append(f"{replicas} replicas")
    sizes = {
        "sequences": mesh.cp_size,
        "experts": mesh.ep_size,
        "features": mesh.tp_size,
        "layers": mesh.pp_size,
    }
    parts += [f"{name} over {size}" for name, size in sizes.items() if size > 1]
    parts.append(parallel.param_dtype.value)
    switches = f"; {', '.join(traits(config))}" if traits(config) else ""
    page.line(f"{parallel.name}: {', '.join(parts)}{switches}")
    accumulated = f" x {train.grad_accum} micro-batches" if train.grad_accum > 1 else ""
    per_rank = f"{train.batch_size} x {train.seq_len:,} tokens{accumulated}"
    sharing_ranks = mesh.cp_size * mesh.tp_size * mesh.pp_size
    sharers = f"{sharing_ranks} ranks" if sharing_ranks > 1 else "rank"
    page.line(
        f"{per_rank} per {sharers}, {prediction.tokens_per_step:,} tokens per step"
    )


def _print_memory(
    prediction: Prediction, hardware: Hardware, memory_bytes: float, page: Page
) -> None:
    memory = prediction.memory
    heading = "Memory of a rank"
    if prediction.stages:
        sizes = [stage.reserved_bytes for stage in prediction.stages]
        rank = sizes.index(max(sizes))
        heading = f"Memory of pipeline rank {rank}, the largest"
    page.heading(heading)
    left = memory_bytes - memory.reserved_bytes
    verdict = f"fits in {gib_text(memory_bytes)}, {gib_text(left)} left"
    if left < 0:
        verdict = (
            f"does not fit in {gib_text(memory_bytes)}, {gib_text(-left)} too much"
        )
    peak = f"allocated, in the {memory.peak_phase} phase"
    rows = [
        ("end of step", gib_text(memory.end_bytes), "allocated"),
        ("peak", gib_text(memory.peak_bytes), peak),
        ("reserved", gib_text(memory.reserved_bytes), verdict),
    ]
    if memory.host_bytes:
        ranks = min(prediction.world_size, round(hardware.devices_per_node.value))
        per_node = f"{gib_text(ranks * memory.host_bytes)} per node"
        rows.append(("host", gib_text(memory.host_bytes), per_node))
    page.grid(rows, "lrl")
    categories = memory.categories.items()
    _print_bars(
        "At the peak", {category.value: size for category, size in categories}, page
    )
    _print_bars("Reserved by stream", memory.streams, page)


def _print_communication(time: TimePrediction, page: Page) -> None:
    rows = [("", "axis", "ranks", "calls", "sent", "time")]
    for volume in sorted(time.volumes, key=lambda volume: -volume.seconds):
        counts = (f"{volume.group_size:,}", f"{volume.calls:,}")
        sums = (gib_text(volume.bytes), seconds_text(volume.seconds))
        rows.append((volume.collective, volume.axis, *counts, *sums))
    if time.volumes:
        page.table("Communication in a step", rows, "llrrrr")


def _print_time(prediction: Prediction, page: Page) -> None:
    time = prediction.time
    heading = "Time of a step"
    if prediction.stages:
        sizes = [stage.compute_seconds for stage in prediction.stages]
        rank = sizes.index(max(sizes))
        heading = f"Time of a step on pipeline rank {rank}, the busiest"
    page.heading(heading)
    parts = [("step", time.step_seconds), ("computing", time.compute_seconds)]
    kinds = sorted(time.kinds.items(), key=lambda item: -item[1])
    parts += [(f"  {kind}", seconds) for kind, seconds in kinds if seconds]
    parts += [
        ("waiting for communication", time.exposed_communication_seconds),
        ("waiting for transfers", time.exposed_transfer_seconds),
        ("waiting for the host", time.host_seconds),
    ]
    if prediction.stages:
        parts.append(("waiting for other pipeline ranks", time.stage_seconds))
    rows = [
        (name, seconds_text(seconds), f"{seconds / time.step_seconds:.1%}")
        for name, seconds in parts
    ]
    page.grid(rows, "lrr")
    speed = f"{prediction.tokens_per_second:,.0f} tokens/s"
    if prediction.world_size > 1:
        per_device = prediction.tokens_per_second / prediction.world_size
        speed += f", {per_device:,.0f} per device"
    mfu = "MFU unknown: no peak for this dtype"
    if prediction.mfu is not None:
        mfu = f"MFU {prediction.mfu:.1%}"
    page.console.print()
    page.line(f"{speed}; {mfu}")


def _print_stages(prediction: Prediction, page: Page) -> None:
    rows = [("rank", "layers", "peak", "reserved", "computing", "bubble", "")]
    for index, stage in enumerate(prediction.stages):
        memory = (gib_text(stage.peak_bytes), gib_text(stage.reserved_bytes))
        times = (seconds_text(stage.compute_seconds), seconds_text(stage.wait_seconds))
        share = f"{stage.wait_seconds / prediction.time.step_seconds:.1%}"
        rows.append((str(index), stage.layers, *memory, *times, share))
    if prediction.stages:
        page.table("Pipeline ranks", rows, "llrrrrr")


def _print_advice(advice: Sequence[Advice], fits: bool, page: Page) -> None:
    heading = "Largest savings; no two changes make it fit, so try fsdptoys plan search"
    if fits or any(change.fits for change in advice):
        heading = "Faster settings" if fits else "Changes that make it fit"
    rows = [("reserved", "tokens/s", "change", "type")]
    for change in advice:
        speed = (f"{change.tokens_per_second:,.0f}", f"{change.speed_change:+.1%}")
        overrides = " ".join(change.overrides)
        rows.append((gib_text(change.reserved_bytes), *speed, overrides))
    page.table(heading, rows, "rrrl")


def _print_bars(heading: str, sizes: dict[str, int], page: Page) -> None:
    sizes = {name: size for name, size in sizes.items() if size}
    if not sizes:
        return
    page.heading(heading)
    mark = "#" if page.console.options.ascii_only else "█"
    most = max(sizes.values())
    total = sum(sizes.values())
    rows = [
        (name, gib_text(size), f"{size / total:.1%}", mark * round(BAR * size / most))
        for name, size in sorted(sizes.items(), key=lambda item: -item[1])
    ]
    page.grid(rows, "lrrl")
