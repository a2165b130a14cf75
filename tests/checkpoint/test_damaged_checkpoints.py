"""One process: damaged and hostile checkpoints are skipped or refused."""

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdptoys.checkpoint import CheckpointConfig, peek
from fsdptoys.checkpoint.checksums import FileSum
from fsdptoys.checkpoint.manifest import Manifest
from fsdptoys.errors import ConfigError
from tests.checkpoint.damages import SENTENCES, Damage, Hostile, change_json, edit_bytes, edit_json, flip
from tests.checkpoint.series import check, check_tensors, copied, resume

ONE, TWO, THREE = (f"step-0000000{step}" for step in (1, 2, 3))
TENSORS = "tensors-00000.safetensors"
MANIFEST = f"{THREE}/manifest.json"


def forge(change: Callable[[dict[str, FileSum]], object], name: str = THREE) -> Damage:
    """A manifest with a valid checksum of its own."""

    def damage(folder: Path) -> None:
        tree = json.loads((folder / THREE / "manifest.json").read_text())["files"]
        files = {path: FileSum(entry["bytes"], entry["sha256"]) for path, entry in tree.items()}
        change(files)
        (folder / THREE / "manifest.json").write_bytes(Manifest(name, files).to_bytes())

    return damage


def replace_by(content: bytes, file: str = "state.json") -> Damage:
    """Other content of a file, with its checksum in the manifest."""

    def damage(folder: Path) -> None:
        (folder / THREE / file).write_bytes(content)
        forge(lambda files: files.update({file: file_sum(content)}))(folder)

    return damage


def file_sum(content: bytes) -> FileSum:
    return FileSum(len(content), hashlib.sha256(content).hexdigest())


def link(path: str, content: bytes | None) -> Damage:
    """Replace a file by a symbolic link: to other content of the same length, or to a pipe."""

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


def replace_folder(fill: Damage = Path.mkdir) -> Damage:
    return lambda folder: (shutil.rmtree(folder / THREE), fill(folder / THREE))


def rename_second(folder: Path) -> None:
    shutil.rmtree(folder / THREE)
    (folder / TWO).rename(folder / THREE)
    shutil.copytree(folder / ONE, folder / TWO)


def list_pipe(folder: Path) -> None:
    os.mkfifo(folder / THREE / "x")
    forge(lambda files: files.update({"x": file_sum(b"")}))(folder)


def replace_by_folder(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()


DAMAGES: dict[str, Damage] = {
    "a flipped bit in the tensors": flip(f"{THREE}/{TENSORS}"),
    "a flipped bit in the index": flip(f"{THREE}/tensors.json"),
    "a flipped bit in a rank's facts": flip(f"{THREE}/rank-00000.json"),
    "a flipped bit in the manifest": flip(MANIFEST),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "an empty folder": replace_folder(),
    "a file in place of the folder": replace_folder(Path.touch),
    "an empty manifest": edit_bytes(lambda text: b"", MANIFEST),
    "a pipe as the manifest": link(MANIFEST, None),
    "a folder as the manifest": replace_by_folder,
    "a missing file": lambda folder: (folder / THREE / TENSORS).unlink(),
    "a truncated file": lambda folder: os.truncate(folder / THREE / TENSORS, 20),
    "a pipe as a file": link(f"{THREE}/state.json", None),
    "a link to another file": link(f"{THREE}/{TENSORS}", b"secret"),
    "a manifest with other spaces": change_json(MANIFEST, lambda tree: None),
    "a newer format": edit_json(MANIFEST, format=2),
    "a renamed folder": rename_second,
    "a manifest that lists a path": forge(lambda files: files.update({"../x": FileSum(1, "0" * 64)})),
    "a manifest that lists an absolute path": forge(lambda files: files.update({"/etc/passwd": FileSum(1, "0" * 64)})),
    "a manifest without the state": forge(lambda files: files.pop("state.json")),
    "a manifest that lists a pipe": list_pipe,
    "a state of another step": replace_by(b'{"step": 2}'),
    "a state with invalid JSON": replace_by(b'{"step": NaN}'),
    "a deeply nested state": replace_by(b"[" * 100_000),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_invalid_checkpoint_is_skipped_or_refused(case: str, series: Path, tmp_path: Path) -> None:
    """Oracle: the expected message, and the values of the previous checkpoint."""
    reason = SENTENCES["damaged checkpoints"][case]
    folder = copied(series, tmp_path / "checkpoints")
    DAMAGES[case](folder)
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


def test_pickles_in_a_checkpoint_folder_are_never_loaded(series: Path, tmp_path: Path) -> None:
    """Oracle: a file that the pickles would create, placed under every name that PyTorch's own loaders would open."""
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
                replace_by(hostile, name)(other)
            try:
                found, _ = resume(other)
                assert found is not None
                check_tensors(found, found.step)
            except ConfigError:
                pass
    assert not made.exists()
    pickle.loads(hostile)
    assert made.exists()


def test_index_with_paths_outside_the_checkpoint_is_refused(series: Path, tmp_path: Path) -> None:
    """Oracle: ConfigError on loading, for an index that the manifest vouches for."""
    folder = copied(series, tmp_path / "checkpoints")
    (folder / "stolen.safetensors").write_bytes((folder / ONE / TENSORS).read_bytes())
    for place in ("../stolen.safetensors", f"{folder}/stolen.safetensors", ".."):
        text = (series / THREE / "tensors.json").read_bytes().replace(TENSORS.encode(), place.encode())
        replace_by(text, "tensors.json")(folder)
        found, _ = resume(folder)
        assert found is not None and found.step == 3
        with pytest.raises(ConfigError, match=r"tensors\.json"):
            check_tensors(found, 3)
