"""Going on from a checkpoint: what is resumed must be what was never disturbed."""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdptoys.checkpoint import CheckpointConfig
from fsdptoys.checkpoint.config import Form
from fsdptoys.checkpoint.retention import Series
from fsdptoys.cli.convert import convert
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError, GivenUpError, LostRanksError
from fsdptoys.memory import CPUOffloadExecutor, MemoryConfig, OffloadSchedule, OffloadStateDType
from fsdptoys.optim import AdamWConfig, MuonConfig, OptimStateDType, SGDConfig, WeightDecayOn
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.parallel.precision import DType
from fsdptoys.train.run import Run
from fsdptoys.train.stop import Stop
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_tensor
from fsdptoys.utils.file_lock import FolderLock
from scripts.parity import hash_parameters
from scripts.ranks import run_ranks
from tests.measuring import without_coverage
from tests.parallel.runs import TINY, WITH_BLOCKS, make_config, tiny_model

STEPS = 6
SHORT = 4
"""Steps where a run is made for each of many configurations: half of them are saved, and one is taken twice."""
SMALL: dict[str, Any] = {
    "model": dataclasses.replace(tiny_model(), n_layers=2),
    "steps": SHORT,
    "grad_accum": 1,
    "deterministic": False,
}
KEPT = ("step", "loss", "grad_norm", "learning_rate", "valid_tokens", "skipped", "skipped_steps")


class Killed(BaseException):
    """Stands for the end of the process."""


def kept(config: Config, folder: Path, every: int = 3, url: str | None = None, **checkpoint: Any) -> Config:
    """The configuration with checkpoints, in a run directory or at a URL; going on where it can."""
    if url is not None:
        checkpoint["folder"] = f"{url}{folder}/elsewhere"
    return dataclasses.replace(
        config,
        checkpoint=CheckpointConfig(every=every, resume="auto", **checkpoint),
        metrics=dataclasses.replace(config.metrics, run_dir=str(folder)),
    )


def run_to_the_end(config: Config, prepare: Callable[[Trainer], None] = lambda trainer: None) -> Trainer:
    trainer = Trainer(config)
    prepare(trainer)
    Run(trainer).run()
    return trainer


def run_until(config: Config, killed_in: int, prepare: Callable[[Trainer], None] = lambda trainer: None) -> None:
    """Take steps and end at the beginning of the one numbered ``killed_in``."""
    trainer = Trainer(config)
    prepare(trainer)
    run = Run(trainer)
    take = trainer.batches.next_step

    def next_step() -> Any:
        if trainer.steps_done + 1 == killed_in:
            run.checkpoints.finish()
            raise Killed
        return take()

    trainer.batches.next_step = next_step  # type: ignore[method-assign]
    try:
        run.run()
    except Killed:
        dist.barrier()
    else:
        raise AssertionError("it came to its end")


def steps_of(folder: Path) -> list[list[Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [[json.loads(line)[name] for name in KEPT] for line in lines]


@pytest.fixture(autouse=True, scope="module")
def without_pictures() -> Iterator[None]:
    """Leave out what takes most of the time of such small runs; their other files are looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdptoys.metrics.plots.draw_loss", lambda *_: None)
        patch.setattr("fsdptoys.metrics.plots.draw_experts", lambda *_: None)
        yield


def resumed_and_undisturbed(rows: dict[str, tuple[Config, dict[str, Any]]], folder: Path) -> dict[str, Any]:
    """For each row, steps and parameters of a run that saves nothing and of one that was killed in its last step."""
    outcomes = {}
    for label, (config, checkpoint) in rows.items():
        whole, killed = folder / label / "whole", folder / label / "killed"
        undisturbed = run_to_the_end(kept(config, whole, every=0))
        checkpoint = {"every": 2, **checkpoint}
        run_until(kept(config, killed, **checkpoint), SHORT)
        resumed = run_to_the_end(kept(config, killed, **checkpoint))
        took = len(resumed.history)
        outcomes[label] = took, hash_parameters(undisturbed), hash_parameters(resumed)
    return outcomes


def two_ranks() -> dict[str, tuple[Config, dict[str, Any]]]:
    def row(parallel: ParallelConfig, memory: dict[str, Any] | None = None, **more: Any) -> tuple[Config, dict]:
        workers, checkpoint = more.pop("workers", 0), more.pop("checkpoint", {})
        config = make_config(parallel, 2, memory=MemoryConfig(**(memory or {})), **{**SMALL, **more})
        config.data.workers = workers
        return config, checkpoint

    background = {"async_save": True}
    lazy = {"optimizer_offload": True, "offload_schedule": OffloadSchedule.lazy}
    rounded = {"optimizer_offload": True, "offload_state_dtype": OffloadStateDType.bfloat16}
    halved = AdamWConfig(lr=1e-2, state_dtype=OptimStateDType.bfloat16, weight_decay_on=WeightDecayOn.all)
    eighth = AdamWConfig(lr=1e-2, state_dtype=OptimStateDType.int8, weight_decay_on=WeightDecayOn.all)
    few_bits = {"optim": eighth, "model": WITH_BLOCKS["qwen3_moe"]}
    overlapped = {"cpu_offload": True, "cpu_offload_executor": CPUOffloadExecutor.overlapped, "cpu_threads": 2}
    return {
        "ddp, at a URL": row(DDPConfig(), checkpoint={"url": "file://"}),
        "ddp, in the background": row(DDPConfig(), checkpoint={"every": 1, **background}),
        "fsdp1": row(FSDP1Config(), checkpoint=background),
        "fsdp1, flat": row(FSDP1Config(use_orig_params=False), grad_accum=2),
        "fsdp2": row(FSDP2Config(), checkpoint=background, workers=1),
        "fsdp2, bf16, whole tensors": row(FSDP2Config(param_dtype=DType.bfloat16), checkpoint={"form": Form.full}),
        "fsdp2, experts": row(FSDP2Config(), model=TINY["qwen3_moe"], grad_accum=2),
        "fsdp2, tied": row(FSDP2Config(), model=TINY["gpt2"], checkpoint={"form": Form.full, **background}),
        "fsdp2, no state": row(FSDP2Config(), optim=SGDConfig(lr=1e-2, momentum=0.0)),
        "fsdp2, lazy offload": row(FSDP2Config(), lazy, checkpoint=background),
        "ddp, muon": row(DDPConfig(), optim=MuonConfig(lr=1e-2)),
        "fsdp2, muon": row(FSDP2Config(), optim=MuonConfig(lr=1e-2), model=TINY["qwen3_moe"], checkpoint=background),
        "ddp, bf16 states": row(DDPConfig(), optim=halved),
        "fsdp1, bf16 states": row(FSDP1Config(), optim=halved),
        "fsdp1, flat, bf16 states": row(FSDP1Config(use_orig_params=False), optim=halved),
        "fsdp2, bf16 states": row(FSDP2Config(), optim=halved, checkpoint=background),
        "ddp, int8 states": row(DDPConfig(), **few_bits),
        "fsdp2, int8 states, whole tensors": row(FSDP2Config(), checkpoint={"form": Form.full}, **few_bits),
        "fsdp2, int8 states": row(FSDP2Config(), checkpoint=background, **few_bits),
        "fsdp2, optimizer in the backward": row(
            FSDP2Config(), {"optimizer_in_backward": True}, max_grad_norm=None, skip_nonfinite=False, grad_accum=1
        ),
        "ddp, rounded offload": row(DDPConfig(), rounded),
        "fsdp2, rounded offload": row(FSDP2Config(), rounded, optim=SGDConfig(lr=1e-2)),
        "fsdp2, overlapped CPU offload": row(FSDP2Config(), overlapped, checkpoint=background),
    }


def four_ranks() -> dict[str, tuple[Config, dict[str, Any]]]:
    rounded = MemoryConfig(optimizer_offload=True, offload_state_dtype=OffloadStateDType.bfloat16)
    return {
        "fsdp2": (make_config(FSDP2Config(), 4, **SMALL), {}),
        "hsdp2": (make_config(FSDP2Config(), 4, fsdp_size=2, **SMALL), {"async_save": True}),
        "hsdp1": (make_config(FSDP1Config(), 4, fsdp_size=2, **SMALL), {}),
        "hsdp2, rounded offload": (make_config(FSDP2Config(), 4, fsdp_size=2, memory=rounded, **SMALL), {}),
    }


def one_rank() -> dict[str, tuple[Config, dict[str, Any]]]:
    return {
        "single": (make_config(SingleConfig(), 1, steps=SHORT), {}),
        "single, at a URL": (make_config(SingleConfig(), 1, steps=SHORT), {"url": "memory://", "async_save": True}),
        "single that follows two": (make_config(SingleConfig(simulated_ranks=2), 1, steps=SHORT), {}),
    }


@pytest.mark.parametrize("ranks, rows", [(1, one_rank), (2, two_ranks), (4, four_ranks)], ids=["1", "2", "4"])
def test_a_resumed_run_is_the_undisturbed_one_in_every_bit(
    ranks: int, rows: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Oracle: the same run in one go: losses, norms, learning rates, tokens, final parameters."""
    if ranks > 1:
        request.getfixturevalue("unmeasured")
    outcomes = run_ranks(ranks, resumed_and_undisturbed, rows(), tmp_path)
    for label in rows():
        undisturbed = steps_of(tmp_path / label / "whole")
        assert steps_of(tmp_path / label / "killed") == undisturbed, label
        assert [step[0] for step in undisturbed] == list(range(1, SHORT + 1))
        every = rows()[label][1].get("every", 2)
        for outcome in outcomes:
            took, whole, resumed = outcome[label]
            assert took == SHORT - (SHORT - 1) // every * every, label
            assert resumed == whole == outcomes[0][label][1], label


def train_and_tell(config: Config, killed_in: int | None) -> list[str]:
    """Train, and tell a hash of every sample that was trained on."""
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
    """A folder with a run that went to its end and one that was killed in its middle, and the samples of each."""
    folder = tmp_path_factory.mktemp("on_two_ranks")
    config = make_config(FSDP1Config(), 2, steps=STEPS, grad_accum=2, deterministic=False)
    with without_coverage():
        told = [
            run_ranks(2, train_and_tell, kept(config, folder / name), killed_in)
            for name, killed_in in (("whole", None), ("killed", 4))
        ]
    wanted, first = ([row for rank in ranks for row in rank] for ranks in told)
    return folder, wanted, first


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("ranks, parallel", [(4, FSDP2Config()), (1, SingleConfig()), (4, DDPConfig())])
def test_another_number_of_ranks_goes_on_with_the_same_samples(
    ranks: int, parallel: ParallelConfig, on_two_ranks: tuple[Path, list[str], list[str]], tmp_path: Path
) -> None:
    """Oracle: the undisturbed run on two ranks with the same global batch; losses within 1e-6, each sample once."""
    folder, wanted, first = on_two_ranks
    killed = tmp_path / "killed"
    shutil.copytree(folder / "killed", killed)
    other = make_config(parallel, ranks, steps=STEPS, grad_accum=4 // ranks, deterministic=False)
    rest = [row for rank in run_ranks(ranks, train_and_tell, kept(other, killed), None) for row in rank]
    assert sorted(first + rest) == sorted(wanted)
    assert len(set(wanted)) == len(wanted) == STEPS * 8
    for found, undisturbed in zip(steps_of(killed), steps_of(folder / "whole"), strict=True):
        assert found[0] == undisturbed[0]
        assert found[1] == pytest.approx(undisturbed[1], abs=1e-6)


def poisoned(config: Config, steps: set[int], rank: int) -> tuple[Trainer, list[bool]]:
    """Train with gradients of one rank that are not finite in some steps; tell whether these left the parameters."""
    trainer = Trainer(config)
    clip, same, before = trainer._clip, [], [""]

    def clip_poisoned(max_norm: float) -> torch.Tensor:
        step = trainer.steps_done + 1
        if step - 1 in steps:
            same.append(hash_parameters(trainer) == before[0])
        before[0] = hash_parameters(trainer)
        if step in steps and trainer.rank == rank:
            grads = [
                local_tensor(param.grad) for _, param in trainer.strategy.named_parameters() if param.grad is not None
            ]
            next(grad for grad in grads if grad.numel()).view(-1)[0] = float("inf")
        return clip(max_norm)

    trainer._clip = clip_poisoned  # type: ignore[method-assign]
    try:
        Run(trainer).run()
    except GivenUpError as error:
        trainer.given_up = str(error)  # type: ignore[attr-defined]
    return trainer, same


def poison_all(rows: dict[str, Config], folder: Path) -> dict[str, Any]:
    warnings.simplefilter("error")  # PyTorch's schedules do not expect a first step without an update
    outcomes = {}
    for label, config in rows.items():
        trainer, same = poisoned(kept(config, folder / label, every=0), {1, 4}, rank=1)
        outcomes[label] = [step.skipped for step in trainer.history], same, hash_parameters(trainer)
    return outcomes


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(tmp_path: Path) -> None:
    """Oracle: the parameters before the step, and the other ranks."""
    lazy = MemoryConfig(optimizer_offload=True, offload_schedule=OffloadSchedule.lazy)
    rows = {
        "ddp": make_config(DDPConfig(), 2, steps=5),
        "fsdp1": make_config(FSDP1Config(), 2, steps=5),
        "fsdp2": make_config(FSDP2Config(), 2, steps=5),
        "fsdp2, default": make_config(FSDP2Config(), 2, steps=5, deterministic=False, max_grad_norm=None),
        "fsdp2, lazy": make_config(FSDP2Config(), 2, steps=5, memory=lazy),
    }
    first, second = run_ranks(2, poison_all, rows, tmp_path)
    for label in rows:
        assert first[label][:2] == second[label][:2] == ([True, False, False, True, False], [True, True]), label
        assert first[label][2] == second[label][2]
        assert [step[-1] for step in steps_of(tmp_path / label)] == [1, 1, 1, 2, 2]


def give_up(config: Config) -> tuple[str, int, str]:
    trainer, _ = poisoned(config, {2, 3, 4, 5, 6}, rank=0)
    return trainer.given_up, trainer.steps_done, hash_parameters(trainer)  # type: ignore[attr-defined]


def load_and_hash(config: Config) -> tuple[int, str]:
    trainer = Trainer(config)
    run = Run(trainer)
    run.checkpoints = run._open_checkpoints()
    run._resume()
    return trainer.steps_done, hash_parameters(trainer)


def test_too_many_skipped_steps_end_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """Oracle: the parameters at the end, loaded from what was saved, which nothing was deleted for."""
    config = make_config(FSDP2Config(), 2, steps=8, max_skipped_in_a_row=3)
    kept_config = kept(config, tmp_path, every=1, keep=1)
    (told, steps, hashed), _ = run_ranks(2, give_up, kept_config)
    assert steps == 4
    assert told.startswith("stopped after step 4: 3 steps in a row had a loss or gradients that are not finite")
    assert "the newest checkpoint is that of step 4" in told
    assert [path.name[-1] for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["3", "4"]
    assert run_ranks(2, load_and_hash, kept_config)[0] == (4, hashed)


def poison(config: Config, steps: set[int]) -> tuple[list[bool], list[float], str | None]:
    trainer, _ = poisoned(config, steps, rank=0)
    return (
        [step.skipped for step in trainer.history],
        [step.loss for step in trainer.history],
        getattr(trainer, "given_up", None),
    )


def test_the_limit_on_skipped_steps_counts_the_whole_run(tmp_path: Path) -> None:
    """Oracle: two skipped steps with a good one between them."""
    config = kept(make_config(FSDP2Config(), 2, steps=6, max_skipped=2), tmp_path, every=0)
    skipped, _, told = run_ranks(2, poison, config, {1, 3})[0]
    assert skipped == [True, False, True]
    assert (
        told is not None and "2 steps in all had a loss or gradients that are not finite (train.max_skipped=2)" in told
    )


def test_without_skipping_a_step_that_is_not_finite_reaches_the_model(tmp_path: Path) -> None:
    """Oracle: the losses after it."""
    config = kept(make_config(FSDP2Config(), 2, steps=4, skip_nonfinite=False), tmp_path, every=0)
    skipped, losses, told = run_ranks(2, poison, config, {2})[0]
    assert skipped == [False] * 4 and told is None
    assert [math.isfinite(loss) for loss in losses] == [True, True, False, False]


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
def test_a_save_may_take_as_long_as_its_own_timeout(seconds: float, outcome: str, tmp_path: Path) -> None:
    """Oracle: a commit of three seconds on rank 0, for which rank 1 waits."""
    config = kept(make_config(FSDP2Config(), 2, steps=1), tmp_path / "run", 1, timeout_seconds=seconds)
    config.launch.timeout_seconds = 2.0
    assert run_ranks(2, save_slowly, config)[1] == outcome


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        run_to_the_end(config)
    return str(caught.value)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Oracle: the sentence."""
    config = kept(make_config(SingleConfig(), 1, steps=2), tmp_path, every=1)
    run_ranks(1, train_and_tell, config, None)
    more = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4))
    wider = dataclasses.replace(more, model=dataclasses.replace(more.model, vocab_size=71))
    other = dataclasses.replace(more, optim=SGDConfig())
    data = dataclasses.replace(more, data=dataclasses.replace(more.data, branching=5))
    assert run_ranks(1, refused, wider)[0] == (
        "model.vocab_size=71 is not 67, with which the weights of the checkpoint of step 2 were made; set "
        "model.vocab_size=67"
    )
    assert run_ranks(1, refused, other)[0] == (
        "optim=sgd has other states than optim=adamw, with which the checkpoint of step 2 was made; set optim=adamw or "
        "start a new run in another folder"
    )
    assert run_ranks(1, refused, data)[0].startswith("data has changed since the checkpoint (fingerprint ")


@pytest.mark.parametrize("form", list(Form), ids=lambda form: form.value)
def test_a_checkpoint_converts_to_what_the_final_weights_convert_to(
    form: Form, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the folder in Hugging Face format made from the final weights, byte for byte."""
    config = kept(make_config(FSDP2Config(), 2, steps=2, model=TINY["qwen3_moe"]), tmp_path / "run", 2, form=form)
    config.checkpoint.final_weights = True
    run_ranks(2, train_and_tell, config, None)
    for source, target in (("run", "final"), ("run/checkpoints", "newest"), ("run/checkpoints/step-00000002", "named")):
        assert convert(["to-hf", str(tmp_path / source), str(tmp_path / target)]) == 0
    (tmp_path / "run" / "weights").rename(tmp_path / "weights")
    assert convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "run_without_weights")]) == 0
    assert "holds no final weights; taking those of its newest checkpoint, step-00000002" in capsys.readouterr().out
    final = {path.name: path.read_bytes() for path in (tmp_path / "final").iterdir()}
    for target in ("newest", "named", "run_without_weights"):
        assert {path.name: path.read_bytes() for path in (tmp_path / target).iterdir()} == final
    manifest = tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json"
    manifest.unlink()
    with pytest.raises(ConfigError, match=r"step-00000002 is incomplete: it has no manifest\.json"):
        convert(["to-hf", str(manifest.parent), str(tmp_path / "refused")])


@pytest.mark.parametrize("on_signal", [True, False])
@pytest.mark.parametrize("every", [0, 2])
def test_what_is_saved_when(every: int, on_signal: bool) -> None:
    """Oracle: the settings' own words."""
    trainer = Trainer.__new__(Trainer)
    trainer.config = make_config(SingleConfig(), 1)
    trainer.config.checkpoint = CheckpointConfig(every=every, on_signal=on_signal)
    assert trainer._saves_after(3, Stop("", signal=True)) == trainer._saves_after(4, Stop("", signal=True)) == on_signal
    assert trainer._saves_after(3, Stop("", gave_up=True))
    assert trainer._saves_after(3, Stop("")) == trainer._saves_after(4, None) == (every == 2)
    assert not trainer._saves_after(3, None)


def weights_of(folder: Path) -> bytes:
    return (folder / "weights.safetensors").read_bytes()


def test_final_weights_are_those_of_the_last_step_however_often_a_run_goes_on(tmp_path: Path) -> None:
    """Oracle: the files: kept where no step is taken, set aside where one is."""
    run = tmp_path / "run"
    config = kept(make_config(SingleConfig(), 1, steps=2), run)
    config.checkpoint.final_weights = True
    for _ in range(3):
        run_ranks(1, train_and_tell, config, None)
    first = weights_of(run / "weights")
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4))
    run_ranks(1, train_and_tell, longer, 4)
    assert not (run / "weights").exists()
    run_ranks(1, train_and_tell, longer, None)
    assert weights_of(run / "weights-1") == first != weights_of(run / "weights")
    assert sorted(path.name for path in run.glob("weights*")) == ["weights", "weights-1"]


def test_a_second_start_touches_nothing_of_a_run_that_is_alive(tmp_path: Path) -> None:
    """Oracle: the folder as it was, in which a checkpoint is being written."""
    partial = tmp_path / "run" / "checkpoints" / ".step-00000009.partial"
    partial.mkdir(parents=True)
    lock = FolderLock(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    told = run_ranks(1, refused, kept(make_config(SingleConfig(), 1), tmp_path / "run"))[0]
    lock.release()
    assert told == (
        f"metrics.run_dir={tmp_path}/run is being written by another run (pid {os.getpid()}); wait for its end, or set "
        "metrics.run_dir to another folder"
    )
    assert [path for path in before if path.name != ".lock"] == sorted(tmp_path.rglob("*"))


def fail_while_saving(config: Config) -> list[str]:
    """Fail in the step after a save in the background began, whose last act takes a while; the checkpoints then."""
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


def test_a_failure_does_not_cost_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    """Oracle: the folder, when the exception comes out."""
    config = kept(make_config(SingleConfig(), 1, steps=4), tmp_path / "run", 2, async_save=True)
    assert run_ranks(1, fail_while_saving, config)[0] == ["step-00000002"]
