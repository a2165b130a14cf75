"""Where each rank is: a small file a rank, rewritten in place, and what it tells when a collective hangs.

A collective that some rank does not join ends, after the timeout, with an error on the ranks that did join, and that
error cannot say who was missing. A rank's file says how far it came: its step, what it does in it, and how many times
it has said so in this step, which puts two ranks in order even where an accumulated step goes through ``forward``
several times (all ranks have to tell the same phases in the same order). A write is one ``pwrite`` of a few hundred
bytes without fsync: microseconds, and after a crash of the process alone the system still has it.

Files of an earlier start of the run are told apart by the meeting point of the ranks, which is another at each start.
Not covered: machines that do not share the run directory, whose ranks are reported as having given no sign; and a
shared file system that shows changes late. Under NCCL a hung collective ends the process (SIGABRT) before Python hears
of it; the launcher reads the same files then.
"""

import contextlib
import json
import os
import re
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdptoys.errors import LostRanksError
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import NotRegularFileError, check_regular, open_descriptor, open_regular

HEARTBEATS_FOLDER = "heartbeats"
"""In the run directory."""

START = "FSDPTOYS_START"
"""What our launchers name a start of the ranks, the same on all machines; torchrun has other variables for it."""

RECORD_BYTES = 320

MOST_RANKS_TOLD = 8
"""Of a thousand ranks that are missing, so many are named."""

LOST_PEER = re.compile(
    r"closed by peer|reset by peer|broken pipe|socket closed|remote process exited|communicator was aborted"
    r"|failed to recv, got 0 bytes|ncclRemoteError",
    re.I,
)
"""What a rank says whose collective broke because another rank was gone."""

TIMED_OUT = re.compile(
    # gloo; the stores that ranks meet at; NCCL and torch_npu, where they tell Python at all; HCCL (EI0002)
    r"timed out waiting \d+ ?ms|wait timeout|socket timeout|timed out after \d+ seconds waiting for clients"
    r"|collective operation timeout|milliseconds before timing out|notify register times out",
    re.I,
)
"""What a rank says whose collective some other rank did not join in time."""


@dataclass(frozen=True)
class Sign:
    """The last that is known of a rank."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    beat: int
    """How many times the rank has given a sign in this step."""
    time: float
    """Seconds since 1970."""
    start: str
    """Told apart by this: starts of the run, of which each has its own meeting point."""

    @property
    def place(self) -> tuple[int, int]:
        """How far the rank has come; in order."""
        return self.step, self.beat

    def state(self) -> str | None:
        """What the process does: ``has ended`` or ``is stopped (SIGSTOP)``, which are only seen on its own machine.

        Returns:
            None where it runs, or nothing is known.
        """
        if self.host != _host():
            return None
        try:
            os.kill(self.pid, 0)
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except ProcessLookupError:
            return "has ended"
        except (OSError, ValueError, IndexError):
            return None
        named = {"Z": "has ended", "X": "has ended", "T": "is stopped (SIGSTOP)", "t": "is stopped (by a debugger)"}
        return named.get(letter)

    def described(self, now: float) -> str:
        """Step, phase, age and process, for a sentence."""
        return f"step {self.step} ({self.phase}), {max(0.0, now - self.time):.0f} s ago, pid {self.pid} on {self.host}"


class Heartbeat:
    """Tells where this rank is."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Open the file of this rank, in a folder that is made if it is missing; a run can do without one."""
        self.path = path_of(folder, rank)
        self._file: int | None = None
        with contextlib.suppress(OSError):
            if folder.is_symlink():  # in a run directory from elsewhere, it may lead to anybody's files
                folder.unlink()
            folder.mkdir(parents=True, exist_ok=True)
            try:
                check_regular(self.path)
            except NotRegularFileError:
                self.path.unlink()
            self._file = open_descriptor(self.path, os.O_RDWR | os.O_CREAT, permissions=0o644)
        self._fixed = {"rank": rank, "host": _host(), "pid": os.getpid(), "start": _start()}
        self._step, self._beat = -1, 0

    def beat(self, step: int, phase: str) -> None:
        """Say that this rank is at ``phase`` of ``step`` now; never fails, since a run can do without it."""
        self._beat = self._beat + 1 if step == self._step else 0
        self._step = step
        record = self._fixed | {"step": step, "phase": phase[:32], "beat": self._beat, "time": round(time.time(), 3)}
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, _encode(record), 0)

    def close(self) -> None:
        """Close the file, which stays."""
        if self._file is not None:
            os.close(self._file)


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank:05d}.json"


def read_heartbeats(folder: Path) -> dict[int, Sign]:
    """The last sign of each rank that has a whole one; what is torn, foreign or missing is left out."""
    signs = {}
    for path in sorted(folder.glob("rank-*.json")):
        for _ in range(3):  # a record that is being written is whole a moment later
            with contextlib.suppress(OSError, ValueError):
                with open_regular(path) as file:
                    sign = _decode(file.read(RECORD_BYTES))
                if path == path_of(folder, sign.rank):
                    signs[sign.rank] = sign
                break
    return signs


def is_lost(message: str) -> bool:
    """Whether an error's message says that a collective failed because of other ranks."""
    return bool(TIMED_OUT.search(message) or LOST_PEER.search(message))


@contextlib.contextmanager
def explain_lost_ranks(folder: Path, rank: int, world_size: int, timeout_seconds: float) -> Iterator[None]:
    """Turn a collective's timeout or broken connection into an error that says which ranks did not arrive.

    Args:
        folder: where the ranks' heartbeats lie.
        rank: this one.
        world_size: ranks in all.
        timeout_seconds: of the process group.

    Raises:
        LostRanksError: in place of what the collective raised.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, LostRanksError) or not is_lost(str(error)):
            raise
        happened = (
            f"a collective timed out (launch.timeout_seconds={timeout_seconds:g})"
            if TIMED_OUT.search(str(error))
            else "the connection to another rank broke"
        )
        raise LostRanksError(
            f"{happened}; {who_is_missing(folder, rank, world_size)} [{str(error).splitlines()[0]}]"
        ) from error


def who_is_missing(folder: Path, rank: int, world_size: int) -> str:
    """Say which ranks are not where ``rank`` is, or that all are there."""
    signs, now = read_heartbeats(folder), time.time()
    own = signs.get(rank)
    if own is None:
        return "no rank gave a sign yet"
    signs = {other: sign for other, sign in signs.items() if sign.start == own.start}
    here = f"step {own.step} ({own.phase})"
    told, silent = [], []
    for other in range(world_size):
        sign = signs.get(other)
        if sign is None:
            silent.append(other)
        elif other == rank:
            continue
        elif state := sign.state():
            told.append(f"rank {other} {state}; its last sign is of {sign.described(now)}")
        elif sign.place < own.place:
            told.append(f"rank {other} did not arrive; its last sign is of {sign.described(now)}")
        elif sign.place > own.place:
            told.append(f"rank {other} is further on, in {sign.described(now)}")
    if silent:
        told.append(f"{ranks_in_words(silent)} gave no sign at all")
    if not told:
        return (
            f"the last sign of all {world_size} ranks is of {here}: the network failed, or they do not call the same "
            "collectives, or one of them hangs within it"
        )
    if len(told) > MOST_RANKS_TOLD:
        told[MOST_RANKS_TOLD:] = [f"and {len(told) - MOST_RANKS_TOLD} more ranks are elsewhere"]
    return f"this rank is in {here}; " + "; ".join(told)


def sign_of(folder: Path, rank: int, pid: int) -> str | None:
    """The last sign of a process of this machine, for a sentence; None where it gave none that is known."""
    sign = read_heartbeats(folder).get(rank)
    return sign.described(time.time()) if sign is not None and (sign.pid, sign.host) == (pid, _host()) else None


def last_signs(folder: Path, pids: Mapping[int, int]) -> str | None:
    """Say where all ranks were, for who finds them ended; None where no heartbeat of theirs is found.

    Args:
        folder: where the ranks' heartbeats lie.
        pids: by rank, of this machine; files of other processes are of an earlier start.
    """
    signs, now = read_heartbeats(folder), time.time()
    starts = {sign.start for rank, sign in signs.items() if pids.get(rank) == sign.pid and sign.host == _host()}
    places: dict[tuple[int, str], list[Sign]] = {}
    for sign in signs.values():
        if sign.start in starts:
            places.setdefault((sign.step, sign.phase), []).append(sign)
    if not places:
        return None
    told = [
        f"{ranks_in_words([sign.rank for sign in there])} in step {step} ({phase}) "
        f"{max(0.0, now - max(sign.time for sign in there)):.0f} s ago"
        for (step, phase), there in sorted(places.items(), key=lambda place: max(sign.place for sign in place[1]))
    ]
    return "last signs: " + ", ".join(told)


def ranks_in_words(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0, 2``, or the first few of many."""
    named = ", ".join(str(rank) for rank in ranks[:MOST_RANKS_TOLD])
    more = f" and {len(ranks) - MOST_RANKS_TOLD} more" * (len(ranks) > MOST_RANKS_TOLD)
    return f"rank{'s' * (len(ranks) > 1)} {named}{more}"


def _encode(record: dict[str, object]) -> bytes:
    text = json.dumps(record)
    whole = text[:-1] + f', "crc32": {zlib.crc32(text.encode())}}}'
    return whole.ljust(RECORD_BYTES - 1).encode() + b"\n"


def _decode(written: bytes) -> Sign:
    """Read a record.

    Raises:
        ValueError: where it is not whole.
    """
    record = parse_json(written)
    checksum = record.pop("crc32", None) if isinstance(record, dict) else None
    if checksum != zlib.crc32(json.dumps(record).encode()):
        raise ValueError("torn")
    sign = build(Sign, record)
    if not 0 < sign.pid < 2**31 or min(sign.rank, sign.time) < 0:
        raise ValueError("no rank gives such a sign")
    if not (sign.host + sign.phase + sign.start).isprintable():
        raise ValueError("its text steers terminals")
    return sign


def _host() -> str:
    return socket.gethostname()[:64]


def _start() -> str:
    """What the environment of this start of the ranks has, and of no other."""
    names: tuple[str, ...] = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    if START in os.environ:
        names = (START,)
    return f"{zlib.crc32('|'.join(os.environ.get(name, '') for name in names).encode()):08x}"
