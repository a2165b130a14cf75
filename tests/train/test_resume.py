"""A resumed run equals the uninterrupted one."""

import dataclasses
import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.checkpoint import CheckpointConfig
from fsdptoys.checkpoint.config import Form
from fsdptoys.checkpoint.retention import Series
from fsdptoys.cli.convert import convert_command
from fsdptoys.config.schema import Config
from fsdptoys.data import SyntheticConfig
from fsdptoys.errors import ConfigError, LostRanksError
from fsdptoys.memory import CPUOffloadExecutor, MemoryConfig, OffloadSchedule, OffloadStateDType
from fsdptoys.optim import AdamWConfig, MuonConfig, OptimStateDType, SGDConfig, WeightDecayOn
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.parallel.precision import DType
from fsdptoys.train.run import Run
from fsdptoys.train.stop import Stop
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.file_lock import FolderLock
from scripts.parity import hash_parameters
from scripts.ranks import run_ranks
from tests.measuring import without_coverage
from tests.parallel.runs import TINY, WITH_BLOCKS, make_config, supported, tiny_model
from tests.train.resumed import kept, run_to_the_end, run_until, steps_of

pytestmark = pytest.mark.usefixtures("without_pictures")

STEPS = 6
SHORT = 4
"""Steps of runs with many configurations: every second one is saved, and one is repeated."""
SMALL: dict[str, Any] = {
    "model": dataclasses.replace(tiny_model(), n_layers=2),
    "steps": SHORT,
    "grad_accum": 1,
    "deterministic": False,
}


Row = tuple[ParallelConfig, dict[str, Any]]
"""A strategy and options of ``make_config``, or under ``checkpoint`` of checkpoints."""


def configs_of(rows: dict[str, Row], ranks: int) -> dict[str, tuple[Config, dict[str, Any]]]:
    """Configuration and checkpoint options of each row that this torch supports."""

    def made(parallel: ParallelConfig, checkpoint: dict[str, Any] | None = None, **options: Any) -> Any:
        return make_config(parallel, ranks, **options), checkpoint or {}

    return {label: made(parallel, **options) for label, (parallel, options) in supported(rows).items()}


def resumed_and_uninterrupted(rows: dict[str, tuple[Config, dict[str, Any]]], folder: Path) -> dict[str, Any]:
    """Steps and parameters, for each row, of a run without checkpoints and of one killed in its last step."""
    outcomes = {}
    for label, (config, checkpoint) in rows.items():
        whole, killed = folder / label / "whole", folder / label / "killed"
        alone = dataclasses.replace(config, data=dataclasses.replace(config.data, workers=0))
        uninterrupted = run_to_the_end(kept(alone, whole, every=0))
        checkpoint = {"every": 2, **checkpoint}
        run_until(kept(config, killed, **checkpoint), SHORT)
        resumed = run_to_the_end(kept(config, killed, **checkpoint))
        took = len(resumed.history)
        outcomes[label] = took, hash_parameters(uninterrupted), hash_parameters(resumed)
    return outcomes


def two_ranks() -> dict[str, Row]:
    def row(parallel: ParallelConfig, memory: dict[str, Any] | None = None, **more: Any) -> Row:
        return parallel, {**SMALL, "memory": MemoryConfig(**(memory or {})), **more}

    background = {"async_save": True}
    lazy = {"optimizer_offload": True, "offload_schedule": OffloadSchedule.lazy}
    rounded = {"optimizer_offload": True, "offload_state_dtype": OffloadStateDType.bfloat16}
    halved = AdamWConfig(lr=1e-2, state_dtype=OptimStateDType.bfloat16, weight_decay_on=WeightDecayOn.all)
    eighth = AdamWConfig(lr=1e-2, state_dtype=OptimStateDType.int8, weight_decay_on=WeightDecayOn.all)
    few_bits = {"optim": eighth, "model": WITH_BLOCKS["qwen3_moe"]}
    overlapped = {"cpu_offload": True, "cpu_offload_executor": CPUOffloadExecutor.overlapped, "cpu_threads": 2}
    return {
        "ddp, at a URL, in the background": row(DDPConfig(), checkpoint={"url": "file://", "every": 1, **background}),
        "fsdp2": row(FSDP2Config(), checkpoint=background),
        "fsdp2, bf16, tied, full tensors": row(
            FSDP2Config(param_dtype=DType.bfloat16), model=TINY["gpt2"], checkpoint={"form": Form.full, **background}
        ),
        "fsdp2, no state": row(FSDP2Config(), optim=SGDConfig(lr=1e-2, momentum=0.0)),
        "fsdp2, lazy offload": row(FSDP2Config(), lazy, checkpoint=background),
        "ddp, muon": row(DDPConfig(), optim=MuonConfig(lr=1e-2)),
        "fsdp2, muon, experts": row(
            FSDP2Config(), optim=MuonConfig(lr=1e-2), model=TINY["qwen3_moe"], grad_accum=2, checkpoint=background
        ),
        "ddp, bf16 states": row(DDPConfig(), optim=halved),
        "fsdp1, bf16 states": row(FSDP1Config(), optim=halved, checkpoint=background),
        "fsdp1, flat, bf16 states": row(FSDP1Config(use_orig_params=False), optim=halved, grad_accum=2),
        "fsdp2, bf16 states": row(FSDP2Config(), optim=halved, checkpoint=background),
        "ddp, int8 states": row(DDPConfig(), **few_bits),
        "fsdp2, int8 states, full tensors": row(FSDP2Config(), checkpoint={"form": Form.full}, **few_bits),
        "fsdp2, int8 states": row(FSDP2Config(), checkpoint=background, **few_bits),
        "fsdp2, optimizer in the backward": row(
            FSDP2Config(), {"optimizer_in_backward": True}, max_grad_norm=None, skip_nonfinite=False, grad_accum=1
        ),
        "ddp, rounded offload": row(DDPConfig(), rounded),
        "fsdp2, rounded offload": row(FSDP2Config(), rounded, optim=SGDConfig(lr=1e-2)),
        "fsdp2, overlapped CPU offload": row(FSDP2Config(), overlapped, checkpoint=background),
    }


def four_ranks() -> dict[str, Row]:
    rounded = MemoryConfig(optimizer_offload=True, offload_state_dtype=OffloadStateDType.bfloat16)
    return {
        "hsdp2": (FSDP2Config(), {**SMALL, "fsdp_size": 2, "checkpoint": {"async_save": True}}),
        "hsdp1": (FSDP1Config(), {**SMALL, "fsdp_size": 2}),
        "hsdp2, rounded offload": (FSDP2Config(), {**SMALL, "fsdp_size": 2, "memory": rounded}),
    }


def one_rank() -> dict[str, Row]:
    loaded = SyntheticConfig(branching=4, ragged=True, workers=1)
    at_a_url = {"url": "memory://", "async_save": True}
    return {
        "single": (SingleConfig(), {"steps": SHORT}),
        "single, at a URL": (SingleConfig(), {"steps": SHORT, "checkpoint": at_a_url}),
        "single that simulates two, with a loader worker": (
            SingleConfig(simulated_ranks=2),
            {"steps": SHORT, "data": loaded},
        ),
    }


@pytest.mark.parametrize("ranks, rows", [(1, one_rank), (2, two_ranks), (4, four_ranks)], ids=["1", "2", "4"])
def test_resumed_run_equals_the_uninterrupted_one_bitwise(
    ranks: int, rows: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Oracle: the uninterrupted run: losses, norms, learning rates, tokens, final parameters."""
    if ranks > 1:
        request.getfixturevalue("unmeasured")
    configs = configs_of(rows(), ranks)
    outcomes = run_ranks(ranks, resumed_and_uninterrupted, configs, tmp_path)
    for label, (_, checkpoint) in configs.items():
        uninterrupted = steps_of(tmp_path / label / "whole")
        assert steps_of(tmp_path / label / "killed") == uninterrupted, label
        assert [step[0] for step in uninterrupted] == list(range(1, SHORT + 1))
        every = checkpoint.get("every", 2)
        for outcome in outcomes:
            took, whole, resumed = outcome[label]
            assert took == SHORT - (SHORT - 1) // every * every, label
            assert resumed == whole == outcomes[0][label][1], label


def train_and_hash_samples(config: Config, killed_in: int | None) -> list[str]:
    """Train, and return a hash of every training sample."""
    seen: list[str] = []

    def prepare(trainer: Trainer) -> None:
        take = trainer.batches.next_step

        def next_step() -> Any:
            batches = take()
            for tokens_BT, labels_BT in batches:
                seen.extend(
                    hashlib.sha256(tokens.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
                    for tokens, labels in zip(tokens_BT, labels_BT, strict=True)
                )
            return batches

        trainer.batches.next_step = next_step  # type: ignore[method-assign]

    if killed_in is None:
        run_to_the_end(config, prepare)
    else:
        run_until(config, killed_in, prepare)
    return seen


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[str]]:
    """A folder with a finished run and one killed half-way, and the samples of each."""
    folder = tmp_path_factory.mktemp("on_two_ranks")
    config = make_config(FSDP1Config(), 2, steps=STEPS, grad_accum=2, deterministic=False)
    with without_coverage():
        hashes = [
            run_ranks(2, train_and_hash_samples, kept(config, folder / name), killed_in)
            for name, killed_in in (("whole", None), ("killed", 4))
        ]
    wanted, first = ([row for rank in ranks for row in rank] for ranks in hashes)
    return folder, wanted, first


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("ranks, parallel", [(4, FSDP2Config()), (1, SingleConfig()), (4, DDPConfig())])
def test_resuming_on_another_number_of_ranks_continues_with_the_same_samples(
    ranks: int, parallel: ParallelConfig, on_two_ranks: tuple[Path, list[str], list[str]], tmp_path: Path
) -> None:
    """Oracle: the uninterrupted run on two ranks with the same global batch; losses within 1e-6, each sample once."""
    folder, wanted, first = on_two_ranks
    killed = tmp_path / "killed"
    shutil.copytree(folder / "killed", killed)
    other = make_config(parallel, ranks, steps=STEPS, grad_accum=4 // ranks, deterministic=False)
    rest = [row for rank in run_ranks(ranks, train_and_hash_samples, kept(other, killed), None) for row in rank]
    assert sorted(first + rest) == sorted(wanted)
    assert len(set(wanted)) == len(wanted) == STEPS * 8
    for found, uninterrupted in zip(steps_of(killed), steps_of(folder / "whole"), strict=True):
        assert found[0] == uninterrupted[0]
        assert found[1] == pytest.approx(uninterrupted[1], abs=1e-6)


def save_slowly(config: Config) -> str:
    commit = Series.commit

    def commit_late(*given: Any) -> None:
        time.sleep(3)
        commit(*given)

    Series.commit = commit_late  # type: ignore[method-assign]
    try:
        run_to_the_end(config)
    except LostRanksError:
        return "lost"
    return "saved"


@pytest.mark.parametrize("seconds, outcome", [(60.0, "saved"), (1.0, "lost")])
def test_checkpoint_timeout_replaces_the_launch_timeout_while_saving(
    seconds: float, outcome: str, tmp_path: Path
) -> None:
    """Oracle: a commit of three seconds on rank 0, for which rank 1 waits."""
    config = kept(make_config(FSDP2Config(), 2, steps=1), tmp_path / "run", 1, timeout_seconds=seconds)
    config.launch.timeout_seconds = 2.0
    assert run_ranks(2, save_slowly, config)[1] == outcome


def refused(*configs: Config) -> list[str]:
    messages = []
    for config in configs:
        with pytest.raises(ConfigError) as caught:
            run_to_the_end(config)
        messages.append(str(caught.value))
    return messages


def test_incompatible_checkpoint_is_refused(tmp_path: Path) -> None:
    """Oracle: the expected messages."""
    config = kept(make_config(SingleConfig(), 1, steps=2), tmp_path, every=1)
    run_ranks(1, train_and_hash_samples, config, None)
    more = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4))
    wider = dataclasses.replace(more, model=dataclasses.replace(more.model, vocab_size=71))
    other = dataclasses.replace(more, optim=SGDConfig())
    data = dataclasses.replace(more, data=dataclasses.replace(more.data, branching=5))
    messages = run_ranks(1, refused, wider, other, data)[0]
    assert messages[0] == (
        "model.vocab_size=71 is not 67, with which the weights of the checkpoint of step 2 were made; set "
        "model.vocab_size=67"
    )
    assert messages[1] == (
        "optim=sgd has other states than optim=adamw, with which the checkpoint of step 2 was made; set optim=adamw or "
        "start a new run in another folder"
    )
    assert messages[2].startswith("data has changed since the checkpoint (fingerprint ")


@pytest.mark.parametrize("form", list(Form), ids=lambda form: form.value)
def test_converted_checkpoints_equal_converted_final_weights(
    form: Form, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the folder in Hugging Face format made from the final weights, byte for byte."""
    config = kept(make_config(FSDP2Config(), 2, steps=2, model=TINY["qwen3_moe"]), tmp_path / "run", 2, form=form)
    config.checkpoint.final_weights = True
    run_ranks(2, train_and_hash_samples, config, None)
    for source, target in (("run", "final"), ("run/checkpoints", "newest"), ("run/checkpoints/step-00000002", "named")):
        assert convert_command(["to-hf", str(tmp_path / source), str(tmp_path / target)]) == 0
    (tmp_path / "run" / "weights").rename(tmp_path / "weights")
    assert convert_command(["to-hf", str(tmp_path / "run"), str(tmp_path / "run_without_weights")]) == 0
    assert "holds no final weights; taking those of its newest checkpoint, step-00000002" in capsys.readouterr().out
    final = {path.name: path.read_bytes() for path in (tmp_path / "final").iterdir()}
    for target in ("newest", "named", "run_without_weights"):
        assert {path.name: path.read_bytes() for path in (tmp_path / target).iterdir()} == final
    manifest = tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json"
    manifest.unlink()
    with pytest.raises(ConfigError, match=r"step-00000002 is incomplete: it has no manifest\.json"):
        convert_command(["to-hf", str(manifest.parent), str(tmp_path / "refused")])


@pytest.mark.parametrize("on_signal", [True, False])
@pytest.mark.parametrize("every", [0, 2])
def test_checkpoints_are_saved_as_documented(every: int, on_signal: bool) -> None:
    """Oracle: the documentation of the settings."""
    trainer = Trainer.__new__(Trainer)
    trainer.config = make_config(SingleConfig(), 1)
    trainer.config.checkpoint = CheckpointConfig(every=every, on_signal=on_signal)
    assert trainer._saves_after(3, Stop("", signal=True)) == trainer._saves_after(4, Stop("", signal=True)) == on_signal
    assert trainer._saves_after(3, Stop("", gave_up=True))
    assert trainer._saves_after(3, Stop("")) == trainer._saves_after(4, None) == (every == 2)
    assert not trainer._saves_after(3, None)


def weights_of(folder: Path) -> bytes:
    return (folder / "weights.safetensors").read_bytes()


def test_final_weights_are_kept_until_a_resumed_run_takes_a_step(tmp_path: Path) -> None:
    """Oracle: the files: kept without further steps, moved aside otherwise."""
    run = tmp_path / "run"
    config = kept(make_config(SingleConfig(), 1, steps=2), run)
    config.checkpoint.final_weights = True
    for _ in range(3):
        run_ranks(1, train_and_hash_samples, config, None)
    first = weights_of(run / "weights")
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4))
    run_ranks(1, train_and_hash_samples, longer, 4)
    assert not (run / "weights").exists()
    run_ranks(1, train_and_hash_samples, longer, None)
    assert weights_of(run / "weights-1") == first != weights_of(run / "weights")
    assert sorted(path.name for path in run.glob("weights*")) == ["weights", "weights-1"]


def test_second_start_does_not_modify_a_running_run(tmp_path: Path) -> None:
    """Oracle: the unchanged folder, with a partially written checkpoint."""
    partial = tmp_path / "run" / "checkpoints" / ".step-00000009.partial"
    partial.mkdir(parents=True)
    lock = FolderLock(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    (message,) = run_ranks(1, refused, kept(make_config(SingleConfig(), 1), tmp_path / "run"))[0]
    lock.release()
    assert message == (
        f"metrics.run_dir={tmp_path}/run is being written by another run (pid {os.getpid()}); wait for its end, or set "
        "metrics.run_dir to another folder"
    )
    assert [path for path in before if path.name != ".lock"] == sorted(tmp_path.rglob("*"))


def fail_while_saving(config: Config) -> list[str]:
    """Fail in the step after an asynchronous save with a slow commit started; return the checkpoints."""
    commit = Series.commit

    def commit_late(*given: Any) -> None:
        time.sleep(1)
        commit(*given)

    Series.commit = commit_late  # type: ignore[method-assign]
    trainer = Trainer(config)
    take = trainer.batches.next_step
    trainer.batches.next_step = lambda: take() if trainer.steps_done < 2 else 1 / 0  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(ZeroDivisionError):
        Run(trainer).run()
    assert config.metrics.run_dir is not None
    return sorted(path.name for path in (Path(config.metrics.run_dir) / "checkpoints").glob("step-*"))


def test_failure_during_an_asynchronous_save_keeps_the_checkpoint(tmp_path: Path) -> None:
    """Oracle: the folder after the exception."""
    config = kept(make_config(SingleConfig(), 1, steps=4), tmp_path / "run", 2, async_save=True)
    assert run_ranks(1, fail_while_saving, config)[0] == ["step-00000002"]
