"""How many broken lines the tests catch: break one line of the product at a time, and run the tests
that execute it.

    python scripts/mutation/mutations.py --report benchmarks/mutations.md  # or go on: --resume

1. Draw sites (``mutation_sites.py``), the same for the same seed and product.
2. Record: run all tests once on a copy of the checkout with probes in front of the sites.
3. For every site, break its line in a new copy and run the tests that executed it, the quickest
   first, until one fails: first those of the short level, then those that only ``--all`` runs.
4. Write the report.

A site that no test executes is reported apart, and the next one of its package takes its turn. What
a test's set-up executes counts for all tests of its module, which may share the fixture; a line
executed during collection counts for all tests. What a test finds in a cache or leaves to a process
of an earlier one counts for the earlier one alone. A failure that also happens on the unbroken copy
is not counted. Beyond ``--cap`` CPU seconds of tests of a level a site is "not decided". Only tests
count: ruff, mypy and import contracts would catch further breaks.

A recording takes as long as the whole suite, a site up to twice the cap. Everything found so far is
in ``--folder``.
"""

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.common.finished_rows import FinishedRows
from scripts.common.progress import progress, unit
from scripts.mutation.mutation_recording import (
    NO_TEST_FOUND,
    Recording,
    copy_checkout,
    list_tests,
    named_tests,
    record,
    run_pytest,
)
from scripts.mutation.mutation_report import write_report
from scripts.mutation.mutation_sites import (
    Site,
    digest,
    draw_sites,
    product_files,
)

ROOT = Path(__file__).resolve().parents[2]
BATCH_CPU_SECONDS = (10.0, 60.0)
"""Sums of tests after which another call of pytest runs the next ones."""
NO_TEST_RUN = 5
PYTEST_ITSELF = "(pytest)"
"""Failed if it names no test: its own process ended, or could not start."""


def batches(
    recording: Recording, tests: Sequence[int], cap_seconds: float
) -> tuple[list[list[str]], bool]:
    """Return the tests of each call of pytest in the order of their files, and whether the cap
    leaves some out."""
    limits = [*BATCH_CPU_SECONDS, cap_seconds]
    groups: list[list[int]] = [[] for _ in limits]
    total = 0.0
    for test in tests:
        total += recording.cpu_seconds[test]
        if total > cap_seconds:
            break
        groups[
            next(number for number, limit in enumerate(limits) if total <= limit)
        ].append(test)
    left_out = sum(map(len, groups)) < len(tests)
    return [
        [recording.tests[test] for test in sorted(group)] for group in groups if group
    ], left_out


class Breaker:
    """Breaks sites in copies of a checkout.

    Args:
        checkout: with the product and its tests.
        recording: of its tests.
        arguments: files and folders of the tests.
        cap_seconds: CPU seconds of tests of a level.
        scratch: folder for the copies.
    """

    def __init__(
        self,
        checkout: Path,
        recording: Recording,
        arguments: Sequence[str],
        cap_seconds: float,
        scratch: Path,
    ) -> None:
        self.recording = recording
        self.cap_seconds = cap_seconds
        self.scratch = scratch
        self.source = copy_checkout(checkout, scratch / "source")
        self.unbroken = copy_checkout(checkout, scratch / "unbroken")
        # Compiles all modules for the copies
        list_tests(self.source, ["--all", *arguments])
        self._lock = threading.Lock()
        self._unsound: dict[tuple[str, ...], bool] = {}

    def check(self, site: Site) -> dict[str, Any]:
        """Break a site, and return what each level of the tests says, and which test failed."""
        folder = self.scratch / hashlib.sha256(site.name.encode()).hexdigest()[:12]
        shutil.copytree(self.source, folder, symlinks=True)
        try:
            file = folder / site.path
            file.write_text(
                site.break_text(file.read_text(encoding="utf-8")), encoding="utf-8"
            )
            tests = self.recording.tests_of(site)
            short = set(self.recording.short)
            row = {"short": "no", "all": "no", "test": ""}
            for level, chosen in (
                ("short", [test for test in tests if test in short]),
                ("all", [test for test in tests if test not in short]),
            ):
                row[level], row["test"] = self._run_level(folder, chosen)
                if row[level] == "yes":
                    row["all"] = "yes"
                    return row
            row["all"] = "not decided" if "not decided" in row.values() else "no"
            return row
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run_level(self, folder: Path, tests: Sequence[int]) -> tuple[str, str]:
        groups, left_out = batches(self.recording, tests, self.cap_seconds)
        for group in groups:
            remaining = list(group)
            while remaining:
                failures, passed = self._run(folder, remaining)
                sound = [
                    test
                    for test in failures
                    if not self._fails_unbroken(test, remaining)
                ]
                if sound:
                    return "yes", sound[0]
                left_out |= PYTEST_ITSELF in failures
                rest = [test for test in remaining if test not in {*failures, *passed}]
                remaining = rest if failures and len(rest) < len(remaining) else []
        return ("not decided" if left_out else "no"), ""

    def _run(self, folder: Path, tests: Sequence[str]) -> tuple[list[str], list[str]]:
        """Run tests until one fails; return the failed ones, or ``PYTEST_ITSELF``, and those that
        passed."""
        names = self.scratch / f"{folder.name}-{threading.get_ident()}.txt"
        cpu_seconds = dict(
            zip(self.recording.tests, self.recording.cpu_seconds, strict=True)
        )
        seconds = 300.0 + 10.0 * sum(cpu_seconds[test] for test in tests)
        options = ["-x", "-rfEp", "--all", "--workers", 1]
        names.write_text("".join(f"{test}\n" for test in tests), encoding="utf-8")
        status, output = run_pytest(folder, [*options, f"@{names}"], seconds)
        if status == NO_TEST_FOUND:  # a break can remove rows of a table of tests
            files = dict.fromkeys(test.partition("::")[0] for test in tests)
            status, output = run_pytest(
                folder, ["--collect-only", "-rE", "--all", *files], seconds
            )
            present = set(output.splitlines())
            tests = [test for test in tests if test in present]
            if status == 0 and tests:
                names.write_text(
                    "".join(f"{test}\n" for test in tests), encoding="utf-8"
                )
                status, output = run_pytest(folder, [*options, f"@{names}"], seconds)
        passed = list(named_tests("PASSED", output, tests))
        if status in (0, NO_TEST_RUN):
            return [], passed
        return list(named_tests("FAILED|ERROR", output, tests)) or [
            PYTEST_ITSELF
        ], passed

    def _fails_unbroken(self, test: str, tests: Sequence[str]) -> bool:
        chosen = tuple(tests) if test == PYTEST_ITSELF else (test,)
        with self._lock:
            if chosen not in self._unsound:
                if test.endswith(".py"):  # a module that could not be collected
                    self._unsound[chosen] = (
                        run_pytest(
                            self.unbroken, ["--collect-only", "--all", test], 300.0
                        )[0]
                        != 0
                    )
                else:
                    self._unsound[chosen] = bool(self._run(self.unbroken, chosen)[0])
            return self._unsound[chosen]


def check_sites(
    breaker: Breaker, sites: Sequence[Site], finished: FinishedRows, jobs: int
) -> None:
    """Check sites, ``jobs`` at a time, and add their rows."""
    lock = threading.Lock()

    def check(site: Site) -> None:
        with unit(site.name) as progress_unit:
            row = breaker.check(site)
            with lock:
                finished.add(site.name, row)
            progress_unit.note = f"short {row['short']}, all {row['all']} {row['test']}"

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(check, sites))


def choose_sites(
    drawn: dict[str, tuple[int, list[Site]]], recording: Recording
) -> tuple[list[Site], list[Site]]:
    """Return the sites to break, and sites without tests that were drawn before the last of
    these."""
    chosen: list[Site] = []
    passed_over: list[Site] = []
    for number, sites in drawn.values():
        executed = [site for site in sites if recording.tests_of(site)][:number]
        last = sites.index(executed[-1]) + 1 if len(executed) == number else len(sites)
        chosen += executed
        passed_over += [site for site in sites[:last] if site not in executed]
    return chosen, passed_over


def main(argv: Sequence[str] | None = None) -> None:
    """Draw, record, break and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=60, help="lines to break")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--packages",
        nargs="+",
        default=[],
        help="folders of the product; all by default",
    )
    parser.add_argument(
        "--tests", nargs="+", default=["tests"], help="files and folders of tests"
    )
    parser.add_argument(
        "--checkout",
        type=Path,
        default=ROOT,
        help="another copy of the project, with its own tests",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=(os.cpu_count() or 1) + 1,
        help="test modules at a time, recording",
    )
    parser.add_argument("--jobs", type=int, default=2, help="sites at a time")
    parser.add_argument(
        "--cap",
        type=float,
        default=300.0,
        help="CPU seconds of tests of a level for a site",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/mutations"),
        help="recording.json and sites.json",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue with what the folder has"
    )
    parser.add_argument("--report", type=Path, help="Markdown file")
    arguments = parser.parse_args(argv)
    checkout = arguments.checkout.resolve()
    tests = sorted(
        path.relative_to(checkout).as_posix()
        for path in (checkout / "tests").rglob("*.py")
    )
    settings = {
        name: getattr(arguments, name)
        for name in ("sites", "seed", "packages", "tests")
    }
    settings |= {
        "product_hash": digest(checkout, product_files(checkout)),
        "tests_hash": digest(checkout, tests),
    }
    arguments.folder.mkdir(parents=True, exist_ok=True)
    recorded = FinishedRows(
        arguments.folder / "recording.json", settings, arguments.resume
    )
    finished = FinishedRows(
        arguments.folder / "sites.json",
        settings | {"cap": arguments.cap},
        arguments.resume,
    )
    try:
        drawn = draw_sites(
            checkout, arguments.sites, arguments.seed, arguments.packages
        )
    except ValueError as error:
        raise SystemExit(str(error)) from None
    everything = [site for _, sites in drawn.values() for site in sites]
    with (
        tempfile.TemporaryDirectory(prefix="mutations-") as scratch,
        progress(units=1 + arguments.sites),
    ):
        with unit("recording") as progress_unit:
            if (row := recorded.get("recording")) is None:
                row = asdict(
                    record(
                        checkout,
                        everything,
                        arguments.tests,
                        arguments.workers,
                        Path(scratch),
                    )
                )
                recorded.add("recording", row)
            recording = Recording(**row)
            chosen, passed_over = choose_sites(drawn, recording)
            progress_unit.note = (
                f"{len(recording.tests)} tests, {len(recording.failures)} failures, "
                f"{len(passed_over)} not executed"
            )
        rest = [site for site in chosen if finished.get(site.name) is None]
        if rest:
            breaker = Breaker(
                checkout, recording, arguments.tests, arguments.cap, Path(scratch)
            )
            check_sites(breaker, rest, finished, arguments.jobs)
    if arguments.report:
        note = (
            f"Seed {arguments.seed}, product {settings['product_hash']}, cap {arguments.cap:.0f} "
            "CPU seconds."
        )
        rows = [(site, finished.rows[site.name]) for site in chosen]
        write_report(arguments.report, rows, passed_over, note)


if __name__ == "__main__":
    main()
