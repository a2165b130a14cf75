"""The planner's estimates against full traces, for ``validate_plan``: errors, and searches checked
by brute force.

1. Errors of peak and reserved memory and of the step, over a set of runs with every strategy and
   memory switch.
2. Random searches over few layers: every candidate is traced in full, and a search counts as right
   if one of the first three of the planner is the fastest that fits, or ties with it (within the 1%
   that the planner counts as a tie).

Traces are made by forks of a process that has done nothing but import.
"""

import multiprocessing
import os
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

import yaml

from fsdptoys.config.compose import compose_config
from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware, load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import MemoryPrediction, TimePrediction
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.search.ranking import TIE, Candidate, label
from fsdptoys.plan.search.search import SearchResult, search
from fsdptoys.plan.search.switches import validate_switches
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.replay import replay
from scripts.common.progress import unit
from tests.harness.full_trace import answer_one, predict_in_full

GIB = 2**30
MODELS = ("llama3_1b", "llama3_8b", "llama2_7b", "qwen3_0.6b", "qwen3_moe_mini")
ERROR_BAR = 0.10
SEARCHES_BAR = 0.95
CHECKED = 3  # Best candidates of which one must be the fastest
MOST_CANDIDATES = 8  # Of a search: each takes a second or two
RUNS_FILE = Path(__file__).with_name("estimate_runs.yaml")
Run = tuple[Config, Hardware, int]
Traced = tuple[MemoryPrediction, TimePrediction]


@dataclass(frozen=True)
class PlannedRun:
    """A run to predict."""

    profile: str
    ranks: int
    words: tuple[str, ...]
    """Overrides, in the order in which they are given."""
    label: str
    """Overrides that differ from those of most runs."""


def read_runs() -> list[PlannedRun]:
    """Read the runs of ``estimate_runs.yaml``."""
    tree = yaml.safe_load(RUNS_FILE.read_text(encoding="utf-8"))

    def expand(text: str) -> Iterator[str]:
        for word in text.split():
            if word in tree["settings"]:
                yield from expand(tree["settings"][word])
            else:
                yield word

    usual = set(expand("base"))
    runs = []
    for line in tree["runs"]:
        profile, ranks, text = line.split(maxsplit=2)
        words = tuple(expand(text))
        changes = " ".join(word for word in words if word not in usual)
        runs.append(PlannedRun(profile, int(ranks), words, f"{profile}, {ranks}: {changes}"))
    return runs


@dataclass(frozen=True)
class Error:
    """Relative errors of an estimate."""

    name: str
    peak: float
    reserved: float
    step: float

    @property
    def worst(self) -> float:
        """The largest, without its sign."""
        return max(abs(self.peak), abs(self.reserved), abs(self.step))


@dataclass(frozen=True)
class Searched:
    """A search whose candidates were all traced."""

    name: str
    candidates: int
    place: int
    """Best place among the first three, in the order of all traces; 1 is the fastest that fits."""
    loss: float  # Tokens per second that the best of the three lacks

    @property
    def right(self) -> bool:
        """Whether the best of the three ties with the fastest."""
        return self.loss <= TIE


@contextmanager
def _tracing(jobs: int) -> Iterator[Callable[[Sequence[Run]], list[Traced | None]]]:
    """Yield a function that traces runs at full depth, and replays them; None for a run that a
    trace refuses."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    context = multiprocessing.get_context("forkserver")
    # A child imports the main script again, and the strategy and the fake process group where it
    # builds them.
    modules = [f"fsdptoys.parallel.{name}" for name in ("single", "ddp", "fsdp1", "fsdp2")]
    context.set_forkserver_preload(
        ["scripts.planner.validate_plan", "torch.testing._internal.distributed.fake_pg", *modules]
    )

    with tempfile.TemporaryDirectory() as name, ThreadPool(jobs) as pool:

        def one(numbered: tuple[int, Run]) -> Traced | None:
            number, (config, hardware, world_size) = numbered
            path = Path(name) / f"{number}.pickle"
            process = context.Process(target=answer_one, args=(path, config, hardware, world_size))
            process.start()
            process.join()
            answer = pickle.loads(path.read_bytes())
            path.unlink()
            if isinstance(answer, tuple):
                if answer[0] is ConfigError:
                    return None
                raise RuntimeError(answer[1])
            allocator = build_allocator(AllocatorKind.expandable, device_type=hardware.device_type)
            made = replay(answer, hardware, allocator)
            return made.memory(), made.time()

        yield lambda runs: pool.map(one, enumerate(runs), chunksize=1)


def configured(hardware: Hardware, world_size: int, words: Sequence[str]) -> Config:
    """A validated configuration."""
    config = compose_config(list(words))
    validate_switches(config, world_size, hardware.device_type)
    return config


def estimate_errors(jobs: int, count: int | None = None) -> list[Error]:
    """Trace the first runs of the file, or all, and compare."""
    planned = read_runs()[:count]
    runs = []
    for run in planned:
        hardware = load_hardware(run.profile)
        runs.append((configured(hardware, run.ranks, run.words), hardware, run.ranks))
    with unit(f"traces of {len(runs)} runs"), _tracing(jobs) as trace:
        traced = iter(trace([run for run in runs if run[0].mesh.pp_size == 1]))
        full = [next(traced) if run[0].mesh.pp_size == 1 else _of_pipeline(*run) for run in runs]
    errors = []
    for run, (config, hardware, ranks), prediction in zip(planned, runs, full, strict=True):
        assert prediction is not None
        memory, time = prediction
        estimate = fast_estimate(config, hardware, ranks)
        errors.append(
            Error(
                run.label,
                estimate.memory.peak_bytes / memory.peak_bytes - 1,
                estimate.memory.reserved_bytes / memory.reserved_bytes - 1,
                estimate.time.step_seconds / time.step_seconds - 1,
            )
        )
    return errors


def _of_pipeline(config: Config, hardware: Hardware, world_size: int) -> Traced:
    """Of all ranks' traces: memory of the largest, time of the busiest."""
    prediction = predict_in_full(config, hardware, world_size)
    return prediction.memory, prediction.time


def random_search(draw: random.Random) -> tuple[str, Hardware, int, float, list[str]]:
    """A name, and profile, ranks, memory and overrides of a search over two kinds of settings."""
    profile, world_size = (
        draw.choice(["h100", "h200", "a100", "4090", "a2"]),
        draw.choice([1, 2, 8, 8, 16]),
    )
    model, layers = draw.choice([*MODELS, "gpt2"]), draw.choice([2, 3])
    seq_len = draw.choice([512, 1024]) if model == "gpt2" else draw.choice([1024, 2048, 4096])
    words = [
        f"model={model}",
        f"model.n_layers={layers}",
        f"train.seq_len={seq_len}",
        "parallel.param_dtype=bfloat16",
    ]
    words += ["experiment=null", "mesh.pp_size=1"]  # one rank is traced
    words += draw.choice(
        [[], [], ["optim=sgd"], ["optim.state_dtype=bfloat16"], ["optim.implementation=foreach"]]
    )
    settings = {
        "checkpointing": [f"memory.gradient_checkpointing={draw.choice(['none', 'full'])}"],
        "loss": [f"memory.chunk_loss={draw.choice(['true', 'false'])}"],
        "offload": ["memory.optimizer_offload=false", "memory.cpu_offload=false"],
        "batch": [f"train.batch_size={draw.choice([1, 2, 4])}"],
    }
    if world_size == 1:
        words.append("parallel=single")
    else:
        settings |= {
            "strategy": ["parallel=fsdp2"],
            "units": ["parallel.reshard_after_forward=default", "parallel.wrap=block"],
            "shards": ["mesh.fsdp_size=-1"],
            "exchanges": ["mesh.cp_size=1", "mesh.ep_size=1"],
        }
    varied = draw.sample(sorted(settings), 2)
    words += [word for name, fixed in settings.items() if name not in varied for word in fixed]
    if "checkpointing" not in varied or draw.random() < 0.5:
        words.append("memory.activation_offload=false")
    gib = draw.choice([4, 8, 12, 16, 24, 40, 76])
    name = f"{profile}, {world_size}, {gib} GiB: {' '.join(words)}"
    return name, load_hardware(profile), world_size, gib * GIB, words


def run_searches(count: int, jobs: int, seed: int = 0) -> list[Searched]:
    """Search, and trace every candidate; searches with too few that fit, or too many, are drawn
    again."""
    draw, done = random.Random(seed), []
    with _tracing(jobs) as trace:
        while len(done) < count:
            name, hardware, world_size, memory_bytes, words = random_search(draw)
            try:
                base = compose_config(words)
                result = search(base, words, hardware, world_size, memory_bytes, fast_estimate)
            except ConfigError:
                continue
            if (
                len(result.candidates) <= CHECKED
                or len(result.candidates) + len(result.over) > MOST_CANDIDATES
            ):
                continue
            with unit(
                f"search {len(done) + 1} of {len([*result.candidates, *result.over])} candidates"
            ) as note:
                done.append(_judge(name, result, trace))
                note.note = f"place {done[-1].place}"
    return done


def _judge(
    name: str, result: SearchResult, trace: Callable[[Sequence[Run]], list[Traced | None]]
) -> Searched:
    every = [*result.candidates, *result.over]
    found = trace([(one.config, result.hardware, result.world_size) for one in every])
    speeds: dict[str, float] = {}
    for one, made in zip(every, found, strict=True):
        if made is not None:
            memory, time = made
            fits = memory.reserved_bytes <= result.memory_bytes
            speeds[label(one.config)] = fits * one.prediction.tokens_per_step / time.step_seconds
    order = sorted(speeds.values(), reverse=True)
    chosen: list[Candidate] = result.leading(CHECKED)
    best = max(speeds.get(label(one.config), 0.0) for one in chosen)
    return Searched(
        name, len(every), order.index(best) + 1, 1 - best / order[0] if order[0] else 0.0
    )


def render(errors: Sequence[Error], searches: Sequence[Searched]) -> tuple[list[str], bool]:
    """Lines of a section of the page, and whether both bars are met."""
    lines = ["## Estimates against full traces", ""]
    missed = [error for error in errors if error.worst > ERROR_BAR]
    if errors:
        lines += [
            f"Layers as given, else 4; {len(missed)} of {len(errors)} runs over {ERROR_BAR:.0%}.",
            "",
        ]
        lines += ["| profile, ranks: overrides | peak | reserved | step |", "|---|---:|---:|---:|"]
        lines += [
            f"| {one.name} | {one.peak:+.1%} | {one.reserved:+.1%} | {one.step:+.1%} |"
            for one in errors
        ]
    wrong = [one for one in searches if not one.right]
    if searches:
        first = sum(one.place == 1 for one in searches)
        lines += ["", "### Random searches, all candidates traced", ""]
        lines += [
            (
                f"- In {len(searches) - len(wrong)} of {len(searches)} the best, or a tie of 1%, "
                f"is among the planner's first three; in {first} the best itself."
            ),
            f"- {sum(one.candidates for one in searches)} candidates traced.",
        ]
        lines += [
            f"- Place {one.place} of {one.candidates}, {one.loss:.1%} slower: {one.name}"
            for one in wrong
        ]
    met = not missed and len(wrong) <= (1 - SEARCHES_BAR) * len(searches)
    return lines, met
