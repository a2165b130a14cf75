"""One process: saving and deleting checkpoints, and selecting or rejecting the one to resume
from."""

import errno
import multiprocessing
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptoys.checkpoint import CheckpointConfig, Checkpointer, Form, peek
from fsdptoys.checkpoint import checkpointer as keeper
from fsdptoys.checkpoint.manifest import to_json
from fsdptoys.checkpoint.storage import LocalStorage
from fsdptoys.errors import ConfigError
from tests.checkpoint.damages import SENTENCES, flip
from tests.harness.disks import refusing
from tests.harness.folders import (
    check,
    copied,
    facts,
    make_series,
    refusal,
    resume,
    save,
)
from tests.harness.processes import wait_until

ONE, TWO, THREE = (f"step-0000000{step}" for step in (1, 2, 3))
TENSORS = "tensors-00000.safetensors"


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("kind", ["path", "file", "memory"])
def test_saved_checkpoint_is_loaded_exactly(
    kind: str, in_background: bool, form: Form, tmp_path: Path
) -> None:
    """Oracle: the tensors and facts before the save; a second run resumes from the last step."""
    where = {
        "path": f"{tmp_path}/a/b",
        "file": f"file://{tmp_path}/c",
        "memory": f"memory://{tmp_path}",
    }[kind]
    config = CheckpointConfig(
        every=1,
        keep=2,
        keep_every=3,
        async_save=in_background,
        form=form,
        resume="auto",
    )
    messages: list[str] = []
    assert peek(config, where) is None
    checkpoints = Checkpointer(config, where, message=messages.append)
    assert checkpoints.resume() is None and checkpoints.last_step is None
    for step in range(1, 9):
        assert save(checkpoints, step) and checkpoints.last_step == step
    assert checkpoints.finish() and checkpoints.report() == []
    names = ["latest", THREE, "step-00000006", "step-00000007", "step-00000008"]
    assert checkpoints._storage.names() == names
    with checkpoints._storage.reading("latest") as file:
        assert file.read() == b"step-00000008\n"
    assert peek(config, where) == facts(8) | {"step": 8, "world_size": 1}
    again = Checkpointer(config, where, message=messages.append)
    check(again.resume(), 8)
    assert again.last_step == 8 and save(again, 8) and save(again, 9) and again.finish()
    check(Checkpointer(config, where).resume(), 9)
    assert messages == []


def test_step_is_saved_once_per_run_and_earlier_runs_are_kept(tmp_path: Path) -> None:
    """Oracle: the values of the tensors; the bytes of the first run's checkpoint, under another
    name."""
    config = CheckpointConfig(every=1, resume="auto")
    first = Checkpointer(config, str(tmp_path))
    assert save(first, 5)
    other = {"model.a": torch.ones(1)}
    assert first.save(5, other, {}, {})
    check(resume(tmp_path)[0], 5)
    before = contents(tmp_path / "step-00000005")
    messages: list[str] = []
    second = Checkpointer(config, str(tmp_path), message=messages.append)
    for _ in range(2):
        assert second.save(5, other, {}, {})
    assert messages == [
        f"an earlier step-00000005 in {tmp_path} was renamed to step-00000005.replaced-1"
    ]
    checkpoint = resume(tmp_path)[0]
    assert checkpoint is not None and checkpoint.own_facts == {}
    assert sorted(os.listdir(tmp_path)) == [
        "latest",
        "step-00000005",
        "step-00000005.replaced-1",
    ]
    assert contents(tmp_path / "step-00000005.replaced-1") == before


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("value", [(1,), float("nan"), {1: 2}, torch.ones(1)])
def test_values_that_do_not_round_trip_through_json_are_rejected(value: Any) -> None:
    """Oracle: the assertion."""
    with pytest.raises(AssertionError):
        to_json({"key": value})


class Gate(LocalStorage):
    """Blocks writes until it is opened, then raises ``refusal`` if set."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.opened = threading.Event()
        self.refusal: OSError | None = None

    def make(self, folder: str) -> None:
        """See Storage."""
        self.opened.wait()
        if self.refusal is not None:
            raise self.refusal
        super().make(folder)


def test_asynchronous_save_waits_only_for_the_previous_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a disk that blocks until it is opened; meanwhile tensors are changed and buffers
    reused."""
    gate = Gate(str(tmp_path))
    monkeypatch.setattr(keeper, "open_storage", lambda where: gate)
    buffers: list[dict[str, Tensor] | None] = []

    def copy(
        tensors: dict[str, Tensor], into: dict[str, Tensor] | None
    ) -> dict[str, Tensor]:
        buffers.append(into)
        copies = into or {
            name: torch.empty_like(tensor) for name, tensor in tensors.items()
        }
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)
        return copies

    messages: list[str] = []
    checkpoints = Checkpointer(
        CheckpointConfig(every=1, async_save=True),
        str(tmp_path),
        None,
        messages.append,
        copy,
    )
    tensors = {"a": torch.ones(3)}
    assert checkpoints.save(1, tensors, {}, {})
    tensors["a"].zero_()
    assert checkpoints.last_step == 1 and os.listdir(tmp_path) == []
    gate.opened.set()
    assert checkpoints.save(2, tensors, {}, {}) and checkpoints.finish()
    assert buffers == [None, buffers[1]] and buffers[1] is not None
    monkeypatch.undo()
    for name, value in ((ONE, 1.0), (TWO, 0.0)):
        checkpoint, _ = resume(tmp_path / "new", f"{tmp_path}/{name}")
        assert checkpoint is not None and checkpoint.name == name
        loaded = {"a": torch.full((3,), 5.0)}
        checkpoint.load(loaded)
        assert loaded["a"].tolist() == [value] * 3
    gate.refusal = OSError(5, "Input/output error")
    assert checkpoints.save(3, tensors, {}, {}) and checkpoints.last_step == 3
    assert not checkpoints.finish() and checkpoints.last_step == 2
    sentence = (
        f"checkpoint of step 3 was not saved: Input/output error in {tmp_path}; the newest one "
        f"is {TWO}; make it writable"
    )
    assert messages == [sentence] and checkpoints.report() == []


def test_running_save_thread_does_not_block_process_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the process waits for its threads and exits while its disk blocks for good."""
    monkeypatch.setattr(keeper, "open_storage", Gate)

    def begin() -> None:
        save(Checkpointer(CheckpointConfig(every=1, async_save=True), str(tmp_path)), 1)

    process = multiprocessing.get_context("fork").Process(target=begin)
    process.start()
    try:
        wait_until(lambda: process.exitcode is not None, "the exit", [process.pid])  # type: ignore[list-item]
        assert process.exitcode == 0 and os.listdir(tmp_path) == []
    finally:
        process.kill()


def test_unexpected_error_of_an_asynchronous_save_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the error, raised when the next save waits for the previous one."""

    def broken(*args: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(keeper, "save_tensors", broken)
    checkpoints = Checkpointer(
        CheckpointConfig(every=1, async_save=True), str(tmp_path)
    )
    assert save(checkpoints, 1)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        save(checkpoints, 2)


def test_resume_selects_the_documented_checkpoint(series: Path, tmp_path: Path) -> None:
    """Oracle: the step; ``peek`` returns the facts of the same checkpoint."""
    run = tmp_path / "run"
    folder = copied(series, run / "checkpoints")
    new = tmp_path / "new"
    cases: list[tuple[str, Path, int]] = [
        ("auto", folder, 3),
        ("must", folder, 3),
        (str(folder), folder, 3),
        (f"{folder}/{THREE}/", folder, 3),
        (str(run), new, 3),
        (f"{folder}/", new, 3),
        (f"{folder}/{TWO}", new, 2),
    ]
    for word, where, step in cases:
        check(resume(where, word)[0], step)
        facts = peek(CheckpointConfig(resume=word), str(where))
        assert facts is not None and facts["step"] == step
    assert (
        resume(new, "auto") == (None, [])
        and peek(CheckpointConfig(resume="auto"), str(new)) is None
    )
    assert (
        resume(new, "never") == (None, [])
        and peek(CheckpointConfig(), str(new)) is None
    )
    assert peek(CheckpointConfig(resume="auto"), None) is None
    assert not new.exists()
    # After a restart a run resumes from its own checkpoints, even if it started from another run's.
    other = tmp_path / "other"
    make_series(other, (7, 8))
    for word in ("never", "auto", "must", f"{folder}/{TWO}"):
        check(resume(other, word, restarted=True)[0], 8)
        assert (peek(CheckpointConfig(resume=word), str(other), restarted=True) or {})[
            "step"
        ] == 8
    check(resume(new, f"{folder}/{TWO}", restarted=True)[0], 2)


@pytest.mark.parametrize("case", SENTENCES["resume"])
def test_resume_that_would_mix_two_runs_is_refused(
    case: str, series: Path, tmp_path: Path
) -> None:
    """Oracle: the expected message, before any worker starts and by the workers alike."""
    other = copied(series, tmp_path / "other")
    (other / ONE).rename(other / "best")
    places = {"own": str(series), "new": str(tmp_path / "new"), "other": str(other)}
    row = SENTENCES["resume"][case]
    folder = places["new" if case == "must without any" else "own"]
    message = refusal(folder, row["word"].format(**places))
    assert message == row["says"].format(**places) or re.fullmatch(row["says"], message)


def test_must_reports_skipped_checkpoints(series: Path, tmp_path: Path) -> None:
    """Oracle: the message; ``auto`` starts from scratch with one message for each."""
    folder = copied(series, tmp_path / "checkpoints")
    for name in (ONE, TWO, THREE):
        (folder / name / "manifest.json").unlink()
    reasons = [
        f"{name} is incomplete: it has no manifest.json" for name in (THREE, TWO, ONE)
    ]
    assert f"in {folder} ({'; '.join(reasons)}); set" in refusal(folder, "must")
    checkpoint, messages = resume(folder)
    assert checkpoint is None and messages == [
        f"{reason}, in {folder}; there is no older one" for reason in reasons
    ]
    assert resume(folder, "never")[0] is None


def test_unwritable_checkpoint_folder_is_reported_before_the_run(
    tmp_path: Path,
) -> None:
    """Oracle: the expected message; checks of writable folders create none."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(
        ConfigError,
        match=f"checkpoints go to {file}/x, which cannot be written .*; set checkpoint",
    ):
        peek(CheckpointConfig(every=1), f"{file}/x")
    assert peek(CheckpointConfig(every=1), str(tmp_path / "a" / "b")) is None
    assert peek(CheckpointConfig(every=1), f"memory://{tmp_path}/probe") is None
    assert os.listdir(tmp_path) == ["file"]
    proc = "/proc/none"
    with pytest.raises(ConfigError, match="which cannot be written"):
        peek(CheckpointConfig(every=1), proc)


def test_retention_deletes_old_checkpoints_and_keeps_damaged_ones(
    tmp_path: Path,
) -> None:
    """Oracle: the remaining names. Damaged, newer and other runs' checkpoints are neither counted
    nor deleted."""
    folder = tmp_path / "checkpoints"
    aside = tmp_path / "aside"
    make_series(folder, (1, 2, 3, 4, 5, 6, 9))
    (folder / "step-00000009").rename(aside)
    (folder / THREE / "manifest.json").unlink()
    os.truncate(folder / "step-00000005" / TENSORS, 3)
    (folder / "notes.txt").touch()
    (folder / ".step-00000004.partial").mkdir()
    (folder / ".step-00000001.deleted").mkdir()
    (folder / ".something.partial").mkdir()
    checkpoints = Checkpointer(
        CheckpointConfig(every=1, keep=2, keep_every=2, resume="auto"), str(folder)
    )
    check(checkpoints.resume(), 6)
    aside.rename(folder / "step-00000009")
    assert save(checkpoints, 7)
    names = [
        TWO,
        THREE,
        "step-00000004",
        "step-00000005",
        "step-00000006",
        "step-00000007",
        "step-00000009",
    ]
    assert sorted(os.listdir(folder)) == [
        ".something.partial",
        "latest",
        "notes.txt",
        *names,
    ]

    messages: list[str] = []
    assert save(Checkpointer(CheckpointConfig(every=1, keep=1), str(folder)), 10)
    assert sorted(os.listdir(folder)) == [
        ".something.partial",
        "latest",
        "notes.txt",
        *names,
        "step-00000010",
    ]
    for name in ("step-00000009", "step-00000010"):
        shutil.rmtree(folder / name)
    broken = Checkpointer(
        CheckpointConfig(every=1, keep=1, resume="auto"),
        str(folder),
        None,
        messages.append,
    )
    check(broken.resume(), 7)

    with refusing(broken._storage, "rename", r"\.deleted$", errno.EPERM):
        assert save(broken, 8)
    assert messages == [
        f"old checkpoints could not be deleted: Operation not permitted at {folder}/step-00000007"
    ]


def test_damaged_checkpoints_do_not_count_toward_keep(tmp_path: Path) -> None:
    """Oracle: the step; damaged checkpoints of the right size must not count toward ``keep``."""
    folder = tmp_path / "checkpoints"
    make_series(folder, (1, 2, 3))
    for name in (TWO, THREE):
        flip(f"{name}/{TENSORS}")(folder)
    checkpoints = Checkpointer(
        CheckpointConfig(every=1, keep=2, resume="auto"), str(folder)
    )
    check(checkpoints.resume(), 1)
    assert save(checkpoints, 4)
    shutil.rmtree(folder / "step-00000004")
    check(resume(folder)[0], 1)
