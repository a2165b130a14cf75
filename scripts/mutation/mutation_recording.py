"""Runs of pytest in copies of a checkout, and the recording of which tests execute which site."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from scripts.mutation.mutation_sites import (
    PROBE,
    Site,
    add_probes,
)

NOT_COPIED = (".venv*", "__pycache__", ".*_cache", "build", "runs", "sweeps")
NO_TEST_FOUND = 4
"""Exit status of pytest if a named test is gone, or if it cannot start."""


def copy_checkout(source: Path, target: Path) -> Path:
    """Copy a checkout with its links, without environments and outputs."""
    return shutil.copytree(
        source, target, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED)
    )


def run_pytest(
    folder: Path, arguments: Sequence[object], seconds: float | None = None
) -> tuple[int, str]:
    """Run pytest in a copy, and return its status and output; at the limit of ``seconds``, kill
    it."""
    options = shlex.split("-m pytest -p no:cacheprovider --color=no")
    command = [sys.executable, *options, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    environment.pop("PYTEST_CURRENT_TEST", None)  # of a test that runs this script
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        finally:
            kill_processes(folder)
            status = process.wait()
        output.seek(0)
        return status, output.read()


def kill_processes(folder: Path) -> None:
    """Kill all processes that were started for the modules of a copy, such as ranks that wait for a
    broken one."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def list_tests(folder: Path, arguments: Sequence[str]) -> list[str]:
    """Return the names of the tests that pytest would run."""
    status, output = run_pytest(folder, ["--collect-only", *arguments])
    if status:
        raise SystemExit(
            f"pytest cannot collect {' '.join(arguments)}:\n{_end(output)}"
        )
    return [line for line in output.splitlines() if "::" in line]


def _end(output: str) -> str:
    return "\n".join(output.splitlines()[-30:])


@dataclass
class Recording:
    """What one run of all tests executes.

    Tests are numbers in ``tests``.
    """

    tests: list[str]
    short: list[int]
    cpu_seconds: list[float]
    called: dict[str, list[int]] = field(default_factory=dict)
    """Name of a site → tests that execute it."""
    prepared: dict[str, list[int]] = field(default_factory=dict)
    """Name of a site → tests of a module of which one executes it in its set-up."""
    collected: list[str] = field(default_factory=list)
    """Names of sites that are executed while tests are collected."""
    failures: list[str] = field(default_factory=list)
    """Tests that failed on the unbroken lines, possibly because of the probes."""

    def tests_of(self, site: Site) -> list[int]:
        """Return the tests that may notice a break, the most promising first, without those that
        failed before it.

        A line executed during collection counts for all tests; those of its package are the most
        promising, then the quickest.
        """
        called = set(self.called.get(site.name, []))
        tests = {*called, *self.prepared.get(site.name, [])}
        if site.name in self.collected:
            tests.update(range(len(self.tests)))
        own = f"tests/{site.package.removeprefix('fsdptoys/').partition('/')[0]}/"

        def order(test: int) -> tuple[bool, float, int]:
            near = test in called or self.tests[test].startswith(own)
            return not near, self.cpu_seconds[test], test

        failures = set(self.failures)
        return sorted(
            (test for test in tests if self.tests[test] not in failures), key=order
        )


def record(
    checkout: Path,
    sites: Sequence[Site],
    arguments: Sequence[str],
    workers: int,
    scratch: Path,
) -> Recording:
    """Run all tests on a copy with probes."""
    folder = copy_checkout(checkout, scratch / "recorded")
    tests = list_tests(folder, ["--all", *arguments])
    short = set(list_tests(folder, arguments))
    recording = Recording(
        tests,
        [number for number, test in enumerate(tests) if test in short],
        [60.0] * len(tests),
    )
    for path in {site.path for site in sites}:
        numbered = {
            number: site for number, site in enumerate(sites) if site.path == path
        }
        file = folder / path
        file.write_text(
            add_probes(file.read_text(encoding="utf-8"), numbered), encoding="utf-8"
        )
    hits = scratch / "hits"
    hits.mkdir()
    (folder / "mutation_probe.py").write_text(
        PROBE.replace("{folder!r}", repr(f"{hits}/"))
    )
    times = scratch / "times.tsv"
    status, output = run_pytest(
        folder, ["--all", "--workers", workers, "--times", times, *arguments]
    )
    if status not in (0, 1):
        raise SystemExit(f"the recording ended with status {status}:\n{_end(output)}")
    recording.failures = list(named_tests("FAILED|ERROR", output, tests))
    numbers = {test: number for number, test in enumerate(tests)}
    for line in times.read_text(encoding="utf-8").splitlines():
        seconds, _, test = line.split("\t", maxsplit=2)
        if test in numbers:
            recording.cpu_seconds[numbers[test]] = float(seconds)
    modules: dict[str, list[int]] = {}
    for number, test in enumerate(tests):
        modules.setdefault(test.partition("::")[0], []).append(number)
    for number, site in enumerate(sites):
        if not (hits / str(number)).exists():
            continue
        called: set[int] = set()
        prepared: set[int] = set()
        for line in set((hits / str(number)).read_text(encoding="utf-8").splitlines()):
            test, _, phase = line.rpartition(" ")
            if line == "(import)":
                recording.collected.append(site.name)
            elif phase == "(setup)":
                prepared.update(modules.get(test.partition("::")[0], []))
            elif test in numbers:
                called.add(numbers[test])
        recording.called[site.name] = sorted(called)
        recording.prepared[site.name] = sorted(prepared)
    shutil.rmtree(folder)
    return recording


def named_tests(results: str, output: str, tests: Sequence[str]) -> Iterator[str]:
    """Yield the tests of pytest's summary with these results, or modules that it could not
    collect."""
    for line in output.splitlines():
        # In captured logs more spaces follow ERROR
        match = re.match(rf"(?:{results}) (\S.*)", line)
        if match:
            candidates = [
                test
                for test in tests
                if match[1] == test or match[1].startswith(f"{test} - ")
            ]
            yield (
                max(candidates, key=len) if candidates else match[1].partition(" - ")[0]
            )
