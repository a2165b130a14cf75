"""Text output of ``fsdptoys plan``, for a terminal of 80 columns or a pipe, and the same as JSON.

A GiB is 2**30 bytes. Numbers are of one rank unless stated otherwise.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.device.profile import Hardware
from fsdptoys.metrics.prediction import Prediction, TimePrediction
from fsdptoys.plan.search.advice import Advice
from fsdptoys.plan.search.effects import Effect, effects
from fsdptoys.plan.search.frontier_plot import spread_out
from fsdptoys.plan.search.ranking import Candidate, frontier, layout, traits
from fsdptoys.plan.search.search import SearchResult
from fsdptoys.plan.search.switches import count_parameters, node_ranks_of
from fsdptoys.utils.tables import print_grid

BAR = 24  # Characters of the longest bar
MOST_ROWS_OF_FRONTIER = 12


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
    _print_caveats(prediction.caveats, console)
    if advice:
        _print_advice(advice, prediction.memory.reserved_bytes <= memory_bytes, console)


def advice_to_dict(advice: Sequence[Advice]) -> list[dict[str, Any]]:
    """Advice as JSON values."""
    rows = [asdict(change) for change in advice]
    return [{"words": row.pop("overrides"), **row} for row in rows]


def print_search(
    result: SearchResult, rows: int, caveats: Sequence[str], console: Console
) -> None:
    """Print the best combinations, at most ``rows``, the frontier, the caveats of the best, and its
    command."""
    first = result.candidates[0]
    _print_model(first.config, console)
    ranks = f"{_ranks(result.world_size)} on {result.hardware.title}"
    _line(f"{ranks}, {_gib(result.memory_bytes)} of memory each", console)
    refused = f", {sum(result.refused.values()):,} refused" if result.refused else ""
    fit = len(result.candidates)
    over = len(result.over)
    fits = f"combination{'s fit' if fit != 1 else ' fits'}"
    does = "does" if over == 1 else "do"
    _line(f"{fit:,} {fits}, {over:,} {does} not{refused}", console)
    _print_candidates("Fastest", result.leading(rows), console)
    best = frontier(result.candidates)
    rows_of_frontier = list(reversed(spread_out(best, MOST_ROWS_OF_FRONTIER)))
    _print_candidates(
        "Pareto front: least memory for each speed", rows_of_frontier, console
    )
    _print_effects(effects(result.best, result.candidates, result.over), console)
    _print_caveats(caveats, console)
    _heading("Command of the best", console)
    print_command(result.best, result.hardware, console)


def print_command(candidate: Candidate, hardware: Hardware, console: Console) -> None:
    """Print the command that trains a candidate, on one line for copying."""
    ranks = candidate.prediction.world_size
    nodes = ranks // node_ranks_of(candidate.config, hardware, ranks)
    more = (
        [f"launch.nnodes={nodes}", "launch.rdzv_endpoint=HOST:29400"]
        if nodes > 1
        else []
    )
    devices = round(hardware.devices_per_node.value)
    if (
        ranks // nodes < devices
        and not candidate.config.parallel.capabilities.single_process
    ):
        more.append(f"launch.nproc_per_node={ranks // nodes}")
    keys = {override.partition("=")[0] for override in candidate.overrides}
    overrides = [
        *candidate.overrides,
        *(override for override in more if override.partition("=")[0] not in keys),
    ]
    if nodes > 1:
        _line("on each node, with the first one's name for HOST:", console)
    console.print(
        " ".join(["bash run_fsdp.sh", *overrides]),
        soft_wrap=True,
        highlight=False,
        markup=False,
        emoji=False,
    )


def search_to_dict(result: SearchResult, caveats: Sequence[str]) -> dict[str, Any]:
    """The content of :func:`print_search` as JSON values."""
    return {
        "hardware": result.hardware.name,
        "world_size": result.world_size,
        "memory_bytes": result.memory_bytes,
        "fitting": len(result.candidates),
        "over": len(result.over),
        "refused": result.refused,
        "candidates": list(
            map(candidate_to_dict, result.leading(len(result.candidates)))
        ),
        "frontier": list(map(candidate_to_dict, frontier(result.candidates))),
        "best": candidate_to_dict(result.best),
        "caveats": list(caveats),
        "effects": [
            asdict(one) for one in effects(result.best, result.candidates, result.over)
        ],
    }


def candidate_to_dict(candidate: Candidate) -> dict[str, Any]:
    """A candidate as JSON values."""
    prediction = candidate.prediction.to_dict()
    return {
        "words": list(candidate.overrides),
        "switches": candidate.switches,
        "prediction": prediction,
    }


def _print_header(
    config: Config, prediction: Prediction, hardware: Hardware, console: Console
) -> None:
    train = config.train
    parallel = config.parallel
    mesh = config.mesh
    _print_model(config, console)
    _line(
        f"{_ranks(prediction.world_size)} on {hardware.title}; {prediction.method}",
        console,
    )
    parts = ["full parameters on each rank"]
    shards = mesh.shard_ranks(prediction.world_size)
    replicas = mesh.stage_ranks(prediction.world_size) // shards
    if parallel.capabilities.shards_parameters and shards > 1:
        parts = [f"shards over {_ranks(shards)}"]
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
    _line(f"{parallel.name}: {', '.join(parts)}{switches}", console)
    accumulated = f" x {train.grad_accum} micro-batches" if train.grad_accum > 1 else ""
    per_rank = f"{train.batch_size} x {train.seq_len:,} tokens{accumulated}"
    sharing_ranks = mesh.cp_size * mesh.tp_size * mesh.pp_size
    sharers = f"{sharing_ranks} ranks" if sharing_ranks > 1 else "rank"
    _line(
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
    _heading(
        f"Memory of pipeline rank {largest}, the largest"
        if stages
        else "Memory of a rank",
        console,
    )
    left = memory_bytes - memory.reserved_bytes
    verdict = f"fits in {_gib(memory_bytes)}, {_gib(left)} left"
    if left < 0:
        verdict = f"does not fit in {_gib(memory_bytes)}, {_gib(-left)} too much"
    rows = [
        ("end of step", _gib(memory.end_bytes), "allocated"),
        (
            "peak",
            _gib(memory.peak_bytes),
            f"allocated, in the {memory.peak_phase} phase",
        ),
        ("reserved", _gib(memory.reserved_bytes), verdict),
    ]
    if memory.host_bytes:
        ranks = min(prediction.world_size, round(hardware.devices_per_node.value))
        rows.append(
            (
                "host",
                _gib(memory.host_bytes),
                f"{_gib(ranks * memory.host_bytes)} per node",
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
                _gib(volume.bytes),
                _seconds(volume.seconds),
            )
        )
    if time.volumes:
        _table("Communication in a step", rows, "llrrrr", console)


def _print_time(prediction: Prediction, console: Console) -> None:
    time = prediction.time
    stages = prediction.stages
    busiest = (
        max(range(len(stages)), key=lambda index: stages[index].compute_seconds)
        if stages
        else 0
    )
    _heading(
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
        (name, _seconds(seconds), f"{seconds / time.step_seconds:.1%}")
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
    _line(f"{prediction.tokens_per_second:,.0f} tokens/s{per_device}{mfu}", console)


def _print_stages(prediction: Prediction, console: Console) -> None:
    rows = [("rank", "layers", "peak", "reserved", "computing", "bubble", "")]
    step = prediction.time.step_seconds
    for index, stage in enumerate(prediction.stages):
        memory = _gib(stage.peak_bytes), _gib(stage.reserved_bytes)
        waits = _seconds(stage.wait_seconds), f"{stage.wait_seconds / step:.1%}"
        rows.append(
            (str(index), stage.layers, *memory, _seconds(stage.compute_seconds), *waits)
        )
    if prediction.stages:
        _table("Pipeline ranks", rows, "llrrrrr", console)


def _print_advice(advice: Sequence[Advice], fits: bool, console: Console) -> None:
    heading = "Largest savings; no two changes make it fit, so try fsdptoys plan search"
    if fits or any(one.fits for one in advice):
        heading = "Faster settings" if fits else "Changes that make it fit"
    rows = [("reserved", "tokens/s", "change", "type")]
    for one in advice:
        speed = f"{one.tokens_per_second:,.0f}", f"{one.speed_change:+.1%}"
        rows.append((_gib(one.reserved_bytes), *speed, " ".join(one.overrides)))
    _table(heading, rows, "rrrl", console)


def _print_effects(effects_of_best: Sequence[Effect], console: Console) -> None:
    """Print the cost and gain of each setting of the best."""
    if not effects_of_best:
        return
    rows = [("memory", "step", "tokens/s", "setting", "instead of")]
    for one in effects_of_best:
        signs = (
            "-" if one.saved_bytes > 0 else "+",
            "-" if one.added_seconds < 0 else "+",
        )
        step = signs[1] + _seconds(abs(one.added_seconds))
        other = one.instead_of if one.fits else f"{one.instead_of} (does not fit)"
        rows.append(
            (
                signs[0] + _gib(abs(one.saved_bytes)),
                step,
                f"{one.speedup:+.1%}",
                one.setting,
                other,
            )
        )
    heading = "Why the best: its settings against others, all else equal"
    _table(heading, rows, "rrrll", console)


def _print_caveats(sentences: Sequence[str], console: Console) -> None:
    if sentences:
        _heading("Caveats", console)
        for sentence in dict.fromkeys(sentences):
            _bullet(sentence, console)


def _print_candidates(
    heading: str, candidates: Sequence[Candidate], console: Console
) -> None:
    rows: list[tuple[str, ...]] = [
        ("tokens/s", "MFU", "reserved", "host", "batch", "strategy", "switches")
    ]
    for candidate in candidates:
        prediction = candidate.prediction
        config = candidate.config
        host = prediction.memory.host_bytes
        mfu = "-" if prediction.mfu is None else f"{prediction.mfu:.1%}"
        memory = _gib(prediction.memory.reserved_bytes), _gib(host) if host else "-"
        setting = (
            str(config.train.batch_size),
            layout(config),
            ", ".join(traits(config)) or "-",
        )
        rows.append((f"{prediction.tokens_per_second:,.0f}", mfu, *memory, *setting))
    if all(row[3] == "-" for row in rows[1:]):
        rows = [(*row[:3], *row[4:]) for row in rows]
    _table(heading, rows, "r" * (len(rows[0]) - 2) + "ll", console)


def _print_model(config: Config, console: Console) -> None:
    model = config.model
    _line(
        f"{model.name or model.family}, {_count(count_parameters(model))} parameters",
        console,
        style="bold",
    )


def _ranks(count: int) -> str:
    return f"{count:,} rank{'s' * (count != 1)}"


def _count(value: int) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def _gib(size: float) -> str:
    if size == 0:
        return "0 GiB"
    if abs(size) >= 0.01 * GIB:
        return f"{size / GIB:,.2f} GiB"
    return (
        f"{size / 2**20:.3g} MiB"
        if abs(size) >= 0.1 * 2**20
        else f"{size / 2**10:.3g} KiB"
    )


def _seconds(seconds: float) -> str:
    if seconds < 1e-8:  # rounding error of a difference
        return "0 s"
    if seconds >= 1:
        return f"{seconds:,.3f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _heading(text: str, console: Console) -> None:
    console.print()
    _line(text, console, style="bold")


def _table(
    heading: str, rows: Sequence[tuple[str, ...]], justify: str, console: Console
) -> None:
    _heading(heading, console)
    print_grid(rows, justify, console, headed=True)


def _line(text: str, console: Console, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, emoji=False)


def _bullet(text: str, console: Console) -> None:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row("-", Text(text))
    console.print(table, highlight=False)


def _bars(heading: str, sizes: dict[str, int], console: Console) -> None:
    sizes = {name: size for name, size in sizes.items() if size}
    if not sizes:
        return
    _heading(heading, console)
    mark = "#" if console.options.ascii_only else "█"
    most = max(sizes.values())
    total = sum(sizes.values())
    rows = [
        (name, _gib(size), f"{size / total:.1%}", mark * round(BAR * size / most))
        for name, size in sorted(sizes.items(), key=lambda item: -item[1])
    ]
    print_grid(rows, "lrrl", console)
