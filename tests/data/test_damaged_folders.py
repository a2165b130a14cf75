"""Damaged data folders: those in the cache are prepared again, the user's own are reported with a
fix."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.data import dataset_index
from fsdptoys.data.hf import HFConfig
from fsdptoys.data.packing import Packing
from fsdptoys.data.prepare import prepare_folder
from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.data.shard_writer import PROGRESS_FILE, ShardsWriter
from fsdptoys.errors import ConfigError
from tests.harness.prepared_data import contents, documents, write_lines
from tests.harness.prepared_data import request as make_request

Damage = Callable[[Path], object]

DEEP = b"[" * 200_000


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str) -> Damage:
    return lambda folder: os.truncate(
        folder / name, (folder / name).stat().st_size // 2
    )


def edit(**changes: object) -> Damage:
    def change(folder: Path) -> None:
        tree = json.loads((folder / "index.json").read_text()) | changes
        (folder / "index.json").write_text(json.dumps(tree))

    return change


def replace_by(make: Damage, name: str = "index.json") -> Damage:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


DAMAGES: dict[str, Damage] = {
    "index emptied": write("index.json", b""),
    "index too deep": write("index.json", DEEP),
    "index of another kind": write("index.json", b"[1, 2]"),
    "share out of range": edit(eval_fraction=7),
    "index missing": lambda folder: (folder / "index.json").unlink(),
    "index as a pipe": replace_by(os.mkfifo),
    "index as a folder": replace_by(Path.mkdir),
    "shard truncated": cut("shard-00000.bin"),
    "shard missing": lambda folder: (folder / "shard-00000.bin").unlink(),
    "shard as a pipe": replace_by(os.mkfifo, "shard-00000.bin"),
    "folder as a file": lambda folder: (shutil.rmtree(folder), folder.write_bytes(b"")),
}


PLAN_DAMAGES: dict[str, Damage] = {
    "empty": write("plan.json", b""),
    "negative": write("plan.json", b'{"rows": -1, "pieces": 1, "ids": 1}'),
    "missing": lambda folder: (folder / "plan.json").unlink(),
    "a pipe": replace_by(os.mkfifo, "plan.json"),
    "starts truncated": cut("starts"),
    "rows missing": lambda folder: (folder / "rows").unlink(),
}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of documents."""
    return write_lines(tmp_path / "a.jsonl", documents(50))


@pytest.fixture
def cached(lines: Path, tmp_path: Path) -> tuple[HFConfig, Path]:
    """A configuration, and its prepared folder in the cache."""
    config = HFConfig(files=[str(lines)], cache=str(tmp_path / "cache"), processes=1)
    config.prepare(16, 256)
    (folder,) = (tmp_path / "cache").iterdir()
    return config, folder


@pytest.fixture
def packed(lines: Path, tmp_path: Path) -> tuple[PreparedConfig, Path]:
    """A configuration, and its packing plan in the cache."""
    prepare_folder(make_request(tmp_path / "tokens", lines))
    cache = tmp_path / "cache"
    config = PreparedConfig(
        folder=str(tmp_path / "tokens"), packing=Packing.best_fit, cache=str(cache)
    )
    config.prepare(16, 256)
    (plan,) = cache.iterdir()
    return config, plan


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(("cached", case) for case in DAMAGES),
        *(("packed", case) for case in PLAN_DAMAGES),
    ],
)
def test_damaged_folder_in_a_cache_is_prepared_again(
    kind: str,
    case: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the original bytes, one message that names the folder, and no leftovers in the
    cache."""
    config, folder = request.getfixturevalue(kind)
    before = contents(folder)
    (DAMAGES if kind == "cached" else PLAN_DAMAGES)[case](folder)
    capsys.readouterr()
    config.validate(16, 256)
    assert config.has_eval == config.has_eval and not capsys.readouterr().err
    config.prepare(16, 256)
    lines = capsys.readouterr().err.splitlines()
    sentences = [
        line for line in lines if line.endswith("; the data is prepared again")
    ]
    assert lines[0].startswith(f"fsdptoys: {folder} is damaged; ")
    assert sentences == lines[: kind == "cached"]
    assert contents(folder) == before and list(folder.parent.iterdir()) == [folder]
    config.build(16, 256, 0)
    config.prepare(16, 256)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_user_folder_is_named_and_left_unchanged(
    damage: Damage, lines: Path, tmp_path: Path
) -> None:
    """Oracle: a sentence with the path and ``prepare``; the names of files stay."""
    folder = tmp_path / "tokens"
    prepare_folder(make_request(folder, lines))
    damage(folder)
    before = sorted(tmp_path.rglob("*"))
    for look in (
        lambda config: config.validate(16, 256),
        lambda config: config.build(16, 256, 0),
    ):
        with pytest.raises(
            ConfigError, match=rf"^data\.folder={folder} .*; .*prepare"
        ) as caught:
            look(PreparedConfig(folder=str(folder)))
        assert str(caught.value).isprintable()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("owner", "function", "suffix", "code", "says"),
    [
        (
            dataset_index,
            "read_regular",
            ".json",
            errno.EACCES,
            r"\(index.json: Permission denied\); change its permissions",
        ),
        (Path, "stat", ".bin", errno.EIO, r"\(.*\.bin: Input/output error\)"),
    ],
    ids=["index", "shard"],
)
def test_unreadable_cache_folder_is_not_replaced(
    owner: Any,
    function: str,
    suffix: str,
    code: int,
    says: str,
    cached: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the expected message and the unchanged folder; a system error proves no damage and no
    gap."""
    config, folder = cached
    before = contents(folder)
    original = getattr(owner, function)

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.suffix == suffix:
            raise OSError(code, os.strerror(code), str(path))
        return original(path, *args, **options)

    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match=rf"^{folder} cannot be read {says}"),
    ):
        patch.setattr(owner, function, refuse)
        config.prepare(16, 256)
    assert contents(folder) == before


def test_noise_in_packing_plans_or_document_ends_is_reported(
    packed: tuple[PreparedConfig, Path], tmp_path: Path
) -> None:
    """Oracle: the expected messages; noise of the right size is seen where it is used."""
    config, plan = packed
    folder = tmp_path / "tokens"
    dataset = config.build(16, 256, 0)
    (plan / "starts").write_bytes(b"\xff" * (plan / "starts").stat().st_size)
    with pytest.raises(
        ConfigError, match=rf"damaged rows in {plan} \(row 3\); remove that folder"
    ):
        dataset.train[3]
    (folder / "shard-00000.ends").write_bytes(
        b"\x7f" * (folder / "shard-00000.ends").stat().st_size
    )
    with pytest.raises(
        ConfigError,
        match=rf"shard-00000\.ends does not fit .* ids of its shard; remove {folder} and",
    ):
        config.prepare(17, 256)


def note(**changes: object) -> dict[str, object]:
    shard = {
        "name": "shard-00000",
        "tokens": 2,
        "documents": 1,
    } | changes
    return {"request": "same", "documents": 1, "left_out": 0, "shards": [shard]}


NOTES: dict[str, bytes] = {
    "empty": b"",
    "deep": DEEP,
    "elsewhere": json.dumps(note(name="../precious")).encode(),
    "negative": json.dumps(note(tokens=-1)).encode(),
    "split": json.dumps(note(split=7)).encode(),
    "documents": json.dumps(note() | {"documents": -5}).encode(),
}


@pytest.mark.parametrize("notes", NOTES.values(), ids=NOTES.keys())
def test_damaged_progress_starts_over_and_touches_no_other_file(
    notes: bytes, tmp_path: Path
) -> None:
    """Oracle: an empty folder to write into; files elsewhere keep their bytes."""
    for name in ("precious.bin", "precious.ends"):
        (tmp_path / name).write_bytes(b"keep this")
    part = tmp_path / "out.part"
    part.mkdir()
    (part / PROGRESS_FILE).write_bytes(notes)
    for name in ("shard-00000.bin", "shard-00000.ends"):
        (part / name).write_bytes(b"\0" * 64)
    writer = ShardsWriter(tmp_path / "out", "same", "uint16", 100)
    writer.close()
    assert (
        not writer.resumed
        and writer.progress.documents == 0
        and list(part.iterdir()) == []
    )
    assert (
        (tmp_path / "precious.bin").read_bytes()
        == (tmp_path / "precious.ends").read_bytes()
        == b"keep this"
    )


def test_symbolic_link_in_place_of_a_shard_is_not_followed_for_writing(
    lines: Path, tmp_path: Path
) -> None:
    """Oracle: the target keeps its bytes; ``tests/utils`` has the lock."""
    (tmp_path / "precious").write_bytes(b"keep this" * 9)
    request = make_request(tmp_path / "out", lines)
    part = tmp_path / "out.part"
    part.mkdir()
    (part / "shard-00000.bin").symlink_to(tmp_path / "precious")
    (part / "shard-00000.ends").write_bytes(b"\0" * 64)
    (part / PROGRESS_FILE).write_text(
        json.dumps(note() | {"request": request.fingerprint})
    )
    prepare_folder(request)
    assert (tmp_path / "precious").read_bytes() == b"keep this" * 9
