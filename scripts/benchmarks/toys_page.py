"""Tables and verdicts of the toys next to PyTorch's own strategies."""

import itertools
import statistics
from dataclasses import dataclass, field

from fsdptoys.utils.tables import markdown_table

MIB = 2**20


@dataclass(frozen=True)
class Contestant:
    """One way to train."""

    name: str
    strategy: str
    target: float | None = None
    """Largest ratio of its step time to that of the first of its group; None for no target."""
    shards_states: bool = False
    """Use PyTorch's ZeroRedundancyOptimizer."""


@dataclass
class Measured:
    """Measurements of one contestant on one rank, or on all."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    collective_seconds: float = 0.0
    """Time with at least one in flight, in the traced step."""
    hidden_seconds: float = 0.0
    """The part of it with an operator of the rank at work."""
    kept_bytes: int = 0
    """Allocated at the end of a step."""
    peak_bytes: int = 0
    """Most allocated at once within a step."""


def loss_difference(toy: Measured, native: Measured) -> float:
    """Return the largest difference of a step's losses, relative to the native one."""
    return max(
        abs(a - b) / abs(b) for a, b in zip(toy.losses, native.losses, strict=True)
    )


def ratios(toy: Measured, native: Measured) -> list[float]:
    """Return the ratio of step times in each turn."""
    return [a / b for a, b in zip(toy.seconds, native.seconds, strict=True)]


def render(group: list[Contestant], rounds: list[list[Measured]]) -> str:
    """Return a group's table and verdicts."""
    rows = [
        [
            "", "s a step", "× native, quartiles", "× native, by round", "CPU s, all ranks",
            "collectives, s", "under operators", "end of a step, MiB a rank", "peak, MiB a rank",
            "losses' difference",
        ]
    ]  # fmt: skip
    verdicts = []
    for number, contestant in enumerate(group):
        results = [measured[number] for measured in rounds]
        by_round = [
            ratios(result, first[0])
            for result, first in zip(results, rounds, strict=True)
        ]
        every = [*itertools.chain(*by_round)]
        points = every if len(every) > 1 else every * 2
        low, ratio, high = statistics.quantiles(points, n=4, method="inclusive")
        seconds = itertools.chain(*(result.seconds for result in results))
        cpu_seconds = itertools.chain(*(result.cpu_seconds for result in results))
        compared = ["", "", ""]
        if number:
            worst = max(
                loss_difference(measured[number], measured[0]) for measured in rounds
            )
            medians = ", ".join(f"{statistics.median(turns):.3f}" for turns in by_round)
            compared = [
                f"{ratio:.3f} ({low:.3f} to {high:.3f})",
                medians,
                f"{worst:.1e}",
            ]
        traced = results[-1]
        hidden = "none"
        if traced.collective_seconds:
            hidden = f"{traced.hidden_seconds / traced.collective_seconds:.0%}"
        rows.append([
            contestant.name, f"{statistics.median(seconds):.3f}", *compared[:2],
            f"{statistics.median(cpu_seconds):.2f}", f"{traced.collective_seconds:.3f}", hidden,
            f"{traced.kept_bytes / MIB:.0f}", f"{traced.peak_bytes / MIB:.0f}", compared[2],
        ])  # fmt: skip
        if contestant.target is not None:
            verdicts.append(
                f"- {'met' if ratio <= contestant.target else 'MISSED'}: {contestant.name} takes "
                f"{ratio:.3f} of the time of {group[0].name}, target {contestant.target}"
            )
    return "\n".join([markdown_table(rows, range(1, 10)), "", *verdicts])
