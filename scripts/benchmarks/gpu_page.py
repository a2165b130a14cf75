"""The page of ``bench_gpu.py``: rows, their tables, and the targets."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

EAGER = "FSDPToys, eager"
COMPILED = "FSDPToys, compiled"
FLOAT8 = "FSDPToys, compiled, float8"
BARE = "PyTorch loop + transformers, compiled"
ACCELERATE = "accelerate + transformers, eager"
FLOAT8_GAIN = 1.25
"""Of the tokens/s of bf16, both compiled."""
LOSS_TOLERANCE = 0.01
"""Relative, of first losses: the same initial values, other roundings (0.13% apart in float8)."""
STEPS = 8
WARMUP = 3
"""Of a row; its figures leave the warm-up out."""
LOSS = "memory.chunk_loss=true"
"""Of all our rows."""


@dataclass(frozen=True)
class Shape:
    """A trained shape."""

    model: str
    seq_len: int
    batch_size: int
    overrides: tuple[str, ...] = ()
    """Of ours, so that it fits."""
    checkpoints: bool = False
    """Whether the peers compute blocks again."""
    half: bool = False
    """Whether the peers have parameters, gradients and states in bf16."""
    target_mfu: float = 0.5

    @property
    def name(self) -> str:
        """For people and the command line."""
        return f"{self.model}-{self.seq_len}"


@dataclass(frozen=True)
class Row:
    """Result of one contestant with one shape."""

    shape: str
    contestant: str
    command: str = ""
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_gib: float | None = None
    planned_gib: float | None = None
    startup_seconds: float | None = None
    losses: Sequence[float] = ()
    """Of each step."""
    note: str = ""
    failure: str | None = None


def judge(rows: Sequence[Row], shapes: Sequence[Shape]) -> list[str]:
    """A sentence a target: met, missed, or not measured."""
    lines = []

    def judge_target(met: bool, sentence: str) -> None:
        lines.append(f"{'met' if met else 'missed'}: {sentence}")

    for shape in shapes:
        of = {row.contestant: row for row in rows if row.shape == shape.name}
        speeds = {
            name: row.tokens_per_second
            for name, row in of.items()
            if row.tokens_per_second is not None
        }
        speed = speeds.get(COMPILED)
        if speed is None:
            failure = of[COMPILED].failure if COMPILED in of else "it was not asked for"
            lines.append(f"not measured: {shape.name} {COMPILED}: {failure}")
            continue
        mfu = of[COMPILED].mfu
        if mfu is not None:
            judge_target(
                mfu >= shape.target_mfu,
                f"{shape.name} compiled has {mfu:.1%} MFU, target {shape.target_mfu:.0%}",
            )
        if FLOAT8 in speeds:
            gain = speeds[FLOAT8] / speed
            judge_target(
                gain >= FLOAT8_GAIN,
                f"{shape.name} float8 has {gain:.2f} of bf16's tokens/s, target {FLOAT8_GAIN}",
            )
        else:
            lines.append(f"not measured: {shape.name} float8")
        peers = {name: speeds[name] for name in (BARE, ACCELERATE) if name in speeds}
        if peers:
            best = max(peers, key=peers.__getitem__)
            ratio = speed / peers[best]
            judge_target(
                ratio >= 1,
                f"{shape.name} compiled has {ratio:.2f} of the tokens/s of {best}, target 1",
            )
        else:
            lines.append(f"not measured: {shape.name} against a peer")
        first = {name: row.losses[0] for name, row in of.items() if row.losses}
        for name, loss in first.items():
            if abs(loss - first[COMPILED]) > LOSS_TOLERANCE * first[COMPILED]:
                judge_target(
                    False,
                    (
                        f"{shape.name} {name} begins with the loss {loss:.3f}, {COMPILED} with "
                        f"{first[COMPILED]:.3f}"
                    ),
                )
    return lines


def render(
    rows: Sequence[Row],
    shapes: Sequence[Shape],
    device: str,
    peak_flops: float | None,
    on: str,
    verdicts: Sequence[str],
) -> str:
    """The page as Markdown.

    Args:
        rows: so far.
        shapes: in the order of their tables.
        device: ``cuda`` or ``cpu``.
        peak_flops: of the device in bf16, a second; None where it is not known.
        on: machine and versions.
        verdicts: of ``judge``.
    """
    peak = (
        f"{peak_flops / 1e12:,.0f} TFLOP/s"
        if peak_flops
        else "not known, so no MFU is given"
    )
    trial = "# A trial of the script on a CPU, whose figures mean nothing"
    lines = [
        "# One GPU" if device == "cuda" else trial,
        "", f"Command: `python {shlex.join(sys.argv)}`", "", f"{on}. Peak in bf16: {peak}.", "",
        (f"Medians of {STEPS - WARMUP} steps after {WARMUP} warm-up steps. Each row is a new "
        "process, and rows run one after the other; the loss is read after each step. Peak: "
        "allocated memory. Planned: the planner's prediction of it. Start: from the command to "
        "the end of step 1, with imports, initialization and compilation."),
    ]  # fmt: skip
    for shape in shapes:
        peers = "all in bf16" if shape.half else "fp32 parameters and states"
        lines += [
            "", f"## {shape.model}, {shape.batch_size} × {shape.seq_len} tokens a step", "",
            f"Ours: `{' '.join([LOSS, *shape.overrides])}`; peers: logits in one piece, {peers}"
            f"{', blocks computed again' * shape.checkpoints}.", "",
            "| | tokens/s | MFU | peak GiB | planned GiB | start, s |", "|---|" + "---:|" * 5,
        ]  # fmt: skip
        for row in rows:
            if row.shape != shape.name:
                continue
            if row.failure is not None:
                lines.append(
                    f"| {row.contestant} | {row.failure} | | | {_cell(row.planned_gib, '.1f')} | |"
                )
                continue
            lines.append(
                f"| {row.contestant} | {_cell(row.tokens_per_second, ',.0f')} | "
                f"{_cell(row.mfu, '.1%')} | {_cell(row.peak_gib, '.1f')} | "
                f"{_cell(row.planned_gib, '.1f')} | {_cell(row.startup_seconds, '.1f')} |"
            )
        trained = [row for row in rows if row.shape == shape.name and row.losses]
        if trained:
            steps = " | ".join(f"step {number}" for number in range(1, STEPS + 1))
            lines += ["", f"| loss | {steps} |", "|---|" + "---:|" * STEPS]
        for row in trained:
            lines.append(
                f"| {row.contestant} | {' | '.join(f'{loss:.3f}' for loss in row.losses)} |"
            )
        notes = [
            f"{row.contestant}: {row.note}."
            for row in rows
            if row.shape == shape.name and row.note
        ]
        lines += ["", *(f"- {note}" for note in notes)]
    return (
        "\n".join(
            [*lines, "", "## Targets", "", *(f"- {verdict}" for verdict in verdicts)]
        )
        + "\n"
    )


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
