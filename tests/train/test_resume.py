"""A resumed run equals the uninterrupted one."""

import dataclasses
import functools
import hashlib
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.checkpoint import CheckpointConfig
from fsdptoys.checkpoint.config import Form
from fsdptoys.checkpoint.retention import Series
from fsdptoys.config.schema import Config
from fsdptoys.data.bin import BinConfig
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.errors import LostRanksError
from fsdptoys.memory import (
    MemoryConfig,
    OffloadStateDType,
)
from fsdptoys.optim import (
    AdamWConfig,
    OptimStateDType,
    SGDConfig,
    WeightDecayOn,
)
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.parallel.precision import DType
from fsdptoys.train.run import Run
from fsdptoys.train.stop import Stop, saves_after
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.file_lock import FolderLock
from tests.harness.coverage import without_coverage
from tests.harness.processes import wait_until
from tests.harness.ranks import run_ranks
from tests.harness.resumed_runs import (
    IN_BACKWARD,
    LAZY,
    MUON,
    OVERLAPPED,
    Row,
    check_resumed_run,
    refused,
    run_to_the_end,
    run_until,
    steps_of,
    with_checkpoints,
)
from tests.harness.tiny import TINY, WITH_BLOCKS, make_config

pytestmark = pytest.mark.usefixtures("without_pictures")

STEPS = 6
BACKGROUND = {"async_save": True}
ROUNDED = {
    "memory": MemoryConfig(
        optimizer_offload=True, offload_state_dtype=OffloadStateDType.bfloat16
    )
}
HALVED = {
    "optim": AdamWConfig(
        lr=1e-2, state_dtype=OptimStateDType.bfloat16, weight_decay_on=WeightDecayOn.all
    )
}
EIGHTH = {
    "optim": AdamWConfig(
        lr=1e-2, state_dtype=OptimStateDType.int8, weight_decay_on=WeightDecayOn.all
    ),
    "model": WITH_BLOCKS["qwen3_moe"],
}

ROWS = {
    "single, at a URL": Row(
        SingleConfig(), 1, {"url": "memory://", **BACKGROUND}, {"deterministic": True}
    ),
    "single that simulates two, with a loader worker": Row(
        SingleConfig(simulated_ranks=2),
        1,
        options={
            "grad_accum": 2,
            "data": SyntheticConfig(branching=4, ragged=True, workers=1),
        },
    ),
    "ddp, at a URL, in the background": Row(
        DDPConfig(), 2, {"url": "file://", "every": 1, **BACKGROUND}
    ),
    "fsdp1, flat, bf16 states": Row(
        FSDP1Config(use_orig_params=False), options={**HALVED, "grad_accum": 2}
    ),
    "fsdp2, bf16, tied, full tensors": Row(
        FSDP2Config(param_dtype=DType.bfloat16),
        2,
        {"form": Form.full, **BACKGROUND},
        {"model": TINY["gpt2"]},
    ),
    "fsdp2, muon, experts": Row(
        FSDP2Config(),
        2,
        BACKGROUND,
        {**MUON, "model": TINY["qwen3_moe"], "grad_accum": 2},
    ),
    "fsdp2, int8 states": Row(FSDP2Config(), 2, BACKGROUND, EIGHTH),
    "fsdp2, lazy offload": Row(FSDP2Config(), 2, BACKGROUND, {"memory": LAZY}),
    "fsdp2, optimizer in the backward": Row(FSDP2Config(), options=IN_BACKWARD),
    "fsdp2, rounded offload": Row(
        FSDP2Config(), options={**ROUNDED, "optim": SGDConfig(lr=1e-2)}
    ),
    "fsdp2, overlapped CPU offload": Row(
        FSDP2Config(), 2, BACKGROUND, {"memory": OVERLAPPED}
    ),
}

MORE_ROWS = {
    "single": Row(SingleConfig(), 1),
    "fsdp2": Row(FSDP2Config(), 2, BACKGROUND),
    "fsdp2, no state": Row(
        FSDP2Config(), options={"optim": SGDConfig(lr=1e-2, momentum=0.0)}
    ),
    "ddp, muon": Row(DDPConfig(), options=MUON),
    "ddp, bf16 states": Row(DDPConfig(), options=HALVED),
    "fsdp1, bf16 states": Row(FSDP1Config(), 2, BACKGROUND, HALVED),
    "fsdp2, bf16 states": Row(FSDP2Config(), 2, BACKGROUND, HALVED),
    "ddp, int8 states": Row(DDPConfig(), options=EIGHTH),
    "fsdp2, int8 states, full tensors": Row(
        FSDP2Config(), 2, {"form": Form.full}, EIGHTH
    ),
    "ddp, rounded offload": Row(DDPConfig(), options=ROUNDED),
    "hsdp2": Row(FSDP2Config(), 4, BACKGROUND, {"fsdp_size": 2}),
    "hsdp1": Row(FSDP1Config(), 4, options={"fsdp_size": 2}),
    "hsdp2, rounded offload": Row(
        FSDP2Config(), 4, options={**ROUNDED, "fsdp_size": 2}
    ),
}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "label",
    [*ROWS, *(pytest.param(label, marks=pytest.mark.extended) for label in MORE_ROWS)],
)
def test_resumed_run_equals_the_uninterrupted_one_bitwise(
    label: str, tmp_path: Path
) -> None:
    """Oracle: the uninterrupted run: losses, norms, learning rates, tokens, final parameters."""
    check_resumed_run(label, (ROWS | MORE_ROWS)[label], tmp_path)


def train_and_hash_samples(config: Config, killed_in: int | None) -> list[str]:
    """Train, and return a hash of every training sample."""
    sample_hashes: list[str] = []

    def prepare(trainer: Trainer) -> None:
        take = trainer.data.batches.next_step

        def next_step() -> Any:
            batches = take()
            for tokens_BT, labels_BT in batches:
                sample_hashes.extend(
                    hashlib.sha256(
                        tokens.numpy().tobytes() + labels.numpy().tobytes()
                    ).hexdigest()
                    for tokens, labels in zip(tokens_BT, labels_BT, strict=True)
                )
            return batches

        trainer.data.batches.next_step = next_step  # type: ignore[method-assign]

    if killed_in is None:
        run_to_the_end(config, prepare)
    else:
        run_until(config, killed_in, prepare)
    return sample_hashes


@pytest.fixture(scope="module")
def on_two_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[str], list[str]]:
    """A folder with a finished run and one killed half-way, and the samples of each."""
    folder = tmp_path_factory.mktemp("on_two_ranks")
    config = make_config(
        FSDP1Config(), 2, steps=STEPS, grad_accum=2, deterministic=False
    )
    with without_coverage():
        hashes = [
            run_ranks(
                2,
                train_and_hash_samples,
                with_checkpoints(config, folder / name),
                killed_in,
            )
            for name, killed_in in (("whole", None), ("killed", 4))
        ]
    whole, first = ([row for rank in ranks for row in rank] for ranks in hashes)
    return folder, whole, first


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "ranks, parallel",
    [
        (1, SingleConfig()),
        pytest.param(4, FSDP2Config(), marks=pytest.mark.extended),
        pytest.param(4, DDPConfig(), marks=pytest.mark.extended),
    ],
)
def test_resuming_on_another_number_of_ranks_continues_with_the_same_samples(
    ranks: int,
    parallel: ParallelConfig,
    on_two_ranks: tuple[Path, list[str], list[str]],
    tmp_path: Path,
) -> None:
    """Oracle: the uninterrupted run on two ranks with the same global batch; losses within 1e-6,
    each sample once."""
    folder, whole, first = on_two_ranks
    killed = tmp_path / "killed"
    shutil.copytree(folder / "killed", killed)
    other = make_config(
        parallel, ranks, steps=STEPS, grad_accum=4 // ranks, deterministic=False
    )
    rest = [
        row
        for rank in run_ranks(
            ranks, train_and_hash_samples, with_checkpoints(other, killed), None
        )
        for row in rank
    ]
    assert sorted(first + rest) == sorted(whole)
    assert len(set(whole)) == len(whole) == STEPS * 8
    for step, uninterrupted in zip(
        steps_of(killed), steps_of(folder / "whole"), strict=True
    ):
        assert step[0] == uninterrupted[0]
        assert step[1] == pytest.approx(uninterrupted[1], abs=1e-6)


def lose_a_commit(config: Config, lost: Path) -> str:
    def commit_in_vain(*_: Any) -> None:
        wait_until(lost.exists, "the other rank's timeout")

    Series.commit = commit_in_vain  # type: ignore[method-assign]
    try:
        run_to_the_end(config)
    except LostRanksError:
        lost.touch()
        return "lost"
    return "saved"


@pytest.mark.extended
def test_commit_beyond_the_checkpoint_timeout_counts_as_a_lost_rank(
    tmp_path: Path,
) -> None:
    """Oracle: LostRanksError of rank 1, for which a commit of rank 0 waits."""
    config = with_checkpoints(
        make_config(FSDP2Config(), 2, steps=1),
        tmp_path / "run",
        1,
        timeout_seconds=10.0,
    )
    assert run_ranks(2, lose_a_commit, config, tmp_path / "lost")[1] == "lost"


def test_incompatible_checkpoint_is_refused(tmp_path: Path) -> None:
    """Oracle: the expected messages."""
    config = with_checkpoints(
        make_config(SingleConfig(), 1, steps=2), tmp_path, every=1
    )
    run_ranks(1, train_and_hash_samples, config, None)
    more = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4))
    wider = dataclasses.replace(
        more, model=dataclasses.replace(more.model, vocab_size=71)
    )
    other = dataclasses.replace(more, optim=SGDConfig())
    data = dataclasses.replace(
        more, data=dataclasses.replace(more.data, branching=5, workers=1)
    )
    shorter = dataclasses.replace(
        more, train=dataclasses.replace(more.train, seq_len=more.train.seq_len // 2)
    )
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(bytes([5, 0] * 4000))
    files = dataclasses.replace(more, data=BinConfig(files=[str(tokens)]))
    messages = run_ranks(1, refused, wider, other, data, shorter, files)[0]
    assert messages[0] == (
        "model.vocab_size=71 is not 67, with which the weights of the checkpoint of step 2 were "
        "made; set model.vocab_size=67"
    )
    assert messages[1] == (
        "optim=sgd is not adamw, with which the checkpoint of step 2 was made; set optim=adamw "
        "or start a new run in another folder"
    )
    before = "when the checkpoint of step 2 was made, so the order of the data cannot continue; set"
    new = "or start a new run in another folder"
    branching = config.data.branching
    length = config.train.seq_len
    assert messages[2:] == [
        f"data.branching=5 was {branching} {before} data.branching={branching} {new}",
        f"train.seq_len={length // 2} was {length} {before} train.seq_len={length} {new}",
        f"data=bin was synthetic {before} data=synthetic {new}",
    ]


@pytest.mark.parametrize("on_signal", [True, False])
@pytest.mark.parametrize("every", [0, 2])
def test_checkpoints_are_saved_as_documented(every: int, on_signal: bool) -> None:
    """Oracle: the documentation of the settings."""
    saves = functools.partial(
        saves_after, CheckpointConfig(every=every, on_signal=on_signal)
    )
    assert (
        saves(3, Stop("", signal=True)) == saves(4, Stop("", signal=True)) == on_signal
    )
    assert saves(3, Stop("", gave_up=True))
    assert saves(3, Stop("")) == saves(4, None) == (every == 2)
    assert not saves(3, None)


def test_second_start_does_not_modify_a_running_run(tmp_path: Path) -> None:
    """Oracle: the unchanged folder, with a partially written checkpoint."""
    partial = tmp_path / "run" / "checkpoints" / ".step-00000009.partial"
    partial.mkdir(parents=True)
    lock = FolderLock(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    (message,) = run_ranks(
        1, refused, with_checkpoints(make_config(SingleConfig(), 1), tmp_path / "run")
    )[0]
    lock.release()
    assert message == (
        f"metrics.run_dir={tmp_path}/run is being written by another run (pid {os.getpid()}); "
        "wait for its end, or set metrics.run_dir to another folder"
    )
    assert [path for path in before if path.name != ".lock"] == sorted(
        tmp_path.rglob("*")
    )


def fail_while_saving(config: Config) -> list[str]:
    """Fail in the step after an asynchronous save started, which commits afterwards; return the
    checkpoints."""
    commit = Series.commit
    failed = threading.Event()

    def commit_late(*args: Any) -> None:
        failed.wait()
        commit(*args)

    Series.commit = commit_late  # type: ignore[method-assign]
    trainer = Trainer(config)
    take = trainer.data.batches.next_step

    def fail() -> Any:
        if trainer.steps_done < 2:
            return take()
        failed.set()
        raise ZeroDivisionError

    trainer.data.batches.next_step = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        Run(trainer).run()
    assert config.metrics.run_dir is not None
    return sorted(
        path.name
        for path in (Path(config.metrics.run_dir) / "checkpoints").glob("step-*")
    )


def test_failure_during_an_asynchronous_save_keeps_the_checkpoint(
    tmp_path: Path,
) -> None:
    """Oracle: the folder after the exception."""
    config = with_checkpoints(
        make_config(SingleConfig(), 1, steps=4), tmp_path / "run", 2, async_save=True
    )
    assert run_ranks(1, fail_while_saving, config)[0] == ["step-00000002"]
