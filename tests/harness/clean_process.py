"""A known state of the process of the tests: signals, environment, standard input, folder and file
modes.

A shell's ``&``, ``nohup`` and some CI runners start their children with SIGINT or SIGHUP ignored.
Terminals, locales and launchers leave variables. No test may depend on them. So the conftest calls
``clean_process`` once, before any test module is imported.
"""

import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

KEPT = {
    "PATH",
    "PYTHONPATH",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "COVERAGE_FILE",
    "FSDPTOYS_SHARED_FOLDER",
    "TORCH_NPU_ENV",
}
"""Variables that say where software and scratch space are. All others go, except those with a
prefix below."""

KEPT_PREFIXES = (
    "COVERAGE_PROCESS_",
    "PYTEST_",
    "OPENBLAS_",
    "PLAYWRIGHT_",
    "ASCEND_",
    "SSL_",
)

FIXED = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TZ": "UTC",
    "OMP_NUM_THREADS": "1",
    # Otherwise every compiling process starts workers, each of which imports torch, for a handful
    # of kernels.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

SIGNALS = (
    "SIGINT",
    "SIGHUP",
    "SIGQUIT",
    "SIGTERM",
    "SIGUSR1",
    "SIGUSR2",
    "SIGCHLD",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
)


def clean_environment(present: Mapping[str, str], home: str) -> dict[str, str]:
    """Return the variables of a test process: the kept ones of ``present``, fixed ones, and a home
    folder."""
    inherited = {
        name: value
        for name, value in present.items()
        if name in KEPT or name.startswith(KEPT_PREFIXES)
    }
    return inherited | FIXED | {"HOME": home}


def clean_process() -> None:
    """Give this process default signals, a clean environment, no input, the root of the checkout,
    and mode 022."""
    for name in SIGNALS:
        number = getattr(signal, name)
        signal.signal(
            number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
        )
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # Kept: matplotlib caches its fonts there
    home = Path(tempfile.gettempdir()) / f"fsdptoys-tests-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    environment = clean_environment(os.environ, str(home))
    os.environ.clear()
    os.environ.update(environment)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.umask(0o022)
    os.chdir(ROOT)
