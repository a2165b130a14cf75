"""Ratios between contestants, and the targets that they are held to."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.benchmarks.peers.measure import Measured

LOSS_TOLERANCE = 1e-3
"""Relative, of the first step."""


@dataclass(frozen=True)
class Pair:
    """A judged pair: one row of ours and one of theirs."""

    contestant: str
    peer: str
    target: float


def median_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def speed_ratio(
    contestant: Sequence[Measured], peer: Sequence[Measured], warmup: int
) -> float:
    """Tokens/s of ours over theirs: the median of the ratios within a turn."""
    first = max(1, warmup)
    return statistics.median(
        b / a
        for own, other in zip(contestant, peer, strict=True)
        for a, b in zip(own.seconds[first:], other.seconds[first:], strict=True)
    )


def losses_agree(results: dict[str, list[Measured]]) -> list[str]:
    """A sentence for each contestant with another first loss than the first contestant's."""
    reference, *_ = results
    expected = results[reference][0].losses[0]
    wrong = []
    for name, runs in results.items():
        loss = runs[0].losses[0]
        if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):
            sentence = f"{name} begins with the loss {loss:.6f}, {reference} with {expected:.6f}"
            wrong.append(sentence)
    return wrong


def judge(
    results: dict[str, list[Measured]],
    judged: Sequence[Pair],
    warmup: int,
    peers: Sequence[str],
) -> list[str]:
    """One sentence per target; missed ones begin with ``missed``."""
    failed = [
        f"missed: {name} failed: {run.failure}"
        for name, runs in results.items()
        for run in runs
        if run.failure
    ]
    if failed:
        return failed
    if wrong := losses_agree(results):
        return [f"missed: not the same work: {sentence}" for sentence in wrong]
    verdicts = []

    def add(met: bool, sentence: str) -> None:
        verdicts.append(sentence if met else f"missed: {sentence}")

    for pair in judged:
        first = results[pair.contestant]
        second = results[pair.peer]
        speed = speed_ratio(first, second, warmup)
        add(
            speed >= pair.target,
            f"{pair.contestant} has {speed:.2f} of the tokens/s of {pair.peer}, "
            f"target {pair.target}",
        )
        memory = median_ratio(
            [r.peak_bytes for r in first], [r.peak_bytes for r in second]
        )
        add(
            memory <= 1,
            f"{pair.contestant} takes {memory:.2f} of the memory of {pair.peer}, target 1.0",
        )
    fastest = min(
        statistics.median(r.startup_seconds for r in results[name]) for name in peers
    )
    for name in dict.fromkeys(pair.contestant for pair in judged):
        seconds = statistics.median(r.startup_seconds for r in results[name])
        add(
            seconds <= fastest,
            (
                f"{name} is through its first step after {seconds:.1f} s, the fastest peer "
                f"{fastest:.1f} s"
            ),
        )
    return verdicts
