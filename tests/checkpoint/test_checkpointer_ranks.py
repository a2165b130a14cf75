"""Collective saves and resumes: all ranks follow a finding or failure of one."""

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from fsdptoys.checkpoint import (
    Checkpoint,
    CheckpointConfig,
    Checkpointer,
    Form,
    manifest,
)
from fsdptoys.errors import ConfigError
from tests.checkpoint.damages import flip
from tests.harness.disks import refusing
from tests.harness.folders import (
    distributed,
    facts,
    full_tensors,
    make_series,
    own_facts,
    resume,
    whole,
)
from tests.harness.ranks import run_ranks


def make(
    folder: Path, messages: list[str] | None = None, **config: Any
) -> Checkpointer:
    """A checkpointer of this rank that saves after every step."""
    message = None if messages is None else messages.append
    group = dist.new_group(backend="gloo")
    return Checkpointer(
        CheckpointConfig(every=1, **config), str(folder), group, message, None, whole
    )


def save(checkpoints: Checkpointer, step: int) -> bool:
    rank = dist.get_rank()
    return checkpoints.save(
        step, distributed(full_tensors(step)), facts(step), own_facts(step, rank)
    )


def check_sharded(checkpoint: Checkpoint | None, step: int, dim: int) -> None:
    """Check a checkpoint loaded into shards along ``dim``."""
    assert checkpoint is not None and checkpoint.step == step
    assert checkpoint.facts == facts(step) | {
        "step": step,
        "world_size": checkpoint.facts["world_size"],
    }
    expected = full_tensors(step)
    tensors = distributed(
        {name: torch.full_like(tensor, 77) for name, tensor in expected.items()},
        [Shard(dim)],
    )
    checkpoint.load(tensors)
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, expected[name]), name


def check_same(sentence: str) -> None:
    """Check that all ranks have the same sentence."""
    sentences: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(sentences, sentence)
    assert set(sentences) == {sentence}, sentences


def on_first(action: Callable[[Path], object], folder: Path) -> None:
    """Run an action on rank 0, and a barrier on all ranks."""
    if dist.get_rank() == 0:
        action(folder)
    dist.barrier()


def train_while_saving(folder: Path) -> None:
    """Training collectives continue on other groups, also with ``Form.full``."""
    for form in Form:
        messages: list[str] = []
        checkpoints = make(folder / form.value, messages, form=form, async_save=True)
        for step in (1, 2, 3):
            tensors = distributed(full_tensors(step))
            assert checkpoints.save(
                step, tensors, facts(step), own_facts(step, dist.get_rank())
            )
            for tensor in tensors.values():
                tensor.zero_()
            for _ in range(20):
                total = torch.full((1000,), float(dist.get_rank()))
                dist.all_reduce(total)
                assert (total == sum(range(dist.get_world_size()))).all()
        assert checkpoints.last_step == 3 and checkpoints.finish() and messages == []
        checkpoint = make(folder / form.value, resume="must").resume()
        check_sharded(checkpoint, 3, dim=1)
        assert checkpoint is not None and checkpoint.own_facts == own_facts(
            3, dist.get_rank()
        )


def agree_on_a_failure(folder: Path) -> None:
    """A failed write of any file on the last rank leaves no files behind, and the next save
    succeeds."""
    last = dist.get_world_size() - 1
    cases = [("tensors-", last, Form.sharded), ("rank-", last, Form.sharded)]
    cases += [
        (name, 0, form)
        for name in ("manifest", "state", "tensors.json", "tensors-")
        for form in Form
    ]
    for name, rank, form in cases:
        for in_background in (False, True):
            target = folder / f"{name} {rank} {form.value} {in_background}"
            messages: list[str] = []
            checkpoints = make(target, messages, async_save=in_background, form=form)
            assert save(checkpoints, 1) and checkpoints.finish()
            refuses = dist.get_rank() == rank
            with (
                refusing(checkpoints._storage, "writing", f"/{name}[^/]*$", errno.EIO)
                if refuses
                else nullcontext()
            ):
                assert save(checkpoints, 2) == in_background
                assert not checkpoints.finish() and checkpoints.last_step == 1
            sentence = (
                f"checkpoint of step 2 was not saved: Input/output error in {target} (rank "
                f"{rank}); the newest one is step-00000001; make it writable"
            )
            assert messages == ([sentence] if dist.get_rank() == 0 else []), messages
            assert sorted(os.listdir(target)) == ["latest", "step-00000001"]
            dist.barrier()
            assert (
                save(checkpoints, 2)
                and checkpoints.finish()
                and checkpoints.last_step == 2
            )
            check_sharded(make(target, resume="auto").resume(), 2, dim=0)


def raise_on_all(folder: Path) -> None:
    """An error other than the system's on the last rank is raised on all, and commits nothing."""
    last = dist.get_world_size() - 1
    for in_background in (False, True):
        checkpoints = make(folder / str(in_background), async_save=in_background)
        assert save(checkpoints, 1) and checkpoints.finish()
        writing = checkpoints._storage.writing

        def fail(path: str, writing: Any = writing) -> Any:
            if path.endswith(f"tensors-{last:05d}.safetensors"):
                raise ConfigError("message")
            return writing(path)

        checkpoints._storage.writing = fail  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="message"):
            save(checkpoints, 2)
            checkpoints.finish()
        check_sharded(
            make(folder / str(in_background), resume="auto").resume(), 1, dim=0
        )


def agree_on_damage(folder: Path) -> None:
    """One rank reads the damaged file, and all ranks skip its checkpoint, or raise the same
    message."""
    checkpoints = make(folder, keep=20)
    assert save(checkpoints, 1)
    names = sorted(os.listdir(folder / "step-00000001"))
    for step, name in enumerate(names, start=2):
        assert save(checkpoints, step)
        on_first(flip(f"step-{step:08d}/{name}"), folder)
    messages: list[str] = []
    check_sharded(make(folder, messages, resume="auto").resume(), 1, dim=1)
    assert len(messages) == (len(names) if dist.get_rank() == 0 else 0)
    assert all(
        "is damaged: " in sentence and "resuming from step-00000001" in sentence
        for sentence in messages
    )
    for word in ("never", f"{folder}/step-00000003", str(folder / "none")):
        with pytest.raises(ConfigError) as refused:
            make(folder, resume=word).resume()
        check_same(str(refused.value))
    with pytest.raises(ConfigError, match="must finds no complete"):
        make(folder / "none", resume="must").resume()


def agree_on_unreadable_files(folder: Path) -> None:
    """If one rank cannot read a file, all stop with one message, or all continue after a successful
    retry."""
    assert save(make(folder), 1) and save(make(folder), 2)
    last = dist.get_world_size() - 1
    manifest.RETRY_PAUSES_SECONDS = (0.0, 0.01)
    for name, rank in (("rank-", last), ("tensors-", last), ("state", 0)):
        for times, loads in ((1, False), (9, False), (1, True), (99, True)):
            checkpoints = make(folder, resume="auto")
            checkpoint = checkpoints.resume() if loads else None
            pattern = "/tensors-[^/]*$" if loads else f"/{name}[^/]*$"
            refusals = times if dist.get_rank() == rank else 0
            sentence = ""
            with refusing(
                checkpoints._storage, "reading", pattern, errno.ESTALE, refusals
            ):
                try:
                    if loads:
                        check_sharded(checkpoint, 2, dim=1)
                    else:
                        checkpoints.resume()
                except ConfigError as refused:
                    sentence = str(refused)
            check_same(sentence)
            assert bool(sentence) == (times > 1), (name, times, loads, sentence)
            assert not sentence or (
                f"{folder} cannot be read (" in sentence
                and "Stale file handle" in sentence
            )


def require_a_shared_folder(folder: Path) -> None:
    """A folder local to each node is rejected before the first step, unless no periodic saves are
    configured."""
    own = folder / f"of rank {dist.get_rank()}"
    on_first(Path.mkdir, own)
    with pytest.raises(
        ConfigError, match="where rank 1 does not see what rank 0 writes; set"
    ):
        make(own, resume="auto").resume()
    assert not own.exists() or os.listdir(own) == []
    assert (
        Checkpointer(
            CheckpointConfig(resume="auto"), str(own), dist.new_group()
        ).resume()
        is None
    )


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "body",
    [
        train_while_saving,
        agree_on_a_failure,
        raise_on_all,
        agree_on_damage,
        agree_on_unreadable_files,
        require_a_shared_folder,
    ],
)
def test_all_ranks(
    body: Callable[[Path], None], world_size: int, tmp_path: Path
) -> None:
    """Oracle: the full tensors and the expected messages, in real processes."""
    run_ranks(world_size, body, tmp_path)


def test_checkpoint_loads_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Oracle: the full tensors. Facts of a rank are available only on the number of ranks that
    saved them."""

    def four() -> None:
        assert save(make(tmp_path / "four"), 3)

    def two(name: str) -> None:
        checkpoints = make(tmp_path / name, resume="auto")
        checkpoint = checkpoints.resume()
        check_sharded(checkpoint, 3, dim=1)
        assert checkpoint is not None and checkpoint.own_facts is None
        assert save(checkpoints, 4)

    run_ranks(4, four)
    make_series(tmp_path / "one", (3,))
    run_ranks(2, two, "four")
    run_ranks(2, two, "one")
    checkpoint, _ = resume(tmp_path / "four")
    assert (
        checkpoint is not None
        and checkpoint.own_facts is None
        and checkpoint.facts["world_size"] == 2
    )
    tensors = {
        name: torch.zeros_like(tensor) for name, tensor in full_tensors(4).items()
    }
    checkpoint.load(tensors)
    assert all(
        torch.equal(tensors[name], tensor) for name, tensor in full_tensors(4).items()
    )
