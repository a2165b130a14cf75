"""Resume in a run directory with files of an earlier start.

A checkpoint records its step and the size of each JSON Lines file. Later lines are truncated, since
their steps are repeated, so that each step has one line in the end. If a file does not end with the
checkpoint's step at that size, it belongs to another run or attempt; all files of the run are then
moved to the subfolder ``attempt-<n>``, never overwritten. A file shorter than at the checkpoint
keeps its complete lines, with a message.
"""

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fsdptoys.utils.bounds import at_least
from fsdptoys.utils.foreign import MAX_YAML_BYTES, ForeignError, parse_json, parse_yaml
from fsdptoys.utils.from_tree import LARGEST_INTEGER, build
from fsdptoys.utils.regular_file import open_regular, read_regular
from fsdptoys.utils.text import value_text

from .config import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    RESUMES_FILE,
    ROUTING_FILE,
    RUN_FILES,
)
from .step import StepMetrics

LONGEST_LINE_BYTES = 2**24
"""Of a line that is read as one: a step has about 1 KiB, a start one for each changed setting."""

LINE_FILES = (METRICS_FILE, ROUTING_FILE)
"""JSON Lines files with one step per line."""


@dataclass(frozen=True)
class ResumePoint:
    """The state from which a run resumes."""

    step: int
    """Step of the checkpoint; 0 without one, so that the run starts from the beginning."""
    offsets: Mapping[str, int]
    """File of the run directory → its bytes at the checkpoint, from ``RunRecorder.offsets``."""
    checkpoint: str | None
    """Name of the checkpoint for messages; None without one."""


@dataclass(frozen=True)
class Resume:
    """A line of ``resumes.jsonl``: a start that resumed, or restarted in the folder of an earlier
    one."""

    time: str
    """UTC, ISO 8601."""
    step: int = field(metadata=at_least(0))
    checkpoint: str | None
    world_size_before: int | None = field(metadata=at_least(0))
    """Ranks of the previous start; None if its ``environment.json`` is missing."""
    world_size: int | None = field(metadata=at_least(0))
    changed: dict[str, list[Any]] | None
    """Setting → [old, new], with None for an absent one; None if the earlier settings are
    missing."""
    moved_to: str | None
    """Subfolder with the earlier files; None if they are continued."""

    def __post_init__(self) -> None:
        """Check that each changed setting has two values."""
        if any(len(pair) != 2 for pair in (self.changed or {}).values()):
            raise ForeignError("a changed setting needs an old and a new value")


RESUME_HEADINGS = (
    "time",
    "start",
    "checkpoint",
    "ranks",
    "changed settings",
    "earlier files moved to",
)


def resume_row(resume: Resume) -> list[str]:
    """Return the texts of a resume below ``RESUME_HEADINGS``."""
    before = resume.world_size_before
    ranks = str(resume.world_size)
    changed = (
        f"{key}: {value_text(old)} → {value_text(new)}"
        for key, (old, new) in (resume.changed or {}).items()
    )
    return [
        resume.time,
        f"after step {resume.step:,}" if resume.step else "from the beginning",
        resume.checkpoint or "",
        ranks if before in (None, resume.world_size) else f"{before} → {ranks}",
        "unknown" if resume.changed is None else "; ".join(changed),
        f"{resume.moved_to}/" if resume.moved_to else "",
    ]


def truncate_or_move(
    folder: Path, resumed: ResumePoint
) -> tuple[str | None, list[str]]:
    """Truncate the JSON Lines files of an existing folder to their sizes at the checkpoint, or move
    all files away.

    Return the subfolder with the moved files, or None, and sentences for the user.
    """
    if not resumed.step:
        return move_aside(folder), []
    if not (folder / METRICS_FILE).exists():
        # The checkpoint is from another folder; the lines of this one start with the next step.
        return move_aside(folder) if (folder / ROUTING_FILE).exists() else None, []
    lengths = {}
    notes = []
    for name in LINE_FILES:
        path = folder / name
        offset = resumed.offsets.get(name)
        content = _read(path)
        if offset is not None and offset <= len(content):
            if offset and not _ends_with_step(
                content[:offset], resumed.step, exactly=name == METRICS_FILE
            ):
                moved_to = move_aside(folder)
                return moved_to, [
                    f"{path} does not match the checkpoint {resumed.checkpoint} at step "
                    f"{resumed.step}; it was moved to {folder / str(moved_to)} with the other "
                    "files of that run"
                ]
            lengths[path] = offset
        elif content or offset:
            size = (
                f"{len(content)} of the {offset} bytes"
                if offset
                else "another length than"
            )
            notes.append(
                f"{path} has {size} recorded in the checkpoint {resumed.checkpoint}; its "
                f"complete lines up to step {resumed.step} are kept"
            )
            lengths[path] = _complete_lines_bytes(content, resumed.step)
    for path, length in lengths.items():
        if path.exists():
            with open_regular(path, "r+b") as file:
                file.truncate(length)
                os.fsync(file.fileno())
    return None, notes


def move_aside(folder: Path) -> str | None:
    """Move all files of a run except ``resumes.jsonl`` to ``attempt-1`` or the next free number;
    return its name.

    None if there is nothing to move.
    """
    names = [
        name
        for name in RUN_FILES
        if name != RESUMES_FILE and os.path.lexists(folder / name)
    ]
    if not names:
        return None
    targets = (folder / f"attempt-{number}" for number in itertools.count(1))
    target = next(path for path in targets if not os.path.lexists(path))
    target.mkdir()
    for name in names:
        os.rename(folder / name, target / name)
    return target.name


def read_steps(path: Path) -> tuple[list[StepMetrics], list[str]]:
    """The steps of ``metrics.jsonl``, and a sentence on invalid lines, if any."""
    steps = []
    unread = []
    for number, line in enumerate(_lines(path), 1):
        try:
            steps.append(StepMetrics.from_json(line.decode()))
        except ValueError:
            unread.append(str(number))
    numbers = ", ".join(unread[:5]) + ", …" * (len(unread) > 5)
    return steps, [
        f"{path} cannot be read in line {numbers}; results and plots omit it"
    ] if unread else []


def read_resumes(path: Path) -> list[Resume]:
    """The lines of ``resumes.jsonl``, without incomplete ones and those of another version."""
    resumes = []
    for line in _lines(path):
        with contextlib.suppress(ForeignError):
            resumes.append(build(Resume, parse_json(line, non_finite=True)))
    return resumes


def append_resume(path: Path, resume: Resume) -> None:
    """Add a line to ``resumes.jsonl``."""
    # skipkeys: YAML allows keys that JSON does not.
    line = json.dumps(dataclasses.asdict(resume), skipkeys=True)
    before = _read(path)
    # a start was killed while it wrote
    torn = before != b"" and not before.endswith(b"\n")
    with open_regular(path, "a", encoding="utf-8") as file:
        file.write("\n" * torn + line + "\n")


def starts(resumes: Sequence[Resume]) -> list[int]:
    """Last step before each start with steps in ``metrics.jsonl``; 0 for the first start."""
    after = [0]
    for resume in resumes:
        # Later steps were truncated.
        after = [step for step in after if step < resume.step] + [resume.step]
    return after


def describe_resume(
    folder: Path,
    resumed: ResumePoint,
    config_tree: dict[str, Any],
    environment: dict[str, Any],
) -> Resume | None:
    """Compare this start with the previous one in the folder; None for a new run in a new
    folder."""
    if not resumed.step and not any(
        os.path.lexists(folder / name) for name in RUN_FILES
    ):
        return None
    before_tree = _read_tree(folder / CONFIG_FILE)
    before = _read_tree(folder / ENVIRONMENT_FILE) or {}
    ranks_before = before.get("world_size")
    return Resume(
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        step=resumed.step,
        checkpoint=resumed.checkpoint,
        world_size_before=ranks_before
        if type(ranks_before) is int and 0 <= ranks_before <= LARGEST_INTEGER
        else None,
        world_size=environment.get("world_size"),
        changed=changed_settings(before_tree, config_tree)
        if before_tree is not None
        else None,
        moved_to=None,
    )


def changed_settings(
    before: dict[str, Any], after: dict[str, Any]
) -> dict[str, list[Any]]:
    """Dotted key → [old, new] of each changed setting, with None for an absent one."""
    old = dict(flatten(before))
    new = dict(flatten(after))
    changed = [
        key
        for key in old | new
        if old.get(key) != new.get(key) or (key in old) != (key in new)
    ]
    return {key: [old.get(key), new.get(key)] for key in changed}


def flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and values of nested dicts."""
    flat: list[tuple[str, Any]] = []
    for name, value in tree.items():
        flat += (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else [(f"{prefix}{name}", value)]
        )
    return flat


def _read_tree(path: Path) -> dict[str, Any] | None:
    """A YAML or JSON file of an earlier start; None if missing or invalid."""
    try:
        content = read_regular(path, MAX_YAML_BYTES)
        tree = parse_json(content) if path.suffix == ".json" else parse_yaml(content)
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def _read(path: Path) -> bytes:
    """The content of a file; empty if it is missing."""
    try:
        with open_regular(path) as file:
            return bytes(file.read())
    except FileNotFoundError:
        return b""


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, without their ends; one that is too long for a line of ours is cut.
    Nothing if missing."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        while line := file.readline(LONGEST_LINE_BYTES):
            yield line.removesuffix(b"\n")
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE_BYTES)


def _ends_with_step(content: bytes, step: int, exactly: bool) -> bool:
    """Whether the last line is complete and has that step, or, if not ``exactly``, at most that
    step."""
    last = _step_of(content[content.rfind(b"\n", 0, -1) + 1 :])
    return (
        last is not None
        and content.endswith(b"\n")
        and (last == step or (not exactly and last < step))
    )


def _complete_lines_bytes(content: bytes, step: int) -> int:
    """Bytes of the complete lines before the first line of a later step."""
    length = 0
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n") or (_step_of(line) or 0) > step:
            break
        length += len(line)
    return length


def _step_of(line: bytes) -> int | None:
    """The step of a line; None if it is incomplete."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if type(step) is int else None
