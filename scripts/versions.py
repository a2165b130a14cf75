"""Tests and commands under the installed PyTorch, and the page that compares versions: see
``versions.sh``.

    python scripts/versions.py run RESULT.json [--quick]
    python scripts/versions.py page benchmarks/versions.md --command COMMAND RESULT.json...

A command fails if its status is not 0 or if it prints a traceback. A refusal (status 2 and one
sentence) counts as skipped where the command names a feature that old versions lack.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.common.child_environment import ROOT, child_environment
from scripts.common.machine import machine
from scripts.common.progress import progress, unit

TESTS = {
    "equality of strategies": "parallel/test_equality.py",
    "collectives, meshes": "parallel/test_collectives.py parallel/test_mesh.py",
    "shared sequences": "parallel/test_context.py",
    "split experts": "parallel/test_expert_parallelism.py parallel/test_expert_shards.py",
    "split features": "parallel/test_tensor.py",
    "split layers": "parallel/test_pipeline_parallelism.py",
    "layout mode": "parallel/test_layout_mode.py",
    "adapters": "parallel/test_lora.py",
    "conversations": "data/test_chat.py data/test_prepared_chat.py",
    "float8, 8-bit AdamW": "parallel/test_float8.py optim/test_low_bit_adamw.py",
    "configuration": "config messages",
    "models": "models",
    "loss": "loss",
    "memory switches": (
        "memory/test_activation_checkpointing.py memory/test_activation_offload.py "
        "memory/test_optimizer_in_backward.py"
    ),
    "resume": "train/test_resume.py train/test_final_weights.py",
    "checkpoints": (
        "checkpoint/test_round_trips.py checkpoint/test_sharded_weights.py "
        "checkpoint/test_sharded_io_ranks.py"
    ),
    "compiler": "train/test_compile.py",
    "plans": (
        "plan/test_tracer.py plan/test_fake_tensors.py plan/test_estimate.py "
        "plan/test_unit_traces.py plan/test_tracing_process.py cli/test_plan.py"
    ),
    "toys": "toys/test_fsdp.py toys/test_ddp.py toys/test_zero.py toys/test_memory.py",
    "patches": "patches",
    "launcher": "launch/test_failures.py train/test_stop.py",
}
"""Group → its folders and files below ``tests``."""
QUICK = ("equality of strategies", "patches")
"""The groups of ``--quick``."""

SMALL = (
    "experiment=null model=llama_debug model.n_layers=3 data=synthetic train.seq_len=64 "
    "train.batch_size=1 train.steps=3 train.eval_every=0 launch.device=cpu "
    "launch.nproc_per_node=2"
)
PLAN = "model=llama3_1b plan.hardware=h100 plan.world_size=8"
COMMON = {"train": SMALL, "sweep": SMALL, "plan": PLAN}
"""Subcommand → its first arguments in every command; those of a command come after them and
override them."""
COMMANDS: list[tuple[str, bool]] = [
    *((f"train parallel={name}", False) for name in ("ddp", "fsdp1", "toy_fsdp")),
    ("train parallel=single launch.nproc_per_node=1", False),
    (
        "train parallel.param_dtype=bfloat16 memory=lean checkpoint.every=2 metrics.run_dir=run",
        False,
    ),
    ("train parallel=fsdp2 parallel.param_dtype=float16 memory=smallest", False),
    ("train parallel=fsdp2 train.compile=true", False),
    ("train parallel=fsdp2 optim=muon model=qwen3_moe_debug", False),
    ("train parallel=fsdp2 mesh.cp_size=2", False),
    ("train parallel=fsdp2 mesh.ep_size=2 model=qwen3_moe_debug", False),
    ("train parallel=fsdp2 mesh.tp_size=2 parallel.param_dtype=bfloat16", False),
    ("train parallel=fsdp1 train.deterministic=layout", False),
    ("train parallel=fsdp2 tune=lora", False),
    ("train parallel=fsdp2 optim.state_dtype=int8", True),
    ("train parallel=fsdp2 train.float8=tensorwise", True),
    ("checkpoint ls run", False),
    ("report run", False),
    ("plan parallel=single plan.world_size=1", False),
    ("plan parallel=ddp", True),
    ("plan parallel=fsdp1 parallel.param_dtype=bfloat16", False),
    ("plan parallel=fsdp2 parallel.param_dtype=bfloat16 memory=lean", False),
    ("plan parallel=fsdp2 train.float8=tensorwise parallel.param_dtype=bfloat16", True),
    (
        "plan parallel=fsdp2 parallel.param_dtype=bfloat16 memory=lean mesh.cp_size=4",
        False,
    ),
    ("plan parallel=fsdp2 parallel.param_dtype=bfloat16 mesh.tp_size=2", False),
    ("sweep parallel=fsdp1,fsdp2 --out sweep", False),
]
"""Arguments of ``fsdptoys`` without the common ones, and whether an old version may refuse them; in
this order."""
LEFT_OUT = (
    "Not counted are settings that a test of several leaves out: FSDP2 with replicas on a CPU "
    "before torch 2.8, and AdamW states of 8 and 4 bits where torchao cannot be imported."
)
"""Above the table of skipped tests."""


@dataclass
class Row:
    """A group of tests, or a command."""

    name: str
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    """Name and first line of each error."""
    reasons: list[str] = field(default_factory=list)
    """Why something was skipped."""

    @property
    def outcome(self) -> str:
        """A table's cell."""
        return f"{self.passed} / {self.skipped} / {self.failed}"


@dataclass
class Result:
    """One version of PyTorch."""

    torch: str
    machine: str
    commit: str
    tests: list[Row]
    commands: list[Row]


def run_tests(name: str) -> Row:
    """Run a group in one process of pytest."""
    row = Row(name)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "--all", "--tb=short"]
        command += [
            f"--junitxml={log}",
            *(f"tests/{path}" for path in TESTS[name].split()),
        ]
        process = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
        )
        cases = (
            ElementTree.parse(log).getroot().iter("testcase")
            if log.exists()
            else iter(())
        )
        for case in cases:
            skips = case.findall("skipped")
            faults = [*case.findall("failure"), *case.findall("error")]
            row.skipped += bool(skips)
            row.failed += bool(faults)
            row.passed += not skips and not faults
            row.reasons += [skip.get("message", "") for skip in skips]
            row.failures += [
                f"{case.get('name')}: {first_line(fault.get('message', ''))}"
                for fault in faults
            ]
    if process.returncode and not row.failed:
        row.failed = 1
        reason = first_line(process.stdout + process.stderr)
        row.failures.append(f"pytest ended with status {process.returncode}: {reason}")
    row.seconds = time.monotonic() - started
    return row


def run_command(arguments: str, may_be_refused: bool, folder: Path) -> Row:
    """Run a command, with the common arguments of its subcommand, in a folder."""
    row = Row(f"fsdptoys {arguments}")
    started = time.monotonic()
    subcommand, *rest = arguments.split()
    argv = [subcommand, *COMMON.get(subcommand, "").split(), *rest]
    process = subprocess.run(
        [sys.executable, "-m", "fsdptoys", *argv],
        cwd=folder,
        env=child_environment(),
        capture_output=True,
        text=True,
        errors="replace",
    )
    output = process.stdout + process.stderr
    if process.returncode == 2 and may_be_refused and "Traceback" not in output:
        row.skipped = 1
        row.reasons.append(process.stderr.strip().splitlines()[-1])
    elif process.returncode or "Traceback" in output:
        row.failed = 1
        errors = re.findall(
            r"^(?:\[.*?\] *)?(\w*(?:Error|Exception)\b.*|fsdptoys: .*)", output, re.M
        )
        row.failures.append(
            f"status {process.returncode}: {errors[-1] if errors else first_line(output)}"
        )
    else:
        row.passed = 1
    row.seconds = time.monotonic() - started
    return row


def first_line(text: str) -> str:
    """The first line with text, shortened."""
    return next(
        (line.strip()[:200] for line in text.splitlines() if line.strip()), "no output"
    )


def measure(groups: Sequence[str]) -> Result:
    """Run groups of tests, and all commands, under this Python's torch."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    result = Result(torch.__version__, machine("cpu"), commit.stdout.strip(), [], [])
    with (
        tempfile.TemporaryDirectory() as folder,
        progress(units=len(groups) + len(COMMANDS)),
    ):
        for name in groups:
            with unit(name) as progress_unit:
                result.tests.append(run_tests(name))
                progress_unit.note = result.tests[-1].outcome
        for arguments, may_be_refused in COMMANDS:
            with unit(arguments) as progress_unit:
                result.commands.append(
                    run_command(arguments, may_be_refused, Path(folder))
                )
                progress_unit.note = result.commands[-1].outcome
    return result


def sum_of(rows: list[Row]) -> Row:
    """All rows as one."""
    counts = [
        sum(getattr(row, key) for row in rows)
        for key in ("passed", "skipped", "failed", "seconds")
    ]
    return Row("all", *counts)


def page_of(results: list[Result], command: str, date: str) -> str:
    """The page in Markdown."""
    lines = [
        "# Versions of PyTorch",
        "",
        (
            f"Command: `{command}`, on {date}, at commit "
            f"{', '.join(sorted({result.commit for result in results}))}."
        ),
        "",
        *(f"- {result.machine}" for result in results),
        "",
        "Passed / skipped / failed, for tests and for commands; seconds for both together.",
        "",
        "| torch | tests | commands | seconds |",
        "|---|---:|---:|---:|",
    ]
    for result in results:
        tests = sum_of(result.tests)
        commands = sum_of(result.commands)
        seconds = tests.seconds + commands.seconds
        lines.append(
            f"| {result.torch} | {tests.outcome} | {commands.outcome} | {seconds:.0f} |"
        )
    header = " | ".join(result.torch for result in results)
    rule = "|---" + "|---:" * len(results) + "|"
    for title, rows_of in (
        ("Tests", [r.tests for r in results]),
        ("Commands", [r.commands for r in results]),
    ):
        lines += ["", f"## {title}", ""]
        if title == "Commands":
            lines += ["Common arguments, which those of a row override:", ""]
            for common in dict.fromkeys(COMMON.values()):
                subcommands = [f"`{name}`" for name in COMMON if COMMON[name] == common]
                lines.append(f"- {', '.join(subcommands)}: `{common}`")
            lines.append("")
        lines += [f"| {title.lower()} | {header} |", rule]
        for rows in zip(*rows_of, strict=True):
            name = rows[0].name if title == "Tests" else f"`{rows[0].name}`"
            lines.append(f"| {name} | {' | '.join(row.outcome for row in rows)} |")
    lines += ["", "## Failures", ""]
    failures = [
        f"- torch {result.torch}, {row.name}: {failure}"
        for result in results
        for row in (*result.tests, *result.commands)
        for failure in row.failures
    ]
    lines += [line.replace("<", "&lt;") for line in failures] or ["None."]
    lines += ["", "## Skipped", "", LEFT_OUT, ""]
    lines += ["| torch | tests or command | number | reason |", "|---|---|---:|---|"]
    for result in results:
        for row in (*result.tests, *result.commands):
            for reason, number in sorted(Counter(row.reasons).items()):
                cells = result.torch, row.name, str(number), " ".join(reason.split())
                lines.append(
                    f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
                )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measure one version, or write the page; the latter's status is 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run")
    run.add_argument("result", type=Path)
    run.add_argument("--quick", action="store_true")
    page = actions.add_parser("page")
    page.add_argument("page", type=Path)
    page.add_argument("--command", required=True)
    page.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args(argv)
    if arguments.action == "run":
        arguments.result.write_text(
            json.dumps(asdict(measure(QUICK if arguments.quick else list(TESTS))))
        )
        return 0
    results = []
    for path in arguments.results:
        tree = json.loads(path.read_text())
        rows = {
            key: [Row(**row) for row in tree.pop(key)] for key in ("tests", "commands")
        }
        results.append(Result(**tree, **rows))
    text = page_of(results, arguments.command, datetime.date.today().isoformat())
    arguments.page.write_text(text)
    print(text)
    return int(
        any(
            row.failed
            for result in results
            for row in (*result.tests, *result.commands)
        )
    )


if __name__ == "__main__":
    sys.exit(main())
