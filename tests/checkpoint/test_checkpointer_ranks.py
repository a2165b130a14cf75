"""Collective saves and resumes: all ranks follow a finding or failure of one."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from fsdptoys.checkpoint import Checkpoint, CheckpointConfig, Checkpointer, Form, manifest
from fsdptoys.errors import ConfigError
from scripts.ranks import run_ranks
from tests.checkpoint.disks import tree
from tests.checkpoint.series import distributed, facts, full_tensors, make_series, own_facts, resume, whole
from tests.measuring import without_coverage

NUMBERS = 120_000
"""float32 elements of the first checkpoint on the disk of 1 MiB; a second one of twice the size does not fit."""


def save(checkpoints: Checkpointer, step: int) -> bool:
    rank = dist.get_rank()
    return checkpoints.save(step, distributed(full_tensors(step)), facts(step), own_facts(step, rank))


def check_sharded(found: Checkpoint | None, step: int, dim: int) -> None:
    """Check a checkpoint loaded into shards along ``dim``."""
    assert found is not None and found.step == step
    assert found.facts == facts(step) | {"step": step, "world_size": found.facts["world_size"]}
    expected = full_tensors(step)
    tensors = distributed({name: torch.full_like(tensor, 77) for name, tensor in expected.items()}, [Shard(dim)])
    found.load(tensors)
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, expected[name]), name


def on_first(action: Callable[[], object]) -> None:
    """Run an action on rank 0, and a barrier on all ranks."""
    if dist.get_rank() == 0:
        action()
    dist.barrier()


class Cases:
    """One process group; every case gets a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo")

    def run(self) -> None:
        """Run all cases."""
        self.saves_and_resumes()
        self.trains_while_it_saves()
        self.agrees_on_a_failure()
        self.agrees_on_damage()
        self.agrees_on_a_refusal()
        self.agrees_on_unreadable_files()
        self.requires_a_shared_folder()

    def make(self, folder: Path, messages: list[str] | None = None, **config: Any) -> Checkpointer:
        """A checkpointer that saves after every step."""
        message = None if messages is None else messages.append
        return Checkpointer(CheckpointConfig(every=1, **config), str(folder), self.group, message, None, whole)

    def saves_and_resumes(self) -> None:
        """Load into other shards than the saved ones; every rank gets its own facts back."""
        for form in Form:
            folder = self.folder / f"saves {form.value}"
            checkpoints = self.make(folder, form=form)
            assert all(save(checkpoints, step) for step in (1, 2))
            found = self.make(folder, resume="auto").resume()
            check_sharded(found, 2, dim=1)
            assert found is not None and found.own_facts == own_facts(2, self.rank)
            files = set(os.listdir(folder / "step-00000002"))
            shards = {f"tensors-{rank:05d}.safetensors" for rank in range(self.size if form is Form.sharded else 1)}
            ranks = {f"rank-{rank:05d}.json" for rank in range(self.size)}
            assert files == {"manifest.json", "state.json", "tensors.json"} | shards | ranks

    def trains_while_it_saves(self) -> None:
        """Training collectives continue on other groups, also with ``Form.full``."""
        for form in Form:
            folder = self.folder / f"trains {form.value}"
            messages: list[str] = []
            checkpoints = self.make(folder, messages, form=form, async_save=True)
            for step in (1, 2, 3):
                tensors = distributed(full_tensors(step))
                assert checkpoints.save(step, tensors, facts(step), own_facts(step, self.rank))
                for tensor in tensors.values():
                    tensor.zero_()
                for _ in range(20):
                    total = torch.full((1000,), float(self.rank))
                    dist.all_reduce(total)
                    assert (total == sum(range(self.size))).all()
            assert checkpoints.last_step == 3 and checkpoints.finish() and messages == []
            check_sharded(self.make(folder, resume="must").resume(), 3, dim=1)

    def agrees_on_a_failure(self) -> None:
        """A failed write of any file on the last rank leaves no files behind, and the next save succeeds."""
        last = self.size - 1
        for name in ("tensors-", "rank-", "manifest", "state", "tensors.json"):
            rank = last if name in ("tensors-", "rank-") else 0
            for in_background in (False, True):
                folder = self.folder / f"fails {name} {in_background}"
                messages: list[str] = []
                checkpoints = self.make(folder, messages, async_save=in_background)
                assert save(checkpoints, 1) and checkpoints.finish()
                with refusing(name, rank, self.rank, checkpoints):
                    begun = save(checkpoints, 2)
                    assert begun == in_background
                    assert not checkpoints.finish() and checkpoints.last_step == 1
                sentence = (
                    f"checkpoint of step 2 was not saved: Input/output error in {folder} (rank {rank}); the newest one "
                    "is step-00000001; make it writable"
                )
                assert messages == ([sentence] if self.rank == 0 else []), messages
                assert sorted(os.listdir(folder)) == ["latest", "step-00000001"]
                dist.barrier()
                assert save(checkpoints, 2) and checkpoints.finish() and checkpoints.last_step == 2
                check_sharded(self.make(folder, resume="auto").resume(), 2, dim=0)

    def agrees_on_damage(self) -> None:
        """One rank reads the damaged file, and all ranks skip its checkpoint."""
        folder = self.folder / "damaged"
        checkpoints = self.make(folder, keep=20)
        assert save(checkpoints, 1)
        names = sorted(os.listdir(folder / "step-00000001"))
        for step, name in enumerate(names, start=2):
            assert save(checkpoints, step)
            on_first(lambda step=step, name=name: flip(folder / f"step-{step:08d}" / name))  # type: ignore[misc]
        messages: list[str] = []
        found = self.make(folder, messages, resume="auto").resume()
        check_sharded(found, 1, dim=1)
        assert len(messages) == (len(names) if self.rank == 0 else 0)
        assert all("is damaged: " in sentence and "resuming from step-00000001" in sentence for sentence in messages)

    def agrees_on_a_refusal(self) -> None:
        """All ranks raise the same message."""
        folder = self.folder / "damaged"
        words = ["never", f"{folder}/step-00000003", str(self.folder / "none")]
        for word in words:
            with pytest.raises(ConfigError) as refused:
                self.make(folder, resume=word).resume()
            sentences: list[str] = [""] * self.size
            dist.all_gather_object(sentences, str(refused.value))
            assert set(sentences) == {str(refused.value)}
        with pytest.raises(ConfigError, match="must finds no complete"):
            self.make(self.folder / "none", resume="must").resume()

    def agrees_on_unreadable_files(self) -> None:
        """If one rank cannot read a file, all stop with one message, or all continue after a successful retry."""
        folder, last = self.folder / "unreadable", self.size - 1
        assert save(self.make(folder), 1) and save(self.make(folder), 2)
        for name in ("rank-", "tensors-", "state"):
            rank = 0 if name == "state" else last
            for times, loads in ((1, False), (9, False), (1, True), (99, True)):
                checkpoints = self.make(folder, resume="auto")
                sentence = ""
                try:
                    if not loads:
                        with refusing_to_read(name, rank, self.rank, checkpoints, times):
                            checkpoints.resume()
                    else:
                        found = checkpoints.resume()
                        with refusing_to_read("tensors-", rank, self.rank, checkpoints, times):
                            check_sharded(found, 2, dim=1)
                except ConfigError as refused:
                    sentence = str(refused)
                sentences: list[str] = [""] * self.size
                dist.all_gather_object(sentences, sentence)
                assert set(sentences) == {sentence}, sentences
                assert bool(sentence) == (times > 1), (name, times, loads, sentence)
                assert not sentence or (f"{folder} cannot be read (" in sentence and "Stale file handle" in sentence)

    def requires_a_shared_folder(self) -> None:
        """A folder local to each node is rejected before the first step, unless no periodic saves are configured."""
        folder = self.folder / f"of rank {self.rank}"
        on_first(folder.mkdir)
        with pytest.raises(ConfigError, match="where rank 1 does not see what rank 0 writes; set"):
            self.make(folder, resume="auto").resume()
        assert not folder.exists() or os.listdir(folder) == []
        config = CheckpointConfig(resume="auto")
        assert Checkpointer(config, str(folder), self.group).resume() is None


@contextmanager
def refusing(name: str, rank: int, own_rank: int, checkpoints: Checkpointer) -> Iterator[None]:
    """Raise an error when one rank writes its file of this name."""
    storage = checkpoints._storage
    original = storage.writing

    def writing(path: str) -> Any:
        if own_rank == rank and path.rpartition("/")[2].startswith(name):
            return refused(path)
        return original(path)

    @contextmanager
    def refused(path: str) -> Iterator[BinaryIO]:
        with original(path) as file:
            yield file
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    storage.writing = writing  # type: ignore[method-assign]
    yield
    storage.writing = original  # type: ignore[method-assign]


@contextmanager
def refusing_to_read(name: str, rank: int, own_rank: int, checkpoints: Checkpointer, times: int) -> Iterator[None]:
    """Raise ESTALE on one rank, ``times`` times, when it opens a file whose name starts with ``name``."""
    storage, left = checkpoints._storage, times if rank == own_rank else 0
    original = storage.reading

    def reading(path: str) -> Any:
        nonlocal left
        if path.rpartition("/")[2].startswith(name) and left > 0:
            left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return original(path)

    storage.reading = reading  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifest, "RETRY_PAUSES_SECONDS", (0.0, 0.01))
        yield
    storage.reading = original  # type: ignore[method-assign]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_agree_on_the_finding_of_one(world_size: int, tmp_path: Path) -> None:
    """Oracle: the full tensors and the expected messages, in real processes."""
    with nullcontext() if world_size == 2 else without_coverage():
        run_ranks(world_size, lambda: Cases(tmp_path).run())


def test_checkpoint_loads_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Oracle: the full tensors. Facts of a rank are available only on the number of ranks that saved them."""

    def four() -> None:
        assert save(Checkpointer(CheckpointConfig(every=1), str(tmp_path / "four"), dist.new_group()), 3)

    def two(name: str) -> None:
        config = CheckpointConfig(every=1, resume="auto")
        checkpoints = Checkpointer(config, str(tmp_path / name), dist.new_group())
        found = checkpoints.resume()
        check_sharded(found, 3, dim=1)
        assert found is not None and found.own_facts is None
        assert save(checkpoints, 4)

    run_ranks(4, four)
    make_series(tmp_path / "one", (3,))
    run_ranks(2, two, "four")
    run_ranks(2, two, "one")
    found, _ = resume(tmp_path / "four")
    assert found is not None and found.own_facts is None and found.facts["world_size"] == 2
    tensors = {name: torch.zeros_like(tensor) for name, tensor in full_tensors(4).items()}
    found.load(tensors)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in full_tensors(4).items())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("in_background", [False, True])
def test_full_disk_loses_only_one_checkpoint(in_background: bool, small_disk: Path) -> None:
    """Oracle: a file system of one MiB: the sentence, the checkpoint before, and the next once there is room."""
    folder = small_disk / "checkpoints"

    def save_large(checkpoints: Checkpointer, step: int, numbers: int) -> bool:
        tensors = distributed({"a": torch.full((numbers,), float(step))})
        checkpoints.save(step, tensors, {}, {})
        return checkpoints.finish()

    def body() -> None:
        messages: list[str] = []
        config = CheckpointConfig(every=1, async_save=in_background, resume="auto")
        checkpoints = Checkpointer(config, str(folder), dist.new_group(), messages.append)
        assert save_large(checkpoints, 1, NUMBERS)
        dist.barrier()
        before = tree(folder)
        dist.barrier()
        assert not save_large(checkpoints, 2, 2 * NUMBERS)
        if dist.get_rank() == 0:
            assert len(messages) == 1
            start, end = messages[0].split(f"No space left on device in {folder} (rank ", 1)
            assert start == "checkpoint of step 2 was not saved: "
            assert end.endswith(
                "; the newest one is step-00000001; free space or set checkpoint.folder to another disk"
            )
        dist.barrier()
        assert tree(folder) == before
        dist.barrier()
        assert save_large(checkpoints, 2, NUMBERS // 2)
        found = Checkpointer(config, str(folder), checkpoints._ranks.group).resume()
        tensors = distributed({"a": torch.zeros(NUMBERS // 2)})
        assert found is not None
        found.load(tensors)
        assert (tensors["a"] == 2).all()

    run_ranks(2, body)
