"""Heartbeat files: the current step and phase of each rank, to name the missing ranks when a
collective hangs.

If a rank does not join a collective, the other ranks fail after the timeout with an error that does
not name it. Each rank therefore rewrites a small file with its step, phase and the number of beats
in this step, which orders two ranks even if gradient accumulation repeats the phases (all ranks
must report the same phases in the same order). A write is one ``pwrite`` of 320 bytes without
fsync: it takes microseconds, and survives a crash of the process, not of the machine. The
rendezvous of the ranks, which differs between starts of a run, separates current files from older
ones.

Limits: ranks on nodes that do not share the run directory are reported as silent, and a shared file
system may show changes late. Under NCCL a hung collective aborts the process (SIGABRT) before
Python can react; then the launcher reads the files.
"""

import contextlib
import json
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsdptoys.errors import LostRanksError
from fsdptoys.utils.bounds import at_least, between, max_length
from fsdptoys.utils.causes import with_causes
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import (
    NotRegularFileError,
    check_regular,
    open_descriptor,
    open_regular,
)

HEARTBEATS_FOLDER = "heartbeats"
"""In the run directory."""

START = "FSDPTOYS_START"
"""Identifies one start of the ranks, on all nodes alike; set by our launcher only, not by
torchrun."""

RECORD_BYTES = 320

MAX_RANKS_NAMED = 8
"""Maximum number of ranks that a message names."""

LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|socket closed|remote process exited"
    r"|communicator was aborted|failed to recv, got 0 bytes|ncclRemoteError",
    re.I,
)
"""Errors of a collective that broke because another rank was gone."""

TIMED_OUT = re.compile(
    # gloo; the rendezvous stores; NCCL and torch_npu, if they raise in Python at all; HCCL (EI0002)
    r"timed out waiting \d+ ?ms|wait timeout|socket timeout"
    r"|timed out after \d+ seconds waiting for clients|collective operation timeout"
    r"|milliseconds before timing out|notify register times out",
    re.I,
)
"""Errors of a collective that another rank did not join in time."""


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a rank."""

    rank: int = field(metadata=at_least(0))
    host: str = field(metadata=max_length(RECORD_BYTES))
    pid: int = field(metadata=between(1, 2**31 - 1))
    step: int
    phase: str = field(metadata=max_length(RECORD_BYTES))
    beat: int
    """Number of earlier heartbeats in this step."""
    time: float = field(metadata=at_least(0))
    """Seconds since 1970."""
    start: str = field(metadata=max_length(RECORD_BYTES))
    """Hash of the rendezvous, which differs between starts of the run."""

    @property
    def progress(self) -> tuple[int, int]:
        """Sort key of the rank's progress: (step, beat)."""
        return self.step, self.beat

    def state(self) -> str | None:
        """``has ended`` or ``is stopped (…)``; None if the process runs, is on another machine, or
        cannot be read."""
        if self.host != _host():
            return None
        try:
            os.kill(self.pid, 0)
            letter = (
                Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            )
        except ProcessLookupError:
            return "has ended"
        except (OSError, ValueError, IndexError):
            return None
        descriptions = {
            "Z": "has ended",
            "X": "has ended",
            "T": "is stopped (SIGSTOP)",
            "t": "is stopped (by a debugger)",
        }
        return descriptions.get(letter)

    def describe(self, now: float) -> str:
        """Step, phase, age and process, for a sentence."""
        return (
            f"step {self.step} ({self.phase}), {max(0.0, now - self.time):.0f} s ago, pid "
            f"{self.pid} on {self.host}"
        )


class HeartbeatWriter:
    """Writes the heartbeat file of this rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Open this rank's file, and create the folder if missing; errors are ignored."""
        self.path = heartbeat_path(folder, rank)
        self._file: int | None = None
        with contextlib.suppress(OSError):
            # a copied run directory could point it at any files
            if folder.is_symlink():
                folder.unlink()
            folder.mkdir(parents=True, exist_ok=True)
            try:
                check_regular(self.path)
            except NotRegularFileError:
                self.path.unlink()
            self._file = open_descriptor(
                self.path, os.O_RDWR | os.O_CREAT, permissions=0o644
            )
        self._fixed = {
            "rank": rank,
            "host": _host(),
            "pid": os.getpid(),
            "start": _start(),
        }
        self._step = -1
        self._beat = 0

    def beat(self, step: int, phase: str) -> None:
        """Record that this rank is now in ``phase`` of ``step``; write errors are ignored."""
        self._beat = self._beat + 1 if step == self._step else 0
        self._step = step
        record = self._fixed | {
            "step": step,
            "phase": phase[:32],
            "beat": self._beat,
            "time": round(time.time(), 3),
        }
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, _encode(record), 0)

    def remove(self) -> None:
        """Remove the file, and the folder unless it has heartbeats of other ranks."""
        with contextlib.suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()

    def close(self) -> None:
        """Close the file without removing it."""
        if self._file is not None:
            os.close(self._file)


def heartbeat_path(folder: Path, rank: int) -> Path:
    """Path of a rank's file."""
    return folder / f"rank-{rank:05d}.json"


def read_heartbeats(folder: Path) -> dict[int, Heartbeat]:
    """Last heartbeat of each rank; missing, torn and foreign files are skipped."""
    signs = {}
    for path in sorted(folder.glob("rank-*.json")):
        for _ in range(3):  # a torn record may just be being written
            with contextlib.suppress(OSError, ValueError):
                with open_regular(path) as file:
                    sign = _decode(file.read(RECORD_BYTES))
                if path == heartbeat_path(folder, sign.rank):
                    signs[sign.rank] = sign
                break
    return signs


def lost_message(error: BaseException) -> str | None:
    """The message of an error, or of one behind it, by which a collective failed because of other
    ranks."""
    messages = map(str, with_causes(error))
    return next(
        (
            message
            for message in messages
            if TIMED_OUT.search(message) or LOST_PEER.search(message)
        ),
        None,
    )


@contextlib.contextmanager
def explain_lost_ranks(
    folder: Path, rank: int, world_size: int, limits: Mapping[str, float]
) -> Iterator[None]:
    """Turn a collective's timeout or broken connection into a ``LostRanksError`` that names the
    missing ranks.

    ``limits`` are the timeouts in seconds by the option that sets them, that of training first.
    """
    try:
        yield
    except RuntimeError as error:
        message = lost_message(error)
        if isinstance(error, LostRanksError) or message is None:
            raise
        happened = "the connection to another rank broke"
        if TIMED_OUT.search(message):
            happened = f"a collective timed out ({_passed_limit(message, limits)})"
        raise LostRanksError(
            f"{happened}; {describe_missing_ranks(folder, rank, world_size)} "
            f"[{message.splitlines()[0]}]"
        ) from error


def _passed_limit(message: str, limits: Mapping[str, float]) -> str:
    """The option of the timeout that a message names, or else the first, with its value."""
    match = re.search(r"(\d+) ?ms|Timeout\(ms\)=(\d+)", message)
    seconds = float(match[1] or match[2]) / 1000 if match else None
    option = next(
        (option for option, limit in limits.items() if limit == seconds),
        next(iter(limits)),
    )
    return f"{option}={limits[option]:g}"


def describe_missing_ranks(folder: Path, rank: int, world_size: int) -> str:
    """Describe the ranks that are at another point than ``rank``."""
    signs = read_heartbeats(folder)
    now = time.time()
    own = signs.get(rank)
    if own is None:
        return "no rank has a heartbeat yet"
    signs = {other: sign for other, sign in signs.items() if sign.start == own.start}
    here = f"step {own.step} ({own.phase})"
    lines = []
    silent = []
    for other in range(world_size):
        sign = signs.get(other)
        if sign is None:
            silent.append(other)
        elif other == rank:
            continue
        elif state := sign.state():
            lines.append(
                f"rank {other} {state}; its last heartbeat is of {sign.describe(now)}"
            )
        elif sign.progress < own.progress:
            lines.append(
                f"rank {other} did not arrive; its last heartbeat is of {sign.describe(now)}"
            )
        elif sign.progress > own.progress:
            lines.append(f"rank {other} is ahead, in {sign.describe(now)}")
    if silent:
        lines.append(f"no heartbeat of {format_ranks(silent)}")
    if not lines:
        return (
            f"the last heartbeat of all {world_size} ranks is of {here}: the network failed, or "
            "they do not call the same collectives, or one of them hangs within it"
        )
    if len(lines) > MAX_RANKS_NAMED:
        lines[MAX_RANKS_NAMED:] = [
            f"and {len(lines) - MAX_RANKS_NAMED} more ranks are elsewhere"
        ]
    return f"this rank is in {here}; " + "; ".join(lines)


def describe_heartbeat(folder: Path, rank: int, pid: int) -> str | None:
    """Describe the last heartbeat of a process on this machine; None if it has none."""
    sign = read_heartbeats(folder).get(rank)
    return (
        sign.describe(time.time())
        if sign is not None and (sign.pid, sign.host) == (pid, _host())
        else None
    )


def describe_last_heartbeats(folder: Path, pids: Mapping[int, int]) -> str | None:
    """Describe the last progress of all ranks after the run has ended; None without heartbeats.

    ``pids``, the process ids of this machine's ranks, identify the start; files of other starts do
    not count.
    """
    signs = read_heartbeats(folder)
    now = time.time()
    starts = {
        sign.start
        for rank, sign in signs.items()
        if pids.get(rank) == sign.pid and sign.host == _host()
    }
    groups: dict[tuple[int, str], list[Heartbeat]] = {}
    for sign in signs.values():
        if sign.start in starts:
            groups.setdefault((sign.step, sign.phase), []).append(sign)
    if not groups:
        return None
    lines = [
        f"{format_ranks([sign.rank for sign in group])} in step {step} ({phase}) "
        f"{max(0.0, now - max(sign.time for sign in group)):.0f} s ago"
        for (step, phase), group in sorted(
            groups.items(), key=lambda item: max(sign.progress for sign in item[1])
        )
    ]
    return "last heartbeats: " + ", ".join(lines)


def format_ranks(ranks: list[int]) -> str:
    """Format as ``rank 3`` or ``ranks 0, 2``, with at most ``MAX_RANKS_NAMED`` numbers."""
    numbers = ", ".join(str(rank) for rank in ranks[:MAX_RANKS_NAMED])
    more = f" and {len(ranks) - MAX_RANKS_NAMED} more" * (len(ranks) > MAX_RANKS_NAMED)
    return f"rank{'s' * (len(ranks) > 1)} {numbers}{more}"


def _encode(record: dict[str, object]) -> bytes:
    text = json.dumps(record)
    whole = text[:-1] + f', "crc32": {zlib.crc32(text.encode())}}}'
    return whole.ljust(RECORD_BYTES - 1).encode() + b"\n"


def _decode(line: bytes) -> Heartbeat:
    """Decode a record; ValueError if it is torn or invalid."""
    record = parse_json(line)
    checksum = record.pop("crc32", None) if isinstance(record, dict) else None
    if checksum != zlib.crc32(json.dumps(record).encode()):
        raise ValueError("torn")
    return build(Heartbeat, record)


def _host() -> str:
    return socket.gethostname()[:64]


def _start() -> str:
    """Hash of the environment variables that identify this start of the ranks."""
    names: tuple[str, ...] = (
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    if START in os.environ:
        names = (START,)
    return f"{zlib.crc32('|'.join(os.environ.get(name, '') for name in names).encode()):08x}"
