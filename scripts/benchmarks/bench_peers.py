"""How fast is training next to others? The same Llama, batches and AdamW on two ranks, under five
ways to train it.

    python scripts/benchmarks/bench_peers.py  # CPU, gloo, 2 ranks; twelve minutes on 2 cores
    python scripts/benchmarks/bench_peers.py --only float32 --rounds 1
    python scripts/benchmarks/bench_peers.py --gpu  # one CUDA device, world size 1

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

import argparse
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
from scripts.benchmarks.peers.measure import Measured, Run, take_turns
from scripts.benchmarks.peers.work import (
    BETAS,
    EPS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    Work,
)
from scripts.benchmarks.peers_inputs import DATA_SEED, write_batches, write_inputs
from scripts.benchmarks.peers_targets import Pair, judge, speed_ratio
from scripts.common.child_environment import child_environment
from scripts.common.machine import machine
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


@dataclass(frozen=True)
class Contestant:
    """One way to train."""

    name: str
    script: str | None = None
    """In ``scripts/benchmarks/peers``; None for ours."""
    words: tuple[str, ...] = ()
    """Ours: arguments added to the command."""
    group: int = 0
    """Contestants of the same group take turns, and are compared."""


ACCELERATE, FABRIC, PLAIN = (
    "(a) accelerate + transformers",
    "(b) Fabric + LitGPT",
    "(c) plain fully_shard",
)


def contestants(gpu: bool) -> list[Contestant]:
    """Peers first; ours with the same loss, and as a user runs it."""
    alike = "fsdp2" if gpu else "ddp"  # as (a) and (b) run
    sharded = 0 if gpu else 1
    found = [
        Contestant(ACCELERATE, "accelerate_transformers.py"),
        Contestant(FABRIC, "fabric_litgpt.py"),
        Contestant(PLAIN, "plain_fully_shard.py", group=sharded),
    ]
    for strategy in dict.fromkeys((alike, "fsdp2")):
        group = 0 if strategy == alike else sharded
        words = (f"parallel={strategy}",)
        found.append(Contestant(f"FSDPToys {strategy}", words=words, group=group))
        chunked = (*words, "memory.chunk_loss=true")
        found.append(Contestant(f"FSDPToys {strategy}, chunked loss", words=chunked, group=group))
    return found


def pairs(gpu: bool) -> list[Pair]:
    """The judged rows are those of one documented command each: ``parallel=…
    memory.chunk_loss=true``."""
    alike = "FSDPToys fsdp2, chunked loss" if gpu else "FSDPToys ddp, chunked loss"
    return [
        Pair(alike, ACCELERATE, FASTER),
        Pair(alike, FABRIC, FASTER),
        Pair("FSDPToys fsdp2, chunked loss", PLAIN, AS_FAST),
    ]


@dataclass(frozen=True)
class Bench:
    """All runs of one number format."""

    work: Work
    model: LlamaConfig
    folder: Path
    peers_bin: Path
    warmup: int

    def command(self, contestant: Contestant, run_dir: Path) -> list[str]:
        """Command that starts a contestant's ranks."""
        work, script = self.work, str(PEERS / (contestant.script or ""))
        if contestant.script is None:
            return [sys.executable, "-m", "fsdptoys", "train", *self.words(), *contestant.words,
                    f"metrics.run_dir={run_dir}"]  # fmt: skip
        on_cpu = work.device == "cpu"
        if contestant.name == ACCELERATE and not on_cpu:
            options = [f"--num_processes={work.ranks}", "--num_machines=1", "--dynamo_backend=no"]
            options += [
                "--use_fsdp",
                "--fsdp_version=2",
                "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
            ]
            options += [f"--mixed_precision={'bf16' if work.bfloat16 else 'no'}"]
            return [
                str(self.peers_bin / "accelerate"),
                "launch",
                *options,
                script,
                *work.arguments(),
            ]
        # accelerate launch --cpu starts one process, however many are asked for; under torchrun
        # there are as many.
        launcher = "fabric run" if contestant.name == FABRIC else "torchrun"
        options = ["--standalone", f"--nproc-per-node={work.ranks}"]
        if launcher == "fabric run":
            options = [f"--accelerator={'cpu' if on_cpu else 'cuda'}", f"--devices={work.ranks}"]
        name, *verb = launcher.split()
        return [str(self.peers_bin / name), *verb, *options, script, *work.arguments()]

    def words(self) -> list[str]:
        """Our command line without the strategy and the loss."""
        work, model = self.work, self.model
        return [
            "experiment=null", "model=llama_bytes", f"model.dim={model.dim}",
            f"model.n_layers={model.n_layers}", f"model.n_heads={model.n_heads}",
            f"model.n_kv_heads={model.n_kv_heads}", f"model.ffn_dim={model.ffn_dim}",
            f"model.vocab_size={model.vocab_size}", f"model.max_seq_len={model.max_seq_len}",
            f"model.init_from={work.weights}",
            "data=bin", f"data.files=[{self.folder / 'tokens.bin'}]",
            f"train.data_seed={DATA_SEED}", f"train.batch_size={work.batch_size}",
            f"train.seq_len={work.seq_len}", f"train.steps={work.steps}",
            f"train.max_grad_norm={MAX_GRAD_NORM}", "optim=adamw", f"optim.lr={LEARNING_RATE}",
            f"optim.beta1={BETAS[0]}", f"optim.beta2={BETAS[1]}", f"optim.eps={EPS}",
            f"optim.weight_decay={WEIGHT_DECAY}", "optim.schedule=constant",
            f"parallel.param_dtype={work.dtype}", f"launch.nproc_per_node={work.ranks}",
            f"launch.device={work.device}", "metrics.log_every=1",
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
        return Run(command, environment, self.folder, self.work.steps, LIMIT_SECONDS, exact)


def peers_bin(named: Path | None) -> Path:
    """Where the peers' programs are, installed first where they are missing."""
    home = named or ROOT / ".venv-peers"
    programs = home / "bin"
    if not (programs / "accelerate").exists() or not (programs / "fabric").exists():
        print(
            f"installing {', '.join(REQUIREMENTS)} and {UNRESOLVED} into {home}",
            file=sys.stderr,
            flush=True,
        )
        venv.create(home, with_pip=True)
        pip = [str(programs / "python"), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, f"torch=={torch.__version__}", "numpy", *REQUIREMENTS], check=True)
        subprocess.run([*pip, "--no-deps", UNRESOLVED], check=True)
    return programs


def computes_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 at a speed worth its name; elsewhere one product takes as
    long as fifty."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def measure(bench: Bench, entrants: Sequence[Contestant], rounds: int) -> dict[str, list[Measured]]:
    """Every contestant once a round, in turns with those of its group."""
    results: dict[str, list[Measured]] = {each.name: [] for each in entrants}
    numbers = itertools.count()
    for turn in range(rounds):
        for group in sorted({each.group for each in entrants}):
            runs = {
                each.name: bench.run(each, next(numbers))
                for each in entrants
                if each.group == group
            }
            take_turns(
                list(runs.values()), f"{bench.work.dtype} round {turn + 1} of {rounds}, {group}"
            )
            for name, run in runs.items():
                results[name].append(run.result)
                outcome = (
                    run.result.failure or f"{run.result.step_seconds(bench.warmup):.2f} s a step"
                )
                print(
                    f"{bench.work.dtype} round {turn + 1} of {rounds}, {name}: {outcome}",
                    file=sys.stderr,
                    flush=True,
                )
    return results


def render(results: dict[str, list[Measured]], work: Work, warmup: int, gpu: bool) -> str:
    """The tables of one number format, as Markdown."""
    groups = {each.name: each.group for each in contestants(gpu)}
    tokens = work.ranks * work.batch_size * work.seq_len
    against = {PLAIN: "(c)", ACCELERATE: "(a)", FABRIC: "(b)"}
    lines = [
        f"## {work.dtype}, {work.batch_size} × {work.seq_len} tokens a rank and step",
        "",
        "| | tokens/s | " + " | ".join(f"× {mark}" for mark in sorted(against.values()))
        + " | CPU s a step, all ranks | peak MiB a rank | start to end of step 1, s |",
        "|---|" + "---:|" * 7,
    ]  # fmt: skip
    for name, runs in results.items():
        cells = [f"{tokens / statistics.median(run.step_seconds(warmup) for run in runs):,.0f}"]
        for peer in sorted(against, key=against.__getitem__):
            compared = name not in against and peer in results and groups[peer] == groups[name]
            cells.append(f"{speed_ratio(runs, results[peer], warmup):.2f}" if compared else "")
        cells.append(f"{statistics.median(run.step_cpu_seconds(warmup) for run in runs):.2f}")
        cells.append(f"{statistics.median(run.peak_bytes for run in runs) / 2**20:,.0f}")
        cells.append(f"{statistics.median(run.startup_seconds for run in runs):.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "Losses of the first round, step by step:", ""]
    steps = len(next(iter(results.values()))[0].losses)
    lines += [
        "| |" + "".join(f" {step} |" for step in range(1, steps + 1)),
        "|---|" + "---:|" * steps,
    ]
    for name, runs in results.items():
        lines.append(f"| {name} | " + " | ".join(f"{loss:.5f}" for loss in runs[0].losses) + " |")
    notes = [f"{name} ran as {runs[0].note}." for name, runs in results.items() if runs[0].note]
    return "\n".join([*lines, "", *notes])


def peers_versions(programs: Path) -> str:
    """Versions of the packages in the peers' environment."""
    names = ["torch", "accelerate", "transformers", "lightning", "litgpt"]
    ask = (
        f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in "
        f"{names}), sep=', ')"
    )
    output = subprocess.run(
        [str(programs / "python"), "-c", ask], check=True, capture_output=True, text=True
    ).stdout
    return output.strip()


def main() -> int:
    """Run everything; 0 if every target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpu", action="store_true", help="one CUDA device instead of two ranks on the CPU"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="a run; 5 in float32 by default")
    parser.add_argument("--warmup", type=int, default=1, help="first steps that are not timed")
    parser.add_argument("--only", choices=["float32", "bfloat16"], help="one number format")
    parser.add_argument(
        "--contestants",
        nargs="*",
        help="only those whose name contains one of these; judges nothing",
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
    entrants, judged = contestants(args.gpu), pairs(args.gpu)
    if args.contestants:
        entrants, judged = (
            [each for each in entrants if any(part in each.name for part in args.contestants)],
            [],
        )
    dtypes = [dtype for dtype in ("float32", "bfloat16") if args.only in (None, dtype)]
    slow = {
        dtype: dtype == "bfloat16" and not args.gpu and not computes_bfloat16() for dtype in dtypes
    }
    shapes = {
        dtype: (1, 128, 3) if slow[dtype] else (8, 1024, 12) if args.gpu else (2, 256, 5)
        for dtype in dtypes
    }
    rounds = {dtype: 1 if slow[dtype] else args.rounds for dtype in dtypes}
    turns = sum(rounds[dtype] * ((args.steps or shapes[dtype][2]) + 1) for dtype in dtypes)
    with progress(turns * len({each.group for each in entrants})):
        doing("looking for the peers, or installing them")
        programs = peers_bin(args.venv)
        on = machine("cuda" if args.gpu else "cpu")
        print(
            f"# Peers\n\nCommand: `python {' '.join(sys.argv)}`\n\n{on}; peers: "
            f"{peers_versions(programs)}.\n"
        )
        heading = (
            f"A Llama of {parameters / 1e6:.1f}M parameters (dim {model.dim}, {model.n_layers} "
            f"layers, {heads} heads, vocabulary {model.vocab_size}); {args.rounds} rounds; "
            f"AdamW, clipping at {MAX_GRAD_NORM}. The rows that are judged are those with the "
            "chunked loss, `memory.chunk_loss=true`; those without it compute the loss as the "
            "peers do.\n"
        )
        print(heading, flush=True)
        missed = False
        with tempfile.TemporaryDirectory() as scratch:
            doing("writing inputs")
            write_inputs(folder := Path(scratch), model)
            for dtype in dtypes:
                batch_size, seq_len, steps = shapes[dtype]
                work = Work(
                    weights=str(folder / "weights"), batches=str(folder / "batches.bin"),
                    ranks=1 if args.gpu else 2, batch_size=batch_size, seq_len=seq_len,
                    steps=args.steps or steps, dtype=dtype, device="cuda" if args.gpu else "cpu",
                )  # fmt: skip
                write_batches(folder, work, model.vocab_size)
                bench = Bench(work, model, folder, programs, args.warmup)
                results = measure(bench, entrants, rounds[dtype])
                verdicts = (
                    []
                    if args.contestants
                    else judge(results, judged, args.warmup, [PLAIN, ACCELERATE, FABRIC])
                )
                if not any(run.failure for runs in results.values() for run in runs):
                    print(render(results, work, args.warmup, args.gpu))
                if slow[dtype]:
                    print("\nThis CPU has no bf16 instructions, so that a step is short here.")
                print("\n" + "\n".join(f"- {line}" for line in verdicts) + "\n", flush=True)
                missed |= any(line.startswith("missed") for line in verdicts)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
