"""Checks of whole commands on a device: a resumed run, generation and evaluation."""

import json
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from scripts.common.child_environment import child_environment
from scripts.smoke.report import Report
from scripts.smoke.runs import COMMON, small_model
from scripts.smoke.training import LOSS


def fsdptoys(argv: list[str], folder: Path, launcher: list[str] | None = None) -> str:
    """Standard output of a command of the project; RuntimeError with its last line if it fails."""
    command = [sys.executable, *(launcher or []), "-m", "fsdptoys", *argv]
    process = subprocess.run(
        command, cwd=folder, env=child_environment(), capture_output=True, text=True
    )
    if process.returncode:
        sys.stderr.write(process.stderr)
        lines = (process.stderr + process.stdout).strip().splitlines() or ["no output"]
        raise RuntimeError(
            f"{' '.join(argv[:2])} ended with status {process.returncode}: {lines[-1]}"
        )
    return process.stdout


def train_command(device: str, run_dir: str, *overrides: str) -> list[str]:
    """A command line of a small run."""
    common = [
        word
        for word in COMMON
        if not word.startswith(("train.steps", "metrics.console"))
    ]
    return [
        "train", *common, *small_model(device), f"launch.device={device}",
        "launch.nproc_per_node=1", "parallel=fsdp2", "parallel.param_dtype=float32",
        "metrics.console=plain", f"metrics.run_dir={run_dir}", *overrides,
    ]  # fmt: skip


def losses_of(run_dir: Path) -> list[float]:
    """Losses of a run's steps."""
    lines = [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    return [line["loss"] for line in lines if "loss" in line]


def check_commands(report: Report, device: str) -> None:
    """A run that is resumed against one without a break; generation and evaluation on the device
    against a CPU.

    Most of a command's time is imports, so independent commands run concurrently.
    """
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        folder = Path(name)

        def trained(run_dir: str, *overrides: str) -> "Future[str]":
            return pool.submit(
                fsdptoys,
                train_command(device, run_dir, "plan.predict=false", *overrides),
                folder,
            )

        halves = "checkpoint.every=2"
        first = trained("run", "train.steps=2", halves)
        whole = trained("whole", "train.steps=4")
        first.result()
        trained("run", "train.steps=4", halves, "checkpoint.resume=must").result()
        whole.result()
        report.close(
            "resumed losses",
            losses_of(folder / "run"),
            losses_of(folder / "whole"),
            1e-6,
        )
        evaluate = shlex.split("evaluate run --windows 8 --json --device")
        generate = shlex.split(
            "generate run --tokenizer ids --prompt '1 2 3' --tokens 10 --temperature 0 --json"
        )
        evaluated = {
            where: pool.submit(fsdptoys, [*evaluate, where], folder)
            for where in dict.fromkeys(("cpu", device))
        }
        generated = {
            (where, dtype): pool.submit(
                fsdptoys, [*generate, "--device", where, "--dtype", dtype], folder
            )
            for where, dtype in {
                ("cpu", "float32"),
                (device, "float32"),
                (device, "bfloat16"),
            }
        }
        losses = {
            where: float(json.loads(answer.result())["loss"])
            for where, answer in evaluated.items()
        }
        report.close("evaluated loss", [losses[device]], [losses["cpu"]], LOSS)
        ids = {
            key: json.loads(answer.result())[0]["ids"]
            for key, answer in generated.items()
        }
        same = ids[device, "float32"] == ids["cpu", "float32"]
        report.expect(
            same,
            f"the most likely tokens in float32 are those of a CPU: {ids[device, 'float32']}",
        )
        report.fact(
            "generated ids", {" ".join(key): value for key, value in ids.items()}
        )
