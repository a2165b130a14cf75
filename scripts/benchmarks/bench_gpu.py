"""How fast is training on one GPU: eager, compiled, in float8, and next to others? All of it in one
call.

    python scripts/benchmarks/bench_gpu.py --write benchmarks/gpu  # gpu.md, gpu.json: ten minutes
    python scripts/benchmarks/bench_gpu.py --shapes llama3_8b-8192 --seconds 300
    python scripts/benchmarks/bench_gpu.py --write benchmarks/gpu --resume  # rows still missing
    python scripts/benchmarks/bench_gpu.py --device cpu --tiny --seconds 120  # the script itself

Contestants train the same shapes on the same batches, one after the other, each in a fresh process.
Their programs are in ``peers``, and ``peers/measure.py`` watches them from outside. Ours is the
trainer without sharding, forward and backward in bf16 over fp32 parameters. Peers are transformers'
Llama in a compiled loop of PyTorch alone, and under Hugging Face accelerate. Each draws the same
initial values on the device (``peers/values.py``), so first losses agree but for rounding.

The 7B and 8B take more than one H200 with fp32 parameters, gradients and AdamW states. Ours keeps
the states in bf16 there (``optim.state_dtype``); transformers has no such switch, so its
parameters, gradients and states are all bf16: fewer bytes than ours, and other rounding. The
planner predicts the memory of our rows before anything runs.

Speed is tokens over the median step after the warm-up, with the loss read after each step; MFU is
the model's FLOPs without recomputation over the peak in bf16. Each row and the whole call have a
time budget. Rows that do not fit, run out of memory or cannot run state the reason. With
``--resume`` rows that STEM.json already has are kept, and the exit status is 75 while rows are left
for another call. Otherwise the status is 1 if a target is missed.
"""

import argparse
import dataclasses
import functools
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.data.bin import TokenDType
from fsdptoys.device import GIB, Device, peak_flops
from fsdptoys.device.profile import load_hardware
from fsdptoys.metrics.prediction import MemoryPrediction
from fsdptoys.models import ModelConfig
from fsdptoys.plan.estimate.estimate import fast_estimate
from scripts.benchmarks.bench_peers import PEERS, ROOT, peers_versions
from scripts.benchmarks.gpu_page import (
    ACCELERATE,
    BARE,
    COMPILED,
    EAGER,
    FLOAT8,
    LOSS,
    STEPS,
    WARMUP,
    Row,
    Shape,
    judge,
    render,
)
from scripts.benchmarks.peers.measure import Measured, Run, take_within
from scripts.benchmarks.peers.work import Work
from scripts.benchmarks.peers_inputs import (
    recipe_overrides,
    write_batches,
    write_tokens,
)
from scripts.common.child_environment import child_environment
from scripts.common.finished_rows import ROWS_LEFT, FinishedRows
from scripts.common.machine import machine, without_clocks
from scripts.common.progress import doing, progress, unit

HARDWARE = "h200"
PACKAGES = ["torch", "transformers", "accelerate"]
"""Of the peers."""
NO_TIME = "left out: the call's time was over"
LEAST_SECONDS = 30.0
"""A row is not begun with less."""
STATES = "optim.state_dtype=bfloat16"
SELECTIVE = "memory.gradient_checkpointing=selective"
SHAPES = [
    Shape("llama3_8b", 8192, 1, (STATES, SELECTIVE), half=True),
    Shape("llama3_1b", 4096, 4, target_mfu=0.45),
    Shape("llama2_7b", 4096, 2, (STATES, SELECTIVE), half=True),
    Shape("llama3_1b", 8192, 2, target_mfu=0.45),
    Shape("llama3_8b", 4096, 2, (STATES, SELECTIVE), half=True),
]
"""In running order, those that fit the device first: the end of the budget leaves out the least
important rows."""
TINY = [Shape("llama_debug", 64, 2, ("kernels.rms_norm=torch",))]

CONTESTANTS: dict[str, str | tuple[str, ...]] = {
    COMPILED: ("train.compile=true",),
    BARE: "bare_loop.py",
    FLOAT8: ("train.compile=true", "train.float8=tensorwise"),
    EAGER: (),
    ACCELERATE: "accelerate_transformers.py",
}
"""Name → words of ours, or a peer's script."""


@dataclass(frozen=True)
class Bench:
    """One call."""

    device: str
    folder: Path
    python: str
    """Of the peers."""
    peak: float | None
    memory_gib: float | None
    """Of the device; None where it is not known."""

    def holds(self, planned_gib: float | None) -> bool:
        """Whether the device has as much memory as that."""
        return (
            planned_gib is None
            or self.memory_gib is None
            or planned_gib <= self.memory_gib
        )

    def work(self, shape: Shape, contestant: str) -> Work:
        """Arguments of a peer."""
        return Work(
            weights=str(self.folder / shape.name),
            batches=str(self.folder / shape.name / "batches.bin"), ranks=1,
            batch_size=shape.batch_size, seq_len=shape.seq_len, steps=STEPS, dtype="bfloat16",
            device=self.device, compiles=int(contestant == BARE),
            checkpoints=int(shape.checkpoints), half=int(shape.half),
        )  # fmt: skip

    def overrides(self, shape: Shape, contestant: str) -> list[str]:
        """Overrides for our trainer."""
        added = CONTESTANTS[contestant]
        assert not isinstance(added, str)
        work = self.work(shape, contestant)
        return [
            "experiment=null", f"model={shape.model}", "parallel=single",
            "parallel.param_dtype=bfloat16", LOSS,
            *recipe_overrides(work, self.folder / shape.name),
            "data.dtype=uint32", "optim.implementation=fused", "metrics.console=none",
            *shape.overrides, *added,
        ]  # fmt: skip

    def command(self, shape: Shape, contestant: str) -> list[str]:
        """Command that starts a contestant."""
        script = CONTESTANTS[contestant]
        if isinstance(script, str):
            return [
                self.python,
                str(PEERS / script),
                *self.work(shape, contestant).arguments(),
            ]
        return [
            sys.executable,
            str(PEERS / "ours.py"),
            *self.overrides(shape, contestant),
        ]

    def environment(self, contestant: str) -> dict[str, str]:
        """One rank by itself, with the same allocator for all."""
        variables = child_environment(
            HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", RANK="0", LOCAL_RANK="0"
        )
        variables |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        if isinstance(CONTESTANTS[contestant], str) and self.python != sys.executable:
            # Packages of this environment would shadow those of the peers' environment
            del variables["PYTHONPATH"]
        if self.device == "cuda":
            variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        # Reads ranks from its launcher's variables; there is no launcher here
        if contestant == ACCELERATE:
            variables = {
                name: value
                for name, value in variables.items()
                if not name.endswith(("RANK", "WORLD_SIZE"))
            }
        return variables

    def write_inputs(self, shape: Shape) -> ModelConfig:
        """A folder with the tokens, the batches made of them, and the model's ``config.json`` for
        the peers."""
        folder = self.folder / shape.name
        folder.mkdir()
        model = compose_config(["experiment=null", f"model={shape.model}"]).model
        write_tokens(folder, model.vocab_size, TokenDType.uint32)
        write_batches(
            folder, self.work(shape, COMPILED), model.vocab_size, TokenDType.uint32
        )
        (folder / "config.json").write_text(
            json.dumps(model.hugging_face.write_config(model))
        )
        return model

    def run(
        self,
        shape: Shape,
        contestant: str,
        flops_per_token: float,
        planned_gib: float | None,
        seconds: float,
    ) -> Row:
        """One row, in a process of its own."""
        command = self.command(shape, contestant)
        row = Row(
            shape.name, contestant, shlex.join(command[1:]).replace(f"{ROOT}/", "")
        )
        if isinstance(CONTESTANTS[contestant], tuple):
            row = dataclasses.replace(row, planned_gib=planned_gib)
            if not self.holds(planned_gib):
                reason = (
                    f"left out: {planned_gib:.0f} GiB are planned, and the device has "
                    f"{self.memory_gib:.0f}"
                )
                return dataclasses.replace(row, failure=reason)
        run = Run(
            command,
            self.environment(contestant),
            self.folder,
            STEPS,
            seconds,
            stops=False,
        )
        take_within(run, seconds)
        result = run.result
        if len(result.seconds) < STEPS:
            return dataclasses.replace(row, failure=why(result))
        speed = shape.batch_size * shape.seq_len / result.step_seconds(WARMUP)
        return dataclasses.replace(
            row,
            tokens_per_second=speed,
            mfu=speed * flops_per_token / self.peak if self.peak else None,
            peak_gib=result.device_peak_bytes / GIB
            if result.device_peak_bytes
            else None,
            startup_seconds=result.startup_seconds,
            losses=result.losses,
            note=result.note,
        )


def why(result: Measured) -> str:
    """Why a row has no figures, in one line."""
    text = result.failure or ""
    if re.search(r"OutOfMemoryError|out of memory|CUBLAS_STATUS_ALLOC_FAILED", text):
        return "out of memory"
    if "killed after" in text:
        return f"no end within its time, {len(result.seconds)} of {STEPS} steps done"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"failed: {lines[-1]}" if lines else "failed without a word"


def planned_memory(overrides: Sequence[str], device: str) -> MemoryPrediction | None:
    """The planner's prediction; None for devices without a profile."""
    if device != "cuda":
        return None
    config = compose_config(list(overrides))
    config.validate(1, "cuda")
    return fast_estimate(config, load_hardware(HARDWARE), 1).memory


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="one tiny shape, to try the script"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="MODEL-LENGTH",
        help=" ".join(shape.name for shape in SHAPES),
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        metavar="WORDS",
        help="those whose name begins with one of these",
    )
    parser.add_argument(
        "--seconds", type=float, default=570.0, help="for the whole call"
    )
    parser.add_argument(
        "--row-seconds", type=float, default=90.0, help="for a row at most"
    )
    parser.add_argument(
        "--peers-python", default=sys.executable, help="has transformers and accelerate"
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="STEM",
        help="STEM.md and STEM.json, written after every row",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows of STEM.json; exit status 75 if any are left",
    )
    args = parser.parse_args()
    if args.resume and not args.write:
        parser.error("--resume needs --write STEM, whose STEM.json has the rows")
    shapes = {shape.name: shape for shape in (TINY if args.tiny else SHAPES)}
    names = set(args.shapes or shapes)
    if unknown := sorted(names - shapes.keys()):
        parser.error(f"--shapes {' '.join(unknown)}: must be of {' '.join(shapes)}")
    args.shapes = [shape for name, shape in shapes.items() if name in names]
    prefixes = args.contestants or list(CONTESTANTS)
    args.contestants = [
        name for name in CONTESTANTS if name.startswith(tuple(prefixes))
    ]
    return args


def main() -> int:
    """Run the rows; 0 if no target is missed."""
    args = parse_arguments()
    on = f"{machine(args.device)}; peers: {peers_versions(args.peers_python, PACKAGES)}"
    peak = memory_gib = None
    if args.device == "cuda":
        peak = peak_flops(Device(args.device).name)
        memory_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    rows: list[Row] = []
    settings = {
        "machine": without_clocks(on),
        "peak_flops": peak,
        "steps": STEPS,
        "warmup": WARMUP,
    }
    finished = FinishedRows(
        args.write and args.write.with_suffix(".json"),
        settings,
        args.resume,
        args.seconds,
    )
    units = len(args.shapes) * len(args.contestants)
    with progress(units), tempfile.TemporaryDirectory() as scratch:
        doing("writing inputs and planning")
        bench = Bench(args.device, Path(scratch), args.peers_python, peak, memory_gib)
        flops = {}
        planned = {}
        for shape in args.shapes:
            model = bench.write_inputs(shape)
            with torch.device("meta"):
                flops[shape] = model.build().flops_per_token(shape.seq_len)
            memory = planned_memory(bench.overrides(shape, EAGER), args.device)
            planned[shape] = memory.peak_bytes / GIB if memory else None
        args.shapes.sort(key=lambda shape: not bench.holds(planned[shape]))
        for shape in args.shapes:
            for contestant in args.contestants:
                key = f"{shape.name}, {contestant}"
                with unit(key) as progress_unit:
                    measure = functools.partial(
                        bench.run, shape, contestant, flops[shape], planned[shape]
                    )
                    measured = finished.measure(
                        key,
                        lambda seconds, run=measure: dataclasses.asdict(run(seconds)),
                        args.row_seconds,
                        LEAST_SECONDS,
                    )
                    row = (
                        Row(**measured)
                        if measured
                        else Row(shape.name, contestant, failure=NO_TIME)
                    )
                    rows.append(row)
                    progress_unit.note = (
                        row.failure or f"{row.tokens_per_second:,.0f} tokens/s"
                    )
                verdicts = judge(rows, args.shapes)
                if args.device == "cpu":
                    verdicts = [
                        "The targets are those of an H200; on a CPU nothing is held against them."
                    ]
                page = render(rows, args.shapes, args.device, peak, on, verdicts)
                if args.write:
                    args.write.with_suffix(".md").write_text(page)
    print(page)
    if args.resume and finished.left:
        return ROWS_LEFT
    return 1 if any(verdict.startswith("missed") for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
