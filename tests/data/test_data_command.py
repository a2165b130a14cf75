"""``fsdptoys data prepare``, ``show`` and ``check``: output, messages and the display."""

import hashlib
import io
import json
import re
from pathlib import Path

import pytest

from fsdptoys.cli.data import data_command
from fsdptoys.data import Display, PreparedConfig, prepare_folder
from fsdptoys.data.prepare import Advance
from fsdptoys.errors import ConfigError
from tests.data.test_prepare import request, save_tokenizer, write_lines


def run_data(capsys, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = data_command([str(word) for word in words])
    return (status, *capsys.readouterr())


def test_prepare_show_and_check_report_folders_and_damage(tmp_path, capsys):
    """Oracle: counts of two documents; one flipped bit is found, and a truncated file is refused."""
    write_lines(tmp_path / "a.jsonl", ["one", "three"], "body")
    words = [tmp_path / "a.jsonl", "--tokenizer", "bytes", "--field", "body", "--processes", "1"]
    status, out, _ = run_data(capsys, "prepare", *words, "--out", tmp_path / "out")
    assert status == 0 and "train      2 documents, 10 tokens in 1 shard of uint16\neval       nothing\n" in out
    assert run_data(capsys, "show", tmp_path / "out")[1] == out
    tree = json.loads(run_data(capsys, "show", tmp_path / "out", "--json")[1])[0]
    assert tree["splits"] == {"train": {"documents": 2, "tokens": 10}, "eval": {"documents": 0, "tokens": 0}}
    status, out, _ = run_data(capsys, "check", tmp_path / "out")
    assert (status, out) == (0, f"{tmp_path / 'out'}: 1 shard, every byte as it was written\n")
    shard = tmp_path / "out" / "shard-00000.bin"
    content = bytearray(shard.read_bytes())
    content[4] ^= 1
    shard.write_bytes(content)
    status, out, err = run_data(capsys, "check", tmp_path / "out")
    assert (status, out) == (1, "") and "shard-00000.bin differs from its index: its SHA-256 is " in err
    shard.write_bytes(content[:-2])
    with pytest.raises(ConfigError, match=r"has 18 bytes in shard-00000\.bin, where its index says 20; restore the"):
        run_data(capsys, "check", tmp_path / "out")


def test_copy_of_the_tokenizer_is_kept_and_checked(tmp_path, capsys):
    """Oracle: the file's bytes; a changed byte and a missing copy are reported and do not prevent training."""
    pytest.importorskip("tokenizers")
    choice = Path(save_tokenizer(tmp_path / "tokenizer", None))
    write_lines(tmp_path / "a.jsonl", ["one two one two", "two three"])
    words = [tmp_path / "a.jsonl", "--out", tmp_path / "out", "--tokenizer", choice, "--processes", "1"]
    assert run_data(capsys, "prepare", *words)[1].endswith("…; kept in the folder\n")
    copy, content = tmp_path / "out" / "tokenizer.json", (choice / "tokenizer.json").read_bytes()
    assert copy.read_bytes() == content
    config = PreparedConfig(folder=str(tmp_path / "out"))
    assert config.find_tokenizer() == str(copy)
    whole = f"{tmp_path / 'out'}: 1 shard and tokenizer.json, every byte as it was written\n"
    assert run_data(capsys, "check", tmp_path / "out") == (0, whole, "")
    copy.write_bytes(content[:-1] + b" ")
    for damage in ("differs from its index: its SHA-256 is ", "cannot be read (No such file or directory)"):
        status, _, err = run_data(capsys, "check", tmp_path / "out")
        assert status == 1 and f"{copy} {damage}" in err
        with pytest.raises(ConfigError, match=re.escape(f"{copy} {damage}")):
            config.find_tokenizer()
        config.validate(4, 8)
        copy.unlink(missing_ok=True)


def test_folder_without_a_tokenizer_copy_is_read(tmp_path, capsys):
    """Oracle: the same folder with the copy and its index entry."""
    pytest.importorskip("tokenizers")
    choice = save_tokenizer(tmp_path / "tokenizer", None)
    write_lines(tmp_path / "a.jsonl", ["one two one two", "two three"])
    prepare_folder(request(tmp_path / "out", tmp_path / "a.jsonl", tokenizer=choice))
    config = PreparedConfig(folder=str(tmp_path / "out"))
    dataset = config.build(4, 8, 0)
    path = tmp_path / "out" / "index.json"
    tree = json.loads(path.read_text())
    assert tree.pop("tokenizer_file_sha256") == hashlib.sha256(Path(choice, "tokenizer.json").read_bytes()).hexdigest()
    path.write_text(json.dumps(tree))
    (tmp_path / "out" / "tokenizer.json").unlink()
    older = config.build(4, 8, 0)
    assert older.fingerprint == dataset.fingerprint and older.train[0][0].tolist() == [2, 3, 2, 3]
    assert config.find_tokenizer() is None and run_data(capsys, "check", tmp_path / "out")[0] == 0


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_displayed(terminal, monkeypatch):
    """Oracle: the numbers; without a terminal one line per interval and no control codes."""
    now = iter(range(0, 1000, 5))
    monkeypatch.setattr("fsdptoys.data.progress.monotonic", lambda: next(now))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    with Display("preparing", stream) as display:
        for done in (1, 2, 3, 4):
            display.show(Advance(done * 1e6, 4_000_000, 1000 * done, 2_000_000 * done))
    lines = re.sub("\x1b[^a-zA-Z]*[a-zA-Z]", "", stream.getvalue().replace("\r", "\n")).splitlines()
    if terminal:
        *_, last = (line for line in lines if line.strip())
        assert last.startswith("preparing ") and "4.0/4.0 MB" in last and "8.0M tokens" in last
    else:
        assert lines == ["preparing: 50%, 0.2 MB/s, 4.0M tokens", "preparing: 100%, 0.2 MB/s, 8.0M tokens"]
