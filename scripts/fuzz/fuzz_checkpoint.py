"""Damage checkpoints in every way a disk or a user may, and check that no damage is loaded
unnoticed; for ``fuzz_readers.py``.

- Damaged: files and folders of checkpoints of several steps are flipped, cut, swapped, copied,
  renamed or deleted. A resumed run must load exactly the values of the step that it reports, or
  none.
- Edited: values of a checkpoint of a real run are exchanged, and its checksums are rewritten, so
  that no checksum shows the edit. A resumed run must refuse it in a sentence, or load exactly what
  the files say: checksums do not prove who wrote them.
"""

import base64
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from fsdptoys.checkpoint import CheckpointConfig, Checkpointer
from fsdptoys.checkpoint.manifest import MANIFEST_FILE
from fsdptoys.config.compose import compose_config
from fsdptoys.train.pretrained import open_weights
from fsdptoys.train.random_states import restore_random_states
from fsdptoys.train.resume import FACTS, check_same_run
from fsdptoys.train.trainer import Trainer
from scripts.fuzz.fuzz_mutations import mutate_bytes, replace_file
from tests.harness.folders import (
    check_tensors,
    distributed,
    facts,
    full_tensors,
    own_facts,
    resume,
    seal,
)
from tests.harness.ranks import run_ranks

STEPS = 5
"""Those with odd numbers are saved by two ranks."""
DRAWS = 700
"""Random numbers drawn after a resume: more than a generator keeps ahead."""
POSITIONS = (
    -(10**8),
    -5,
    -1,
    0,
    1,
    2,
    623,
    624,
    625,
    100_000,
    2 * 10**9,
    2**31,
    2**32 - 1,
)
"""Positions of a generator in its numbers, of which there are 624."""
DAMAGES = (
    "bytes", "bytes", "bytes", "bytes", "replaced", "delete file", "swap within", "swap between",
    "mix", "swap folders", "rename folder", "copy folder", "delete folder", "latest",
)  # fmt: skip


def save_steps(folder: Path) -> None:
    """Save the checkpoints to damage."""
    for step in range(1, STEPS + 1):
        run_ranks(1 + step % 2, _save_step, folder, step)


def _save_step(folder: Path, step: int) -> None:
    group = dist.new_group(backend="gloo")
    checkpoints = Checkpointer(
        CheckpointConfig(every=1, keep=STEPS), str(folder), group
    )
    own = own_facts(step, dist.get_rank())
    assert checkpoints.save(step, distributed(full_tensors(step)), facts(step), own)


def damage_checkpoints(folder: Path, draw: random.Random) -> str:
    """Damage the newest checkpoint, since older ones are read only if it is damaged."""
    *older, newest = sorted(path for path in folder.iterdir() if path.is_dir())
    other = draw.choice(older)
    files = sorted(newest.iterdir())
    file = draw.choice(files)
    kind = draw.choice(DAMAGES)
    if kind == "bytes":
        content, kind = mutate_bytes(file.read_bytes(), draw)
        file.write_bytes(content)
    elif kind == "replaced":
        kind = replace_file(file, draw)
    elif kind == "delete file":
        file.unlink()
    elif kind == "swap within":
        _swap(*draw.sample(files, 2))
    elif kind == "swap between":
        common = {path.name for path in other.iterdir()} & {path.name for path in files}
        name = draw.choice(sorted(common))
        _swap(other / name, newest / name)
    elif kind == "mix":
        sources = sorted(other.iterdir())
        for source in draw.sample(sources, draw.randrange(1, len(sources))):
            shutil.copyfile(source, newest / source.name)
    elif kind == "swap folders":
        _swap(other, newest)
    elif kind == "rename folder":
        newest.rename(folder / f"step-{draw.choice([0, STEPS + 1, 10**8, 10**9]):08d}")
    elif kind == "copy folder":
        copies = [
            f"step-{STEPS + 1:08d}",
            f"{newest.name} (copy)",
            f".{newest.name}.partial",
        ]
        shutil.copytree(newest, folder / draw.choice(copies))
    elif kind == "delete folder":
        shutil.rmtree(newest)
    else:
        texts = ["step-00000001\n", "../../etc/passwd\n", "", "\0\xff"]
        (folder / "latest").write_text(draw.choice(texts))
    return f"{kind}: {file.name}, {other.name}"


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def resume_damaged(folder: Path) -> str:
    """Resume as a run would, and compare with the values saved at that step."""
    point, messages = resume(folder)
    if point is not None:
        assert 1 <= point.step <= STEPS, f"step {point.step} was never saved"
        ranks = 1 + point.step % 2
        saved = facts(point.step) | {"step": point.step, "world_size": ranks}
        assert point.facts == saved, "other facts"
        assert point.own_facts == (None if ranks == 2 else own_facts(point.step)), (
            "other own facts"
        )
        check_tensors(point, point.step)
    return "\n".join(messages)


def mend_checkpoint(file: Path) -> None:
    """Write a manifest that knows a mutated file of a checkpoint, except the manifest itself."""
    is_listed = file.name != MANIFEST_FILE and (file.parent / MANIFEST_FILE).exists()
    if is_listed and file.is_file() and file.stat().st_size < 2**24:
        seal(file.parent)


def edit_generator(file: Path, draw: random.Random) -> str:
    """Edit the position of one of the random number generators of a rank."""
    tree = json.loads(file.read_text())
    name = draw.choice(("numpy", "python", "torch", "torch"))
    position = draw.choice(POSITIONS)
    if name == "numpy":
        tree["numpy"]["position"] = position
    elif name == "python":
        tree["python"]["internal"][-1] = position
    else:
        state = bytearray(base64.b64decode(tree["torch"]))
        start = draw.choice((8, 12, 16, 20, draw.randrange(len(state) - 4)))
        state[start : start + 4] = (position % 2**32).to_bytes(4, "little")
        tree["torch"] = base64.b64encode(state).decode()
    file.write_text(json.dumps(tree))
    return f"position {position} of {name}"


def resume_edited(copy: Path, overrides: list[str]) -> str:
    """Resume a trainer as a run would, compare what it loaded with the files, and use it.

    Args:
        copy: the run directory.
        overrides: overrides of the run.
    """
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = compose_config([*overrides, "checkpoint.resume=auto"])
    config.validate(1, "cpu")
    trainer = Trainer(config)
    messages: list[str] = []
    folder = str(copy / "checkpoints")
    point = Checkpointer(
        config.checkpoint, folder, message=messages.append, schema=FACTS
    ).resume()
    if point is not None:
        check_same_run(config, point.facts)
        trainer.load_state_dict(point.facts, point.load)
        restore_random_states(point.own_facts, trainer.world.device, 0, point.step, 0)
        drawn = [random.random() for _ in range(DRAWS)]
        for values in (drawn, np.random.random(DRAWS), torch.rand(DRAWS)):
            assert all(0 <= float(value) <= 1 for value in values), (
                "draws are no random numbers"
            )
        loaded = trainer.state_dict()
        for key in ("step", "skipped_steps", "skipped_in_a_row", "spikes"):
            assert loaded[key] == point.facts[key], f"loaded with another {key}"
        assert loaded["data"]["samples"] == point.facts["data"]["samples"], (
            "other samples"
        )
        open_weights(str(copy)).read("norm.weight", ())
    return "\n".join(messages)
