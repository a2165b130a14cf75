"""``data=hf``: prepared once before the ranks start, then equal to ``data=prepared``."""

import os
from pathlib import Path

import numpy as np
import pytest

from fsdptoys.cli import main as __main__
from fsdptoys.cli import train as train_command
from fsdptoys.config.schema import Config
from fsdptoys.data import HFConfig, PreparedConfig
from fsdptoys.data import prepare as preparing
from fsdptoys.data.prepare import prepare_folder
from fsdptoys.errors import ConfigError
from fsdptoys.parallel import FSDP2Config
from fsdptoys.train import run
from fsdptoys.train.trainer import Trainer
from scripts.ranks import run_ranks
from tests.data.test_prepare import contents, documents, request, save_tokenizer, write_lines
from tests.parallel.runs import make_config


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
    settings = {"files": ["a.jsonl"], "text_field": "body", "eval_fraction": 0.2, "cache": "cache", "processes": 1}
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
    dataset, other = config().build(16, 256, 0), PreparedConfig(folder="out").build(16, 256, 0)
    assert dataset.fingerprint == other.fingerprint and dataset.document_end == 0
    assert config().has_eval and dataset.eval is not None and not config(eval_fraction=0).has_eval
    np.testing.assert_array_equal(dataset.train[3][0], other.train[3][0])


def test_data_is_prepared_again_only_after_changes():
    """Oracle: the number of preparations and of folders, after every change of options and of the file."""
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
    "train data=hf data.files=[a.jsonl] data.text_field=body data.cache=cache data.eval_fraction=0.2 launch.device=cpu"
)


def test_launcher_prepares_data_before_it_starts_ranks(monkeypatch):
    """Oracle: the cache when the launcher starts the ranks."""
    seen = []
    monkeypatch.setattr(train_command, "launch", lambda plan: seen.append(len(list(Path("cache").iterdir()))) or 0)
    assert __main__.main(WORDS.split()) == 0 and seen == [1]
    assert __main__.main([*WORDS.split(), "--cfg", "job"]) == 0 and times_prepared() == 1


def test_torchrun_rank_prepares_data_before_training(monkeypatch):
    """Oracle: the cache when the rank starts training."""
    seen = []
    monkeypatch.setattr(run, "train", lambda config, prediction: seen.append(len(list(Path("cache").iterdir()))))
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    train_command._work(WORDS.split()[1:])
    assert seen == [1]


def losses(config: Config) -> list[float]:
    trainer = Trainer(config)
    trainer.train()
    return [step.loss for step in trainer.history] + [trainer.history[-1].eval_loss or 0.0]


def test_two_ranks_have_the_losses_of_one():
    """Oracle: one process with the full global batch, which sums in another order."""
    found = []
    for ranks, batch_size in ((1, 4), (2, 2)):
        wanted = make_config(FSDP2Config(), ranks, steps=3, grad_accum=1, batch_size=batch_size, eval_every=3)
        wanted.model.vocab_size = 256
        wanted.data = config()
        wanted.data.prepare(wanted.train.seq_len, 256)
        wanted.validate(ranks, "cpu")
        found.append(run_ranks(ranks, losses, wanted)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_too_short_text_is_reported_by_prepare_and_validate():
    """Oracle: the expected message on preparation and on every later check."""
    config(eval_fraction=0.0).prepare(16, 256)
    for check in (config(eval_fraction=0.0).prepare, config(eval_fraction=0.0).validate):
        with pytest.raises(ConfigError, match=r"^train\.seq_len=99999 needs 100000 tokens for one sequence, but the"):
            check(99999, 256)


def test_evaluation_without_held_out_data_is_refused_before_ranks_start(capsys, monkeypatch):
    """Oracle: the expected message, on the preparation of one text without a held-out part and on every later start."""
    monkeypatch.setattr(train_command, "launch", lambda plan: pytest.fail("ranks were started"))
    Path("one.txt").write_text("one text " * 500)
    words = "train data=hf data.files=[one.txt] data.cache=cache data.eval_fraction=0.05 train.eval_every=1"
    for _ in range(2):
        assert __main__.main([*words.split(), "launch.device=cpu"]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == (
            "fsdptoys: train.eval_every=1 (typed, or set by the experiment) needs a held-out part, which data=hf does "
            "not have as set; set data.eval_fraction above 0.05 or train.eval_every=0"
        )
    assert not config(files=["one.txt"], text_field="text", eval_fraction=0.05).has_eval
