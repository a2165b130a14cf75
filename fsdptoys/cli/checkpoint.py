"""``fsdptoys checkpoint``: list the checkpoints of a run, and show the contents of one.

fsdptoys checkpoint ls runs/mine --verify
fsdptoys checkpoint show runs/mine 'optim.*.exp_avg'
fsdptoys checkpoint show runs/mine/checkpoints/step-00000120 --json
"""

import fnmatch
import json
import math
import sys
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fsdptoys.checkpoint.inspect import (
    Condition,
    Description,
    describe,
    is_cheap,
    open_series,
    other_folders,
    resumed_by_auto,
    states_by_kind,
    verify,
)
from fsdptoys.checkpoint.shard_format import StoredTensor
from fsdptoys.checkpoint.storage import Storage
from fsdptoys.config.saved import read_tree
from fsdptoys.data import Display
from fsdptoys.errors import ConfigError
from fsdptoys.train.resume import FACTS
from fsdptoys.utils.tables import align_columns
from fsdptoys.utils.text import counted, one_line, printable, size_text

from .commands import check_count, parse, run_part


def checkpoint_command(argv: Sequence[str]) -> int:
    """Run the command; return the exit status: 1 if ``ls`` finds a damaged checkpoint."""
    return run_part("checkpoint", argv, {"ls": _ls, "show": _show})


def _ls(argv: Sequence[str]) -> int:
    options = parse("checkpoint ls", argv)
    check_count(
        "checkpoint ls",
        options.arguments,
        1,
        "one run or folder of checkpoints",
        "PATH",
    )
    (where,) = options.arguments
    storage, names, is_one = _open(where)
    descriptions = [describe(storage, name, FACTS) for name in names]
    complete = [
        checkpoint
        for checkpoint in descriptions
        if checkpoint.condition is Condition.complete
    ]
    total = _verify(storage, complete, options.verify)
    auto = None if is_one else resumed_by_auto(descriptions)
    others = [] if is_one else other_folders(storage)
    if options.json:
        resumes = (
            auto.name
            if auto is not None and auto.condition is Condition.complete
            else None
        )
        checkpoints = [_facts(checkpoint) for checkpoint in descriptions]
        facts = {"folder": storage.where, "auto": resumes, "checkpoints": checkpoints}
        print(json.dumps(facts | {"never_loaded": others}, indent=2))
    else:
        heading = (
            "step",
            "state",
            "saved",
            "layout",
            "tensors",
            "size",
            "checksums",
            "",
        )
        rows = [
            heading,
            *(_row(checkpoint, checkpoint is auto) for checkpoint in descriptions),
        ]
        _say(storage.where, *align_columns(rows, (0, 4, 5)))
        for checkpoint in descriptions:
            if checkpoint.problem is not None:
                _say(f"{checkpoint.name} {checkpoint.problem}")
        if any(checkpoint.verified is None for checkpoint in complete):
            _say(
                f"checksums are not read; fsdptoys checkpoint ls {where} --verify reads "
                f"{size_text(total)}"
            )
        if not is_one:
            _say(_auto_sentence(auto))
        if others:
            _say(f"never loaded: {', '.join(map(one_line, others))}")
    return int(
        any(checkpoint.condition is Condition.damaged for checkpoint in descriptions)
    )


def _show(argv: Sequence[str]) -> int:
    options = parse("checkpoint show", argv)
    if len(options.arguments) not in (1, 2):
        needed = "one run or checkpoint, and at most one PATTERN"
        check_count("checkpoint show", options.arguments, 1, needed, "PATH [PATTERN]")
    where, pattern = (*options.arguments, None)[:2]
    storage, names, _ = _open(where)
    checkpoint = _newest_complete(storage, names)
    assert checkpoint.manifest is not None
    tensors = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if fnmatch.fnmatchcase(name, pattern or "*")
    }
    if not tensors and pattern is not None:
        raise ConfigError(
            f"{pattern} is the name of no tensor in {storage.where}/{checkpoint.name}; write "
            f"'*{pattern}*' for a part of a name"
        )
    if options.json:
        files = {name: file.size for name, file in checkpoint.manifest.files.items()}
        contents = {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "bytes": tensor.nbytes,
                "shards": len(tensor.chunks),
            }
            for name, tensor in tensors.items()
        }
        facts = {"files": files, "state": checkpoint.facts, "contents": contents}
        print(
            json.dumps({"folder": storage.where} | _facts(checkpoint) | facts, indent=2)
        )
        return 0
    if pattern is None:
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith("optim.")
        }
    rows = [("tensor", "dtype", "shape", "shards", "size")]
    for name, tensor in tensors.items():
        shape = " × ".join(map(str, tensor.shape)) or "one number"
        size = size_text(tensor.nbytes)
        rows.append(
            (one_line(name, 120), tensor.dtype, shape, str(len(tensor.chunks)), size)
        )
    _say(
        f"{storage.where}/{checkpoint.name}",
        *align_columns(_summary(checkpoint), ()),
        "",
        *align_columns(rows, (3, 4)),
        "",
    )
    totals = [("all of these" if pattern else "parameters", *_total(tensors.values()))]
    if pattern is None:
        for kind, of_kind in states_by_kind(checkpoint.tensors).items():
            totals.append((f"optimizer state {one_line(kind, 60)}", *_total(of_kind)))
    _say(*align_columns(totals, (1, 2, 3)))
    if len(totals) > 1:
        _say(
            f"fsdptoys checkpoint show {where} 'optim.*' lists the tensors of the optimizer"
        )
    return 0


def _open(where: str) -> tuple[Storage, list[str], bool]:
    """Return the storage, the names, and whether ``where`` is one checkpoint."""
    try:
        return open_series(where)
    except ConfigError as mistake:
        config = Path(where).expanduser() / "config.yaml"
        saved = read_tree(config).get("checkpoint") if config.is_file() else None
        folder = saved.get("folder") if isinstance(saved, dict) else None
        if isinstance(folder, str):
            raise ConfigError(
                f"{where} keeps its checkpoints in {one_line(folder)}; name that folder"
            ) from mistake
        raise


def _newest_complete(storage: Storage, names: Sequence[str]) -> Description:
    problems = []
    for name in names:
        checkpoint = describe(storage, name, FACTS)
        if checkpoint.condition is Condition.complete:
            _verify(storage, [checkpoint])
        if checkpoint.condition is Condition.complete:
            return checkpoint
        problems.append(f"{name} {checkpoint.problem}")
    raise ConfigError(
        f"{storage.where} holds no complete checkpoint: {'; '.join(problems)}; name another folder"
    )


def _verify(
    storage: Storage, checkpoints: Sequence[Description], always: bool = False
) -> int:
    """Verify complete checkpoints, if that is cheap, or ``always``; return their bytes."""
    total = sum(checkpoint.bytes for checkpoint in checkpoints)
    if always or is_cheap(storage, total):
        display = Display("verifying", total)
        for checkpoint in checkpoints:
            verify(storage, checkpoint, display.advance)
    return total


def _row(checkpoint: Description, auto: bool) -> tuple[str, ...]:
    unread = "not read" if checkpoint.condition is Condition.complete else ""
    checksums = {None: unread, True: "hold", False: "differ"}[checkpoint.verified]
    size = size_text(checkpoint.bytes) if checkpoint.manifest is not None else ""
    tensors = f"{len(checkpoint.tensors):,}" if checkpoint.tensors else ""
    layout = one_line(checkpoint.layout, 60) if checkpoint.facts else ""
    return (
        str(checkpoint.step),
        checkpoint.condition.value,
        _time(checkpoint),
        layout,
        tensors,
        size,
        checksums,
        "auto" if auto else "",
    )


def _auto_sentence(checkpoint: Description | None) -> str:
    if checkpoint is None:
        return "checkpoint.resume=auto finds no complete checkpoint and starts from scratch"
    if checkpoint.condition is Condition.unreadable:
        return (
            f"checkpoint.resume=auto stops at {checkpoint.name}, which may be complete; make it "
            "readable, or move it away"
        )
    return (
        f"checkpoint.resume=auto resumes from {checkpoint.name}"
        + ", if its checksums hold" * (not checkpoint.verified)
    )


def _summary(checkpoint: Description) -> list[tuple[str, str]]:
    """Labels and texts on the checkpoint and its state other than tensors."""
    assert checkpoint.manifest is not None
    facts = checkpoint.facts
    files = checkpoint.manifest.files
    config = facts["config"]
    versions = facts.get("versions")
    random_bytes = sum(
        file.size for name, file in files.items() if name.startswith("rank-")
    )
    rows = {
        "step": f"{checkpoint.step:,}, of which {facts['skipped_steps']:,} skipped",
        "saved": _time(checkpoint),
        "layout": checkpoint.layout,
        "model": f"{config['model'].get('name')}, optimizer {config['optim']['name']}",
        "data": f"{facts['data']['samples']:,} sequences seen, {facts['global_batch']:,} a step",
        "random states": f"of {counted(facts['world_size'], 'rank')}, {size_text(random_bytes)}",
        "files": (
            f"{len(files):,}, {size_text(checkpoint.bytes)}; checksums "
            f"{'hold' if checkpoint.verified else 'not read'}"
        ),
        "versions": "unknown",
    }
    if isinstance(versions, dict):
        rows["versions"] = ", ".join(
            f"{name} {version}" for name, version in versions.items()
        )
    return [(label, one_line(text)) for label, text in rows.items()]


def _total(tensors: Collection[StoredTensor]) -> tuple[str, str, str]:
    elements = sum(math.prod(tensor.shape) for tensor in tensors)
    total_bytes = sum(tensor.nbytes for tensor in tensors)
    return (
        counted(len(tensors), "tensor"),
        f"{elements:,} elements",
        size_text(total_bytes),
    )


def _facts(checkpoint: Description) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "step": checkpoint.step,
        "condition": checkpoint.condition.value,
        "problem": checkpoint.problem,
        "saved_at": checkpoint.saved_at,
        "layout": checkpoint.layout if checkpoint.facts else None,
        "ranks": checkpoint.facts.get("world_size"),
        "tensors": len(checkpoint.tensors) or None,
        "bytes": checkpoint.bytes if checkpoint.manifest is not None else None,
        "checksums_hold": checkpoint.verified,
    }


def _time(checkpoint: Description) -> str:
    if checkpoint.saved_at is None:
        return ""
    return datetime.fromtimestamp(checkpoint.saved_at).isoformat(" ", "seconds")


def _say(*lines: str) -> None:
    for line in lines:
        print(printable(line, sys.stdout))
