"""Rows of complete documents, compared with the documents and a simple best fit."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from fsdptoys.data import IGNORE_INDEX, PreparedConfig, packing, read_index
from fsdptoys.data.hf import HFConfig
from fsdptoys.data.mixture import MixedSamples
from fsdptoys.data.packing import Packing, best_fit, cut
from fsdptoys.errors import ConfigError
from scripts.ranks import run_ranks
from tests.data.test_prepare import contents, read_split
from tests.data.test_prepared import make


def plain_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Put the longest first, each into the fullest row with enough space, by scanning all rows."""
    rows: list[list[int]] = []
    for piece in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        rooms = [capacity - sum(lengths[other] for other in row) for row in rows]
        fitting = [number for number, room in enumerate(rooms) if room >= lengths[piece]]
        if fitting:
            rows[min(fitting, key=rooms.__getitem__)].append(piece)
        else:
            rows.append([piece])
    return rows


@pytest.mark.parametrize("capacity", [5, 33, 200])
@pytest.mark.parametrize("seed", range(3))
def test_best_fit_fills_rows_like_the_reference_implementation(capacity, seed):
    """Oracle: row lengths of the simple best fit, which no tie affects; each piece is in one row, within capacity."""
    lengths = np.random.default_rng(seed).integers(2, capacity + 1, 150)
    rows = best_fit(lengths, capacity)
    assert sorted(piece for row in rows for piece in row) == list(range(150))
    assert all(row == sorted(row) and lengths[row].sum() <= capacity for row in rows)
    filled = sorted(int(lengths[row].sum()) for row in rows)
    assert filled == sorted(int(lengths[row].sum()) for row in plain_best_fit(lengths.tolist(), capacity))


def labels_of(starts: np.ndarray, lengths: np.ndarray) -> list[int]:
    """Positions of all ids but the first of each piece."""
    return [at for start, length in zip(starts, lengths, strict=True) for at in range(start + 1, start + length)]


@pytest.mark.parametrize("seq_len", [1, 4, 7])
def test_cut_documents_predict_every_token_once(seq_len):
    """Oracle: the labels of all pieces, which are all ids of a document but its first."""
    lengths = np.arange(2, 40)
    starts = np.cumsum(lengths) - lengths
    piece_starts, piece_lengths = cut(starts, lengths, seq_len)
    assert ((piece_lengths >= 2) & (piece_lengths <= seq_len + 1)).all()
    assert labels_of(piece_starts, piece_lengths) == labels_of(starts, lengths)
    whole = lengths <= seq_len + 1
    assert np.isin(starts[whole], piece_starts[np.isin(piece_lengths, lengths[whole])]).all()


def config(folder: str, cache: Path, **changes) -> PreparedConfig:
    return PreparedConfig(**{"folder": folder, "packing": Packing.best_fit, "cache": str(cache)} | changes)


@pytest.mark.parametrize("group", [16, 2**16])
def test_rows_hold_complete_documents_and_ignored_padding(tmp_path, monkeypatch, group):
    """Oracle: the folder's documents, each once, over several shards and groups; the rest is padding."""
    monkeypatch.setattr(packing, "GROUP", group)
    folder, seq_len = make(tmp_path / "out"), 700
    dataset = config(folder, tmp_path / "cache").build(seq_len, 256, 0)
    for samples, split in ((dataset.train, "train"), (dataset.eval, "eval")):
        found = []
        for index in range(len(samples)):
            tokens_T, labels_T = samples[index]
            assert tokens_T.shape == labels_T.shape == (seq_len,) and tokens_T.dtype == labels_T.dtype == np.int64
            valid = int((labels_T != IGNORE_INDEX).sum())
            assert (labels_T[:valid] != IGNORE_INDEX).all() and labels_T[valid - 1] == 0
            assert (tokens_T[valid:] == 0).all()
            np.testing.assert_array_equal(tokens_T[1:valid], labels_T[: valid - 1])
            ids = np.append(tokens_T[:valid], labels_T[valid - 1])
            found += ids.astype(np.uint8).tobytes().split(b"\0")[:-1]
        assert sorted(found) == sorted(read_split(Path(folder), split))
        lengths = [len(document) + 1 for document in found]
        assert group == 16 or len(samples) == len(plain_best_fit(lengths, seq_len + 1))


def test_documents_longer_than_a_row_are_complete(tmp_path):
    """Oracle: one label for each id of the folder except the first of each document."""
    folder = make(tmp_path / "out", eval_fraction=0.0)
    samples = config(folder, tmp_path / "cache").build(50, 256, 0).train
    index = read_index(folder, "")
    labels = [samples[number][1] for number in range(len(samples))]
    joined = sum(len(samples.rows.row(number)) - 1 for number in range(len(samples)))
    valid = sum(int((labels_T != IGNORE_INDEX).sum()) for labels_T in labels)
    assert valid - joined == index.tokens("train") - index.documents("train")


def build(wanted: PreparedConfig) -> int:
    return len(wanted.build(64, 256, 0).train)


def test_packing_plan_is_built_once_per_sequence_length(tmp_path, monkeypatch):
    """Oracle: a log of the planning processes, for concurrent and for later ranks."""
    write, log = packing._write_rows, tmp_path / "log"

    def logged(*args):
        with log.open("a") as opened:
            print(os.getpid(), file=opened)
        write(*args)

    monkeypatch.setattr(packing, "_write_rows", logged)
    wanted = config(make(tmp_path / "out", eval_fraction=0.0), tmp_path / "cache")
    assert len(set(run_ranks(3, build, wanted))) == 1
    wanted.prepare(64, 256)
    assert len(log.read_text().splitlines()) == 1
    wanted.prepare(65, 256)
    assert len(log.read_text().splitlines()) == 2 and len(list((tmp_path / "cache").iterdir())) == 2


def test_packing_changes_the_fingerprint_and_pickles_omit_memory_maps(tmp_path):
    """Oracle: the same folder without packing; a pickled reader gives the same samples."""
    folder = make(tmp_path / "out")
    packed, plain = config(folder, tmp_path / "cache"), PreparedConfig(folder=folder)
    dataset = packed.build(64, 256, 0)
    assert dataset.fingerprint != plain.build(64, 256, 0).fingerprint
    dataset.train[0]
    sent = pickle.loads(pickle.dumps(dataset.train))
    assert dataset.train.rows._maps is not None and sent.rows._maps is None
    for part, other in zip(sent[3], dataset.train[3], strict=True):
        np.testing.assert_array_equal(part, other)
    assert dataset.unigram_entropy_nats == plain.build(64, 256, 0).unigram_entropy_nats


def test_mixed_and_cached_data_can_be_packed(tmp_path):
    """Oracle: rows of the folders without mixing; data=hf packs its cached folder."""
    folders = [make(tmp_path / name, seed=seed) for seed, name in enumerate(("first", "other"))]
    mixed = config(None, tmp_path / "cache", sources=folders, weights=[1.0, 1.0]).build(64, 256, 0).train
    assert isinstance(mixed, MixedSamples)
    owner, number = mixed.locate(5)
    alone = config(folders[owner], tmp_path / "cache").build(64, 256, 0).train
    np.testing.assert_array_equal(mixed[5][1], alone[number][1])
    hf = HFConfig(files=[str(tmp_path / "first.jsonl")], cache=str(tmp_path / "hf"), packing=Packing.best_fit)
    hf.prepare(64, 256)
    (cached,) = [path for path in (tmp_path / "hf").iterdir() if not path.name.startswith("packing-")]
    assert "index.json" in contents(cached) and len(list((tmp_path / "hf").iterdir())) == 2


def test_unwritable_packing_cache_is_reported(tmp_path):
    """Oracle: the expected message."""
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"^data\.packing=best_fit cannot keep its rows in .*; set data\.cache to a"):
        config(make(tmp_path / "out"), tmp_path / "cache").prepare(64, 256)
