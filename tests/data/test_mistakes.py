"""Sentences on mistakes in settings, in the words of ``fsdptoys data``, and in the index of a
folder."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdptoys.cli.data import data_command
from fsdptoys.data import DATASETS
from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.errors import ConfigError
from tests.data.mistakes import mistakes
from tests.harness.prepared_data import documents, make, save_tokenizer, write_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and prepared folders to name."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, tokens in {
            "high.bin": range(100),
            "short.bin": range(3),
            "one.bin": [0],
            "empty.bin": [],
        }.items():
            np.array(tokens, dtype="uint16").tofile(name)
        Path("odd.bin").write_bytes(b"123")
        Path("a.txt").write_text("first document")
        Path("d.txt").write_bytes(bytes(range(1, 256)))
        Path("one.txt").write_text("one text " * 13 + "end")
        Path("deep").mkdir()
        Path("deep/empty.txt").touch()
        os.mkfifo("fifo")
        write_lines(Path("a.jsonl"), ["some text"])
        write_lines(Path("many.jsonl"), documents(100), "body")
        write_lines(Path("nothing.jsonl"), ["", None])
        Path("empty").mkdir()
        for name in ("a", "b", "gone", "wide", "short"):
            make(Path(name), count=3 if name == "short" else 20, eval_fraction=0.0)
        Path("gone/shard-00000.bin").unlink()
        change_index("wide", vocab_size=300)
        make(
            Path("words"),
            count=90,
            eval_fraction=0.0,
            tokenizer=save_tokenizer(Path("tokenizer"), None),
        )
    return folder


def change_index(
    folder: str, shard: dict[str, Any] | None = None, **changes: Any
) -> None:
    path = Path(folder, "index.json")
    index = json.loads(path.read_text()) | changes
    index["shards"][0] |= shard or {}
    path.write_text(json.dumps(index))


@pytest.fixture(autouse=True)
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(("setting", "says"), mistakes("settings"))
def test_wrong_setting_is_reported_in_one_sentence(
    setting: list[Any], says: str
) -> None:
    """Oracle: the recorded sentence, also on the second start; wrong settings prepare nothing."""
    kind, seq_len, vocab_size, settings = setting
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            config = DATASETS[kind](**settings)
            config.validate(seq_len, vocab_size)
            config.prepare(seq_len, vocab_size)
        assert str(caught.value) == says.replace("{here}", os.getcwd())
    assert not Path("cache").exists()


@pytest.mark.parametrize(("line", "says"), mistakes("words"))
def test_wrong_words_are_reported_in_one_sentence(line: str, says: str) -> None:
    """Oracle: the recorded sentence; nothing is prepared."""
    with pytest.raises(ConfigError) as caught:
        data_command(line.split())
    assert str(caught.value) == says.replace("{here}", os.getcwd())
    assert not Path("new").exists()


@pytest.mark.parametrize(("change", "says"), mistakes("index"))
def test_invalid_index_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Oracle: the recorded sentence; a shard's name that leads elsewhere is not followed."""
    folder = make(tmp_path / "out", count=3, eval_fraction=0.0)
    change_index(folder, **change)
    with pytest.raises(ConfigError) as caught:
        PreparedConfig(folder=folder).validate(1, 256)
    assert (
        f"has an index.json that cannot be used ({says}); prepare the folder again"
        in str(caught.value)
    )
