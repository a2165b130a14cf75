"""Edit checkpoints of a run and rewrite their checksums, so that no checksum shows the edit.

A small run saves checkpoints. Again and again a copy of the newest is edited: a value of another
type, null, out of range, huge, nested deeply, missing. Then a run resumes from the copy and draws
random numbers. An edit is

- *detected* if the checkpoint is passed over or refused, with a sentence;
- *harmless* if the run has loaded exactly the present content of the files: checksums do not prove
  who wrote them;
- *missed* if anything else happens: another exception, other values, or the end of the process.

All of it happens in a forked process, which reports edit by edit, so that one that crashes is
known.
"""

import base64
import faulthandler
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdptoys.checkpoint import Checkpointer
from fsdptoys.checkpoint.manifest import Manifest
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.train.random_states import restore_random_states
from fsdptoys.train.resume import FACTS, check_same_run
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.sealed_folder import sum_path
from tests.harness.ranks import run_ranks

STEPS = 2

DRAWS = 700
"""Random numbers drawn after each resume: more than a generator keeps ahead."""

DEEP = "deep below"
"""Stands for many lists within each other, which Python's own encoder does not write."""

VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        "",
        "x",
        "\x1b]0;title\x07",
        "x" * 5000,
        "../../etc/passwd",
        DEEP,
        [],
        {},
        [[]],
        {"a": None},
    ),
    *(
        -1,
        0,
        1,
        2,
        625,
        100_000,
        2**31,
        2**32,
        2**63,
        2**64,
        -(2**63),
        10**400,
        0.5,
        -0.0,
        1e308,
        float("nan"),
    ),
    *(float("inf"), -float("inf"), "NaN", "1", [1] * 3000),
]

Edit = Callable[[Path, random.Random], str]
"""Edits a checkpoint's folder, except its manifest, and says how."""


def edit_state(folder: Path, draw: random.Random) -> str:
    """The facts of all ranks; seldom the settings, which are most of them."""
    path = folder / "state.json"
    tree = json.loads(path.read_text())
    kept = {} if draw.randrange(4) == 0 else {key: tree.pop(key) for key in ("config", "versions")}
    text, how = _edited(tree, draw)
    if kept and text.startswith(b"{"):
        text = b"{" + json.dumps(kept)[1:-1].encode() + (b", " if text != b"{}" else b"") + text[1:]
    path.write_bytes(text)
    return f"state.json: {how}"


def edit_rank(folder: Path, draw: random.Random) -> str:
    """The facts of one rank; often a place in its generators."""
    path = folder / "rank-00000.json"
    kind = draw.randrange(4)
    tree = json.loads(path.read_text())
    if kind == 0:
        tree["numpy"]["position"] = draw.choice(
            [-(10**8), -5, -1, 0, 623, 624, 625, 100_000, 2 * 10**9, 2**31]
        )
        path.write_text(json.dumps(tree))
        return f"numpy.position = {tree['numpy']['position']}"
    if kind == 1:
        tree["python"]["internal"][-1] = draw.choice([-1, 0, 624, 625, 10**6, 2**31])
        path.write_text(json.dumps(tree))
        return f"python's place = {tree['python']['internal'][-1]}"
    return _edit_json(path, draw)


def edit_torch_state(folder: Path, draw: random.Random) -> str:
    """Bytes of torch's generator, most of them where its place in its numbers is."""
    path = folder / "rank-00000.json"
    tree = json.loads(path.read_text())
    state = bytearray(base64.b64decode(tree["torch"]))
    if draw.randrange(5) == 0:
        state = state[: draw.randrange(len(state))]
    else:
        start = draw.choice([8, 12, 16, 20, draw.randrange(len(state) - 4)])
        state[start : start + 4] = draw.choice(
            [0, 1, 2, 623, 624, 625, 2**31, draw.randrange(2**32)]
        ).to_bytes(4, "little")
    tree["torch"] = base64.b64encode(state).decode()
    path.write_text(json.dumps(tree))
    return "torch's state"


def edit_index(folder: Path, draw: random.Random) -> str:
    """Which tensor is where."""
    return _edit_json(folder / "tensors.json", draw)


def edit_header(folder: Path, draw: random.Random) -> str:
    """Header of a file of tensors."""
    path = folder / "tensors-00000.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text, how = _edited(json.loads(content[8 : 8 + length]), draw)
    says = draw.choice([len(text), len(text), len(text), 0, len(text) + 8, 2**40, 2**63])
    path.write_bytes(says.to_bytes(8, "little") + text + content[8 + length :])
    return f"header: {how}"


EDITS: dict[str, Edit] = {
    "edited state": edit_state,
    "edited rank": edit_rank,
    "edited generator": edit_torch_state,
    "edited index": edit_index,
    "edited header": edit_header,
}


def seal(folder: Path) -> None:
    """Write a manifest that knows the files as they are."""
    files = {file.name: sum_path(file) for file in folder.iterdir() if file.name != "manifest.json"}
    (folder / "manifest.json").write_bytes(Manifest(folder.name, files).to_bytes())


def edits(kinds: Sequence[str], seed: int) -> Iterator[tuple[str, str, str]]:
    """Edit copies of one checkpoint, and resume from each.

    Args:
        kinds: of the edits, in turn.
        seed: of all choices.

    Yields:
        Kind, outcome and reason of each.
    """
    with tempfile.TemporaryDirectory() as place:
        config = _config(Path(place) / "run")
        run_ranks(1, _take_steps, config)
        done = 0
        while done < len(kinds):
            for outcome, why in _in_child(place, config, kinds, done, seed):
                yield kinds[done], outcome, why
                done += 1
            if done < len(kinds):
                yield kinds[done], "missed", "the process died"
                done += 1


def _config(run_dir: Path) -> Config:
    words = [
        "experiment=null",
        "parallel=single",
        "train.seq_len=32",
        "metrics.console=none",
        "checkpoint.every=1",
    ]
    config = compose_config(
        [*words, f"train.steps={STEPS}", f"metrics.run_dir={run_dir}", "checkpoint.resume=auto"]
    )
    config.validate(1, "cpu")
    return config


def _take_steps(config: Config) -> None:
    Run(Trainer(config)).run()


def _in_child(
    place: str, config: Config, kinds: Sequence[str], first: int, seed: int
) -> Iterator[tuple[str, str]]:
    """Outcomes of the edits from one on, until the process that finds them ends."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(reader)
            with open(writer, "w", buffering=1) as report:
                _resume_all(place, config, kinds, first, seed, report)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    with open(reader) as report:
        for line in report:
            outcome, why = json.loads(line)
            yield outcome, why
    os.waitpid(process, 0)


def _resume_all(
    place: str, config: Config, kinds: Sequence[str], first: int, seed: int, report: Any
) -> None:
    faulthandler.disable()  # the caller looks for a crash of this process
    torch.set_num_threads(1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer(config)
    whole = Path(place) / "run" / "checkpoints"
    for index in range(first, len(kinds)):
        draw = random.Random(f"{seed} {index}")
        folder = Path(place) / f"edit-{index}"
        shutil.copytree(whole, folder)
        newest = folder / f"step-{STEPS:08d}"
        how = EDITS[kinds[index]](newest, draw)
        seal(newest)
        try:
            outcome, why = _resume(trainer, config, folder)
        except Exception as error:
            outcome, why = "missed", f"{type(error).__name__}: {str(error)[:300]}"
        report.write(json.dumps([outcome, f"{how}: {why}"]) + "\n")
        shutil.rmtree(folder)


def _resume(trainer: Trainer, config: Config, folder: Path) -> tuple[str, str]:
    """Resume as a run would, and use the loaded values."""
    said: list[str] = []
    checkpoints = Checkpointer(config.checkpoint, str(folder), message=said.append, schema=FACTS)
    try:
        found = checkpoints.resume()
        if found is None:
            return "detected", "; ".join(said)
        check_same_run(config, found.facts)
        trainer.load_state_dict(found.facts, found.load)
    except ConfigError as error:
        return (
            ("detected", str(error))
            if str(error).isprintable()
            else ("missed", f"unprintable {error!r}")
        )
    reason = restore_random_states(found.own_facts, trainer.world.device, 0, found.step, 0)
    drawn = [random.random() for _ in range(DRAWS)], np.random.random(DRAWS), torch.rand(DRAWS)
    assert all(0 <= float(value) <= 1 for values in drawn for value in values), (
        "draws that are no random numbers"
    )
    if found.step != STEPS:
        return "detected", "; ".join(said)
    said_now, loaded = found.facts, trainer.state_dict()
    wrong = [
        key
        for key in ("step", "skipped_steps", "skipped_in_a_row", "spikes")
        if loaded[key] != said_now[key]
    ]
    wrong += [] if loaded["data"]["samples"] == said_now["data"]["samples"] else ["data.samples"]
    return (
        ("missed", f"loaded with another {wrong[0]}")
        if wrong
        else ("harmless", reason or "loaded as it is")
    )


def _edit_json(path: Path, draw: random.Random) -> str:
    text, how = _edited(json.loads(path.read_text()), draw)
    path.write_bytes(text)
    return f"{path.name}: {how}"


def _edited(tree: Any, draw: random.Random) -> tuple[bytes, str]:
    """A tree with one value of it exchanged, removed or added to, as JSON."""
    parent: Any = {"": tree}
    key: Any = ""
    path = []
    while isinstance(parent[key], (dict, list)) and parent[key] and draw.random() < 0.8:
        parent = parent[key]
        key = draw.choice(list(parent)) if isinstance(parent, dict) else draw.randrange(len(parent))
        path.append(str(key))
    how = draw.choice(
        ["exchange", "exchange", "exchange", "remove", "wrap", "text", "repeat", "shift"]
    )
    value = parent[key]
    if how == "exchange":
        parent[key] = draw.choice(VALUES)
        how = f"= {str(parent[key])[:20]!r}"
    elif how == "remove" and path:
        del parent[key]
    elif how == "wrap":
        parent[key] = [value]
    elif how == "text":
        parent[key] = str(value)
    elif how == "repeat" and isinstance(value, (list, str)):
        parent[key] = value * 3
    elif how == "shift" and type(value) in (int, float):
        parent[key] = value + draw.choice([-1, 1, 2**31])
    if not path:
        tree = parent.get("", {})
    deep = "[" * 20_000 + "]" * 20_000
    return json.dumps(tree).replace(json.dumps(DEEP), deep).encode(), f"{'.'.join(path)} {how}"
