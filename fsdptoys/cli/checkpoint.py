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
from fsdptoys.utils.text import near_miss, one_line, printable, size_text

from .commands import check_count, parse, run_part


def checkpoint_command(words: Sequence[str]) -> int:
    """Run the command; return the exit status: 1 if ``ls`` finds a damaged checkpoint."""
    return run_part("checkpoint", words, {"ls": _ls, "show": _show})


def _ls(words: Sequence[str]) -> int:
    options = parse("checkpoint ls", words)
    check_count("checkpoint ls", options.words, 1, "one run or folder of checkpoints", "PATH")
    (where,) = options.words
    storage, names, is_one = _open(where)
    found = [describe(storage, name, FACTS) for name in names]
    complete = [each for each in found if each.condition is Condition.complete]
    total = _verify(storage, complete, options.verify)
    auto = None if is_one else resumed_by_auto(found)
    others = [] if is_one else other_folders(storage)
    if options.json:
        resumes = auto.name if auto is not None and auto.condition is Condition.complete else None
        checkpoints = [_facts(each) for each in found]
        _print_json({"folder": storage.where, "auto": resumes, "checkpoints": checkpoints, "never_loaded": others})
    else:
        heading = ("step", "state", "saved", "layout", "tensors", "size", "checksums", "")
        rows = [heading, *(_row(each, each is auto) for each in found)]
        _say(storage.where, *align_columns(rows, (0, 4, 5)))
        _say(*(f"{each.name} {each.problem}" for each in found if each.problem is not None))
        if any(each.verified is None for each in complete):
            _say(f"checksums are not read; fsdptoys checkpoint ls {where} --verify reads {size_text(total)}")
        if not is_one:
            _say(_auto_sentence(auto))
        if others:
            _say(f"never loaded: {', '.join(map(one_line, others))}")
    return int(any(each.condition is Condition.damaged for each in found))


def _show(words: Sequence[str]) -> int:
    options = parse("checkpoint show", words)
    where, *patterns = options.words or [""]
    if not where or len(patterns) > 1:
        check_count("checkpoint show", options.words, 1, "one run or checkpoint, and at most one PATTERN", "PATH")
    storage, names, _ = _open(where)
    found = _newest_complete(storage, names)
    assert found.manifest is not None
    pattern = patterns[0] if patterns else None
    chosen = {name: each for name, each in found.tensors.items() if fnmatch.fnmatchcase(name, pattern or "*")}
    if not chosen and pattern is not None:
        near = near_miss(pattern, list(found.tensors))
        fix = f"did you mean {one_line(near)}?" if near else f"write '*{pattern}*' for a part of a name"
        raise ConfigError(f"{pattern} is the name of no tensor in {storage.where}/{found.name}; {fix}")
    if options.json:
        files = {name: each.size for name, each in found.manifest.files.items()}
        contents = {name: _tensor_facts(each) for name, each in chosen.items()}
        facts = {"files": files, "state": found.facts, "contents": contents}
        _print_json({"folder": storage.where} | _facts(found) | facts)
        return 0
    shown = {name: each for name, each in chosen.items() if pattern is not None or not name.startswith("optim.")}
    rows = [("tensor", "dtype", "shape", "shards", "size")]
    for name, each in shown.items():
        shape = " × ".join(map(str, each.shape)) or "one number"
        rows.append((one_line(name, 120), each.dtype, shape, str(len(each.chunks)), size_text(each.nbytes)))
    _say(f"{storage.where}/{found.name}", *align_columns(_summary(found), ()), "", *align_columns(rows, (3, 4)), "")
    totals = [("all of these" if pattern else "parameters", *_total(shown.values()))]
    for kind, of_kind in states_by_kind(found.tensors).items() if pattern is None else ():
        totals.append((f"optimizer state {one_line(kind, 60)}", *_total(of_kind)))
    _say(*align_columns(totals, (1, 2, 3)))
    if pattern is None and len(totals) > 1:
        _say(f"fsdptoys checkpoint show {where} 'optim.*' lists the tensors of the optimizer")
    return 0


def _open(where: str) -> tuple[Storage, list[str], bool]:
    """Storage, names, and whether ``where`` is one checkpoint."""
    try:
        return open_series(where)
    except ConfigError as mistake:
        config = Path(where).expanduser() / "config.yaml"
        saved = read_tree(config).get("checkpoint") if config.is_file() else None
        folder = saved.get("folder") if isinstance(saved, dict) else None
        if isinstance(folder, str):
            raise ConfigError(f"{where} keeps its checkpoints in {one_line(folder)}; name that folder") from mistake
        raise


def _newest_complete(storage: Storage, names: Sequence[str]) -> Description:
    problems = []
    for name in names:
        found = describe(storage, name, FACTS)
        if found.condition is Condition.complete:
            _verify(storage, [found])
        if found.condition is Condition.complete:
            return found
        problems.append(f"{name} {found.problem}")
    raise ConfigError(f"{storage.where} holds no complete checkpoint: {'; '.join(problems)}; name another folder")


def _verify(storage: Storage, found: Sequence[Description], typed: bool = False) -> int:
    """Verify complete checkpoints, if that is cheap or ``typed``; return their bytes."""
    total, done = sum(each.bytes for each in found), 0
    if not (typed or is_cheap(storage, total)):
        return total
    with Display("verifying") as display:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            display.show_bytes(done, total)

        for each in found:
            verify(storage, each, advance)
    return total


def _row(each: Description, auto: bool) -> tuple[str, ...]:
    unread = "not read" if each.condition is Condition.complete else ""
    checksums = {None: unread, True: "hold", False: "differ"}[each.verified]
    size = size_text(each.bytes) if each.manifest is not None else ""
    tensors = f"{len(each.tensors):,}" if each.tensors else ""
    layout = one_line(each.layout, 60) if each.facts else ""
    return str(each.step), each.condition.value, _time(each), layout, tensors, size, checksums, "auto" if auto else ""


def _auto_sentence(chosen: Description | None) -> str:
    if chosen is None:
        return "checkpoint.resume=auto finds no complete checkpoint and starts from scratch"
    if chosen.condition is Condition.unreadable:
        return (
            f"checkpoint.resume=auto stops at {chosen.name}, which may be complete; make it readable, or move it away"
        )
    return f"checkpoint.resume=auto resumes from {chosen.name}" + ", if its checksums hold" * (not chosen.verified)


def _summary(found: Description) -> list[tuple[str, str]]:
    """Labels and texts on the checkpoint and its state other than tensors."""
    assert found.manifest is not None
    facts, files = found.facts, found.manifest.files
    ranks = facts["world_size"]
    versions = facts.get("versions")
    skipped = facts["skipped_steps"]
    random_bytes = sum(each.size for name, each in files.items() if name.startswith("rank-"))
    rows = [
        ("step", f"{found.step:,}" + f", of which {skipped:,} skipped" * bool(skipped)),
        ("saved", _time(found)),
        ("layout", found.layout),
        ("model", f"{facts['config']['model'].get('name', 'unknown')}, optimizer {facts['config']['optim']['name']}"),
        ("data", f"{facts['data']['samples']:,} sequences seen, {facts['global_batch']:,} a step"),
        ("random states", f"of {ranks:,} rank{'s' * (ranks != 1)}, {size_text(random_bytes)}"),
        ("files", f"{len(files):,}, {size_text(found.bytes)}; checksums {'hold' if found.verified else 'not read'}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else "unknown"),
    ]
    return [(label, one_line(text)) for label, text in rows]


def _total(tensors: Collection[StoredTensor]) -> tuple[str, str, str]:
    elements = sum(math.prod(each.shape) for each in tensors)
    count = f"{len(tensors):,} tensor{'s' * (len(tensors) != 1)}"
    return count, f"{elements:,} elements", size_text(sum(each.nbytes for each in tensors))


def _facts(each: Description) -> dict[str, Any]:
    return {
        "name": each.name,
        "step": each.step,
        "condition": each.condition.value,
        "problem": each.problem,
        "saved_at": each.saved_at,
        "layout": each.layout if each.facts else None,
        "ranks": each.facts.get("world_size"),
        "tensors": len(each.tensors) or None,
        "bytes": each.bytes if each.manifest is not None else None,
        "checksums_hold": each.verified,
    }


def _tensor_facts(each: StoredTensor) -> dict[str, Any]:
    return {"dtype": each.dtype, "shape": each.shape, "bytes": each.nbytes, "shards": len(each.chunks)}


def _time(each: Description) -> str:
    if each.saved_at is None:
        return ""
    return datetime.fromtimestamp(each.saved_at).isoformat(" ", "seconds")


def _print_json(tree: dict[str, Any]) -> None:
    print(json.dumps(tree, indent=2))


def _say(*lines: str) -> None:
    for line in lines:
        print(printable(line, sys.stdout))
