"""Resuming reports changed data files and accepts copied ones."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.data import (
    BatchStream,
    DataConfig,
    TokenDataset,
    content_sample,
)
from fsdptoys.data.bin import BinConfig
from fsdptoys.data.byte_text import TextConfig
from fsdptoys.data.content_sample import BLOCK_BYTES, SampledFiles, sampled_offsets
from fsdptoys.data.prepare import prepare_folder
from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.data.source_files import SourceFile
from fsdptoys.errors import ConfigError
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from tests.harness.prepared_data import documents, request, write_lines
from tests.harness.ranks import run_ranks

MIDDLE = 40_000
"""Farther from both ends than the fingerprint of earlier versions looked at."""


def write_bin(folder: Path) -> tuple[DataConfig, Path]:
    (folder / "tokens.bin").write_bytes(bytes([7, 0]) * 50_000)
    return BinConfig([str(folder / "tokens.bin")]), folder / "tokens.bin"


def write_text(folder: Path) -> tuple[DataConfig, Path]:
    for number in range(3):
        (folder / f"{number}.txt").write_bytes(bytes([65 + number]) * 100_000)
    return TextConfig([f"{folder}/*.txt"]), folder / "1.txt"


def write_prepared(folder: Path) -> tuple[DataConfig, Path]:
    lines = write_lines(folder / "a.jsonl", documents(900))
    prepare_folder(request(folder / "tokens", lines, shard_tokens=60_000))
    return PreparedConfig(
        folder=str(folder / "tokens")
    ), folder / "tokens" / "shard-00000.bin"


Writer = Callable[[Path], tuple[DataConfig, Path]]
KINDS: list[Writer] = [write_bin, write_text, write_prepared]


def open_stream(dataset: TokenDataset) -> BatchStream:
    return BatchStream(
        dataset.train,
        2,
        1,
        range(1),
        1,
        0,
        dataset.fingerprint,
        files=dataset.sample_files(),
    )


def change_middle(path: Path, count: int) -> None:
    with open(path, "r+b") as file:
        file.seek(MIDDLE)
        file.write(bytes([9, 0]) * (count // 2))


@pytest.mark.parametrize("write", KINDS)
def test_file_changed_in_its_middle_is_named_on_resume(
    write: Writer, tmp_path: Path
) -> None:
    """Oracle: the fingerprint, which stays the same, and the sentence; the change spans two sampled
    blocks."""
    config, path = write(tmp_path)
    before = config.build(16, 256, 0)
    state = open_stream(before).state_dict()
    change_middle(path, 2 * os.path.getsize(path) // content_sample.LEAST_BLOCKS)
    after = config.build(16, 256, 0)
    assert after.fingerprint == before.fingerprint
    with pytest.raises(ConfigError) as caught:
        open_stream(after).load_state_dict(state)
    key = "data.folder" if isinstance(config, PreparedConfig) else "data.files"
    assert str(caught.value).startswith(
        f"{key}=[{path}] has changed since the checkpoint, so that the run cannot"
    )


@pytest.mark.parametrize("write", KINDS)
def test_moved_data_resumes(
    write: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the number of samples seen; modification times and locations of files do not
    matter."""
    (tmp_path / "placed").mkdir()
    monkeypatch.chdir(tmp_path / "placed")
    config, path = write(Path())
    stream = open_stream(config.build(16, 256, 0))
    stream.next_step()
    os.utime(path, (0, 0))
    shutil.copytree(tmp_path / "placed", tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    again = open_stream(config.build(16, 256, 0))
    again.load_state_dict(stream.state_dict())
    assert again.samples_seen == stream.samples_seen > 0


@pytest.mark.parametrize(
    "size", [1, 4096, 4097, 18 * 4096, 18 * 4096 + 1, 10**6, 2**30 + 17]
)
def test_sampled_blocks_are_spread_over_the_file(size: int) -> None:
    """Oracle: the definition: all of a small file; otherwise both ends and one block per section,
    none twice."""
    offsets = sampled_offsets(size, 16)
    assert all(
        later - earlier >= BLOCK_BYTES
        for earlier, later in itertools.pairwise(offsets[:-1])
    )
    if size <= 18 * BLOCK_BYTES:
        assert offsets == list(range(0, size, BLOCK_BYTES))
    else:
        assert len(offsets) == 18 and offsets[-1] == size - BLOCK_BYTES
        assert (
            max(later - earlier for earlier, later in itertools.pairwise(offsets))
            <= 2 * size / 16
        )


def test_many_files_share_a_bounded_number_of_blocks_and_digests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: counts, and the range of names; the files of 1 TB do not exist."""
    counts: list[int] = []
    marked: list[bytes] = [b"same"]

    def count(file: SourceFile, blocks: int) -> bytes:
        counts.append(blocks)
        return marked[0] if file.name == "500" else b"same"

    monkeypatch.setattr(content_sample, "_digest", count)
    files = [
        SourceFile(f"/data/{number}", str(number), 2**30) for number in range(1000)
    ]
    state = SampledFiles("data.files", files).state_dict()
    assert sum(counts) <= content_sample.MOST_BLOCKS and min(counts) >= 1
    assert len(state["digests"]) == content_sample.MOST_DIGESTS
    SampledFiles("data.files", files).check_unchanged(state)
    marked[0] = b"other"
    with pytest.raises(
        ConfigError,
        match=r"^one of the 3 files from data\.files=\[/data/500\] to /data/502 has c",
    ):
        SampledFiles("data.files", files).check_unchanged(state)


@pytest.mark.parametrize(
    "state",
    [None, {"version": 2, "digests": ["x"]}, {"version": 1, "digests": ["x", "y"]}],
)
def test_incomparable_states_pass_the_content_check(state: Any, tmp_path: Path) -> None:
    """Oracle: no error for states of other versions, of other numbers of files, and of none."""
    (tmp_path / "a").write_bytes(b"content")
    SampledFiles(
        "data.files", [SourceFile(str(tmp_path / "a"), "a", 7)]
    ).check_unchanged(state)


def train(overrides: list[str]) -> None:
    config = compose_config(overrides)
    config.validate(1, "cpu")
    Run(Trainer(config)).run()


def test_run_does_not_resume_with_a_changed_file(tmp_path: Path) -> None:
    """Oracle: the expected message of a real run that resumes, which ends before its first step."""
    _, path = write_bin(tmp_path)
    overrides = [
        "experiment=null",
        "parallel=single",
        "train.seq_len=32",
        "metrics.console=none",
        "checkpoint.every=1",
    ]
    overrides += [
        "data=bin",
        f"data.files=[{path}]",
        f"metrics.run_dir={tmp_path}/run",
        "checkpoint.resume=auto",
    ]
    for steps in (2, 3):
        run_ranks(1, train, [*overrides, f"train.steps={steps}"])
    change_middle(path, 20_000)
    with pytest.raises(
        RuntimeError, match=r"tokens\.bin\] has changed since the checkpoint"
    ):
        run_ranks(1, train, [*overrides, "train.steps=4"])
