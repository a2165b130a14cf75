"""Fuzzers of checkpoints, readers and toys: nothing fails, and they detect what does."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.checkpoint import load as reading
from fsdptoys.toys.ddp.core import Bucket
from scripts import fuzz_checkpoint, fuzz_readers, fuzz_toys
from scripts.fuzz_checkpoint import DAMAGES
from scripts.fuzz_edits import EDITS
from scripts.fuzz_readers import run_cases
from scripts.fuzz_targets import READERS, Reader
from scripts.fuzz_toys import Crew
from scripts.fuzz_trees import Node, Tree


@pytest.mark.extended
def test_all_damage_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the saved values; all kinds of damage alternate."""
    assert fuzz_checkpoint.main(["--damages", "60", "--seed", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [*DAMAGES, *EDITS, "all"]
    # Most of them damage the newest checkpoint permanently.
    assert 30 <= int(rows[-1].split("|")[3]) <= 57


@pytest.mark.extended
def test_undetected_damage_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: a reader that checks sizes only."""
    monkeypatch.setattr(reading, "verify_file", lambda *args: None)
    monkeypatch.setattr(fuzz_checkpoint, "EDITS", {})
    counts = fuzz_checkpoint.fuzz(4 * len(DAMAGES), seed=0)
    assert sum(of_kind["missed"] for of_kind in counts.values()) > 2
    assert "missed: " in capsys.readouterr().out


@pytest.mark.extended
def test_mutated_files_cause_no_traceback() -> None:
    """Oracle: every reader's own errors; a full run of the fuzzer."""
    done, failed = fuzz_readers.fuzz(2000, seed=0, progress=False)
    assert set(done) == set(READERS)
    assert not failed, "\n".join(f"{result.case} {result.mutation}: {result.failure}" for result in failed)


def raises(copy: Path) -> None:
    raise KeyError("x")


def spins(copy: Path) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("read", "failure"),
    [
        (raises, "KeyError"),
        (spins, "of a processor"),
        (lambda copy: bytes(2**32), "MemoryError"),
        (lambda copy: os._exit(1), "the process ended"),
        (lambda copy: print("a\x1b[2J"), "prints"),
        (lambda copy: None, None),
    ],
)
def test_failing_reader_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read, failure) -> None:
    """Oracle: readers made to fail; the next case still runs."""
    specimen = tmp_path / "specimens" / "made"
    specimen.mkdir(parents=True)
    (specimen / "file.json").write_text("{}")
    monkeypatch.setitem(READERS, "made", Reader("made", ("*",), read))
    monkeypatch.setattr(fuzz_readers, "PROCESSOR_SECONDS", 0.5)
    cases = [("made", 0), ("made", 1)]
    results = list(run_cases(cases, 0, tmp_path, processes=1))
    assert [result.case for result in results] == cases
    for result in results:
        assert (result.failure is None) if failure is None else failure in str(result.failure)


@pytest.mark.extended
@pytest.mark.parametrize("toy", fuzz_toys.TOYS)
def test_random_trees_train_in_the_bits_of_pytorch(toy: str) -> None:
    """Oracle: ``fully_shard`` and DDP of PyTorch; 15 trees of a full run of the fuzzer."""
    counts, reports = fuzz_toys.fuzz(toy, list(range(15)), seed=0, shrinks=False)
    assert not {"different", "died", "hung"} & set(counts), "\n".join(reports)
    assert counts["equal"] >= 10


OFF = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "set_later", "hook", "ignored")
OPTIONS = {"bucket_cap_mb": 25, "sync_buffers": True, **dict.fromkeys(OFF, False)}


def rounds(bucket: Bucket, slot: int, divisor: float, as_views: bool) -> None:
    param, view = bucket.params[slot], bucket.views[slot]
    assert param.grad is not None
    view.copy_(torch.nextafter(param.grad / divisor, torch.tensor(torch.inf)))


def dies(*_: Any) -> None:
    os._exit(7)


def sleeps(*_: Any) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("fill", "outcome", "text"),
    [
        (rounds, "different", "differs by"),
        pytest.param(dies, "died", "7", marks=pytest.mark.extended),
        pytest.param(sleeps, "hung", "no answer", marks=pytest.mark.extended),
    ],
)
def test_a_toy_that_differs_is_reported(
    monkeypatch: pytest.MonkeyPatch, fill: Callable[..., None], outcome: str, text: str
) -> None:
    """Oracle: toys with a mistake in the last bit, a death and a hang."""
    monkeypatch.setattr(Bucket, "fill", fill)
    seconds = 120.0
    if outcome == "hung":  # the others end by themselves, on a busy machine too
        monkeypatch.setattr(fuzz_toys, "SECONDS", 1.0)
        seconds = 3.0
    plain = Tree(2, Node("chain", 0, [Node("linear", 1), Node("linear", 2)]), options=OPTIONS)
    crew = Crew(2)
    result = crew.run("ddp", plain, seconds)
    crew.stop()
    assert result.outcome == outcome and text in result.text


def test_a_graph_declared_static_later_keeps_its_first_buckets() -> None:
    """Oracle: PyTorch's class; on three ranks the bits of a sum depend on the buckets."""
    settings = {"find_unused_parameters": True, "static_graph": True, "set_later": True, "bucket_cap_mb": 0.00005}
    root = Node("chain", 0, [Node("mlp", 1), Node("linear", 2), Node("linear", 3)])
    crew = Crew(3)
    result = crew.run("ddp", Tree(3, root, options=OPTIONS | settings))
    crew.stop()
    assert result.outcome == "equal", result.text
