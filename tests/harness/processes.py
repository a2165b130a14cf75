"""What the processes of a test are doing, for the message of a test that waited in vain, and how to
end them."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
"""Makes a process of the tests, and its forks, write the stacks of all threads; no product code
uses it."""

LEAST_SECONDS = 120.0
STACK_SECONDS = 0.2  # for a process to write its stacks; two at once would mix theirs


def load_factor() -> float:
    """Return how many times longer work takes than on an idle machine: runnable processes a core,
    at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(
    condition: Callable[[], object],
    what: str,
    pids: Iterable[int] = (),
    seconds: float = LEAST_SECONDS,
) -> None:
    """Wait until ``condition()`` is true.

    Args:
        condition: polled every 10 ms.
        what: the expected event, for the message.
        pids: processes that should bring it about; the message says what they and their children
            are doing.
        seconds: limit on an idle machine; a loaded one gets more.

    Raises:
        AssertionError: after the limit.
    """
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        if waited > seconds and waited > seconds * load_factor():
            raise AssertionError(
                f"not in {waited:.0f} s: {what}\n" + "\n".join(map(describe_tree, pids))
            )
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Return a process and all its children and their children, parents first; Linux only,
    elsewhere the process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            children.setdefault(
                int(path.read_text().rpartition(")")[2].split()[1]), []
            ).append(int(path.parent.name))
    tree = [pid]
    for parent in tree:
        tree.extend(children.get(parent, []))
    return tree


def describe_tree(pid: int) -> str:
    """Return a line for a process and each of its descendants: state, wait channel, CPU seconds,
    command."""
    return "\n".join(map(_describe, descendants(pid)))


def _describe(pid: int) -> str:
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        command = (
            (folder / "cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")[:200]
        )
        cpu_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        waits = (folder / "wchan").read_text() if fields[0] != "Z" else ""
    except OSError:
        return f"  process {pid}: gone"
    return (
        f"  process {pid}: state {fields[0]}, in {waits or '?'}, "
        f"{cpu_seconds:.1f} CPU s: {command}"
    )


def request_stacks(pid: int) -> None:
    """Make a process and all its forks, one after the other, write their stacks to the file of
    ``faulthandler``."""
    for member in descendants(pid):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            status = Path(f"/proc/{member}/status").read_text().splitlines()
            caught = int(
                next(line for line in status if line.startswith("SigCgt")).split()[1],
                16,
            )
            if caught >> (STACK_SIGNAL - 1) & 1:
                os.kill(member, STACK_SIGNAL)
                time.sleep(STACK_SECONDS * load_factor())


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    for member in descendants(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)


@contextlib.contextmanager
def as_other_user() -> Iterator[None]:
    """Drop root's permissions."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
