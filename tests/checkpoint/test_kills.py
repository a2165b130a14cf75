"""No kill or power loss at any operation loses a complete checkpoint."""

import copy
import itertools
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.checkpoint import CheckpointConfig, Checkpointer
from fsdptoys.checkpoint import checkpointer as keeper
from fsdptoys.checkpoint.storage import LocalStorage, Storage
from tests.checkpoint.saves import KEEP, save
from tests.harness.disks import (
    LossyDisk,
    PowerLoss,
    ending_storage,
    in_child,
    kill_self,
)

pytestmark = pytest.mark.usefixtures("without_retry_pauses")


def make_checkpoints(storage: Any, monkeypatch: pytest.MonkeyPatch) -> Checkpointer:
    monkeypatch.setattr(keeper, "open_storage", lambda where: storage)
    return Checkpointer(
        CheckpointConfig(every=1, keep=KEEP, resume="auto"), storage.where
    )


def save_and_check(checkpoints: Checkpointer, step: int, value: float) -> None:
    assert save(checkpoints, step, value)


def newest(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, float] | None:
    """Resume; return step and value of the checkpoint. All parts must come from one save."""
    checkpoint = make_checkpoints(storage, monkeypatch).resume()
    if checkpoint is None:
        return None
    tensors = {"model.a": torch.zeros(3, 5), "optim.a.step": torch.zeros(())}
    checkpoint.load(tensors)
    values = {*tensors["model.a"].flatten().tolist(), tensors["optim.a.step"].item()}
    assert checkpoint.own_facts is not None
    values |= {checkpoint.facts["value"], checkpoint.own_facts["own"]}
    assert len(values) == 1
    return checkpoint.step, values.pop()


def after_crash(
    storage: Storage,
    allowed: list[tuple[int, float] | None],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, float] | None:
    """Return the newest checkpoint; check that saves succeed after the crash and that no leftovers
    of it remain."""
    outcome = newest(storage, monkeypatch)
    assert outcome in allowed
    checkpoints = make_checkpoints(storage, monkeypatch)
    checkpoints.resume()
    step = 1 + (outcome[0] if outcome else 0)
    assert save(checkpoints, step, -1.0) and save(checkpoints, step + 1, -2.0)
    assert newest(storage, monkeypatch) == (step + 1, -2.0)
    names = [name for name in storage.names() if not name.endswith(".replaced-1")]
    assert names == ["latest", f"step-{step:08d}", f"step-{step + 1:08d}"]
    return outcome


# Earlier saves as (step, value), the save during the crash, and the possible checkpoints
# afterwards.
CASES: dict[
    str,
    tuple[list[tuple[int, float]], tuple[int, float], list[tuple[int, float] | None]],
] = {
    "the first": ([], (1, 1.0), [None, (1, 1.0)]),
    "one that deletes another": ([(1, 1.0), (2, 2.0)], (3, 3.0), [(2, 2.0), (3, 3.0)]),
    "one that replaces another": ([(1, 1.0), (2, 2.0)], (2, 9.0), [(2, 2.0), (2, 9.0)]),
}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("case", CASES)
def test_kill_at_any_operation_preserves_the_newest_checkpoint(
    case: str, memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the saved values; a forked process sends itself SIGKILL within each of its
    operations."""
    before, saving, allowed = CASES[case]
    start = memory_folder / "start"
    start.mkdir()
    for step, value in before:
        assert save(
            make_checkpoints(LocalStorage(str(start)), monkeypatch), step, value
        )
    outcomes = []
    for moment in itertools.count():
        folder = memory_folder / str(moment)
        shutil.copytree(start, folder)
        checkpoints = make_checkpoints(
            ending_storage(LocalStorage(str(folder)), moment, kill_self), monkeypatch
        )
        code = in_child(save_and_check, checkpoints, *saving)
        assert code in (0, -signal.SIGKILL)
        outcomes.append(after_crash(LocalStorage(str(folder)), allowed, monkeypatch))
        if code == 0:
            break
    _check_outcomes(outcomes, allowed)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "keeps",
    [
        "none",
        pytest.param("all", marks=pytest.mark.extended),
        pytest.param("any", marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_power_loss_at_any_operation_preserves_the_newest_checkpoint(
    case: str, keeps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the saved values; the disk keeps none, all or any of the unsynced data."""
    before, saving, allowed = CASES[case]
    start = LossyDisk()
    for step, value in before:
        assert save(make_checkpoints(start, monkeypatch), step, value)

    def lose_power() -> None:
        raise PowerLoss

    outcomes: list[tuple[int, float] | None] = []
    for seed in range(3 if keeps == "any" else 1):
        is_saved = False
        for moment in itertools.count():
            disk = copy.deepcopy(start)
            with suppress(PowerLoss):
                is_saved = save(
                    make_checkpoints(
                        ending_storage(disk, moment, lose_power), monkeypatch
                    ),
                    *saving,
                )
                assert is_saved
            outcomes.append(
                after_crash(
                    disk.after_power_loss(keeps, seed + 10 * moment),
                    allowed,
                    monkeypatch,
                )
            )
            assert not is_saved or outcomes[-1] == saving
            if is_saved:
                break
    if keeps != "any":
        _check_outcomes(outcomes, allowed)


def _check_outcomes(
    outcomes: list[tuple[int, float] | None], allowed: list[tuple[int, float] | None]
) -> None:
    """Check that outcomes switch once, from the old checkpoint to the new one, with many moments of
    each."""
    turn = outcomes.index(allowed[1])
    assert outcomes == [allowed[0]] * turn + [allowed[1]] * (len(outcomes) - turn)
    assert turn > 15 and len(outcomes) - turn > 3
