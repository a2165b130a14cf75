"""Compilations by ``torch.compile`` in this process: number, duration, recompilations with their
cause, graph breaks.

``torch.compile`` recompiles a function when a guard fails: a shape, the gradient mode or a module
type has changed. A few recompilations are expected, since training and evaluation differ, and so do
a model's types of blocks. One per step makes a run slower than eager mode, and after eight
(``torch._dynamo.config``) PyTorch runs new cases in eager mode, with only a line in its log. So the
compiler's records are read after every pass over the model, and recompilations after a phase's
first pass are reported.

Every compilation in this rank's process counts. Not covered: the cause of misses in the on-disk
cache.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fsdptoys.utils.text import counted, one_line

RECORDS = 10**6
"""Limit of PyTorch's compilation records; its default is 64."""
MAX_REPORTED = 3
"""Passes with recompilations reported on the console; further ones are only in the summary."""
REASON_CHARS = 160


@dataclass(frozen=True)
class Recompilation:
    """A recompilation of a function, done or refused."""

    step: int
    phase: str
    function: str
    reason: str
    at_limit: bool
    """Whether PyTorch reached its recompilation limit and continues in eager mode."""


@dataclass(frozen=True)
class Compilations:
    """All compilations of a process."""

    compiled: int
    """Compilations of functions, or of their parts between graph breaks."""
    seconds: float
    """Compile time of all forwards and backwards."""
    recompilations: tuple[Recompilation, ...]
    graph_breaks: dict[str, int]
    """Reason of a graph break → count."""


class CompilationWatch:
    """Reads the compiler's records after each pass over a model."""

    def __init__(self) -> None:
        self._record_count = len(_records())
        self._breaks = _graph_breaks()
        self._passes: Counter[str] = Counter()
        self._compiled = 0
        self._seconds = 0.0
        self._recompilations: list[Recompilation] = []
        self._sentences: list[str] = []
        self._reported = 0

    def record_pass(self, phase: str, step: int) -> None:
        """Record the compilations of one pass at or after ``step``.

        The first pass of a ``phase``, such as training, is expected to compile.
        """
        records = _records()
        new_records, self._record_count = records[self._record_count :], len(records)
        recompilations = []
        for record in new_records:
            self._compiled += bool(record.has_guarded_code)
            self._seconds += (record.duration_us or 0) / 1e6
            at_limit = "recompile_limit" in (record.fail_reason or "")
            if at_limit or (record.has_guarded_code and (record.cache_size or 0) > 0):
                # PyTorch does not record the name of a function that reached the limit.
                function = record.co_name or "a function"
                recompilations.append(
                    Recompilation(step, phase, function, _reason(record), at_limit)
                )
        self._recompilations += recompilations
        self._passes[phase] += 1
        if any(recompilation.at_limit for recompilation in recompilations) or (
            recompilations and self._passes[phase] > 1
        ):
            self._report(recompilations)

    def take_messages(self) -> list[str]:
        """Messages on the passes since the last call."""
        sentences, self._sentences = self._sentences, []
        return sentences

    def result(self) -> Compilations:
        """All compilations so far."""
        breaks = _graph_breaks() - self._breaks
        return Compilations(
            self._compiled, self._seconds, tuple(self._recompilations), dict(breaks)
        )

    def _report(self, recompilations: list[Recompilation]) -> None:
        worst = max(recompilations, key=lambda recompilation: recompilation.at_limit)
        where = f"{worst.phase} of step {worst.step}"
        if worst.at_limit:
            self._sentences.append(
                f"{where} reached PyTorch's recompilation limit for {worst.function}; new cases "
                f"run in eager mode, which is slower; last reason: {worst.reason}"
            )
            return
        self._reported += 1
        if self._reported <= MAX_REPORTED:
            self._sentences.append(
                f"{where} recompiled {worst.function}: {worst.reason}"
            )


def _reason(record: Any) -> str:
    """The failed guard on one line, without the compilation's number."""
    reason = (
        getattr(record, "recompile_reason", None)
        or "a reason that PyTorch does not report"
    )
    return one_line(re.sub(r"^\d+/\d+: ", "", reason.splitlines()[0]), REASON_CHARS)


def _records() -> list[Any]:
    """PyTorch's record of each compilation, forward or backward, in this process.

    The function and the fields of ``CompilationMetrics`` are private API, tested with torch 2.13.
    """
    from torch._dynamo import utils

    if not hasattr(utils, "get_compilation_metrics"):
        return []
    utils.set_compilation_metrics_limit(RECORDS)
    return utils.get_compilation_metrics()


def _graph_breaks() -> "Counter[str]":
    """PyTorch's counts of graph breaks by the first line of their reason."""
    from torch._dynamo.utils import counters

    breaks: Counter[str] = Counter()
    for reason, count in counters["graph_break"].items():
        breaks[reason.splitlines()[0]] += count
    return breaks


SHOWN = 20
"""Maximum rows of the summary's table."""


def compilation_line(compilation: Compilations) -> str:
    """One line on number and time of compilations, recompilations and graph breaks."""
    again = [
        recompilation
        for recompilation in compilation.recompilations
        if not recompilation.at_limit
    ]
    given_up = len(compilation.recompilations) - len(again)
    breaks = sum(compilation.graph_breaks.values())
    line = f"compiled {counted(compilation.compiled, 'function')} in {compilation.seconds:.1f} s"
    if again:
        last = "s, the last" if len(again) > 1 else ""
        line += f" ({len(again)} recompilation{last} in {again[-1].phase}: {again[-1].reason})"
    line += f", {counted(breaks, 'graph break')}"
    if breaks:
        reasons = compilation.graph_breaks
        line += f" ({max(reasons, key=lambda reason: reasons[reason])})"
    if given_up:
        line += (
            f"; reached the recompilation limit {counted(given_up, 'time')}, and continued in "
            "eager mode"
        )
    return line


def recompilation_rows(compilation: Compilations) -> list[tuple[str, str, str, str]]:
    """Step, phase, function and reason of each recompilation."""
    rows = []
    for recompilation in compilation.recompilations[:SHOWN]:
        reason = (
            "`"
            + recompilation.reason.replace("`", "'")
            + "`"
            + " (limit reached)" * recompilation.at_limit
        )
        rows.append(
            (
                str(recompilation.step),
                recompilation.phase,
                f"`{recompilation.function}`",
                reason,
            )
        )
    more = len(compilation.recompilations) - SHOWN
    return rows + ([("…", "", "", f"{more} more")] if more > 0 else [])
