"""Mutate every kind of file that fsdptoys reads, and check that each reader returns a result or
raises its own error.

    python scripts/fuzz/fuzz_readers.py --cases 2000 --seed 0
    python scripts/fuzz/fuzz_readers.py --only "sweep folder" --cases 500
    python scripts/fuzz/fuzz_readers.py --case "compare:17"        # once more, with its traceback

In a case a copy of a valid specimen is mutated once (a value, a structure, bytes, or something
other than a file in a file's place) and read. It fails if

- anything but the reader's documented errors comes out, which are one sentence for the user;
- it takes more than 10 s of a processor, or waits for a minute;
- it takes more than 2 GiB of memory;
- it prints a character that controls a terminal.

Readers run in forked processes, which are killed and started again where a case hangs. Checksums
that a mutation breaks are mended where that lets more of a reader be reached. Exit status 1 where a
case fails.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.fuzz.fuzz_mutations import mutate_file
from scripts.fuzz.fuzz_specimens import make_specimens
from scripts.fuzz.fuzz_targets import READERS

PROCESSES = 2
PROCESSOR_SECONDS = 10.0
"""A checksum of the largest file takes 4 s where a processor has no instructions for SHA-256."""
WAITING_SECONDS = 60.0
MEMORY_BYTES = 2**31
"""Beyond the process's memory before its first case."""
PROGRESS_SECONDS = 8.0

MUTATION = "mutation"
"""File in a process's folder that names its current mutation."""

Case = tuple[str, int]
"""Reader and number."""


@dataclass
class Result:
    """How a case ended."""

    case: Case
    mutation: str
    failure: str | None
    """None where it is as it should be."""
    details: str = ""


@dataclass
class Worker:
    """A forked process that runs cases."""

    pid: int
    orders: IO[bytes]
    answers: IO[bytes]
    case: Case | None = None
    began: float = 0.0
    processor_seconds: float = 0.0
    """Of all its cases, at the beginning of this one."""
    traces: Path = field(default_factory=Path)


def plan_cases(count: int, only: str | None) -> list[Case]:
    """So many cases, spread over the readers by their shares, one of each at least."""
    readers = {name: reader for name, reader in READERS.items() if only in (None, name)}
    total = sum(reader.part for reader in readers.values())
    counts = {name: max(1, round(count * reader.part / total)) for name, reader in readers.items()}
    cases = [(name, number) for name, most in counts.items() for number in range(most)]
    return sorted(cases, key=lambda case: (case[1] / counts[case[0]], case[0]))


def run_case(case: Case, seed: int, specimens: Path, scratch: Path) -> Result:
    """Mutate a copy and read it, here."""
    name, number = case
    reader, draw = READERS[name], random.Random(f"{seed}:{name}:{number}")
    copy = scratch / "copy"
    _remove(copy)
    shutil.copytree(specimens / reader.specimen, copy, symlinks=True)
    if reader.specimen == "run":  # the run to compare with
        _remove(scratch / "run")
        os.symlink(specimens / "run", scratch / "run")
    pattern = draw.choice(reader.files)
    file = draw.choice([path for path in sorted(copy.glob(pattern)) if path.is_file()])
    mutation = f"{file.relative_to(copy)} {mutate_file(file, draw)}"
    (scratch / MUTATION).write_text(mutation)  # for a case that does not come back
    reader.mend(copy)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            found = reader.read(copy)
    except reader.errors as error:
        found = None
        if not str(error).strip():
            return Result(case, mutation, "an error without a sentence")
    except BaseException as error:
        return Result(case, mutation, _where(error), traceback.format_exc())
    text = printed.getvalue() + (found if isinstance(found, str) else "")
    steering = sorted(
        {character for character in text if not character.isprintable() and character not in "\n\t"}
    )
    if steering:
        index = min(text.index(character) for character in steering)
        context = ascii(text[max(0, index - 60) : index + 60])
        return Result(case, mutation, f"prints {''.join(steering)[:20]!a}", context)
    return Result(case, mutation, None)


def _where(error: BaseException) -> str:
    """An exception's name, and the last place of this project that it passed."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "fsdptoys" in Path(frame.filename).parts
    ]
    own = [frame for frame in frames if "scripts" not in Path(frame.filename).parts]
    place = "?"
    if own:
        parts = Path(own[-1].filename).parts
        place = (
            f"{'/'.join(parts[len(parts) - 1 - parts[::-1].index('fsdptoys') :])}:{own[-1].lineno}"
        )
    return f"{type(error).__name__} at {place}: {ascii(str(error))[:80]}"


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def start_worker(seed: int, specimens: Path, scratch: Path) -> Worker:
    """Fork a process that runs the cases that it is sent."""
    scratch.mkdir(exist_ok=True)
    traces = scratch / "traces"
    orders, answers = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(orders[1])
            os.close(answers[0])
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            with open("/proc/self/statm") as statm:
                size = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.chdir(scratch)
            with (
                open(orders[0], "rb") as inbox,
                open(answers[1], "wb", buffering=0) as outbox,
                open(traces, "w") as trace_file,
            ):
                for line in inbox:
                    name, number = json.loads(line)
                    trace_file.seek(0)
                    trace_file.truncate()
                    faulthandler.enable(trace_file)
                    faulthandler.register(signal.SIGUSR1, trace_file)
                    result = run_case((name, number), seed, specimens, scratch)
                    answer = [result.mutation, result.failure, result.details[-3000:]]
                    outbox.write(json.dumps(answer).encode() + b"\n")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)
    os.close(orders[0])
    os.close(answers[1])
    return Worker(
        pid, open(orders[1], "wb", buffering=0), open(answers[0], "rb", buffering=0), traces=traces
    )


def processor_seconds(pid: int) -> float:
    """Used by a process so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_cases(cases: list[Case], seed: int, folder: Path, processes: int) -> Iterator[Result]:
    """Run all cases in forked processes, in no order."""
    specimens = folder / "specimens"
    workers: dict[int, Worker] = {}
    waiting = list(reversed(cases))
    places = [folder / f"worker-{number}" for number in range(processes)]
    try:
        while waiting or any(worker.case is not None for worker in workers.values()):
            for number, place in enumerate(places):
                if number not in workers and waiting:
                    workers[number] = start_worker(seed, specimens, place)
            for worker in workers.values():
                if worker.case is None and waiting:
                    worker.case, worker.began = waiting.pop(), time.monotonic()
                    worker.processor_seconds = processor_seconds(worker.pid)
                    worker.orders.write(json.dumps(worker.case).encode() + b"\n")
            busy = [worker for worker in workers.values() if worker.case is not None]
            ready, _, _ = select.select([worker.answers for worker in busy], [], [], 0.2)
            for number, worker in list(workers.items()):
                if worker.case is None:
                    continue
                case, failure, details, mutation = worker.case, None, "", "?"
                if worker.answers in ready:
                    line = worker.answers.readline()
                    if line:
                        mutation, failure, details = json.loads(line)
                        worker.case = None
                        yield Result(case, mutation, failure, details)
                        continue
                    failure = "the process ended"
                elif time.monotonic() - worker.began > WAITING_SECONDS:
                    failure = f"waits for more than {WAITING_SECONDS:g} s"
                elif processor_seconds(worker.pid) - worker.processor_seconds > PROCESSOR_SECONDS:
                    failure = f"takes more than {PROCESSOR_SECONDS:g} s of a processor"
                if failure is not None:
                    with contextlib.suppress(OSError):
                        mutation = (places[number] / MUTATION).read_text()
                    yield Result(case, mutation, failure, _end(worker))
                    del workers[number]
    finally:
        for worker in workers.values():
            _end(worker)


def _end(worker: Worker) -> str:
    """Kill a process; returns where it was."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(0.2)
        os.kill(worker.pid, signal.SIGKILL)
    _, status = os.waitpid(worker.pid, 0)
    worker.orders.close()
    worker.answers.close()
    traces = worker.traces.read_text(errors="replace") if worker.traces.is_file() else ""
    return f"{traces[-3000:]}\nstatus {os.waitstatus_to_exitcode(status)}"


def fuzz(
    count: int,
    seed: int,
    only: str | None = None,
    processes: int = PROCESSES,
    progress: bool = True,
) -> tuple[Counter[str], list[Result]]:
    """Run so many cases; returns how many each reader had, and those that failed."""
    done: Counter[str] = Counter()
    failed: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="fsdptoys-fuzz-") as name:
        folder = Path(name)
        if progress:
            print("making specimens, about 10 s", flush=True)
        make_specimens(folder / "specimens")
        cases = plan_cases(count, only)
        began = reported = time.monotonic()
        for result in run_cases(cases, seed, folder, processes):
            done[result.case[0]] += 1
            if result.failure is not None:
                failed.append(result)
            now = time.monotonic()
            if progress and now - reported > PROGRESS_SECONDS:
                reported, total = now, sum(done.values())
                left = (len(cases) - total) * (now - began) / total
                print(
                    f"{total:,} of {len(cases):,} cases, {len(failed)} failed, about "
                    f"{left:.0f} s left",
                    flush=True,
                )
    return done, failed


def print_results(done: Counter[str], failed: list[Result]) -> None:
    """A table of the readers, then the failures: one of each kind in full."""
    width = max(map(len, done))
    print(f"\n{'reader':<{width}}  cases  failed")
    for name in READERS:
        if name in done:
            print(
                f"{name:<{width}}  {done[name]:>5}  "
                f"{sum(result.case[0] == name for result in failed):>6}"
            )
    kinds: dict[tuple[str, str], list[Result]] = {}
    for result in failed:
        kinds.setdefault((result.case[0], str(result.failure).partition(": ")[0]), []).append(
            result
        )
    for (name, _), results in kinds.items():
        first = results[0]
        print(f"\n{name}: {first.failure}")
        for result in results[:3]:
            print(f'  --case "{name}:{result.case[1]}"  {result.mutation}')
        if len(results) > 3:
            print(f"  and {len(results) - 3} more")
    print(f"\n{sum(done.values()):,} cases, {len(failed)} failed")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000, help="in all (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of all mutations (0)")
    parser.add_argument(
        "--only", choices=sorted(READERS), metavar="READER", help="one of " + ", ".join(READERS)
    )
    parser.add_argument("--case", metavar="READER:NUMBER", help="run this one alone")
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"that read ({PROCESSES})")
    args = parser.parse_args()
    if args.case is not None:
        name, _, number = args.case.rpartition(":")
        if name not in READERS or not number.isdecimal():
            parser.error(f"--case {args.case} must be a reader and a number")
        with tempfile.TemporaryDirectory(prefix="fsdptoys-fuzz-") as folder:
            make_specimens(Path(folder) / "specimens")
            (Path(folder) / "worker").mkdir()
            faulthandler.dump_traceback_later(WAITING_SECONDS, exit=True)
            result = run_case(
                (name, int(number)), args.seed, Path(folder) / "specimens", Path(folder) / "worker"
            )
        print(f"{result.mutation}\n{result.failure or 'as it should be'}\n{result.details}")
        return 1 if result.failure else 0
    done, failed = fuzz(args.cases, args.seed, args.only, args.processes)
    print_results(done, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
