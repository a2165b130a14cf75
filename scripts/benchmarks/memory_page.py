"""Verdicts and page of the memory benchmark."""

import argparse
import shlex
import sys

from fsdptoys.device import available_cores
from scripts.benchmarks.memory_rows import ROWS, Result, row_cores
from scripts.common.machine import machine

CHUNK_SAVES_GIB = 0.5


def judge(results: dict[tuple[str, str], Result], classic: bool) -> list[str]:
    """Each target, met or missed, as far as the rows for it were measured; ``classic``: as in the
    classic table."""
    verdicts: list[str] = []

    def verdict(met: bool, text: str) -> None:
        verdicts.append(f"{'met' if met else 'missed'}: {text}")

    for (strategy, name), result in results.items():
        if result.failure and not result.refused and ROWS[name].target:
            verdict(False, f"{strategy} {name} failed: {result.failure}")
    for strategy in sorted({strategy for strategy, _ in results}):
        of = {
            name: result
            for (owner, name), result in results.items()
            if owner == strategy and not result.failure
        }
        for name, result in of.items():
            base = ROWS[name].base
            target = ROWS[name].target
            if target and base in of:
                ratio = result.seconds / of[base].seconds
                verdict(
                    ratio <= target,
                    f"{strategy} {name} takes {ratio:.2f} times as long as {base}, bar {target}",
                )
        if (
            classic
            and "gc" in of
            and "gc chunk" in of
            and of["gc"].peak_gib is not None
        ):
            saved = of["gc"].peak_gib - of["gc chunk"].peak_gib
            verdict(
                saved >= CHUNK_SAVES_GIB,
                f"{strategy} chunked loss saves {saved:.2f} GiB, {CHUNK_SAVES_GIB}",
            )
        for name, result in of.items() if classic else ():
            for what, actual, published in (
                ("allocated at the end", result.end_gib, ROWS[name].published_end_gib),
                ("reserved", result.reserved_gib, ROWS[name].published_reserved_gib),
            ):
                if actual is not None and strategy in published:
                    verdict_text = (
                        f"{strategy} {name}: {actual:.2f} GiB {what}, published "
                        f"{published[strategy]:.2f}"
                    )
                    verdict(actual <= published[strategy] + 0.005, verdict_text)
    return verdicts


def render(
    args: argparse.Namespace,
    results: dict[tuple[str, str], Result],
    verdicts: list[str],
    classic: bool,
) -> str:
    """The page as Markdown."""
    cores = row_cores(args)
    lines = [
        (
            f"# Memory switches: {args.model}, rank 0 of {args.world_size}, batch 1, sequence "
            f"{args.seq_len}"
        ),
        "",
        (
            "gc: gradient checkpointing; chunk: chunked loss; oo: optimizer offload; co: CPU "
            "offload; ao: activation"
        ),
        (
            "offload; parts: `parallel.wrap=block_attn_mlp`. The collectives are fake: nothing is "
            "sent, a gather copies"
        ),
        (
            "the rank's own shard into each part of its output, a reduce-scatter writes zeros; "
            "losses have no meaning."
        ),
        "",
        f"- Command: `python {shlex.join(sys.argv)}`",
        f"- {machine(args.device)}",
        (
            f"- The rank has {cores} of {available_cores()} cores, on which the time of CPU "
            "offload depends."
        ),
        (
            "- Lazy optimizer offload (oo alone) holds the gradients until the next forward, and "
            "so at the end of a step."
        ),
        (
            "- Published: the first README of this project (8 Ascend A2 NPUs, torch 2.7.1), where "
            "it ran the same."
        ),
        "",
        (
            "| strategy | row | s a step | × row without | GiB at end | GiB peak | GiB reserved | "
            "published reserved |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for (strategy, name), result in results.items():
        if result.failure:
            lines.append(
                f"| {strategy} | {name} | not run: {result.failure} | | | | | |"
            )
            continue
        base = results.get((strategy, ROWS[name].base or ""))
        ratio = (
            f"{result.seconds / base.seconds:.2f} of {ROWS[name].base}"
            if base and base.seconds
            else ""
        )
        published = ROWS[name].published_reserved_gib if classic else {}
        cells = [
            f"{result.seconds:.3f}",
            ratio,
            gib(result.end_gib),
            gib(result.peak_gib),
            gib(result.reserved_gib),
        ]
        lines.append(
            f"| {strategy} | {name} | {' | '.join(cells)} | {gib(published.get(strategy))} |"
        )
    return "\n".join([*lines, "", *(f"- {verdict}" for verdict in verdicts)]) + "\n"


def gib(value: float | None) -> str:
    """A cell of memory."""
    return "" if value is None else f"{value:.2f}"
