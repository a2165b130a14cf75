"""The planner's estimates against full traces, for ``validate_plan``: errors, and searches checked
by brute force.

1. Errors of peak and reserved memory and of the step, over a set of runs with every strategy and
   memory switch.
2. Random searches over few layers: every candidate is traced in full, and a search counts as right
   if one of the first three of the planner is the fastest that fits, or ties with it (within the 1%
   that the planner counts as a tie).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

import yaml

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.device.profile import Hardware, load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import MemoryPrediction, TimePrediction
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.search.ranking import TIE, label
from fsdptoys.plan.search.search import SearchResult, search
from fsdptoys.plan.search.switches import validate_switches
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.replay import replay
from fsdptoys.utils.tables import markdown_table
from scripts.common.progress import unit
from tests.harness.full_trace import predict_in_full, trace_run
from tests.harness.plan_processes import in_fresh_process

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
    overrides: tuple[str, ...]
    """Overrides, in the order in which they are given."""
    label: str
    """Overrides that differ from those of most runs."""


def read_runs() -> list[PlannedRun]:
    """Read the runs of ``estimate_runs.yaml``."""
    tree = yaml.safe_load(RUNS_FILE.read_text(encoding="utf-8"))

    def expand(text: str) -> Iterator[str]:
        for override in text.split():
            if override in tree["settings"]:
                yield from expand(tree["settings"][override])
            else:
                yield override

    usual = set(expand("base"))
    runs = []
    for line in tree["runs"]:
        profile, ranks, text = line.split(maxsplit=2)
        overrides = tuple(expand(text))
        changes = " ".join(override for override in overrides if override not in usual)
        runs.append(
            PlannedRun(profile, int(ranks), overrides, f"{profile}, {ranks}: {changes}")
        )
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
    """A search with all candidates traced."""

    name: str
    candidates: int
    position: int
    """Best place among the first three, in the order of all traces; 1 is the fastest that fits."""
    loss: float  # Tokens per second that the best of the three lacks

    @property
    def right(self) -> bool:
        """Whether the best of the three ties with the fastest."""
        return self.loss <= TIE


def trace_in_full(runs: Sequence[Run], jobs: int) -> list[Traced]:
    """Trace runs at full depth, and replay them."""
    with ThreadPool(jobs) as pool:
        return pool.starmap(_trace_one, runs, chunksize=1)


def _trace_one(config: Config, hardware: Hardware, world_size: int) -> Traced:
    if config.mesh.pp_size > 1:
        prediction = predict_in_full(config, hardware, world_size)
        return prediction.memory, prediction.time
    trace = in_fresh_process(trace_run, config, hardware, world_size)
    allocator = build_allocator(config.plan.allocator, hardware.device_type)
    replayed = replay(trace, hardware, allocator)
    return replayed.memory(), replayed.time()


def configured(hardware: Hardware, world_size: int, overrides: Sequence[str]) -> Config:
    """A validated configuration."""
    config = compose_config(list(overrides))
    validate_switches(config, world_size, hardware.device_type)
    return config


def estimate_errors(jobs: int, count: int | None = None) -> list[Error]:
    """Trace the first runs of the file, or all, and compare."""
    planned = read_runs()[:count]
    runs = []
    for run in planned:
        hardware = load_hardware(run.profile)
        runs.append(
            (configured(hardware, run.ranks, run.overrides), hardware, run.ranks)
        )
    with unit(f"traces of {len(runs)} runs"):
        full = trace_in_full(runs, jobs)
    errors = []
    for run, (config, hardware, ranks), prediction in zip(
        planned, runs, full, strict=True
    ):
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


def random_search(draw: random.Random) -> tuple[str, Hardware, int, float, list[str]]:
    """A name, and profile, ranks, memory and overrides of a search over two kinds of settings."""
    profile = draw.choice(["h100", "h200", "a100", "4090", "a2"])
    world_size = draw.choice([1, 2, 8, 8, 16])
    model = draw.choice([*MODELS, "gpt2"])
    seq_len = draw.choice([512, 1024] if model == "gpt2" else [1024, 2048, 4096])
    settings = {
        "checkpointing": f"memory.gradient_checkpointing={draw.choice(['none', 'full'])}",
        "loss": f"memory.chunk_loss={draw.choice(['true', 'false'])}",
        "offload": "memory.optimizer_offload=false memory.cpu_offload=false",
        "batch": f"train.batch_size={draw.choice([1, 2, 4])}",
    }
    if world_size > 1:
        settings |= {
            "strategy": "parallel=fsdp2",
            "units": "parallel.reshard_after_forward=default parallel.wrap=block",
            "shards": "mesh.fsdp_size=-1",
            "exchanges": "mesh.cp_size=1 mesh.ep_size=1",
        }
    varied = draw.sample(sorted(settings), 2)
    overrides = [
        "experiment=null",
        f"model={model}",
        f"model.n_layers={draw.choice([2, 3])}",
        f"train.seq_len={seq_len}",
        "parallel.param_dtype=bfloat16",
        "mesh.pp_size=1",  # one rank is traced
        *draw.choice([[], ["optim=sgd"], ["optim.state_dtype=bfloat16"]]),
        *(["parallel=single"] if world_size == 1 else []),
        *" ".join(
            text for name, text in settings.items() if name not in varied
        ).split(),
    ]
    if "checkpointing" not in varied or draw.random() < 0.5:
        overrides.append("memory.activation_offload=false")
    gib = draw.choice([4, 8, 12, 16, 24, 40, 76])
    name = f"{profile}, {world_size}, {gib} GiB: {' '.join(overrides)}"
    return name, load_hardware(profile), world_size, gib * GIB, overrides


def run_searches(count: int, jobs: int) -> list[Searched]:
    """Search, and trace every candidate; searches with too few that fit, or too many, are drawn
    again."""
    draw = random.Random(0)
    searches: list[Searched] = []
    while len(searches) < count:
        name, hardware, world_size, memory_bytes, overrides = random_search(draw)
        try:
            base = compose_config(overrides)
            result = search(
                base, overrides, hardware, world_size, memory_bytes, fast_estimate
            )
        except ConfigError:
            continue
        every = [*result.candidates, *result.over]
        if len(result.candidates) > CHECKED and len(every) <= MOST_CANDIDATES:
            with unit(f"search {len(searches) + 1} of {len(every)} candidates"):
                runs = [(one.config, hardware, world_size) for one in every]
                searches.append(judge(name, result, trace_in_full(runs, jobs)))
    return searches


def judge(name: str, result: SearchResult, traced: Sequence[Traced]) -> Searched:
    """Compare the first candidates of a search with all, by the traces of these."""
    every = [*result.candidates, *result.over]
    speeds: dict[str, float] = {}
    for one, (memory, time) in zip(every, traced, strict=True):
        fits = memory.reserved_bytes <= result.memory_bytes
        speeds[label(one.config)] = (
            fits * one.prediction.tokens_per_step / time.step_seconds
        )
    order = sorted(speeds.values(), reverse=True)
    best = max(speeds[label(one.config)] for one in result.leading(CHECKED))
    loss = 1 - best / order[0] if order[0] else 0.0
    return Searched(name, len(every), order.index(best) + 1, loss)


def render(
    errors: Sequence[Error], searches: Sequence[Searched]
) -> tuple[list[str], bool]:
    """Lines of a section of the page, and whether both bars are met."""
    lines = ["## Estimates against full traces", ""]
    missed = [error for error in errors if error.worst > ERROR_BAR]
    if errors:
        cells = [["profile, ranks: overrides", "peak", "reserved", "step"]]
        cells += [
            [one.name, f"{one.peak:+.1%}", f"{one.reserved:+.1%}", f"{one.step:+.1%}"]
            for one in errors
        ]
        lines += [f"{len(missed)} of {len(errors)} runs over {ERROR_BAR:.0%}.", ""]
        lines += [markdown_table(cells, right=(1, 2, 3)), ""]
    wrong = [one for one in searches if not one.right]
    if searches:
        first = sum(one.position == 1 for one in searches)
        lines += [
            "### Random searches, all candidates traced",
            "",
            f"- In {len(searches) - len(wrong)} of {len(searches)} the best, or a tie of 1%, is "
            f"among the planner's first three; in {first} the best itself.",
            f"- {sum(one.candidates for one in searches)} candidates traced.",
        ]
    for one in wrong:
        lines.append(
            f"- Place {one.position} of {one.candidates}, {one.loss:.1%} slower: {one.name}"
        )
    met = not missed and len(wrong) <= (1 - SEARCHES_BAR) * len(searches)
    return lines, met
