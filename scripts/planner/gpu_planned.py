"""Compare the memory and time that ``gpu_smoke.py`` has measured with the planner's predictions.
Needs no GPU.

    python scripts/planner/gpu_planned.py smoke/smoke.jsonl --hardware h200 --write PAGE.md

Every row of the file that a fresh or emptied process trained alone is traced with the same words.
Peak is the highest sum of tensors on the device in the steps after the first, to the byte of
PyTorch's allocator. Models that take a few milliseconds are bound by their host, which a profile
does not know: their times are not compared.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.device import GIB
from fsdptoys.device.profile import load_hardware
from fsdptoys.plan.predict import predict
from scripts.common.progress import progress, unit
from scripts.smoke import speed, training
from scripts.smoke.runs import COMMON, SMALL

BF16 = ["parallel.param_dtype=bfloat16"]


@dataclass(frozen=True)
class Compared:
    """A measured row and its prediction."""

    check: str
    name: str
    measured: dict[str, Any]
    peak_gib: float
    reserved_gib: float
    step_ms: float


def overrides_of(check: str) -> dict[str, list[str]]:
    """Return the overrides of each row of a check."""
    fsdp2 = [*SMALL, "parallel=fsdp2"]
    if check == "memory":
        plain = [*fsdp2, "parallel.param_dtype=float32"]
        return {"plain": plain} | {
            name: [*plain, *overrides] for name, overrides in training.MEMORY.items()
        }
    if check in ("compile", "float8"):
        rows = training.COMPILED if check == "compile" else training.FLOAT8
        compiled = ["train.compile=true"] * (check == "float8")
        return {
            name: [*fsdp2, *BF16, *compiled, *overrides]
            for name, overrides in rows.items()
        }
    if check == "optimizers":
        return {
            name: [*SMALL, *training.SINGLE, *overrides]
            for name, overrides in training.OPTIMIZERS.items()
        }
    if check == "adapters":
        return {
            f"{form} {dtype}": [
                *overrides,
                "parallel=fsdp2",
                f"parallel.param_dtype={dtype}",
            ]
            for form, overrides in training.adapter_rows("cuda").items()
            for dtype in ("float32", "bfloat16")
        }
    if check == "speed":
        return {
            name: [*speed.MODEL, *overrides] for name, overrides in speed.ROWS.items()
        }
    return {}


def compare(lines: list[dict[str, Any]], hardware: str) -> Iterator[Compared]:
    """Each measured row with its prediction."""
    profile = load_hardware(hardware)
    for line in lines:
        for name, overrides in overrides_of(line["check"]).items():
            measured = line.get("facts", {}).get(name)
            if not isinstance(measured, dict) or "peak_gib" not in measured:
                continue
            with unit(f"{line['check']}, {name}"):
                config = compose_config(
                    [*COMMON, f"launch.device={line['device']}", *overrides]
                )
                config.validate(1, line["device"])
                prediction = predict(config, profile, 1)
            memory = prediction.memory
            peak_gib = memory.peak_bytes / GIB
            reserved_gib = memory.reserved_bytes / GIB
            milliseconds = 1e3 * prediction.time.step_seconds
            yield Compared(
                line["check"], name, measured, peak_gib, reserved_gib, milliseconds
            )


def render(rows: list[Compared], command: str, machine: str, hardware: str) -> str:
    """The page."""
    page = [
        "# Predictions against measurements on one device",
        "",
        f"Command: `{command}`",
        "",
    ]
    page += [
        f"Measured on: {machine}.",
        f"Predicted with torch {torch.__version__} for `plan.hardware={hardware}`.",
        "",
    ]
    page += [
        "| check | row | peak, GiB | predicted | error |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        peak = row.measured["peak_gib"]
        page.append(
            f"| {row.check} | {row.name} | {peak:.4f} | {row.peak_gib:.4f} | "
            f"{100 * (row.peak_gib / peak - 1):+.2f}% |"
        )
    timed = [row for row in rows if "reserved_gib" in row.measured]
    if timed:
        page += [
            "",
            "| row | step, ms | predicted | error | reserved, GiB | predicted |",
        ]
        page += ["|---|---:|---:|---:|---:|---:|"]
    for row in timed:
        step = row.measured["step_ms"]
        page.append(
            f"| {row.name} | {step:.1f} | {row.step_ms:.1f} | "
            f"{100 * (row.step_ms / step - 1):+.1f}% | {row.measured['reserved_gib']:.2f} | "
            f"{row.reserved_gib:.2f} |"
        )
    return "\n".join(page) + "\n"


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path, help="smoke.jsonl")
    parser.add_argument("--hardware", required=True, help="profile of the device")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.measured.read_text().splitlines()]
    machine = next(
        (
            line["facts"]["machine"]
            for line in lines
            if "machine" in line.get("facts", {})
        ),
        "not recorded",
    )
    units = sum(len(overrides_of(line["check"])) for line in lines)
    with progress(units):
        rows = list(compare(lines, args.hardware))
    page = render(rows, f"python {shlex.join(sys.argv)}", machine, args.hardware)
    if args.write:
        args.write.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
