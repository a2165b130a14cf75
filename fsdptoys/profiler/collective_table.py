"""A table of a step's collectives: identical ones folded, sums below.

Consecutive calls that differ only in their parameters are one line, ``× 12``; so is a repeated
pattern of up to four calls, such as an all-gather and a reduce-scatter in each block's backward.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fsdptoys.utils.tables import align_columns
from fsdptoys.utils.text import size_text

from .collectives import Call

LONGEST_PATTERN = 4
COLUMNS = (
    "#",
    "phase",
    "collective",
    "dtype",
    "size",
    "this rank gives",
    "gets",
    "ranks",
    "of",
    "called by",
)
RIGHT = (0, 4, 5, 6, 7)  # Right-aligned columns


@dataclass(frozen=True)
class Fold:
    """A repeated pattern of calls."""

    calls: Sequence[Call]
    period: int

    @property
    def times(self) -> int:
        """Number of repetitions."""
        return len(self.calls) // self.period


def fold(calls: Sequence[Call]) -> list[Fold]:
    """Cut a sequence into repeated patterns, greedily by the number of calls covered."""
    kinds = [_kind(call) for call in calls]
    folds = []
    here = 0
    while here < len(calls):
        best = (1, 1)
        for period in range(1, LONGEST_PATTERN + 1):
            times = 1
            pattern = kinds[here : here + period]
            while kinds[here + times * period : here + (times + 1) * period] == pattern:
                times += 1
            if times > 1 and times * period > best[0] * best[1]:
                best = (period, times)
        length = best[0] * best[1]
        folds.append(Fold(calls[here : here + length], best[0]))
        here += length
    return folds


def render(calls: Sequence[Call], title: str) -> str:
    """The table of a step's calls and the sums, as plain text."""
    sending = [call for call in calls if call.ranks > 1]
    alone = len(calls) - len(sending)
    left_out = (
        f"{alone} calls over groups of one rank, which send nothing" if alone else ""
    )
    if not sending:
        return f"{title}: none" + (f" but {left_out}" if left_out else "")
    rows = [
        COLUMNS,
        *(row for pattern in fold(sending) for row in _rows(pattern, calls)),
    ]
    table = align_columns(rows, RIGHT)
    sums = align_columns(
        [("in all", "calls", "size", "sent by a rank on a ring"), *_sums(sending)],
        (1, 2, 3),
    )
    return "\n".join(
        [
            f"{title}:",
            *table,
            "",
            *sums,
            *([f"left out: {left_out}"] if left_out else []),
        ]
    )


def to_lines(calls: Sequence[Call], step: int) -> str:
    """One line of JSON a collective, nothing folded or left out."""
    return "".join(json.dumps({"step": step, **asdict(call)}) + "\n" for call in calls)


def describe(names: Sequence[str], everything: Sequence[str] = ()) -> str:
    """The blocks or modules of parameters; ~ marks incomplete ones if ``everything`` has all of the
    model's names."""
    modules = Counter(map(block_of, names))
    total = Counter(map(block_of, everything))
    labels = [
        module + "~" * (count < total[module]) for module, count in modules.items()
    ]
    if len(labels) > 3:
        return f"{labels[0]} … {labels[-1]} ({len(names)} tensors)"
    return ", ".join(labels) or "-"


def block_of(name: str) -> str:
    """``layers.3`` of ``layers.3.attn.q_proj.weight``, and ``norm`` of ``norm.weight``."""
    parts = name.split(".")
    return ".".join(parts[:2]) if len(parts) > 2 and parts[1].isdigit() else parts[0]


def _kind(call: Call) -> tuple[object, ...]:
    """Equal for calls that may be folded: all fields except number and parameters."""
    return tuple(
        value
        for name, value in vars(call).items()
        if name not in ("number", "parameters")
    )


def _rows(folded: Fold, calls: Sequence[Call]) -> list[tuple[str, ...]]:
    """One row for each call of the pattern."""
    everything = list(dict.fromkeys(name for call in calls for name in call.parameters))
    several_microbatches = any(call.microbatch not in (None, 1) for call in calls)
    rows: list[tuple[str, ...]] = []
    for position in range(folded.period):
        first = folded.calls[position]
        last = folded.calls[len(folded.calls) - folded.period + position]
        number = str(first.number)
        if folded.times > 1:
            number = "+" if position else f"{first.number}-{folded.calls[-1].number}"
        phase = (
            f"{first.phase} {first.microbatch}"
            if several_microbatches and first.microbatch
            else first.phase
        )
        name = first.collective.replace("_", "-") + (
            f" × {folded.times}" if folded.times > 1 else ""
        )
        sizes = map(size_text, (first.size_bytes, first.gives_bytes, first.gets_bytes))
        of, of_last = (describe(call.parameters, everything) for call in (first, last))
        of = of if of == of_last else f"{of} … {of_last}"
        rows.append(
            (number, phase, name, first.dtype, *sizes, str(first.ranks), of, first.site)
        )
    return rows


def _sums(calls: Sequence[Call]) -> list[tuple[str, ...]]:
    kinds = dict.fromkeys(call.collective for call in calls)
    groups = {
        kind.replace("_", "-"): [call for call in calls if call.collective == kind]
        for kind in kinds
    }
    rows: list[tuple[str, ...]] = []
    for label, group in [
        *groups.items(),
        *([("together", calls)] if len(groups) > 1 else []),
    ]:
        size = sum(call.size_bytes for call in group)
        sent = sum(call.sends_bytes for call in group)
        rows.append((label, str(len(group)), size_text(size), size_text(round(sent))))
    return rows
