"""Mutate every kind of file that fsdptoys reads, and check that each reader returns a result or
raises its own error.

    python scripts/fuzz/fuzz_readers.py --cases 2000 --seed 0
    python scripts/fuzz/fuzz_readers.py --only "damaged checkpoints" --cases 500
    python scripts/fuzz/fuzz_readers.py --case "compare:17"        # once more, with its traceback

In a case a copy of a valid specimen is mutated once (a value, a structure, bytes, or something
other than a file in a file's place) and read. It fails if

- anything but the reader's documented errors comes out, which are one sentence for the user;
- it takes more than 10 s of a processor, or waits for a minute;
- it takes more than 2 GiB of memory;
- it prints a character that controls a terminal;
- a checkpoint is loaded with other values than were saved (``fuzz_checkpoint``).

A case runs in a forked process, which the kernel ends at these limits. Checksums that a mutation
breaks are mended where that lets more of a reader be reached. Exit status 1 where a case fails.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.progress import doing, progress
from scripts.fuzz.fuzz_specimens import make_specimens
from scripts.fuzz.fuzz_targets import READERS

PROCESSES = 2
PROCESSOR_SECONDS = 10
"""A checksum of the largest file takes 4 s where a processor has no instructions for SHA-256."""
WAITING_SECONDS = 60
MEMORY_BYTES = 2**31
"""Beyond the process's memory before its case."""
MUTATION = "mutation"
ANSWER = "answer"
TRACES = "traces"
"""Files of a case: its mutation, its result, and where it was when a limit ended it."""

Case = tuple[str, int]
"""Reader and number."""


@dataclasses.dataclass
class Result:
    """How a case ended."""

    case: Case
    mutation: str
    failure: str | None
    """None where it is as it should be."""
    details: str = ""


def plan_cases(count: int, only: str | None) -> list[Case]:
    """So many cases, spread over the readers by their shares, one of each at least."""
    readers = {name: reader for name, reader in READERS.items() if only in (None, name)}
    total = sum(reader.share for reader in readers.values())
    counts = {
        name: max(1, round(count * reader.share / total))
        for name, reader in readers.items()
    }
    return [(name, number) for name, most in counts.items() for number in range(most)]


def run_case(case: Case, seed: int, specimens: Path, scratch: Path) -> Result:
    """Mutate a copy and read it, here."""
    name, number = case
    reader = READERS[name]
    draw = random.Random(f"{seed}:{name}:{number}")
    copy = scratch / "copy"
    shutil.copytree(specimens / reader.specimen, copy, symlinks=True)
    if reader.specimen == "run":  # the run to compare with
        (scratch / "run").symlink_to(specimens / "run")
    mutation = reader.mutate(copy, draw)
    (scratch / MUTATION).write_text(mutation)  # for a case that does not come back
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            answer = reader.read(copy)
    except reader.errors as error:
        answer = None
        if not str(error).strip():
            return Result(case, mutation, "an error without a sentence")
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(frame.filename).name}:{frame.lineno}"
        failure = f"{type(error).__name__} at {at}: {ascii(str(error))[:80]}"
        return Result(case, mutation, failure, traceback.format_exc())
    text = printed.getvalue() + (answer if isinstance(answer, str) else "")
    for index, character in enumerate(text):
        if not character.isprintable() and character not in "\n\t":
            context = ascii(text[max(0, index - 60) : index + 60])
            return Result(case, mutation, f"prints {character!a}", context)
    return Result(case, mutation, None)


def run_apart(case: Case, seed: int, specimens: Path) -> Result:
    """Mutate a copy and read it in a process with limits."""
    with tempfile.TemporaryDirectory(dir=specimens.parent) as folder:
        scratch = Path(folder)
        pid = os.fork()
        if pid == 0:
            try:
                set_limits(scratch)
                result = run_case(case, seed, specimens, scratch)
                (scratch / ANSWER).write_text(json.dumps(dataclasses.asdict(result)))
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        if (scratch / ANSWER).exists():
            return Result(**json.loads((scratch / ANSWER).read_text()) | {"case": case})
        failures = {
            signal.SIGXCPU: f"takes more than {PROCESSOR_SECONDS} s of a processor",
            signal.SIGALRM: f"waits for more than {WAITING_SECONDS} s",
        }
        failure = failures.get(
            os.WTERMSIG(status), f"the process ended with status {status}"
        )
        return Result(
            case,
            (scratch / MUTATION).read_text(),
            failure,
            (scratch / TRACES).read_text(),
        )


def set_limits(scratch: Path) -> None:
    """Let the kernel end this process where a reader hangs, and note where it was."""
    os.chdir(scratch)
    traces = (scratch / TRACES).open("w")
    faulthandler.enable(traces)
    for number in (signal.SIGXCPU, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
        faulthandler.register(number, traces, chain=True)
    signal.alarm(WAITING_SECONDS)
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_SECONDS, PROCESSOR_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, resource.RLIM_INFINITY))


def run_cases(cases: Sequence[Case], seed: int, specimens: Path) -> Iterator[Result]:
    """Run all cases, several at a time."""
    run = functools.partial(run_apart, seed=seed, specimens=specimens)
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        yield from pool.imap(run, cases)


def fuzz(cases: Sequence[Case], seed: int) -> tuple[Counter[str], list[Result]]:
    """Run cases; return how many each reader had, and those that failed."""
    counts: Counter[str] = Counter()
    failed: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="fsdptoys-fuzz-") as name, progress(1):
        specimens = Path(name) / "specimens"
        doing("making specimens")
        make_specimens(specimens)
        for result in run_cases(cases, seed, specimens):
            counts[result.case[0]] += 1
            failed += [result] if result.failure else []
            doing(
                f"{sum(counts.values()):,} of {len(cases):,} cases, {len(failed)} failed"
            )
    return counts, failed


def print_results(counts: Counter[str], failed: Sequence[Result]) -> None:
    """Print a table of the readers, then the failures: one of each kind in full."""
    print(f"\n{'reader':<30}  cases  failed")
    for name, count in counts.items():
        failures = sum(result.case[0] == name for result in failed)
        print(f"{name:<30}  {count:>5}  {failures:>6}")
    kinds: dict[tuple[str, str], list[Result]] = {}
    for result in failed:
        kind = (result.case[0], str(result.failure).partition(": ")[0])
        kinds.setdefault(kind, []).append(result)
    for (name, _), results in kinds.items():
        print(f"\n{name}: {results[0].failure}\n{results[0].details[-3000:]}")
        for result in results[:3]:
            print(f'  --case "{name}:{result.case[1]}"  {result.mutation}')
        if len(results) > 3:
            print(f"  and {len(results) - 3} more")
    print(f"\n{sum(counts.values()):,} cases, {len(failed)} failed")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000, help="in all (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of all mutations (0)")
    parser.add_argument(
        "--only",
        choices=sorted(READERS),
        metavar="READER",
        help="one of " + ", ".join(READERS),
    )
    parser.add_argument("--case", metavar="READER:NUMBER", help="run this one alone")
    args = parser.parse_args()
    cases = plan_cases(args.cases, args.only)
    if args.case is not None:
        name, _, number = args.case.rpartition(":")
        if name not in READERS or not number.isdecimal():
            parser.error(f"--case {args.case} must be a reader and a number")
        cases = [(name, int(number))]
    counts, failed = fuzz(cases, args.seed)
    print_results(counts, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
