"""Text output of ``fsdptoys plan search``, and the same as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from fsdptoys.device.profile import Hardware
from fsdptoys.imports import import_options
from fsdptoys.plan.page import Page, gib_text, ranks_text, seconds_text
from fsdptoys.plan.search.effects import Effect, effects
from fsdptoys.plan.search.frontier_plot import spread_out
from fsdptoys.plan.search.ranking import Candidate, frontier, layout, traits
from fsdptoys.plan.search.search import SearchResult
from fsdptoys.plan.search.switches import node_ranks_of

MOST_ROWS_OF_FRONTIER = 12


def print_search(
    result: SearchResult, rows: int, caveats: Sequence[str], console: Console
) -> None:
    """Print the best combinations, at most ``rows``, the frontier, the caveats of the best, and its
    command."""
    page = Page(console)
    page.model(result.best.config)
    ranks = f"{ranks_text(result.world_size)} on {result.hardware.title}"
    page.line(f"{ranks}, {gib_text(result.memory_bytes)} of memory each")
    refused = f", {sum(result.refused.values()):,} refused" if result.refused else ""
    fit = len(result.candidates)
    over = len(result.over)
    fits = f"combination{'s fit' if fit != 1 else ' fits'}"
    does = "does" if over == 1 else "do"
    page.line(f"{fit:,} {fits}, {over:,} {does} not{refused}")
    _print_candidates("Fastest", result.leading(rows), page)
    best = spread_out(frontier(result.candidates), MOST_ROWS_OF_FRONTIER)
    _print_candidates("Pareto front: least memory for each speed", best[::-1], page)
    _print_effects(effects(result.best, result.candidates, result.over), page)
    page.caveats(caveats)
    page.heading("Command of the best")
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
        Page(console).line("on each node, with the first one's name for HOST:")
    console.print(
        " ".join(["bash run_fsdp.sh", *import_options(), *overrides]),
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


def _print_effects(effects_of_best: Sequence[Effect], page: Page) -> None:
    """Print the cost and gain of each setting of the best."""
    rows = [("memory", "step", "tokens/s", "setting", "instead of")]
    for effect in effects_of_best:
        memory = "-" if effect.saved_bytes > 0 else "+"
        memory += gib_text(abs(effect.saved_bytes))
        step = "-" if effect.added_seconds < 0 else "+"
        step += seconds_text(abs(effect.added_seconds))
        other = effect.instead_of + " (does not fit)" * (not effect.fits)
        rows.append((memory, step, f"{effect.speedup:+.1%}", effect.setting, other))
    if effects_of_best:
        heading = "Why the best: its settings against others, all else equal"
        page.table(heading, rows, "rrrll")


def _print_candidates(
    heading: str, candidates: Sequence[Candidate], page: Page
) -> None:
    rows: list[tuple[str, ...]] = [
        ("tokens/s", "MFU", "reserved", "host", "batch", "strategy", "switches")
    ]
    for candidate in candidates:
        prediction = candidate.prediction
        config = candidate.config
        host = prediction.memory.host_bytes
        row = (
            f"{prediction.tokens_per_second:,.0f}",
            "-" if prediction.mfu is None else f"{prediction.mfu:.1%}",
            gib_text(prediction.memory.reserved_bytes),
            gib_text(host) if host else "-",
            str(config.train.batch_size),
            layout(config),
            ", ".join(traits(config)) or "-",
        )
        rows.append(row)
    if all(row[3] == "-" for row in rows[1:]):
        rows = [(*row[:3], *row[4:]) for row in rows]
    page.table(heading, rows, "r" * (len(rows[0]) - 2) + "ll")
