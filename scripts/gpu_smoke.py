"""Does this device train correctly? Checks in the order of their risk, each against an oracle, in
under ten minutes.

    python scripts/gpu_smoke.py --out smoke           # smoke/smoke.jsonl and smoke/smoke.md
    python scripts/gpu_smoke.py --checks device loss attention
    python scripts/gpu_smoke.py --out smoke --jobs 6  # checks at a time, except measuring ones
    python scripts/gpu_smoke.py --device cpu          # a small form of each check that a CPU has
    python scripts/gpu_smoke.py --list

Each check runs in a process of its own with a time limit, since an error on a device poisons its
process, and writes one line of JSON when it and those before it have ended: its status, its facts,
and its comparisons that failed. Its stderr, with the tracebacks of rows that failed, lies in
``--out`` as ``NAME.log``. The oracles are losses of the same training on a CPU (1e-5 relative in
float32), float64 for kernels, the bits of a second run in deterministic mode, and runs without the
switch under test. A check that compared nothing has failed.

After a failure the next check runs. A check that no longer fits into ``--seconds`` is reported as
left out. Exits with status 75 if some were left out, which ``--resume`` runs, else 1 if a check
failed.
"""

import argparse
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fsdptoys.launch.hardware import set_allocator
from fsdptoys.sweep.validate import code_version
from scripts.common.child_environment import child_environment
from scripts.common.finished_rows import ROWS_LEFT
from scripts.common.progress import progress, unit
from scripts.smoke.report import Check, Report

COMPILES = "compilation takes a minute on a CPU; its tests run it"
CHECKS = [
    Check("device", "device:check_device", 60, alone=True),
    Check("loss", "kernels:check_loss", 60),
    Check("experts", "kernels:check_experts", 60),
    Check("attention", "kernels:check_attention", 90),
    Check("process group", "device:check_process_group", 40),
    Check("strategies", "training:check_strategies", 120),
    Check("toys", "training:check_toys", 90),
    Check("torchrun", "speed:check_torchrun", 80),
    Check("memory", "training:check_memory", 120),
    Check("documents", "training:check_documents", 90),
    Check("layout mode", "training:check_layout_mode", 90),
    Check("layout families", "training:check_layout_families", 90),
    Check("adapters", "training:check_adapters", 90),
    Check("MoE model", "training:check_experts", 60),
    Check("optimizers", "training:check_optimizers", 150),
    Check("commands", "commands:check_commands", 180),
    Check("compile", "training:check_compile", 120, ("cuda",), COMPILES),
    Check("float8", "training:check_float8", 120, ("cuda",), COMPILES),
    Check("speed", "speed:check_speed", 150, alone=True),
    Check("run_fsdp.sh", "speed:check_first_command", 120, alone=True),
]
"""In running order, the riskiest first."""


def main() -> int:
    """Run the checks; 0 if all passed."""
    args = parse_arguments()
    if args.one:
        set_allocator()  # as in every run, before the device is initialized
        check = next(check for check in CHECKS if check.name == args.one)
        module, function = check.function.split(":")
        getattr(importlib.import_module(f"scripts.smoke.{module}"), function)(
            Report(), args.device
        )
        sys.stdout.flush()
        # Not return: autograd's thread of a device may still run, and Python's end would abort the
        # process.
        os._exit(0)
    end = time.monotonic() + args.seconds
    lines: list[dict[str, Any]] = []
    earlier = read_lines(args.out / "smoke.jsonl", args.version) if args.resume else {}

    def run(check: Check) -> dict[str, Any]:
        with unit(check.name) as progress_unit:
            line = earlier.get(check.name) or run_check(
                check, args.device, end - time.monotonic(), args.out
            )
            line["version"] = args.version
            progress_unit.note = line["status"]
        return line

    with progress(len(args.checks)):
        for line in side_by_side(args.checks, run, args.jobs):
            lines.append(line)
            print(json.dumps(line), flush=True)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                rows = "".join(json.dumps(line) + "\n" for line in lines)
                (args.out / "smoke.jsonl").write_text(rows)
                (args.out / "smoke.md").write_text(render(lines, args.device))
    statuses = {line["status"] for line in lines}
    if "left out" in statuses:
        return ROWS_LEFT
    return 1 if statuses & {"failed", "timed out", "crashed"} else 0


def side_by_side(
    checks: list[Check], run: Callable[[Check], dict[str, Any]], jobs: int
) -> Iterator[dict[str, Any]]:
    """Run ``jobs`` checks at a time, and those marked ``alone`` by themselves; yield their lines in
    order."""
    for alone, group in groupby(checks, lambda check: check.alone):
        with ThreadPoolExecutor(1 if alone else jobs) as pool:
            yield from pool.map(run, group)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "npu", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all checks")
    parser.add_argument(
        "--checks", nargs="+", metavar="NAME", help="some of them; --list names all"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="checks at a time, two cores each; 1 by default",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="smoke.jsonl, smoke.md and logs, written after each check",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="do not repeat checks that have a line of this version of the code in --out",
    )
    parser.add_argument(
        "--version",
        help="of the code; by default its commit, or a hash of changed files",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the checks and their limits"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.list:
        for check in CHECKS:
            print(f"{check.name:15} {check.seconds:4.0f} s  {', '.join(check.devices)}")
        raise SystemExit(0)
    if args.resume and not args.out:
        parser.error("--resume needs --out, the folder of the earlier call")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    names = {check.name for check in CHECKS}
    for name in args.checks or []:
        if name not in names:
            parser.error(f"--checks {name}: must be of {', '.join(sorted(names))}")
    args.version = args.version or code_version()
    args.checks = [
        check for check in CHECKS if args.checks is None or check.name in args.checks
    ]
    return args


def read_lines(path: Path, version: str) -> dict[str, dict[str, Any]]:
    """Check → its line in a file of an earlier call with this version, without those that were left
    out."""
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    measured = (
        line
        for line in lines
        if line["status"] != "left out" and line.get("version") == version
    )
    return {line["check"]: line for line in measured}


def run_check(
    check: Check, device: str, left: float, logs: Path | None = None
) -> dict[str, Any]:
    """The line of a check, which is killed at its limit or when the time of all is over.

    Args:
        check: the check.
        device: ``cuda``, ``npu`` or ``cpu``.
        left: seconds until the end of all checks.
        logs: folder for its stderr; None to drop it.
    """
    line: dict[str, Any] = {
        "check": check.name,
        "device": device,
        "limit_seconds": check.seconds,
    }
    if device not in check.devices:
        return line | {"status": f"not on {device}", "reason": check.otherwise}
    if left < check.seconds / 3:
        return line | {
            "status": "left out",
            "reason": f"{max(0, left):.0f} s were left",
        }
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        # A session of its own, so that the ranks it starts end with it.
        process = subprocess.Popen(
            [sys.executable, __file__, "--one", check.name, "--device", device],
            stdout=output, stderr=errors, env=child_environment(), start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(min(check.seconds, left))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        line["seconds"] = round(time.monotonic() - began, 1)
        if logs:
            errors.seek(0)
            logs.mkdir(parents=True, exist_ok=True)
            (logs / f"{check.name.replace(' ', '_')}.log").write_text(errors.read())
        return line | read_events(output, errors, status)


def read_events(output: Any, errors: Any, status: int | None) -> dict[str, Any]:
    """Status, facts and comparisons of a check from its output; ``status`` is None for one that was
    killed."""
    output.seek(0)
    errors.seek(0)
    facts = {}
    met = 0
    failed = []
    for text in output:
        try:
            kind, name, value = json.loads(text)
        except ValueError:  # of a library, or cut off by the kill
            continue
        if kind == "fact":
            facts[name] = value
        elif kind == "met":
            met += 1
        else:
            failed.append(name)
    outcome: dict[str, Any] = {"met": met, "failed": failed, "facts": facts}
    if status is None:
        return {"status": "timed out", **outcome}
    if status:
        tail = [line for line in errors.read().splitlines() if line.strip()]
        return {
            "status": "crashed",
            "reason": f"status {status}: {' | '.join(tail[-3:])}"[:600],
            **outcome,
        }
    if not met and not failed:
        return {"status": "failed", "reason": "it compared nothing", **outcome}
    return {"status": "failed" if failed else "passed", **outcome}


def render(lines: list[dict[str, Any]], device: str) -> str:
    """The page as Markdown."""
    machine = next(
        (
            line["facts"].get("machine")
            for line in lines
            if line["check"] == "device" and "facts" in line
        ),
        None,
    )
    page = [
        f"# Checks on {device}",
        "",
        f"Command: `python {shlex.join(sys.argv)}`",
        "",
    ]
    page += [f"{machine}.", ""] if machine else []
    page += [
        "| check | status | s | comparisons met | failed |",
        "|---|---|---:|---:|---|",
    ]
    for line in lines:
        failures = "; ".join(
            filter(None, [line.get("reason"), *line.get("failed", [])])
        ).replace("|", "/")
        page.append(
            f"| {line['check']} | {line['status']} | {line.get('seconds', '')} | "
            f"{line.get('met', '')} | {failures} |"
        )
    for line in lines:
        if line.get("facts"):
            page += ["", f"## {line['check']}", ""]
            page += [
                f"- {name}: {_text(value)}" for name, value in line["facts"].items()
            ]
    return "\n".join(page) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
