"""The runner of the tests: limits, crashes, reports and times, in a small suite of its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.clean_process import ROOT

CONFTEST = """
from pathlib import Path
from tests.harness import workers

workers.EXIT_SECONDS = 3.0

def pytest_configure(config):
    config.pluginmanager.register(workers.WorkersPlugin(2, ("test_plain",), Path("times")))
"""

SUITE = {
    "test_plain.py": """
import os, pytest, signal, sys, threading

def test_passes(): pass
def test_fails(): print("seen by a reader"); assert 1 == 2
def test_is_skipped(): pytest.skip("for a reason")
@pytest.mark.limit(1)
def test_hangs():
    if os.fork() == 0:
        signal.pause()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
def test_follows(): pass
def test_is_killed(): os.kill(os.getpid(), signal.SIGSEGV)
def test_exits(): os._exit(3)
def test_changes_the_process(): os.environ["CHANGED"] = "yes"
""",
    "test_others.py": """
import os, threading, time

def test_is_not_changed(): assert "CHANGED" not in os.environ
def test_leaves_a_thread(): threading.Thread(target=threading.Event().wait).start()
""",
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Output and times of the small suite."""
    folder = tmp_path_factory.mktemp("suite")
    for name, text in {"conftest.py": CONFTEST, **SUITE}.items():
        (folder / name).write_text(text)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 1, process.stdout + process.stderr
    return process.stdout, (folder / "times").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "test_plain.py::test_passes PASSED",
        "test_plain.py::test_is_skipped SKIPPED (for a reason)",
        "test_plain.py::test_follows PASSED",
        "test_others.py::test_is_not_changed PASSED",
        "seen by a reader",
        "FAILED test_plain.py::test_hangs - no end after ",
        "the process of the test ended with SIGSEGV",
        "FAILED test_plain.py::test_exits - the process of the test ended with status 3",
        "FAILED test_others.py::test_leaves_a_thread - no end after ",
        "5 failed, 5 passed, 1 skipped",
    ],
)
def test_every_test_is_reported(output: tuple[str, str], text: str) -> None:
    """Oracle: what each small test does."""
    assert text in output[0], output[0]


def test_a_hanging_test_shows_the_stacks_of_its_processes(
    output: tuple[str, str],
) -> None:
    """Oracle: the lines at which the two processes of the small test wait."""
    report = re.split(r"_+ test_\w+ _+\n", output[0].partition(" test_hangs _")[2])[0]
    lines = SUITE["test_plain.py"].splitlines()
    for waiting in ("signal.pause()", "lock.acquire()"):
        number = max(number for number, line in enumerate(lines, 1) if waiting in line)
        assert re.search(rf'test_plain.py", line {number} in test_hangs', report), (
            report
        )
    assert report.count("CPU s: ") == 2


def test_times_has_a_row_for_every_test_that_ended(output: tuple[str, str]) -> None:
    """Oracle: the tests with processes that lived on."""
    rows = [line.split("\t") for line in output[1].splitlines()]
    assert {row[2].rpartition("::")[2] for row in rows} == {
        "(imports, collection)",
        *(
            "test_passes",
            "test_fails",
            "test_is_skipped",
            "test_follows",
            "test_changes_the_process",
        ),
        *("test_is_not_changed", "test_leaves_a_thread"),
    }
    assert all(float(row[0]) >= 0 and float(row[1]) >= 0 for row in rows)


def test_inherited_state_is_reset() -> None:
    """Oracle: a process; its parent ignored signals and set variables of launchers and
    terminals."""
    code = (
        "from tests.harness.clean_process import clean_process\nclean_process()\nimport os, "
        "signal, sys\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler, "
        "signal.getsignal(signal.SIGHUP).name)\nprint(sorted(name for name in ('RANK', "
        "'COLUMNS', 'LC_ALL', 'PATH') if name in os.environ), os.read(0, "
        "1))\nprint(oct(os.umask(0)), signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        os.umask(0o077)

    variables = {
        "RANK": "3",
        "COLUMNS": "40",
        "LC_ALL": "tr_TR.UTF-8",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        preexec_fn=ignore,
        input="typed",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.stdout.splitlines() == [
        "True SIG_DFL",
        "['PATH'] b''",
        "0o22 set()",
    ], process.stderr


def test_a_wait_in_vain_names_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: this process's own number; a limit of no seconds, at any load."""
    from tests.harness import processes

    monkeypatch.setattr(processes, "load_factor", lambda: 0.0)
    with pytest.raises(
        AssertionError,
        match=rf"(?s)not in 0 s: a miracle.*process {os.getpid()}: state ",
    ):
        processes.wait_until(lambda: False, "a miracle", [os.getpid()], seconds=0.0)


def test_short_level_leaves_out_extended_tests(tmp_path: Path) -> None:
    """Oracle: the ids that this checkout's own conftest collects, with and without ``--all``."""
    (tmp_path / "test_levels.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('size', [1, pytest.param(2, "
        "marks=pytest.mark.extended)])\ndef test_sizes(size): pass\n"
    )
    ids = []
    for options in ([], ["--all"]):
        argv = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.conftest",
            "-c",
            str(ROOT / "pyproject.toml"),
            *options,
        ]
        argv += [
            "--rootdir",
            str(tmp_path),
            "-p",
            "no:cacheprovider",
            "--collect-only",
            str(tmp_path),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.run(
            argv, env=environment, capture_output=True, text=True, timeout=300
        )
        ids.append(re.findall(r"test_sizes\[(\d)\]", process.stdout))
    assert ids == [["1"], ["1", "2"]]
