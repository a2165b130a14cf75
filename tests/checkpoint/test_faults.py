"""No OSError at any operation loses a complete checkpoint or ends in a traceback."""

import errno
import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from fsdptoys.checkpoint import CheckpointConfig, Checkpointer, manifest, peek
from fsdptoys.checkpoint import checkpointer as keeper
from fsdptoys.checkpoint import select as choice
from fsdptoys.checkpoint.storage import LocalStorage, Storage, open_storage
from fsdptoys.errors import ConfigError
from tests.checkpoint.disks import FaultyStorage

UNREADABLE = (errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE, errno.EINTR)
"""Errors that leave a folder's content unknown; the tests alternate between them."""

READING = ("names", "exists", "size", "open", "read")
"""Operations that may fail with a missing file; the others may fail with a full disk."""

KEEP = 2

numbers = itertools.count()


@pytest.fixture(autouse=True)
def without_retry_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without pauses."""
    monkeypatch.setattr(manifest, "RETRY_PAUSES_SECONDS", (0.0, 0.0))


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where syncs are free."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def save(checkpoints: Checkpointer, step: int, value: float) -> bool:
    return checkpoints.save(step, {"model.a": torch.full((3,), float(value))}, {"value": value}, {"own": value})


def contents(storage: Storage) -> dict[str, str]:
    """Folder → sum of its files' names and bytes, of all that have a manifest."""
    found = {}
    for name in storage.names():
        files = storage.names(name)
        if "manifest.json" not in files:
            continue
        digest = hashlib.sha256()
        for file in files:
            with storage.reading(f"{name}/{file}") as opened:
                content = opened.read()
            digest.update(f"{file} {len(content)} ".encode() + content)
        found[name] = digest.hexdigest()
    return found


def make_place(kind: str, folder: Path) -> Storage:
    """An empty storage of this kind."""
    return open_storage({"path": f"{folder}/{next(numbers)}", "memory": f"memory://{folder}/{next(numbers)}"}[kind])


def copy(storage: Storage, to: Storage) -> None:
    for name in storage.names():
        for file in storage.names(name) or [""]:
            to.make(name if file else "")
            path = f"{name}/{file}".rstrip("/")
            with storage.reading(path) as source, to.writing(path) as target:
                target.write(source.read())


def damage_newest(storage: Storage) -> None:
    with storage.writing("step-00000003/tensors-00000.safetensors") as file:
        file.write(b"x" * 100)


def move_newest_aside(storage: Storage) -> None:
    """Reproduce the state after a kill between the two renames."""
    storage.move("step-00000003", ".step-00000003.old")


def leave_unchanged(storage: Storage) -> None:
    pass


def start(storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], set[str], int | None]:
    """Start a run that saves two steps.

    Returns:
        The messages, the checkpoints that retention may have deleted, and the step resumed from; None on an error.
    """
    monkeypatch.setattr(keeper, "open_storage", lambda where: storage)
    monkeypatch.setattr(choice, "open_storage", lambda where: storage)
    messages: list[str] = []
    may_go: set[str] = set()
    resumed = None
    config = CheckpointConfig(every=1, keep=KEEP, resume="auto")
    try:
        peek(config, storage.where)
        checkpoints = Checkpointer(config, storage.where, message=messages.append)
        found = checkpoints.resume()
        if found is not None:
            found.load({"model.a": torch.zeros(3)})
        step = resumed = found.step if found is not None else 0
        have = [f"step-{each:08d}" for each in range(1, step + 1)]
        for each in (step + 1, step + 2):
            before = len(messages)
            if save(checkpoints, each, -each):
                have.append(f"step-{each:08d}")
                may_go |= set(have[:-KEEP])
            else:
                assert len(messages) > before, "a save failed without a sentence"
                if f"step-{each:08d}" in storage.committed():
                    have.append(f"step-{each:08d}")  # it could not be handed to the disk at once
    except ConfigError as error:
        messages.append(str(error))
    finally:
        monkeypatch.undo()
    monkeypatch.setattr(manifest, "RETRY_PAUSES_SECONDS", (0.0, 0.0))
    return messages, may_go, resumed


PREPARED = {"whole": leave_unchanged, "newest damaged": damage_newest, "newest set aside": move_newest_aside}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("prepared", PREPARED)
@pytest.mark.parametrize("kind", ["path", "memory"])
def test_no_single_os_error_loses_a_checkpoint(
    kind: str, prepared: str, lasting: bool, memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the bytes of earlier checkpoints, under any name; each operation fails in turn."""
    if kind == "memory" and prepared == "newest set aside":
        pytest.skip("nothing is renamed there")
    prepare, codes = PREPARED[prepared], itertools.cycle(UNREADABLE)
    first = make_place(kind, memory_folder)
    assert all(save(Checkpointer(CheckpointConfig(every=1, keep=9), first.where), step, step) for step in (1, 2, 3))
    whole = contents(first)
    if prepare is damage_newest:
        del whole["step-00000003"]
    prepare(first)
    newest = 2 if prepare is damage_newest else 3

    def refuse(moment: int, code: int) -> FaultyStorage:
        storage = make_place(kind, memory_folder)
        copy(first, storage)
        faulty = FaultyStorage(storage, code, moment, lasting)
        messages, may_go, resumed = start(faulty, monkeypatch)
        left = set(contents(storage).values())
        lost = [name for name, digest in whole.items() if digest not in left and name not in may_go]
        assert not lost, (faulty.refused, os.strerror(code), lost, messages, storage.names())
        # A missing checkpoint is skipped or cannot be restored; an unreadable one is never skipped.
        is_gone = code == errno.ENOENT or (lasting and prepare is move_newest_aside)
        assert is_gone or resumed in (newest, None), (faulty.refused, os.strerror(code), resumed, messages)
        storage.remove("")
        return faulty

    # Without a refusal it does as it should, and how many operations that takes.
    operations = refuse(-1, 0).operations
    assert len(operations) > 150
    paths: set[str] = set()
    for moment, operation in enumerate(operations):
        kind_of, _, path = operation.partition(" ")
        if lasting and path in paths:
            continue  # refused all along by now
        paths.add(path)
        for code in (next(codes), errno.ENOENT if kind_of in READING else errno.ENOSPC):
            assert (refuse(moment, code).refused or "").startswith(f"{kind_of} ")


@pytest.mark.parametrize("code", UNREADABLE)
@pytest.mark.parametrize("word", ["auto", "must", "never", "path"])
def test_start_stops_at_an_unreadable_checkpoint(
    code: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message, and the folder as it was; once the file can be read, the run resumes from it."""
    folder = tmp_path / "checkpoints"
    assert save(Checkpointer(CheckpointConfig(every=1), str(folder)), 1, 1) and save(
        Checkpointer(CheckpointConfig(every=1), str(folder)), 2, 2
    )
    before = sorted(folder.rglob("*"))
    file = "manifest.json" if word == "never" else "state.json"
    config = CheckpointConfig(every=1, resume=f"{folder}/step-00000002" if word == "path" else word)
    refusals = len(manifest.RETRY_PAUSES_SECONDS) + 1
    reading = LocalStorage.reading

    def refuse(storage: LocalStorage, path: str) -> Any:
        nonlocal refusals
        if path == f"step-00000002/{file}" and refusals > 0:
            refusals -= 1
            raise OSError(code, os.strerror(code), path)
        return reading(storage, path)

    monkeypatch.setattr(LocalStorage, "reading", refuse)
    sentence = (
        f"step-00000002 in {folder} cannot be read ({file}: {os.strerror(code)}), and may be a complete checkpoint; "
        "make it readable, or move it out of that folder"
    )
    for look in (
        lambda: peek(config, str(folder)),
        lambda: Checkpointer(config, str(folder)).resume(),
    ):
        refusals = len(manifest.RETRY_PAUSES_SECONDS) + 1
        with pytest.raises(ConfigError) as refused:
            look()
        assert str(refused.value) == sentence
        assert sorted(folder.rglob("*")) == before
        if word != "never":
            refusals = len(manifest.RETRY_PAUSES_SECONDS)
            found: Any = look()
            assert (found if isinstance(found, dict) else found.facts)["step"] == 2


def test_missing_permission_is_not_reported_as_damage(tmp_path: Path) -> None:
    """Oracle: the expected message of the system itself, for a process that may not read one file."""
    assert save(Checkpointer(CheckpointConfig(every=1), str(tmp_path)), 1, 1)
    (tmp_path / "step-00000001" / "state.json").chmod(0)
    if os.access(tmp_path / "step-00000001" / "state.json", os.R_OK):
        pytest.skip("root reads everything")
    with pytest.raises(ConfigError, match=r"cannot be read \(state.json: Permission denied\), and may be a whole"):
        peek(CheckpointConfig(resume="auto"), str(tmp_path))


@pytest.mark.parametrize("name", ["n" * 300, "/".join(["n" * 200] * 25)], ids=["name", "path"])
@pytest.mark.parametrize("every", [0, 1])
def test_too_long_folder_name_is_reported_in_one_sentence(name: str, every: int, tmp_path: Path) -> None:
    """Oracle: the message with the system's error text."""
    for word in ("never", "auto", "must"):
        with pytest.raises(ConfigError, match=r"cannot be (read|written) \(File name too long\)"):
            peek(CheckpointConfig(every=every, on_signal=False, resume=word), f"{tmp_path}/{name}/checkpoints")


def test_unreadable_old_checkpoints_are_neither_counted_nor_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the remaining names, and one message for any number of saves."""
    messages: list[str] = []
    config = CheckpointConfig(every=1, keep=2)
    checkpoints = Checkpointer(config, str(tmp_path), message=messages.append)
    assert all(save(checkpoints, step, step) for step in (1, 2))
    reading = LocalStorage.reading

    def refuse(storage: LocalStorage, path: str) -> Any:
        if path.startswith("step-00000002/"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return reading(storage, path)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "reading", refuse)
        assert all(save(checkpoints, step, step) for step in (3, 4))
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000002", "step-00000003", "step-00000004"]
    assert messages == [
        f"step-00000002 cannot be read (manifest.json: Input/output error), in {tmp_path}, and is neither counted nor "
        "deleted"
    ]
    assert save(checkpoints, 5, 5)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000004", "step-00000005"] and len(messages) == 1


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("in_background", [False, True])
def test_full_disk_is_freed_of_expired_checkpoints(
    keep: int, in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a disk with room for three; lowering ``keep`` makes room, and otherwise nothing is deleted."""
    first = Checkpointer(CheckpointConfig(every=1, keep=3), str(tmp_path))
    assert all(save(first, step, step) for step in (1, 2, 3))
    writing = LocalStorage.writing

    @contextmanager
    def limited(storage: LocalStorage, path: str) -> Iterator[BinaryIO]:
        if path.endswith(".safetensors") and len(list(tmp_path.glob("step-*"))) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        with writing(storage, path) as file:
            yield file

    monkeypatch.setattr(LocalStorage, "writing", limited)
    messages: list[str] = []
    config = CheckpointConfig(every=1, keep=keep, resume="auto", async_save=in_background)
    checkpoints = Checkpointer(config, str(tmp_path), message=messages.append)
    assert checkpoints.resume() is not None
    save(checkpoints, 4, 4)
    assert checkpoints.finish() == (keep < 3)
    left = [path.name for path in sorted(tmp_path.glob("step-*"))]
    if keep == 3:
        assert left == [f"step-0000000{step}" for step in (1, 2, 3)]
        assert messages == [
            f"checkpoint of step 4 was not saved: No space left on device in {tmp_path}; the newest one is "
            "step-00000003; free space or set checkpoint.folder to another disk"
        ]
    else:
        assert left == [f"step-0000000{step}" for step in range(5 - keep, 5)] and messages == []
