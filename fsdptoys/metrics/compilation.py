"""What the compiler did in this process: how often, how long, what it compiled again and why, where it gave up.

``torch.compile`` compiles a function again whenever something that it had taken for granted has changed: a shape, the
gradient mode, a kind of module. A few times are meant: training and evaluation differ, and so do a model's kinds of
blocks. One a step makes a run slower than without the compiler, and after eight (``torch._dynamo.config``) PyTorch
leaves what is new to eager mode, with a line in its log. So every pass over the model is followed by a look at what the
compiler has recorded, and what is compiled again after a phase's first pass is told.

Everything that is compiled in the process counts, on this rank. Not covered: why a cache on the disk was missed.

What the compiler did, in one line and in rows.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

RECORDS = 10**6
"""Compilations that PyTorch keeps records of; its own limit is 64."""
TOLD = 3
"""Passes with compilations in them that are told; further ones are in the summary alone."""
REASON_CHARS = 160


@dataclass(frozen=True)
class Again:
    """A function that was compiled, or was to be compiled, once more."""

    step: int
    phase: str
    function: str
    reason: str
    at_limit: bool
    """Whether PyTorch refused to, and goes on without the compiler."""


@dataclass(frozen=True)
class Compilations:
    """What was compiled."""

    compiled: int
    """Functions, or parts of functions between graph breaks, each time that they were compiled."""
    seconds: float
    """For the forwards and backwards of all of them."""
    again: tuple[Again, ...]
    """Those that were compiled before."""
    graph_breaks: dict[str, int]
    """Why the compiler had to leave a function in its middle → how many places."""


class CompilationWatch:
    """Looks at the compiler's records after each pass over a model."""

    def __init__(self) -> None:
        self._seen = len(_records())
        self._breaks = _graph_breaks()
        self._passes: Counter[str] = Counter()
        self._compiled, self._seconds = 0, 0.0
        self._again: list[Again] = []
        self._sentences: list[str] = []
        self._told = 0

    def passed(self, phase: str, step: int) -> None:
        """Look at what one pass has compiled.

        Args:
            phase: kind of pass: its first is expected to compile.
            step: in or after which it was.
        """
        records = _records()
        new, self._seen = records[self._seen :], len(records)
        again = []
        for record in new:
            self._compiled += bool(record.has_guarded_code)
            self._seconds += (record.duration_us or 0) / 1e6
            at_limit = "recompile_limit" in (record.fail_reason or "")
            if at_limit or (record.has_guarded_code and (record.cache_size or 0) > 0):
                # Of a function that it gives up on, PyTorch does not record the name.
                again.append(Again(step, phase, record.co_name or "a function", _reason(record), at_limit))
        self._again += again
        self._passes[phase] += 1
        if any(each.at_limit for each in again) or (again and self._passes[phase] > 1):
            self._tell(again)

    def take_sentences(self) -> list[str]:
        """What to tell of the passes since this was asked last."""
        sentences, self._sentences = self._sentences, []
        return sentences

    def result(self) -> Compilations:
        """All of it until now."""
        breaks = _graph_breaks() - self._breaks
        return Compilations(self._compiled, self._seconds, tuple(self._again), dict(breaks))

    def _tell(self, again: list[Again]) -> None:
        worst = max(again, key=lambda each: each.at_limit)
        where = f"{worst.phase} of step {worst.step}"
        if worst.at_limit:
            self._sentences.append(
                f"in the {where} the compiler gave up on {worst.function}, which it had compiled too often, and goes "
                f"on in eager mode where it is called in a new way, which is slower; last reason: {worst.reason}"
            )
            return
        self._told += 1
        if self._told <= TOLD:
            self._sentences.append(
                f"the {where} compiled {worst.function} again: {worst.reason}"
                + "; further ones are counted in the summary" * (self._told == TOLD)
            )


def _reason(record: Any) -> str:
    """Why, in one line: the guard that failed, without the number of the compilation that it belongs to."""
    reason = getattr(record, "recompile_reason", None) or "a reason that PyTorch does not tell"
    line = re.sub(r"^\d+/\d+: ", "", reason.splitlines()[0]).strip()
    return line if len(line) <= REASON_CHARS else line[: REASON_CHARS - 1] + "…"


def _records() -> list[Any]:
    """PyTorch's record of each compilation, forward or backward, in this process.

    Private, like what is read of them (``CompilationMetrics``); tried on torch 2.13.
    """
    from torch._dynamo import utils

    if not hasattr(utils, "get_compilation_metrics"):
        return []
    utils.set_compilation_metrics_limit(RECORDS)
    return utils.get_compilation_metrics()


def _graph_breaks() -> "Counter[str]":
    """The first line of each reason, which PyTorch counts by itself."""
    from torch._dynamo.utils import counters

    breaks: Counter[str] = Counter()
    for reason, count in counters["graph_break"].items():
        breaks[reason.splitlines()[0]] += count
    return breaks


SHOWN = 20
"""Rows of a table at most."""


def compilation_line(compilation: Compilations) -> str:
    """How much was compiled, how long it took, what happened again."""
    again = [each for each in compilation.again if not each.at_limit]
    given_up = len(compilation.again) - len(again)
    breaks = sum(compilation.graph_breaks.values())
    line = f"compiled {compilation.compiled} function{'s' * (compilation.compiled != 1)} in {compilation.seconds:.1f} s"
    if again:
        which = "the last" if len(again) > 1 else "that"
        line += f" ({len(again)} of them again, {which} in {again[-1].phase}: {again[-1].reason})"
    line += f", {breaks} graph break{'s' * (breaks != 1)}"
    if breaks:
        line += f" ({max(compilation.graph_breaks, key=lambda reason: compilation.graph_breaks[reason])})"
    if given_up:
        line += f"; gave up {given_up} time{'s' * (given_up != 1)}, and went on in eager mode"
    return line


def again_rows(compilation: Compilations) -> list[tuple[str, str, str, str]]:
    """Step, phase, function and reason of what was compiled again."""
    rows = []
    for each in compilation.again[:SHOWN]:
        reason = each.reason.replace("`", "'")
        rows.append((str(each.step), each.phase, f"`{each.function}`", f"`{reason}`" + " — given up" * each.at_limit))
    more = len(compilation.again) - SHOWN
    return rows + ([("…", "", "", f"{more} more")] if more > 0 else [])
