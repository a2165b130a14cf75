"""Damage checkpoints in every way a disk or a user may, and check that no damage is loaded
unnoticed.

    python scripts/fuzz/fuzz_checkpoint.py --damages 1000 --seed 0

Checkpoints of several steps are saved by one process and by two ranks, into one folder. Then,
repeatedly, a copy of it is damaged once, and a run resumes from the copy with
``checkpoint.resume=auto``. The loaded values must be equal in every bit to those saved at the step
that it reports. A damage is

- *detected* if an older checkpoint is taken, or none, with a sentence;
- *harmless* if the newest is taken with all its values;
- *missed* if other values are loaded. Then this exits with status 1.

The newest checkpoint is damaged, since older ones are read only if it is damaged. All kinds of
damage take turns, also the edits of ``fuzz_edits``, whose checksums are right.
"""

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdptoys.checkpoint import CheckpointConfig, Checkpointer
from fsdptoys.errors import ConfigError
from scripts.fuzz.fuzz_edits import EDITS, edits
from tests.harness.ranks import run_ranks

PROGRESS_SECONDS = 5.0

STEPS = 5
"""Those with odd numbers are saved by two ranks."""

Damage = Callable[[Path, random.Random], str]
"""Damages a folder of checkpoints, and says how."""


def tensors_of(step: int) -> dict[str, Tensor]:
    """Tensors saved at a step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.embed.weight": torch.randn(9, 6, generator=generator),
        "model.norm.weight": torch.randn(6, generator=generator).bfloat16(),
        "optim.embed.weight.exp_avg": torch.randn(9, 6, generator=generator),
        "optim.embed.weight.step": torch.tensor(float(step)),
    }


def facts_of(step: int) -> dict[str, Any]:
    """Other values saved at a step."""
    return {"loss": 1 / step, "seen_tokens": 2**40 + step}


def save_steps(folder: Path) -> None:
    """Save the checkpoints to damage."""
    config = CheckpointConfig(every=1, keep=STEPS)
    for step in range(1, STEPS + 1):

        def save(step: int = step) -> None:
            tensors = tensors_of(step)
            group = None
            if dist.is_initialized():
                group, mesh = (
                    dist.new_group(backend="gloo"),
                    init_device_mesh("cpu", (dist.get_world_size(),)),
                )
                tensors = {
                    name: distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.ndim else tensor
                    for name, tensor in tensors.items()
                }
            own = {"rng": f"{step} {group and dist.get_rank(group)}"}
            assert Checkpointer(config, str(folder), group).save(step, tensors, facts_of(step), own)

        if step % 2:
            run_ranks(2, save)
        else:
            save()


def flip_bit(folder: Path, draw: random.Random) -> str:
    """One bit of one file."""
    file = _file(folder, draw)
    content = bytearray(file.read_bytes())
    place = draw.randrange(len(content) * 8)
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)
    return f"bit {place} of {_name(file)}"


def truncate(folder: Path, draw: random.Random) -> str:
    """A file loses its end."""
    file = _file(folder, draw)
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{_name(file)} cut to {size} bytes"


def empty(folder: Path, draw: random.Random) -> str:
    """A file loses all it holds."""
    file = _file(folder, draw)
    os.truncate(file, 0)
    return f"{_name(file)} emptied"


def append(folder: Path, draw: random.Random) -> str:
    """A file gains bytes."""
    file = _file(folder, draw)
    with open(file, "ab") as opened:
        opened.write(draw.choice([b"\n", b" ", b"\0" * 8, draw.randbytes(100)]))
    return f"{_name(file)} lengthened"


def overwrite(folder: Path, draw: random.Random) -> str:
    """A block of zeros or noise, as after a write that never reached the disk."""
    file = _file(folder, draw)
    content = bytearray(file.read_bytes())
    start = draw.randrange(len(content))
    stop = min(len(content), start + draw.randrange(1, 64))
    content[start:stop] = (
        bytes(stop - start) if draw.random() < 0.5 else draw.randbytes(stop - start)
    )
    file.write_bytes(content)
    return f"bytes {start} to {stop} of {_name(file)}"


def delete(folder: Path, draw: random.Random) -> str:
    """A file is gone."""
    file = _file(folder, draw)
    file.unlink()
    return f"{_name(file)} deleted"


def swap_within(folder: Path, draw: random.Random) -> str:
    """Two files of one checkpoint change places."""
    place = _newest(folder)
    return _swap(*draw.sample(sorted(place.iterdir()), 2))


def swap_between(folder: Path, draw: random.Random) -> str:
    """Files of one name change places between two checkpoints."""
    one, other = draw.choice(_checkpoints(folder)[:-1]), _newest(folder)
    common = sorted({file.name for file in one.iterdir()} & {file.name for file in other.iterdir()})
    name = draw.choice(common)
    return _swap(one / name, other / name)


def copy_between(folder: Path, draw: random.Random) -> str:
    """A file of another checkpoint comes in its place."""
    one, other = draw.choice(_checkpoints(folder)[:-1]), _newest(folder)
    file = draw.choice(sorted(one.iterdir()))
    shutil.copyfile(file, other / file.name)
    return f"{_name(file)} copied into {other.name}"


def mix(folder: Path, draw: random.Random) -> str:
    """A checkpoint is written over by an older one up to some file."""
    one, other = draw.choice(_checkpoints(folder)[:-1]), _newest(folder)
    files = sorted(one.iterdir())
    draw.shuffle(files)
    count = draw.randrange(1, len(files))
    for file in files[:count]:
        shutil.copyfile(file, other / file.name)
    return f"{count} files of {one.name} copied into {other.name}"


def swap_folders(folder: Path, draw: random.Random) -> str:
    """Two checkpoints change names."""
    return _swap(draw.choice(_checkpoints(folder)[:-1]), _newest(folder))


def rename_folder(folder: Path, draw: random.Random) -> str:
    """A checkpoint takes the name of another step."""
    place = draw.choice(_checkpoints(folder))
    name = f"step-{draw.choice([0, STEPS + 1, 10**8, 10**9]):08d}"
    place.rename(folder / name)
    return f"{place.name} renamed to {name}"


def copy_folder(folder: Path, draw: random.Random) -> str:
    """A checkpoint lies there twice."""
    place = draw.choice(_checkpoints(folder))
    name = draw.choice([f"step-{STEPS + 1:08d}", f"{place.name} (copy)", f".{place.name}.partial"])
    shutil.copytree(place, folder / name)
    return f"{place.name} copied to {name}"


def delete_folder(folder: Path, draw: random.Random) -> str:
    """A checkpoint is gone."""
    place = _newest(folder)
    shutil.rmtree(place)
    return f"{place.name} deleted"


def spoil_latest(folder: Path, draw: random.Random) -> str:
    """The name of the newest is another, nonsense, or gone."""
    latest = folder / "latest"
    text = draw.choice(["step-00000001\n", "../../etc/passwd\n", "", "\0\xff", None])
    if text is None:
        latest.unlink()
    else:
        latest.write_text(text)
    return f"latest says {text!r}"


DAMAGES: dict[str, Damage] = {
    "flipped bit": flip_bit,
    "truncated": truncate,
    "emptied": empty,
    "appended bytes": append,
    "overwritten block": overwrite,
    "deleted file": delete,
    "swapped within": swap_within,
    "swapped between": swap_between,
    "copied between": copy_between,
    "mixed with another": mix,
    "swapped folders": swap_folders,
    "renamed folder": rename_folder,
    "copied folder": copy_folder,
    "deleted folder": delete_folder,
    "damaged latest": spoil_latest,
}


def outcome_of(folder: Path) -> tuple[str, str]:
    """Resume as a run would: detected, harmless or missed, and why."""
    messages: list[str] = []
    try:
        found = Checkpointer(
            CheckpointConfig(every=1, resume="auto"), str(folder), message=messages.append
        ).resume()
        if found is None:
            return "detected", "; ".join(messages)
        tensors = {
            name: torch.full_like(tensor, torch.nan) for name, tensor in tensors_of(1).items()
        }
        found.load(tensors)
    except ConfigError as error:
        return "detected", str(error)
    ranks = 2 if found.step % 2 else 1
    expected = tensors_of(found.step)
    whole = found.step in range(1, STEPS + 1) and found.facts == facts_of(found.step) | {
        "step": found.step,
        "world_size": ranks,
    }
    whole = whole and found.own_facts == (None if ranks == 2 else {"rng": f"{found.step} None"})
    whole = whole and all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    if not whole:
        return "missed", f"{found.name} was loaded with other values"
    return ("harmless" if found.step == STEPS else "detected"), "; ".join(messages)


def fuzz(damages: int, seed: int) -> dict[str, dict[str, int]]:
    """Damage copies of one folder, one damage each.

    Args:
        damages: how many; the kinds take turns.
        seed: of all choices.

    Returns:
        Kind → outcome → count; missed damages are printed.
    """
    kinds = [*DAMAGES, *EDITS]
    turns = [kinds[turn % len(kinds)] for turn in range(damages)]
    counts = {kind: dict.fromkeys(("detected", "harmless", "missed"), 0) for kind in kinds}
    found = itertools.chain(
        _damaged([kind for kind in turns if kind in DAMAGES], seed),
        edits([kind for kind in turns if kind in EDITS], seed)
        if any(kind in EDITS for kind in turns)
        else (),
    )
    started = last = time.monotonic()
    for done, (kind, outcome, why) in enumerate(found, start=1):
        counts[kind][outcome] += 1
        if outcome == "missed":
            print(f"missed: {kind}: {why}")
        now = time.monotonic()
        if now - last >= PROGRESS_SECONDS:
            last, left = now, (now - started) / done * (damages - done)
            print(
                f"{done} of {damages} damages in {now - started:.0f} s, about {left:.0f} s left",
                file=sys.stderr,
            )
    return counts


def _damaged(kinds: Sequence[str], seed: int) -> Iterator[tuple[str, str, str]]:
    """Kind, outcome and reason of each damage."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        save_steps(whole)
        assert outcome_of(whole)[0] == "harmless"
        for turn, kind in enumerate(kinds):
            folder = Path(place) / str(turn)
            shutil.copytree(whole, folder)
            done = DAMAGES[kind](folder, draw)
            outcome, why = outcome_of(folder)
            yield kind, outcome, f"{done}: {why}"
            shutil.rmtree(folder)


def table(counts: dict[str, dict[str, int]]) -> str:
    """The counts in Markdown."""
    lines = ["| damage | count | detected | harmless | missed |", "|---|---|---|---|---|"]
    rows = [(kind, *of_kind.values()) for kind, of_kind in counts.items()]
    rows.append(("all", *(sum(row[column] for row in rows) for column in (1, 2, 3))))
    lines += [
        f"| {kind} | {sum(numbers)} | {' | '.join(map(str, numbers))} |" for kind, *numbers in rows
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the script.

    Returns:
        The exit status: 1 if a damage was missed.
    """
    parser = argparse.ArgumentParser(
        description="Damage checkpoints and see that none of it is loaded."
    )
    parser.add_argument("--damages", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of all choices")
    options = parser.parse_args(arguments)
    counts = fuzz(options.damages, options.seed)
    print(table(counts))
    return int(any(of_kind["missed"] for of_kind in counts.values()))


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _newest(folder: Path) -> Path:
    return _checkpoints(folder)[-1]


def _file(folder: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(_newest(folder).iterdir()))


def _swap(one: Path, other: Path) -> str:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    return f"{_name(one)} and {_name(other)} swapped"


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


if __name__ == "__main__":
    sys.exit(main())
