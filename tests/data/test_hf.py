"""``data=hf`` and ``fsdptoys data``: prepared once before the ranks start, then equal to
``data=prepared``."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from fsdptoys.cli import main as __main__
from fsdptoys.cli import train as train_command
from fsdptoys.cli.data import data_command
from fsdptoys.data import Display, prepare_folder
from fsdptoys.data import prepare as preparing
from fsdptoys.data.hf import HFConfig
from fsdptoys.data.prepare import Advance
from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.errors import ConfigError
from fsdptoys.train import run
from tests.harness.prepared_data import (
    contents,
    documents,
    request,
    save_tokenizer,
    write_lines,
)
from tests.harness.ranks import run_ranks


@pytest.fixture(autouse=True)
def _corpus(tmp_path, monkeypatch):
    """A file of documents, and a log of the preparing processes."""
    monkeypatch.chdir(tmp_path)
    write_lines(Path("a.jsonl"), documents(100), "body")
    write = preparing._write

    def logged(request, *callbacks):
        with open("log", "a") as log:
            print(os.getpid(), file=log)
        return write(request, *callbacks)

    monkeypatch.setattr(preparing, "_write", logged)


def config(**changes) -> HFConfig:
    settings = {
        "files": ["a.jsonl"],
        "text_field": "body",
        "eval_fraction": 0.2,
        "cache": "cache",
        "processes": 1,
    }
    return HFConfig(**(settings | changes))


def times_prepared() -> int:
    return len(Path("log").read_text().splitlines())


def test_hf_data_equals_a_folder_of_the_prepare_command():
    """Oracle: a folder prepared from the same file by the function of the command."""
    config().validate(16, 256)
    assert not Path("cache").exists(), "checking prepares nothing"
    config().prepare(16, 256)
    prepare_folder(request(Path("out"), "a.jsonl", field="body", eval_fraction=0.2))
    (cached,) = Path("cache").iterdir()
    assert contents(cached) == contents(Path("out"))
    dataset = config().build(16, 256, 0)
    other = PreparedConfig(folder="out").build(16, 256, 0)
    assert dataset.fingerprint == other.fingerprint and dataset.document_end == 0
    assert (
        config().has_eval
        and dataset.eval is not None
        and not config(eval_fraction=0).has_eval
    )
    np.testing.assert_array_equal(dataset.train[3][0], other.train[3][0])


def test_data_is_prepared_again_only_after_changes():
    """Oracle: the number of preparations and of folders, after every change of options and of the
    file."""
    for processes in (1, 1, 2):
        config(processes=processes).prepare(16, 256)
    assert times_prepared() == len(list(Path("cache").iterdir())) == 1
    config(eval_fraction=0.0).prepare(16, 256)
    config(tokenizer=save_tokenizer(Path("tokenizer"), None)).prepare(8, 256)
    write_lines(Path("a.jsonl"), documents(101), "body")
    config().prepare(16, 256)
    assert times_prepared() == len(list(Path("cache").iterdir())) == 4


def prepare_and_fingerprint(config: HFConfig) -> str:
    config.prepare(16, 256)
    return config.build(16, 256, 0).fingerprint


def test_concurrent_ranks_prepare_once():
    """Oracle: the log of the preparing processes; all ranks see the same data."""
    assert len(set(run_ranks(4, prepare_and_fingerprint, config()))) == 1
    assert times_prepared() == 1


WORDS = (
    "train data=hf data.files=[a.jsonl] data.text_field=body data.cache=cache "
    "data.eval_fraction=0.2 launch.device=cpu"
)


def test_launcher_prepares_data_before_it_starts_ranks(monkeypatch):
    """Oracle: the cache when the launcher starts the ranks."""
    folder_counts = []
    monkeypatch.setattr(
        train_command,
        "launch",
        lambda plan: folder_counts.append(len(list(Path("cache").iterdir()))) or 0,
    )
    assert __main__.main(WORDS.split()) == 0 and folder_counts == [1]
    assert (
        __main__.main([*WORDS.split(), "--cfg", "job"]) == 0 and times_prepared() == 1
    )


def test_torchrun_rank_prepares_data_before_training(monkeypatch):
    """Oracle: the cache when the rank starts training."""
    folder_counts = []
    monkeypatch.setattr(
        run,
        "train",
        lambda config, prediction: folder_counts.append(
            len(list(Path("cache").iterdir()))
        ),
    )
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {
        **ranks,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    train_command._work(WORDS.split()[1:])
    assert folder_counts == [1]


def test_evaluation_without_held_out_data_is_refused_before_ranks_start(
    capsys, monkeypatch
):
    """Oracle: the expected message, on the preparation of one text without a held-out part and on
    every later start."""
    monkeypatch.setattr(
        train_command, "launch", lambda plan: pytest.fail("ranks were started")
    )
    Path("one.txt").write_text("one text " * 500)
    line = (
        "train data=hf data.files=[one.txt] data.cache=cache data.eval_fraction=0.05 "
        "train.eval_every=1"
    )
    for _ in range(2):
        assert __main__.main([*line.split(), "launch.device=cpu"]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == (
            "fsdptoys: train.eval_every=1 (typed, or set by the experiment) needs a held-out "
            "part, which data=hf does not have as set; set data.eval_fraction above 0.05 or "
            "train.eval_every=0"
        )
    assert not config(files=["one.txt"], text_field="text", eval_fraction=0.05).has_eval


def run_data(capsys, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = data_command([str(argument) for argument in arguments])
    return (status, *capsys.readouterr())


def test_prepare_show_and_check_report_folders_and_damage(tmp_path, capsys):
    """Oracle: counts of two documents; one flipped bit is found, and a truncated file is
    refused."""
    write_lines(tmp_path / "a.jsonl", ["one", "three"], "body")
    arguments = [
        tmp_path / "a.jsonl",
        "--tokenizer",
        "bytes",
        "--field",
        "body",
        "--processes",
        "1",
    ]
    status, out, _ = run_data(capsys, "prepare", *arguments, "--out", tmp_path / "out")
    assert (
        status == 0
        and "train      2 documents, 10 tokens in 1 shard of uint16\neval       nothing\n"
        in out
    )
    assert run_data(capsys, "show", tmp_path / "out")[1] == out
    tree = json.loads(run_data(capsys, "show", tmp_path / "out", "--json")[1])[0]
    assert tree["splits"] == {
        "train": {"documents": 2, "tokens": 10},
        "eval": {"documents": 0, "tokens": 0},
    }
    status, out, _ = run_data(capsys, "check", tmp_path / "out")
    assert (status, out) == (
        0,
        f"{tmp_path / 'out'}: 1 shard, every byte as it was written\n",
    )
    shard = tmp_path / "out" / "shard-00000.bin"
    content = bytearray(shard.read_bytes())
    content[4] ^= 1
    shard.write_bytes(content)
    status, out, err = run_data(capsys, "check", tmp_path / "out")
    assert (status, out) == (
        1,
        "",
    ) and "shard-00000.bin differs from its index: its SHA-256 is " in err
    shard.write_bytes(content[:-2])
    with pytest.raises(
        ConfigError,
        match=r"has 18 bytes in shard-00000\.bin, where its index says 20; restore the",
    ):
        run_data(capsys, "check", tmp_path / "out")


def test_copy_of_the_tokenizer_is_kept_and_checked(tmp_path, capsys):
    """Oracle: the file's bytes; a changed byte and a missing copy are reported and do not prevent
    training."""
    pytest.importorskip("tokenizers")
    choice = Path(save_tokenizer(tmp_path / "tokenizer", None))
    write_lines(tmp_path / "a.jsonl", ["one two one two", "two three"])
    arguments = [
        tmp_path / "a.jsonl",
        "--out",
        tmp_path / "out",
        "--tokenizer",
        choice,
        "--processes",
        "1",
    ]
    assert run_data(capsys, "prepare", *arguments)[1].endswith(
        "…; kept in the folder\n"
    )
    copy = tmp_path / "out" / "tokenizer.json"
    content = (choice / "tokenizer.json").read_bytes()
    assert copy.read_bytes() == content
    config = PreparedConfig(folder=str(tmp_path / "out"))
    assert config.find_tokenizer() == str(copy)
    whole = f"{tmp_path / 'out'}: 1 shard and tokenizer.json, every byte as it was written\n"
    assert run_data(capsys, "check", tmp_path / "out") == (0, whole, "")
    copy.write_bytes(content[:-1] + b" ")
    for damage in (
        "differs from its index: its SHA-256 is ",
        "cannot be read (No such file or directory)",
    ):
        status, _, err = run_data(capsys, "check", tmp_path / "out")
        assert status == 1 and f"{copy} {damage}" in err
        with pytest.raises(ConfigError, match=re.escape(f"{copy} {damage}")):
            config.find_tokenizer()
        config.validate(4, 8)
        copy.unlink(missing_ok=True)


def test_progress_is_displayed(monkeypatch, capsys):
    """Oracle: the numbers, one line per interval."""
    now = iter(range(0, 1000, 5))
    monkeypatch.setattr("fsdptoys.data.progress.monotonic", lambda: next(now))
    display = Display("preparing")
    for count in (1, 2, 3, 4):
        display.show(Advance(count * 1e6, 4_000_000, 1000 * count, 2_000_000 * count))
    assert capsys.readouterr().err.splitlines() == [
        "fsdptoys: preparing: 50%, 0.2 MB/s 4.0M tokens",
        "fsdptoys: preparing: 100%, 0.2 MB/s 8.0M tokens",
    ]
