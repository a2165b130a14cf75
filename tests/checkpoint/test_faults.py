"""No OSError at any operation loses a complete checkpoint or ends in a traceback."""

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.checkpoint import CheckpointConfig, Checkpointer, manifest, peek
from fsdptoys.checkpoint import checkpointer as keeper
from fsdptoys.checkpoint import select as choice
from fsdptoys.checkpoint.storage import LocalStorage, Storage, open_storage
from fsdptoys.errors import ConfigError
from tests.checkpoint.saves import KEEP, save
from tests.harness.disks import FaultyStorage, refusing

pytestmark = pytest.mark.usefixtures("without_retry_pauses")

UNREADABLE = (errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE, errno.EINTR)
"""Errors that leave a folder's content unknown; the tests alternate between them."""

READING = ("names", "exists", "size", "reading", "read")
"""Operations that may fail with a missing file; the others may fail with a full disk."""


numbers = itertools.count()


def read(storage: Storage, path: str) -> bytes:
    with storage.reading(path) as file:
        return file.read()


def contents(storage: Storage) -> dict[str, list[tuple[str, bytes]]]:
    """Folder → names and bytes of its files, of all that have a manifest."""
    files = {name: storage.names(name) for name in storage.names()}
    complete = [name for name in files if "manifest.json" in files[name]]
    return {
        name: [(file, read(storage, f"{name}/{file}")) for file in files[name]]
        for name in complete
    }


def make_place(kind: str, folder: Path) -> Storage:
    """An empty storage of this kind."""
    return open_storage(
        {
            "path": f"{folder}/{next(numbers)}",
            "memory": f"memory://{folder}/{next(numbers)}",
        }[kind]
    )


def copy_all(storage: Storage, to: Storage) -> None:
    for name in storage.names():
        for file in storage.names(name) or [""]:
            to.make(name if file else "")
            path = f"{name}/{file}".rstrip("/")
            with to.writing(path) as target:
                target.write(read(storage, path))


def damage_newest(storage: Storage) -> None:
    with storage.writing("step-00000003/tensors-00000.safetensors") as file:
        file.write(b"x" * 100)


def move_newest_aside(storage: Storage) -> None:
    """Reproduce the state after a kill between the two renames."""
    storage.move("step-00000003", ".step-00000003.old")


def start(storage: FaultyStorage) -> tuple[list[str], set[str], int | None]:
    """Start a run that saves two steps.

    Returns:
        The messages, the checkpoints that retention may have deleted, and the step resumed from;
        None on an error.
    """
    messages: list[str] = []
    may_go: set[str] = set()
    resumed = None
    config = CheckpointConfig(every=1, keep=KEEP, resume="auto")
    try:
        peek(config, storage.where)
        checkpoints = Checkpointer(config, storage.where, message=messages.append)
        checkpoint = checkpoints.resume()
        if checkpoint is not None:
            checkpoint.load({"model.a": torch.zeros(3, 5)}, weights_only=True)
        resumed = checkpoint.step if checkpoint is not None else 0
        names = [f"step-{step:08d}" for step in range(1, resumed + 1)]
        for step in (resumed + 1, resumed + 2):
            before = len(messages)
            if save(checkpoints, step, -step):
                names.append(f"step-{step:08d}")
                may_go |= set(names[:-KEEP])
            else:
                assert len(messages) > before, "a save failed without a sentence"
                if storage._storage.exists(f"step-{step:08d}/manifest.json"):
                    # it could not be handed to the disk at once
                    names.append(f"step-{step:08d}")
    except ConfigError as error:
        messages.append(str(error))
    return messages, may_go, resumed


PREPARED = {
    "whole": lambda storage: None,
    "newest damaged": damage_newest,
    "newest set aside": move_newest_aside,
}
SHORT = ("path", "whole")
"""The search of the short level with failures that pass; those with lasting ones are cheaper."""


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("kind", "prepared", "lasting"),
    [
        pytest.param(
            *(kind, name, lasting),
            marks=[pytest.mark.extended]
            if not lasting and (kind, name) != SHORT
            else [],
            id=f"{kind}-{name}-{'lasting' if lasting else 'once'}",
        )
        for kind, names in (
            ("path", list(PREPARED)),
            ("memory", ["whole", "newest damaged"]),
        )
        for name in names
        for lasting in (False, True)
    ],
)
def test_no_single_os_error_loses_a_checkpoint(
    kind: str,
    prepared: str,
    lasting: bool,
    memory_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the bytes of earlier checkpoints, under any name; each operation fails in turn."""
    codes = itertools.cycle(UNREADABLE)
    first = make_place(kind, memory_folder)
    assert all(
        save(Checkpointer(CheckpointConfig(every=1, keep=9), first.where), step, step)
        for step in (1, 2, 3)
    )
    whole = contents(first)
    newest = 3
    if prepared == "newest damaged":
        del whole["step-00000003"]
        newest = 2
    PREPARED[prepared](first)

    def refuse(moment: int, code: int) -> FaultyStorage:
        storage = make_place(kind, memory_folder)
        copy_all(first, storage)
        faulty = FaultyStorage(storage, code, moment, lasting)
        with monkeypatch.context() as patch:
            patch.setattr(keeper, "open_storage", lambda where: faulty)
            patch.setattr(choice, "open_storage", lambda where: faulty)
            messages, may_go, resumed = start(faulty)
        left = contents(storage).values()
        lost = [
            name
            for name, files in whole.items()
            if files not in left and name not in may_go
        ]
        assert not lost, (
            faulty.refused,
            os.strerror(code),
            lost,
            messages,
            storage.names(),
        )
        # A missing checkpoint is skipped or cannot be restored; an unreadable one is never skipped.
        is_gone = code == errno.ENOENT or (lasting and prepared == "newest set aside")
        assert is_gone or resumed in (newest, None), (
            faulty.refused,
            os.strerror(code),
            resumed,
            messages,
        )
        storage.remove("")
        return faulty

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
    code: int, word: str, tmp_path: Path
) -> None:
    """Oracle: the expected message, and the folder as it was; once the file can be read, the run
    resumes from it."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        assert save(Checkpointer(CheckpointConfig(every=1), str(folder)), step, step)
    before = sorted(folder.rglob("*"))
    file = "manifest.json" if word == "never" else "state.json"
    config = CheckpointConfig(
        every=1, resume=f"{folder}/step-00000002" if word == "path" else word
    )
    retries = len(manifest.RETRY_PAUSES_SECONDS)
    for look in (
        lambda: peek(config, str(folder)),
        lambda: Checkpointer(config, str(folder)).resume(),
    ):
        with (
            refusing(
                LocalStorage, "reading", f"^step-00000002/{file}$", code, retries + 1
            ),
            pytest.raises(ConfigError) as refused,
        ):
            look()
        assert str(refused.value) == (
            f"step-00000002 in {folder} cannot be read ({file}: {os.strerror(code)}), and may be "
            "a complete checkpoint; make it readable, or move it out of that folder"
        )
        assert sorted(folder.rglob("*")) == before
        if word != "never":
            with refusing(
                LocalStorage, "reading", f"^step-00000002/{file}$", code, retries
            ):
                checkpoint: Any = look()
            assert (checkpoint if isinstance(checkpoint, dict) else checkpoint.facts)[
                "step"
            ] == 2


@pytest.mark.parametrize(
    "name", ["n" * 300, "/".join(["n" * 200] * 25)], ids=["name", "path"]
)
@pytest.mark.parametrize("every", [0, 1])
def test_too_long_folder_name_is_reported_in_one_sentence(
    name: str, every: int, tmp_path: Path
) -> None:
    """Oracle: the message with the system's error text."""
    for word in ("never", "auto", "must"):
        with pytest.raises(
            ConfigError, match=r"cannot be (read|written) \(File name too long\)"
        ):
            peek(
                CheckpointConfig(every=every, on_signal=False, resume=word),
                f"{tmp_path}/{name}/checkpoints",
            )


def test_unreadable_old_checkpoints_are_neither_counted_nor_deleted(
    tmp_path: Path,
) -> None:
    """Oracle: the remaining names, and one message for any number of saves."""
    messages: list[str] = []
    config = CheckpointConfig(every=1, keep=2)
    checkpoints = Checkpointer(config, str(tmp_path), message=messages.append)
    assert all(save(checkpoints, step, step) for step in (1, 2))
    with refusing(LocalStorage, "reading", "^step-00000002/", errno.EIO):
        assert all(save(checkpoints, step, step) for step in (3, 4))
    assert sorted(os.listdir(tmp_path)) == [
        "latest",
        "step-00000002",
        "step-00000003",
        "step-00000004",
    ]
    assert messages == [
        f"step-00000002 cannot be read (manifest.json: Input/output error), in {tmp_path}, and "
        "is neither counted nor deleted"
    ]
    assert save(checkpoints, 5, 5)
    assert (
        sorted(os.listdir(tmp_path)) == ["latest", "step-00000004", "step-00000005"]
        and len(messages) == 1
    )


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("in_background", [False, True])
def test_full_disk_is_freed_of_expired_checkpoints(
    keep: int, in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a disk with room for three; lowering ``keep`` makes room, and otherwise nothing is
    deleted."""
    first = Checkpointer(CheckpointConfig(every=1, keep=3), str(tmp_path))
    assert all(save(first, step, step) for step in (1, 2, 3))
    writing = LocalStorage.writing

    def limited(storage: LocalStorage, path: str) -> Any:
        if path.endswith(".safetensors") and len(list(tmp_path.glob("step-*"))) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return writing(storage, path)

    monkeypatch.setattr(LocalStorage, "writing", limited)
    messages: list[str] = []
    config = CheckpointConfig(
        every=1, keep=keep, resume="auto", async_save=in_background
    )
    checkpoints = Checkpointer(config, str(tmp_path), message=messages.append)
    assert checkpoints.resume() is not None
    save(checkpoints, 4, 4)
    assert checkpoints.finish() == (keep < 3)
    left = [path.name for path in sorted(tmp_path.glob("step-*"))]
    if keep < 3:
        assert (
            left == [f"step-0000000{step}" for step in range(5 - keep, 5)]
            and messages == []
        )
    else:
        assert left == [f"step-0000000{step}" for step in (1, 2, 3)]
        assert messages == [
            f"checkpoint of step 4 was not saved: No space left on device in {tmp_path}; the "
            "newest one is step-00000003; free space or set checkpoint.folder to another disk"
        ]
