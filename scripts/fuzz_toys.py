"""Train random modules under the toys and under PyTorch's classes, and compare every bit.

    python scripts/fuzz_toys.py --trees 500 --seed 0              # of each: toy_fsdp and toy_ddp
    python scripts/fuzz_toys.py --only fsdp --trees 100
    python scripts/fuzz_toys.py --case fsdp:17 --seed 0           # one again, with its tree and its traceback

A tree has shared, unused and frozen parameters, nested units, mixed dtypes, hooks, accumulation and recomputation
(``fuzz_trees``). It is trained on 2, 3 or 4 gloo ranks, twice: by ``torch.distributed.fsdp.fully_shard`` and
``fsdptoys.toys.fsdp``, or by ``torch.nn.parallel.DistributedDataParallel`` and ``fsdptoys.toys.ddp``. Every loss,
gradient, parameter and buffer of every step is compared (``fuzz_training``), and which of the two raises. An outcome is

- *equal*, or *both raise*;
- *explained*: a difference of ``EXPLAINED``, which documents why;
- *different*, *died* or *hung*: printed with the line that repeats it and the smallest tree that still fails. Then this
  exits with status 1.

Ranks are forked once and train many trees; those of a tree that raised, died or hung are started again. A tree that
died or hung is tried a second time, with three times the time, and counted as *slow* if it passes then.
"""

import argparse
import dataclasses
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of every search without a find
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from scripts.fuzz_training import Record, difference, sentence, train
from scripts.fuzz_trees import Tree, draw_tree, smaller
from scripts.progress import progress, unit
from scripts.ranks import run_rank

TOYS = ("fsdp", "ddp")
SECONDS = 20.0
"""For one tree."""
SHRINKING_SECONDS = 40.0

EXPLAINED: dict[str, Callable[[Tree, str], bool]] = {
    "the toy FSDP refuses several dtypes in one unit": lambda tree, text: "cannot mix" in text,
    "fully_shard raises where a unit has never run, and accumulates in a reduce_dtype": (
        lambda tree, text: "object has no attribute '_unsharded_param'" in text
    ),
    "DDP does not support no_sync in the first step of a static graph": (
        lambda tree, text: "expect_autograd_hooks_ INTERNAL ASSERT" in text
    ),
    "DDP divides sparse gradients in place, and with them gradients that share their memory": (
        lambda tree, text: any(node.kind == "sparse_lookup" for node in tree.nodes()) and "differs by" in text
    ),
}
"""Differences that docs/toys/ddp.md and docs/toys/fsdp.md explain, and how to know them by the tree and the result."""


@dataclass
class Result:
    """How a tree ended."""

    outcome: str
    text: str = ""
    details: str = ""


def serve(orders: list[Connection], answers: list[Connection], log: str) -> None:
    """Train the trees that the parent sends, as one rank, until it sends None."""
    warnings.filterwarnings("ignore")
    rank = dist.get_rank()
    own_log = os.open(f"{log}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(own_log, 2)  # gloo and the C++ runtime print their last words there
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()

    while (order := orders[rank].recv()) is not None:
        toy, tree = order
        os.ftruncate(own_log, 0)
        records: list[Record] = []
        for name, is_toy in (("PyTorch's", False), ("the toy", True)):
            os.write(own_log, f"training with {name}\n".encode())
            records.append(train(toy, tree, is_toy))
        theirs, ours = records
        tracebacks = [record.get("traceback", "") for record in records]
        raised = "error" in theirs or "error" in ours
        found = difference(ours, theirs)
        answers[rank].send((found, sentence(ours.get("error")) if raised else "", "\n".join(filter(None, tracebacks))))  # type: ignore[arg-type]


class Crew:
    """Ranks that train trees, started again after one that raised, died or hung."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._processes: list[Any] = []

    def start(self) -> None:
        """Fork the ranks."""
        context: Any = get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        self._log = f"{self._folder.name}/stack"
        orders = [context.Pipe(duplex=False) for _ in range(self.ranks)]
        answers = [context.Pipe(duplex=False) for _ in range(self.ranks)]
        results = [context.Pipe(duplex=False) for _ in range(self.ranks)]
        ours = ([pipe[0] for pipe in orders], [pipe[1] for pipe in answers], self._log)
        self._processes = [
            context.Process(
                target=run_rank,
                args=(rank, self.ranks, f"{self._folder.name}/store", "cpu", results[rank][1], None, serve, ours),
                daemon=True,
            )
            for rank in range(self.ranks)
        ]
        for process in self._processes:
            process.start()
        self._orders, self._answers = [pipe[1] for pipe in orders], [pipe[0] for pipe in answers]
        for pipe in (*ours[0], *ours[1], *(pipe[1] for pipe in results)):
            pipe.close()
        self._results = [pipe[0] for pipe in results]

    def run(self, toy: str, tree: Tree, seconds: float = SECONDS) -> Result:
        """Train a tree."""
        if not self._processes:
            self.start()
        for pipe in self._orders:
            pipe.send((toy, tree))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < self.ranks:
            waiting = [pipe for rank, pipe in enumerate(self._answers) if rank not in answers]
            ready = wait(
                [*waiting, *(each.sentinel for each in self._processes)], max(0.0, deadline - time.monotonic())
            )
            closed = False  # by the end of its rank
            for rank, pipe in enumerate(self._answers):
                if pipe in waiting and pipe in ready:
                    try:
                        answers[rank] = pipe.recv()
                    except EOFError:
                        closed = True
            if closed or not ready or (len(answers) < self.ranks and not any(pipe in ready for pipe in waiting)):
                for rank, process in enumerate(self._processes):
                    if process.sentinel in ready or (closed and self._answers[rank] in ready):
                        process.join(5.0)  # its descriptors close shortly before its exit status is known
                died = [f"rank {n}: {each.exitcode}" for n, each in enumerate(self._processes) if not each.is_alive()]
                details = self._stacks()
                self.stop()
                if died:
                    return Result("died", f"exit status of {', '.join(died)}", details)
                return Result("hung", f"no answer of ranks {sorted(set(range(self.ranks)) - set(answers))}", details)
        if any(raised for _, raised, _ in answers.values()):
            self.stop()  # collectives of a step cut short may be in flight
        texts = [text for text, _, _ in answers.values() if text is not None]
        details = next((details for _, _, details in answers.values() if details), "")
        if texts:
            why = next((why for why, applies in EXPLAINED.items() if applies(tree, texts[0])), None)
            return Result("different", texts[0], details) if why is None else Result("explained", why)
        raised = next((raised for _, raised, _ in answers.values() if raised), "")
        return Result("both raise" if raised else "equal", raised, details)

    def _stacks(self) -> str:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        logs = [Path(f"{self._log}.{rank}") for rank in range(self.ranks)]
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())

    def stop(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            self._folder.cleanup()
        self._processes = []


def check(crews: dict[int, Crew], toy: str, tree: Tree) -> Result:
    """Train a tree, a second time with more time if it died or hung."""
    crew = crews.setdefault(tree.ranks, Crew(tree.ranks))
    result = crew.run(toy, tree)
    if result.outcome in ("died", "hung"):
        again = crew.run(toy, tree, 3 * SECONDS)
        if again.outcome not in ("died", "hung", "different"):
            return Result("slow", f"{result.outcome} at first ({result.text})", result.details)
    return result


def shrink(crews: dict[int, Crew], toy: str, tree: Tree, result: Result) -> tuple[Tree, Result]:
    """Simplify a failing tree while it fails."""
    deadline = time.monotonic() + SHRINKING_SECONDS
    made = smaller(tree)
    while time.monotonic() < deadline and (candidate := next(made, None)) is not None:
        crew = crews.setdefault(candidate.ranks, Crew(candidate.ranks))
        found = crew.run(toy, candidate, SECONDS / 4)
        if found.outcome == result.outcome and found.text.split(":")[0] in ("the toy", result.text.split(":")[0]):
            tree, result, made = candidate, found, smaller(candidate)
    return tree, result


def fuzz(toy: str, numbers: list[int], seed: int, shrinks: bool = True) -> tuple[Counter[str], list[str]]:
    """Train trees.

    Args:
        toy: "fsdp" or "ddp".
        numbers: of the trees.
        seed: of all trees.
        shrinks: simplify trees that fail.

    Returns:
        Outcome → count, and a report of each failure.
    """
    counts: Counter[str] = Counter()
    reports: list[str] = []
    crews: dict[int, Crew] = {}
    try:
        for number in numbers:
            with unit(f"{toy}:{number}") as done:
                tree = draw_case(toy, number, seed)
                result = check(crews, toy, tree)
                counts[result.outcome] += 1
                done.note = f"{result.outcome} {result.text}".strip()
                if result.outcome in ("different", "died", "hung", "slow"):
                    repeat = f"python scripts/fuzz_toys.py --case {toy}:{number} --seed {seed}"
                    reports.append(f"{result.outcome}: {repeat}\n  {result.text}\n{result.details}")
                    if shrinks and result.outcome != "slow":
                        least, found = shrink(crews, toy, tree, result)
                        reports[-1] += f"  smallest: {found.text}\n  {show(least)}"
    finally:
        for crew in crews.values():
            crew.stop()
    return counts, reports


def draw_case(toy: str, number: int, seed: int) -> Tree:
    """Draw the tree of a number."""
    return draw_tree(toy, random.Random(f"{seed} {toy} {number}"))


def show(value: Any) -> str:
    """Print a tree without the fields that have their defaults."""
    if isinstance(value, list):
        return f"[{', '.join(map(show, value))}]"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    plain = [(each, getattr(value, each.name)) for each in dataclasses.fields(value)]
    fields = [f"{each.name}={show(own)}" for each, own in plain if own != each.default and own not in ([], {})]
    return f"{type(value).__name__}({', '.join(fields)})"


def main(arguments: list[str] | None = None) -> int:
    """Run the script.

    Returns:
        The exit status: 1 if a tree differs, died or hung.
    """
    parser = argparse.ArgumentParser(description="Train random modules under the toys and under PyTorch's classes.")
    parser.add_argument("--trees", type=int, default=50, help="of each toy")
    parser.add_argument("--first", type=int, default=0, help="number of the first tree")
    parser.add_argument("--seed", type=int, default=0, help="of all trees")
    parser.add_argument("--only", choices=TOYS, help="one toy")
    parser.add_argument("--case", help="one tree, as fsdp:17")
    options = parser.parse_args(arguments)
    if options.case:
        toy, number = options.case.split(":")
        print(show(draw_case(toy, int(number), options.seed)))
        crews: dict[int, Crew] = {}
        result = check(crews, toy, draw_case(toy, int(number), options.seed))
        print(f"{result.outcome} {result.text}\n{result.details}")
        for crew in crews.values():
            crew.stop()
        return int(result.outcome in ("different", "died", "hung"))
    toys = [options.only] if options.only else list(TOYS)
    failed = 0
    with progress(len(toys) * options.trees):
        for toy in toys:
            counts, reports = fuzz(toy, list(range(options.first, options.first + options.trees)), options.seed)
            for report in reports:
                print(report)
            print(f"toy_{toy}: {', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}")
            failed += sum(counts[outcome] for outcome in ("different", "died", "hung"))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
