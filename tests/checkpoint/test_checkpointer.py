"""One process: saving and deleting checkpoints, and selecting or rejecting the one to resume from."""

import hashlib
import json
import multiprocessing
import os
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptoys.checkpoint import CheckpointConfig, Checkpointer, Form, peek
from fsdptoys.checkpoint import checkpointer as keeper
from fsdptoys.checkpoint.checksums import FileSum
from fsdptoys.checkpoint.manifest import Manifest, to_json
from fsdptoys.checkpoint.storage import LocalStorage
from fsdptoys.errors import ConfigError
from tests.checkpoint.damages import Hostile
from tests.checkpoint.series import Damage, check, check_tensors, copied, facts, make_series, resume, save

ONE, TWO, THREE = (f"step-0000000{step}" for step in (1, 2, 3))
TENSORS = "tensors-00000.safetensors"


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3; not to be written to."""
    folder = tmp_path_factory.mktemp("series") / "checkpoints"
    make_series(folder)
    return folder


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("kind", ["path", "file", "memory"])
def test_what_is_saved_is_loaded_exactly(kind: str, in_background: bool, form: Form, tmp_path: Path) -> None:
    """Oracle: tensors and facts before they were saved; then the next run, which starts where this one ended."""
    where = {"path": f"{tmp_path}/a/b", "file": f"file://{tmp_path}/c", "memory": f"memory://{tmp_path}"}[kind]
    config = CheckpointConfig(every=1, keep=2, keep_every=3, async_save=in_background, form=form, resume="auto")
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


def test_a_step_is_saved_once_by_a_run_and_again_by_another(tmp_path: Path) -> None:
    """Oracle: the values of the tensors; the bytes of the first run's checkpoint, under another name."""
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
    assert messages == [f"an earlier step-00000005 in {tmp_path} was renamed to step-00000005.replaced-1"]
    found = resume(tmp_path)[0]
    assert found is not None and found.own_facts == {}
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000005", "step-00000005.replaced-1"]
    assert contents(tmp_path / "step-00000005.replaced-1") == before


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("value", [(1,), float("nan"), {1: 2}, torch.ones(1)])
def test_facts_that_would_come_back_as_something_else_are_not_taken(value: Any) -> None:
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
        self.opened.wait(60)
        if self.refusal is not None:
            raise self.refusal
        super().make(folder)


def test_a_save_in_the_background_stops_for_nothing_but_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a disk that blocks until it is opened; meanwhile tensors are changed and buffers reused."""
    gate = Gate(str(tmp_path))
    monkeypatch.setattr(keeper, "open_storage", lambda where: gate)
    given: list[dict[str, Tensor] | None] = []

    def copy(tensors: dict[str, Tensor], into: dict[str, Tensor] | None) -> dict[str, Tensor]:
        given.append(into)
        copies = into or {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)
        return copies

    messages: list[str] = []
    checkpoints = Checkpointer(CheckpointConfig(every=1, async_save=True), str(tmp_path), None, messages.append, copy)
    tensors = {"a": torch.ones(3)}
    assert checkpoints.save(1, tensors, {}, {})
    tensors["a"].zero_()
    assert checkpoints.last_step == 1 and os.listdir(tmp_path) == []
    gate.opened.set()
    assert checkpoints.save(2, tensors, {}, {}) and checkpoints.finish()
    assert given == [None, given[1]] and given[1] is not None
    monkeypatch.undo()
    aside = tmp_path.with_name(TWO)
    for step, value in ((2, 0.0), (1, 1.0)):
        found, _ = resume(tmp_path)
        assert found is not None and found.step == step
        loaded = {"a": torch.full((3,), 5.0)}
        found.load(loaded)
        assert loaded["a"].tolist() == [value] * 3
        if step == 2:
            (tmp_path / TWO).rename(aside)
    aside.rename(tmp_path / TWO)
    gate.refusal = OSError(5, "Input/output error")
    assert checkpoints.save(3, tensors, {}, {}) and checkpoints.last_step == 3
    assert not checkpoints.finish() and checkpoints.last_step == 2
    sentence = (
        f"checkpoint of step 3 was not saved: Input/output error in {tmp_path}; the newest one is {TWO}; make it "
        "writable"
    )
    assert messages == [sentence] and checkpoints.report() == []


def test_a_thread_that_still_saves_does_not_keep_a_process_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the process waits for its threads and exits while its disk still blocks for a minute."""
    monkeypatch.setattr(keeper, "open_storage", Gate)

    def begin() -> None:
        save(Checkpointer(CheckpointConfig(every=1, async_save=True), str(tmp_path)), 1)

    process = multiprocessing.get_context("fork").Process(target=begin)
    process.start()
    process.join(30)
    try:
        assert process.exitcode == 0 and os.listdir(tmp_path) == []
    finally:
        process.kill()


def test_an_error_in_the_background_that_is_not_the_disks_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the error, when the next save waits for the one before."""

    def broken(*args: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(keeper, "save_tensors", broken)
    checkpoints = Checkpointer(CheckpointConfig(every=1, async_save=True), str(tmp_path))
    assert save(checkpoints, 1)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        save(checkpoints, 2)


def flip(path: str) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray((folder / path).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / path).write_bytes(content)

    return damage


def edit(path: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tree = json.loads((folder / path).read_text())
        change(tree)
        (folder / path).write_text(json.dumps(tree))

    return damage


def forge(change: Callable[[dict[str, FileSum]], object], name: str = THREE) -> Damage:
    """A manifest whose own sum is right."""

    def damage(folder: Path) -> None:
        tree = json.loads((folder / THREE / "manifest.json").read_text())["files"]
        files = {path: FileSum(entry["bytes"], entry["sha256"]) for path, entry in tree.items()}
        change(files)
        (folder / THREE / "manifest.json").write_bytes(Manifest(name, files).to_bytes())

    return damage


def replace_by(content: str) -> Damage:
    """A state whose sum the manifest knows."""

    def damage(folder: Path) -> None:
        text = content.encode()
        (folder / THREE / "state.json").write_bytes(text)
        forge(lambda files: files.update({"state.json": FileSum(len(text), hashlib.sha256(text).hexdigest())}))(folder)

    return damage


def link(path: str, content: bytes | None) -> Damage:
    """A file becomes a symbolic link to one elsewhere: with other content of the same length, or a pipe."""

    def damage(folder: Path) -> None:
        elsewhere = folder.parent / "elsewhere"
        if content is None:
            os.mkfifo(elsewhere)
        else:
            size = (folder / path).stat().st_size
            elsewhere.write_bytes((content * size)[:size])
        (folder / path).unlink()
        (folder / path).symlink_to(elsewhere)

    return damage


MANIFEST_DAMAGED = "is damaged: its manifest.json cannot be used"
OTHER_SUM = "is damaged: the SHA-256 of {} is not the one that manifest.json says"

DAMAGES: dict[str, tuple[Damage, str]] = {
    "a flipped bit in the tensors": (flip(f"{THREE}/{TENSORS}"), OTHER_SUM.format(TENSORS)),
    "a flipped bit in the index": (flip(f"{THREE}/tensors.json"), OTHER_SUM.format("tensors.json")),
    "a flipped bit in a rank's facts": (
        flip(f"{THREE}/rank-00000.json"),
        OTHER_SUM.format("rank-00000.json"),
    ),
    "a flipped bit in the manifest": (flip(f"{THREE}/manifest.json"), MANIFEST_DAMAGED),
    "no manifest": (lambda f: (f / THREE / "manifest.json").unlink(), "is incomplete: it has no manifest.json"),
    "an empty folder": (
        lambda f: (shutil.rmtree(f / THREE), (f / THREE).mkdir()),
        "is incomplete: it has no manifest.json",
    ),
    "a file in its place": (
        lambda f: (shutil.rmtree(f / THREE), (f / THREE).touch()),
        "is incomplete: it has no manifest.json",
    ),
    "an empty manifest": (
        lambda f: (f / THREE / "manifest.json").write_bytes(b""),
        "is damaged: its manifest.json holds 0 bytes",
    ),
    "a manifest that is a pipe": (link(f"{THREE}/manifest.json", None), "is damaged: its manifest.json holds 0 bytes"),
    "a manifest that is a folder": (
        lambda f: ((f / THREE / "manifest.json").unlink(), (f / THREE / "manifest.json").mkdir()),
        "is damaged: (its )?manifest.json .*",
    ),
    "a file that is missing": (lambda f: (f / THREE / TENSORS).unlink(), f"is damaged: {TENSORS} is missing"),
    "a file that is too short": (
        lambda f: os.truncate(f / THREE / TENSORS, 20),
        f"is damaged: {TENSORS} holds 20 bytes, and manifest.json says [0-9]+",
    ),
    "a file that is a pipe": (link(f"{THREE}/state.json", None), "is damaged: state.json holds 0 bytes, and .*"),
    "a link to elsewhere": (link(f"{THREE}/{TENSORS}", b"secret"), OTHER_SUM.format(TENSORS)),
    "a manifest with other spaces": (edit(f"{THREE}/manifest.json", lambda tree: None), MANIFEST_DAMAGED),
    "a newer format": (
        edit(f"{THREE}/manifest.json", lambda tree: tree.update(format=2)),
        "is of format 2, which a newer fsdptoys wrote; this one reads 1",
    ),
    "a renamed folder": (
        lambda f: (shutil.rmtree(f / THREE), (f / TWO).rename(f / THREE), shutil.copytree(f / ONE, f / TWO)),
        f"is damaged: its manifest.json is that of '{TWO}'",
    ),
    "a manifest that lists a path": (
        forge(lambda files: files.update({"../x": FileSum(1, "0" * 64)})),
        MANIFEST_DAMAGED,
    ),
    "a manifest that lists an absolute path": (
        forge(lambda files: files.update({"/etc/passwd": FileSum(1, "0" * 64)})),
        MANIFEST_DAMAGED,
    ),
    "a manifest without the state": (
        forge(lambda files: files.pop("state.json")),
        "is damaged: its manifest.json lists files that no checkpoint has, or too few",
    ),
    "a manifest that lists a pipe": (
        lambda f: (
            os.mkfifo(f / THREE / "x"),
            forge(lambda files: files.update({"x": FileSum(0, hashlib.sha256().hexdigest())}))(f),
        ),
        "is damaged: its manifest.json lists files that no checkpoint has, or too few",
    ),
    "a state of another step": (replace_by('{"step": 2}'), "is damaged: state.json is that of step 2"),
    "a state that is no JSON": (replace_by('{"step": NaN}'), "is damaged: state.json is not JSON .*"),
    "a state of endless depth": (replace_by("[" * 100_000), "is damaged: state.json is not JSON .*"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_checkpoint_that_is_not_whole_is_passed_over_or_refused(case: str, series: Path, tmp_path: Path) -> None:
    """Oracle: the sentence; and the values of the one before it."""
    damage, reason = DAMAGES[case]
    folder = copied(series, tmp_path / "checkpoints")
    damage(folder)
    twice = case == "a renamed folder"
    found, messages = resume(folder)
    whole, onward = (1, ONE) if twice else (2, TWO)
    check(found, whole)
    assert re.fullmatch(
        rf"{THREE} {reason}(?: \(.*\))?, in {re.escape(str(folder))}; resuming from {onward}", messages[0]
    ), messages
    assert len(messages) == 1 + twice
    for word in (f"{folder}/{THREE}", str(folder)):
        with pytest.raises(ConfigError) as refused:
            resume(folder, word)
        fix = f"move it away and set checkpoint.resume={folder}/{onward}"
        start = re.escape(f"checkpoint.resume={word} is refused: {THREE} in {folder} ")
        assert re.fullmatch(rf"{start}{reason}(?: \(.*\))?; {re.escape(fix)}", str(refused.value)), refused.value
    # Damage that neither sizes nor the state's own sum show is found only by reading everything.
    assert (peek(CheckpointConfig(resume="auto"), str(folder)) or {})["step"] in (whole, 3)


def test_what_could_run_code_is_never_opened(series: Path, tmp_path: Path) -> None:
    """Oracle: a file that the pickles would make; they lie under every name that PyTorch's own loaders would open."""
    folder = copied(series, tmp_path / "checkpoints")
    made = tmp_path / "made"
    hostile = pickle.dumps(Hostile(made))
    for name in (".metadata", "__0_0.distcp", "pytorch_model.bin", "model.pt", "rank-00000.pt", "state.pkl"):
        for place in (folder, *(folder / step for step in (ONE, TWO, THREE))):
            (place / name).write_bytes(hostile)
    check(resume(folder)[0], 3)
    for name in sorted(os.listdir(folder / THREE)):
        for replace in (True, False):
            other = copied(series, tmp_path / f"{name}{replace}")
            (other / THREE / name).write_bytes(hostile)
            if replace and name in ("state.json", "tensors.json", TENSORS, "rank-00000.json"):
                said = FileSum(len(hostile), hashlib.sha256(hostile).hexdigest())
                forge(lambda files, name=name, said=said: files.update({name: said}))(other)  # type: ignore[misc]
            try:
                found, _ = resume(other)
                assert found is not None
                check_tensors(found, found.step)
            except ConfigError:
                pass
    assert not made.exists()
    pickle.loads(hostile)
    assert made.exists()


def test_an_index_that_leads_elsewhere_is_refused(series: Path, tmp_path: Path) -> None:
    """Oracle: ConfigError on loading, for an index that the manifest vouches for."""
    folder = copied(series, tmp_path / "checkpoints")
    (folder / "stolen.safetensors").write_bytes((folder / ONE / TENSORS).read_bytes())
    for place in ("../stolen.safetensors", f"{folder}/stolen.safetensors", ".."):
        text = (series / THREE / "tensors.json").read_bytes().replace(TENSORS.encode(), place.encode())
        (folder / THREE / "tensors.json").write_bytes(text)
        said = FileSum(len(text), hashlib.sha256(text).hexdigest())
        forge(lambda files, said=said: files.update({"tensors.json": said}))(folder)  # type: ignore[misc]
        found, _ = resume(folder)
        assert found is not None and found.step == 3
        with pytest.raises(ConfigError, match=r"tensors\.json"):
            check_tensors(found, 3)


def test_resume_takes_what_its_words_say(series: Path, tmp_path: Path) -> None:
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
    assert resume(new, "auto") == (None, []) and peek(CheckpointConfig(resume="auto"), str(new)) is None
    assert resume(new, "never") == (None, []) and peek(CheckpointConfig(), str(new)) is None
    assert peek(CheckpointConfig(resume="auto"), None) is None
    assert not new.exists()
    # After a restart a run goes on from its own, whatever it began from.
    other = tmp_path / "other"
    make_series(other, (7, 8))
    for word in ("never", "auto", "must", f"{folder}/{TWO}"):
        check(resume(other, word, restarted=True)[0], 8)
        assert (peek(CheckpointConfig(resume=word), str(other), restarted=True) or {})["step"] == 8
    check(resume(new, f"{folder}/{TWO}", restarted=True)[0], 2)


REFUSALS: dict[str, tuple[str, str]] = {
    "never": (
        "never",
        f"checkpoint.resume=never starts from scratch, and {{own}} already holds {THREE}; set "
        "checkpoint.resume=auto to resume from it, or another folder",
    ),
    "must without any": (
        "must",
        "checkpoint.resume=must finds no complete checkpoint in {new}; set checkpoint.resume=auto to start from "
        "scratch, or checkpoint.folder or metrics.run_dir to where they are",
    ),
    "an older one of the same folder": (
        f"{{own}}/{TWO}",
        f"checkpoint.resume={{own}}/{TWO} goes back to before {THREE}, which the next checkpoint.resume=auto would "
        "take; move the newer ones out of {own}, or set metrics.run_dir or checkpoint.folder to another folder",
    ),
    "another run's": (
        "{other}",
        f"checkpoint.resume={{other}} starts a run in {{own}}, which already holds {THREE} of another one; set "
        "checkpoint.resume=auto to resume from that, or another folder",
    ),
    "nothing there": (
        "{new}",
        "checkpoint.resume={new} holds no checkpoint; set it to never, auto or must, or to the folder of a checkpoint, "
        "of several, or of a run",
    ),
    "a step that is not there": (
        "{own}/step-00000009",
        "checkpoint.resume={own}/step-00000009 holds no checkpoint; set it to never, auto or must, or to the "
        "folder of a checkpoint, of several, or of a run",
    ),
    "under another name": (
        "{other}/best",
        "checkpoint.resume={other}/best holds a checkpoint under another name than its own, step-…; give it the name "
        "that its manifest.json says",
    ),
    "a URL of no kind": ("no://such", "no://such is of no kind .*"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_mix_up_two_runs_is_refused(case: str, series: Path, tmp_path: Path) -> None:
    """Oracle: the sentence, before any worker starts and by the workers alike."""
    other = copied(series, tmp_path / "other")
    (other / ONE).rename(other / "best")
    places = {"own": str(series), "new": str(tmp_path / "new"), "other": str(other)}
    word, sentence = (text.format(**places) for text in REFUSALS[case])
    folder = places["new" if case == "must without any" else "own"]
    for refuse in (
        lambda: peek(CheckpointConfig(resume=word), folder),
        lambda: Checkpointer(CheckpointConfig(resume=word), folder).resume(),
    ):
        with pytest.raises(ConfigError) as refused:
            refuse()
        assert str(refused.value) == sentence or re.fullmatch(sentence, str(refused.value))


def test_must_tells_what_was_passed_over(series: Path, tmp_path: Path) -> None:
    """Oracle: the message; ``auto`` starts from scratch with one message for each."""
    folder = copied(series, tmp_path / "checkpoints")
    for name in (ONE, TWO, THREE):
        (folder / name / "manifest.json").unlink()
    reasons = [f"{name} is incomplete: it has no manifest.json" for name in (THREE, TWO, ONE)]
    for refuse in (
        lambda: peek(CheckpointConfig(resume="must"), str(folder)),
        lambda: resume(folder, "must"),
    ):
        with pytest.raises(ConfigError) as refused:
            refuse()
        assert f"in {folder} ({'; '.join(reasons)}); set" in str(refused.value)
    found, messages = resume(folder)
    assert found is None and messages == [f"{reason}, in {folder}; there is no older one" for reason in reasons]
    assert resume(folder, "never")[0] is None


def test_a_folder_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    """Oracle: the sentence; nothing is made for it where it can."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"checkpoints go to {file}/x, which cannot be written .*; set checkpoint"):
        peek(CheckpointConfig(every=1), f"{file}/x")
    assert peek(CheckpointConfig(every=1), str(tmp_path / "a" / "b")) is None
    assert peek(CheckpointConfig(every=1), f"memory://{tmp_path}/probe") is None
    assert os.listdir(tmp_path) == ["file"]
    proc = "/proc/none"
    with pytest.raises(ConfigError, match="which cannot be written"):
        peek(CheckpointConfig(every=1), proc)


def test_old_checkpoints_go_and_what_is_not_whole_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the remaining names. Damaged, newer and other runs' checkpoints are neither counted nor deleted."""
    folder, aside = tmp_path / "checkpoints", tmp_path / "aside"
    make_series(folder, (1, 2, 3, 4, 5, 6, 9))
    (folder / "step-00000009").rename(aside)
    (folder / THREE / "manifest.json").unlink()
    os.truncate(folder / "step-00000005" / TENSORS, 3)
    (folder / "notes.txt").touch()
    (folder / ".step-00000004.partial").mkdir()
    (folder / ".step-00000001.deleted").mkdir()
    (folder / ".something.partial").mkdir()
    checkpoints = Checkpointer(CheckpointConfig(every=1, keep=2, keep_every=2, resume="auto"), str(folder))
    check(checkpoints.resume(), 6)
    aside.rename(folder / "step-00000009")
    assert save(checkpoints, 7)
    kept = [TWO, THREE, "step-00000004", "step-00000005", "step-00000006", "step-00000007", "step-00000009"]
    assert sorted(os.listdir(folder)) == [".something.partial", "latest", "notes.txt", *kept]

    messages: list[str] = []
    assert save(Checkpointer(CheckpointConfig(every=1, keep=1), str(folder)), 10)
    assert sorted(os.listdir(folder)) == [".something.partial", "latest", "notes.txt", *kept, "step-00000010"]
    for name in ("step-00000009", "step-00000010"):
        shutil.rmtree(folder / name)
    broken = Checkpointer(CheckpointConfig(every=1, keep=1, resume="auto"), str(folder), None, messages.append)
    check(broken.resume(), 7)

    def refuse(old: str, new: str) -> None:
        if new.endswith(".deleted"):
            raise OSError(1, "Operation not permitted")
        LocalStorage.rename(broken._storage, old, new)  # type: ignore[arg-type]

    monkeypatch.setattr(broken._storage, "rename", refuse)
    assert save(broken, 8) and len(messages) == 1
    assert messages == [f"old checkpoints could not be deleted: Operation not permitted at {folder}/step-00000007"]


def test_a_run_never_deletes_what_it_goes_on_from_for_what_is_damaged(tmp_path: Path) -> None:
    """Oracle: the step; damaged checkpoints of the right size must not count toward ``keep``."""
    folder = tmp_path / "checkpoints"
    make_series(folder, (1, 2, 3))
    for name in (TWO, THREE):
        flip(f"{name}/{TENSORS}")(folder)
    checkpoints = Checkpointer(CheckpointConfig(every=1, keep=2, resume="auto"), str(folder))
    check(checkpoints.resume(), 1)
    assert save(checkpoints, 4)
    shutil.rmtree(folder / "step-00000004")
    check(resume(folder)[0], 1)
