"""The toys' benchmark: measured rows, and missed targets."""

import dataclasses

import pytest

from scripts import bench_toys
from scripts.bench_toys import Contestant, Measured

TINY = ["--rounds", "1", "--turns", "2", "--warmup", "1", "--dim", "128", "--layers", "2", "--heads", "2"]
TINY += ["--vocab-size", "4001", "--batch-size", "1", "--seq-len", "16"]


@pytest.mark.parametrize("target", [pytest.param(1e9, marks=pytest.mark.extended), 0.0], ids=["met", "missed"])
def test_script_lists_every_contestant_and_exit_status_follows_the_targets(
    target: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the contestants of its first page, and targets always or never met; real ranks, equal losses."""
    groups = {
        name: [dataclasses.replace(each, target=each.target and target) for each in group]
        for name, group in bench_toys.GROUPS.items()
    }
    chosen = list(groups) if target else ["ddp"]
    monkeypatch.setattr(bench_toys, "GROUPS", groups)
    assert bench_toys.main([*TINY, "--only", *chosen]) == (0 if target else 1)
    text = capsys.readouterr().out
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ") and "×" not in line]
    assert [row[1].strip() for row in rows] == [each.name for name in chosen for each in groups[name]]
    assert all(float(row[2]) > 0 and float(row[6]) > 0 and row[7].strip().endswith("%") for row in rows)
    judged = [each.name for name in chosen for each in groups[name] if each.target is not None]
    assert text.count("- met: ") + text.count("- MISSED: ") == len(judged)
    assert ("MISSED" in text) is not bool(target)


def test_different_loss_ends_the_script() -> None:
    """Oracle: the check itself, given a loss off by a thousandth."""
    group = [Contestant("native", "ddp"), Contestant("toy", "toy_ddp", 1.05)]
    with pytest.raises(SystemExit, match="not the same work: step 2 of toy"):
        bench_toys.check_losses(group, [Measured(losses=[2.0, 1.0]), Measured(losses=[2.0, 1.001])])


def test_step_time_is_that_of_the_slower_rank_and_ratios_are_per_turn() -> None:
    """Oracle: computed by hand; two ranks, two turns."""
    ranks = [
        [Measured([1.0, 4.0], [1.0, 1.0], [3.0, 2.0]), Measured([2.0, 2.0], [1.0, 2.0], [3.0, 2.0])],
        [Measured([2.0, 1.0], [3.0, 3.0], [5.0, 2.0]), Measured([1.0, 6.0], [1.0, 4.0], [5.0, 2.0])],
    ]
    native, toy = bench_toys.over_ranks(ranks)
    assert (native.seconds, toy.seconds) == ([2.0, 4.0], [2.0, 6.0])
    assert native.cpu_seconds == [4.0, 4.0] and native.losses == [4.0, 2.0]
    assert bench_toys.ratios(toy, native) == [1.0, 1.5]
