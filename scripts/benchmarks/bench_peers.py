"""How fast is training next to others? The same Llama, batches and AdamW on two ranks, under five
ways to train it.

    python scripts/benchmarks/bench_peers.py  # CPU, gloo, 2 ranks; twelve minutes on 2 cores
    python scripts/benchmarks/bench_peers.py --only float32 --rounds 1

Against (a) Hugging Face accelerate with transformers' Llama, (b) Lightning Fabric with LitGPT's
model, (c) a plain script around PyTorch's ``fully_shard`` and transformers' Llama. Each is one
short script in ``peers``, started by its own launcher. They are installed into ``.venv-peers``
beside the checkout when they are missing; ``--venv`` names another environment. All have one thread
a rank, torch.optim.AdamW as torch chooses to run it, attention by ``scaled_dot_product_attention``,
nothing compiled, and the loss read after each step.

Everything is measured from outside (``peers/measure.py``). Those who are judged against each other
run at the same time and take turns step by step, each stopped while another has its step; so up to
four are in memory at once, about 16 GiB. Figures are medians over steps and rounds, ratios medians
of the ratios within a turn. Losses come from the same initial weights and the same batches: the
first must agree to 1e-3, or nothing is judged. Prints Markdown. Exits with status 1 if a target is
missed.
"""

import itertools
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fsdptoys.models import LlamaConfig
from fsdptoys.utils.tables import markdown_table
from scripts.benchmarks.peers.measure import Measured, Run, take_turns
from scripts.benchmarks.peers.work import Work
from scripts.benchmarks.peers_inputs import (
    recipe_overrides,
    write_batches,
    write_inputs,
)
from scripts.benchmarks.peers_targets import Pair, judge, speed_ratio
from scripts.common.child_environment import child_environment
from scripts.common.machine import machine
from scripts.common.page import command_line, page_parser, publish
from scripts.common.progress import doing, progress

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "scripts" / "benchmarks" / "peers"
REQUIREMENTS = (
    "accelerate==1.15.0",
    "transformers==5.23.0",
    "lightning==2.6.6",
    "jsonargparse[signatures]==4.41.0",
)
UNRESOLVED = "litgpt==0.5.13"
"""Installed without its dependencies: it wants an older huggingface-hub than transformers, and its
model none."""
FASTER = 1.15
"""Of the tokens/s of accelerate and of Fabric."""
AS_FAST = 1.0
"""Of the tokens/s of the plain script."""
LIMIT_SECONDS = 300.0


RANKS = 2


@dataclass(frozen=True)
class Contestant:
    """One way to train."""

    name: str
    script: str | None = None
    """In ``scripts/benchmarks/peers``; None for ours."""
    overrides: tuple[str, ...] = ()
    """Ours: arguments added to the command."""
    group: int = 0
    """Contestants of the same group take turns, and are compared."""


ACCELERATE = "(a) accelerate + transformers"
FABRIC = "(b) Fabric + LitGPT"
PLAIN = "(c) plain fully_shard"
OURS_DDP = "FSDPToys ddp, chunked loss"
OURS_FSDP2 = "FSDPToys fsdp2, chunked loss"
CHUNKED = "memory.chunk_loss=true"
CONTESTANTS = [
    Contestant(ACCELERATE, "accelerate_transformers.py"),
    Contestant(FABRIC, "fabric_litgpt.py"),
    Contestant(PLAIN, "plain_fully_shard.py", group=1),
    Contestant("FSDPToys ddp", overrides=("parallel=ddp",)),
    Contestant(OURS_DDP, overrides=("parallel=ddp", CHUNKED)),
    Contestant("FSDPToys fsdp2", overrides=("parallel=fsdp2",), group=1),
    Contestant(OURS_FSDP2, overrides=("parallel=fsdp2", CHUNKED), group=1),
]
"""Peers first; ours with the same loss, and as a user runs it."""
PAIRS = [
    Pair(OURS_DDP, ACCELERATE, FASTER),
    Pair(OURS_DDP, FABRIC, FASTER),
    Pair(OURS_FSDP2, PLAIN, AS_FAST),
]
"""Judged rows: those of one documented command each."""


@dataclass(frozen=True)
class Bench:
    """All runs of one number format."""

    work: Work
    model: LlamaConfig
    folder: Path
    peers_bin: Path

    def command(self, contestant: Contestant, run_dir: Path) -> list[str]:
        """Command that starts a contestant's ranks."""
        if contestant.script is None:
            return [sys.executable, "-m", "fsdptoys", "train", *self.overrides(),
                    *contestant.overrides, f"metrics.run_dir={run_dir}"]  # fmt: skip
        # accelerate launch --cpu starts one process, however many are asked for; under torchrun
        # there are as many.
        launcher = ["torchrun", "--standalone", f"--nproc-per-node={RANKS}"]
        if contestant.name == FABRIC:
            launcher = ["fabric", "run", "--accelerator=cpu", f"--devices={RANKS}"]
        program, *options = launcher
        script = str(PEERS / contestant.script)
        return [str(self.peers_bin / program), *options, script, *self.work.arguments()]

    def overrides(self) -> list[str]:
        """Our command line without the strategy and the loss."""
        work = self.work
        model = self.model
        return [
            "experiment=null", "model=llama_bytes", f"model.dim={model.dim}",
            f"model.n_layers={model.n_layers}", f"model.n_heads={model.n_heads}",
            f"model.n_kv_heads={model.n_kv_heads}", f"model.ffn_dim={model.ffn_dim}",
            f"model.vocab_size={model.vocab_size}", f"model.max_seq_len={model.max_seq_len}",
            f"model.init_from={work.weights}", *recipe_overrides(work, self.folder),
            f"parallel.param_dtype={work.dtype}", f"launch.nproc_per_node={work.ranks}",
        ]  # fmt: skip

    def run(self, contestant: Contestant, number: int) -> Run:
        """One run of one contestant, to be begun."""
        run_dir = self.folder / f"{self.work.dtype}-{number}"
        environment = child_environment(
            OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
        )
        # Peers have an environment of their own, which packages of this one would shadow.
        for name in ("VIRTUAL_ENV", *(("PYTHONPATH",) if contestant.script else ())):
            environment.pop(name, None)
        # The console rounds
        exact = run_dir / "metrics.jsonl" if contestant.script is None else None
        command = self.command(contestant, run_dir)
        return Run(
            command, environment, self.folder, self.work.steps, LIMIT_SECONDS, exact
        )


def peers_bin(folder: Path | None) -> Path:
    """Where the peers' programs are, installed first where they are missing."""
    home = folder or ROOT / ".venv-peers"
    programs = home / "bin"
    if not (programs / "accelerate").exists() or not (programs / "fabric").exists():
        print(
            f"installing {', '.join(REQUIREMENTS)} and {UNRESOLVED} into {home}",
            file=sys.stderr,
            flush=True,
        )
        venv.create(home, with_pip=True)
        pip = [str(programs / "python"), "-m", "pip", "install", "-q"]
        subprocess.run(
            [*pip, f"torch=={torch.__version__}", "numpy", *REQUIREMENTS], check=True
        )
        subprocess.run([*pip, "--no-deps", UNRESOLVED], check=True)
    return programs


def computes_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 at a speed worth its name; elsewhere one product takes as
    long as fifty."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def measure(bench: Bench, rounds: int) -> dict[str, list[Measured]]:
    """Every contestant once a round, in turns with those of its group."""
    results: dict[str, list[Measured]] = {
        contestant.name: [] for contestant in CONTESTANTS
    }
    numbers = itertools.count()
    for turn in range(rounds):
        for group in (0, 1):
            runs = {
                contestant.name: bench.run(contestant, next(numbers))
                for contestant in CONTESTANTS
                if contestant.group == group
            }
            title = f"{bench.work.dtype} round {turn + 1} of {rounds}, {group}"
            take_turns(list(runs.values()), title)
            for name, run in runs.items():
                results[name].append(run.result)
    return results


def render(results: dict[str, list[Measured]], work: Work, warmup: int) -> str:
    """The tables of one number format, as Markdown."""
    groups = {contestant.name: contestant.group for contestant in CONTESTANTS}
    tokens = work.ranks * work.batch_size * work.seq_len
    peers = (ACCELERATE, FABRIC, PLAIN)
    columns = [
        "CPU s a step, all ranks",
        "peak MiB a rank",
        "start to end of step 1, s",
    ]
    rows = [["", "tokens/s", *(f"× {peer[:3]}" for peer in peers), *columns]]
    for name, runs in results.items():
        cells = [
            f"{tokens / statistics.median(run.step_seconds(warmup) for run in runs):,.0f}"
        ]
        for peer in peers:
            compared = name not in peers and groups[peer] == groups[name]
            cells.append(
                f"{speed_ratio(runs, results[peer], warmup):.2f}" if compared else ""
            )
        cells.append(
            f"{statistics.median(run.step_cpu_seconds(warmup) for run in runs):.2f}"
        )
        cells.append(
            f"{statistics.median(run.peak_bytes for run in runs) / 2**20:,.0f}"
        )
        cells.append(f"{statistics.median(run.startup_seconds for run in runs):.1f}")
        rows.append([name, *cells])
    losses = [["", *map(str, range(1, len(results[PLAIN][0].losses) + 1))]]
    losses += [
        [name, *(f"{loss:.5f}" for loss in runs[0].losses)]
        for name, runs in results.items()
    ]
    notes = [
        f"{name} ran as {runs[0].note}."
        for name, runs in results.items()
        if runs[0].note
    ]
    return "\n\n".join([
        f"## {work.dtype}, {work.batch_size} × {work.seq_len} tokens a rank and step",
        markdown_table(rows, range(1, 8)),
        "Losses of the first round, step by step:",
        markdown_table(losses, range(1, len(losses[0]))),
        *notes,
    ])  # fmt: skip


PACKAGES = ["torch", "accelerate", "transformers", "lightning", "litgpt"]


def peers_versions(python: str, names: Sequence[str]) -> str:
    """Versions of the packages that the peers' environment has."""
    ask = (
        "import importlib.metadata as m, importlib.util as u\n"
        f"print(*(f'{{n}} {{m.version(n)}}' for n in {names} if u.find_spec(n)), sep=', ')"
    )
    return subprocess.run(
        [python, "-c", ask], check=True, capture_output=True, text=True
    ).stdout.strip()


def main() -> int:
    """Run everything; 0 if every target is met."""
    parser = page_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="a run; 5 in float32 by default")
    parser.add_argument(
        "--warmup", type=int, default=1, help="first steps that are not timed"
    )
    parser.add_argument(
        "--only", choices=["float32", "bfloat16"], help="one number format"
    )
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--venv", type=Path, help="environment with the peers")
    args = parser.parse_args()
    heads = args.dim // 64
    model = LlamaConfig(
        name="peers", dim=args.dim, n_layers=args.layers, n_heads=heads, n_kv_heads=heads,
        ffn_dim=args.dim * 11 // 4, vocab_size=args.vocab_size, max_seq_len=2048,
    )  # fmt: skip
    with torch.device("meta"):
        parameters = model.build().parameter_counts().total
    shapes = {"float32": (2, 256, args.steps or 5, args.rounds)}
    shapes["bfloat16"] = shapes["float32"]
    if not computes_bfloat16():
        shapes["bfloat16"] = (1, 128, args.steps or 3, 1)
    shapes = {
        dtype: shape for dtype, shape in shapes.items() if args.only in (None, dtype)
    }
    texts: list[str] = []
    turns = sum(2 * rounds * (steps + 1) for *_, steps, rounds in shapes.values())
    with progress(turns), tempfile.TemporaryDirectory() as scratch:
        doing("looking for the peers, or installing them")
        programs = peers_bin(args.venv)
        versions = peers_versions(str(programs / "python"), PACKAGES)
        texts += [
            f"# Peers\n\n{command_line()}\n\n{machine('cpu')}; peers: {versions}.",
            f"A Llama of {parameters / 1e6:.1f}M parameters (dim {model.dim}, {model.n_layers} "
            f"layers, {heads} heads, vocabulary {model.vocab_size}); {args.rounds} rounds; "
            "AdamW, clipping at 1.0. The rows that are judged are those with the chunked loss, "
            "`memory.chunk_loss=true`; those without it compute the loss as the peers do.",
        ]
        folder = Path(scratch)
        doing("writing inputs")
        write_inputs(folder, model)
        for dtype, (batch_size, seq_len, steps, rounds) in shapes.items():
            work = Work(
                weights=str(folder / "weights"), batches=str(folder / "batches.bin"), ranks=RANKS,
                batch_size=batch_size, seq_len=seq_len, steps=steps, dtype=dtype, device="cpu",
            )  # fmt: skip
            write_batches(folder, work, model.vocab_size)
            results = measure(Bench(work, model, folder, programs), rounds)
            if not any(run.failure for runs in results.values() for run in runs):
                texts.append(render(results, work, args.warmup))
            if seq_len == 128:
                texts.append(
                    "This CPU has no bf16 instructions, so that a step is short here."
                )
            verdicts = judge(results, PAIRS, args.warmup, [PLAIN, ACCELERATE, FABRIC])
            texts.append("\n".join(f"- {line}" for line in verdicts))
    publish("\n\n".join(texts), args.write)
    return 1 if any("- missed" in text for text in texts) else 0


if __name__ == "__main__":
    sys.exit(main())
