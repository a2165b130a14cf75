"""The training loop: the numbers of a step, equal on all ranks, and garbage collection between
steps."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config, SumDType
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.errors import ConfigError
from fsdptoys.memory import MemoryConfig
from fsdptoys.metrics import StepMetrics
from fsdptoys.optim import AdamWConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.train.trainer import Trainer
from tests.harness.outcomes import hash_parameters
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config
from tests.train.plain_model import plain_model

STRATEGIES: list[ParallelConfig] = [DDPConfig(), FSDP1Config(), FSDP2Config()]


def first_step_and_oracle(config: Config) -> tuple[list[float], list[float]]:
    """Loss and norm of the first step, and the oracle's."""
    trainer = Trainer(config)
    model = plain_model(trainer)
    train = config.train
    samples = range(trainer.strategy.data_ranks * train.batch_size * train.grad_accum)
    rows = [trainer.data.dataset.train[i] for i in samples]
    tokens, labels = (
        torch.stack([torch.from_numpy(row[i]) for row in rows]) for i in (0, 1)
    )
    logits = model(tokens).flatten(0, 1)
    flat = labels.flatten()
    loss = F.cross_entropy(
        logits, flat, ignore_index=-100, label_smoothing=train.label_smoothing
    )
    loss = loss + train.z_loss_coef * logits.logsumexp(-1)[flat != -100].square().mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm(
        [param.grad for param in model.parameters() if param.grad is not None]
    )
    trainer.train()
    return [trainer.history[0].loss, trainer.history[0].grad_norm], [
        loss.item(),
        norm.item(),
    ]


CHUNKED = MemoryConfig(chunk_loss=True, chunk_tokens="7")
SMOOTHED = {"label_smoothing": 0.2, "z_loss_coef": 0.01, "deterministic": False}


@pytest.mark.parametrize("parallel", STRATEGIES, ids=lambda parallel: parallel.name)
@pytest.mark.parametrize(
    "options",
    [
        {"grad_accum": 3, "deterministic": False},
        {"grad_accum": 3},
        SMOOTHED,
        {**SMOOTHED, "memory": CHUNKED},
    ],
    ids=["default", "deterministic", "smoothed", "smoothed in chunks"],
)
def test_loss_is_the_mean_over_valid_tokens_of_the_global_batch(
    parallel: ParallelConfig, options: dict[str, Any]
) -> None:
    """Oracle: F.cross_entropy's mean over the full ragged global batch, in one plain module.

    Label smoothing is cross_entropy's own, and the z loss is the mean squared logsumexp.
    """
    numbers_of_step, expected = run_ranks(
        2, first_step_and_oracle, make_config(parallel, 2, steps=1, **options)
    )[0]
    assert numbers_of_step == pytest.approx(expected, rel=1e-5)
    assert numbers_of_step[0] == pytest.approx(expected[0], rel=1e-6)


def test_evaluation_is_plain_cross_entropy_for_any_training_loss() -> None:
    """Oracle: a run that minimizes plain cross entropy, also with learning rate 0."""
    sizes = {
        "eval_every": 1,
        "steps": 1,
        "optim": AdamWConfig(lr=0.0, weight_decay=0.0),
    }
    changed = {
        "label_smoothing": 0.2,
        "z_loss_coef": 0.01,
        "memory": MemoryConfig(chunk_loss=True),
    }
    configs = [
        make_config(SingleConfig(), 1, **sizes, **more) for more in ({}, changed)
    ]
    (plain,), (smoothed,) = run_ranks(1, histories, configs)[0]
    assert smoothed.eval_loss == pytest.approx(plain.eval_loss, rel=1e-6)
    assert smoothed.loss > plain.loss


def count_full_losses(config: Config) -> int:
    """Number of full-logits losses of a run with evaluations."""
    calls = 0
    original = F.cross_entropy

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return original(*args, **options)

    F.cross_entropy = counted
    Trainer(config).train()
    return calls


@pytest.mark.parametrize("chunk_loss", [False, True], ids=["whole", "chunks"])
def test_evaluation_uses_the_chunked_loss_if_training_does(chunk_loss: bool) -> None:
    """Oracle: calls of F.cross_entropy on full logits: two steps of two micro-batches, two
    evaluations."""
    memory = MemoryConfig(chunk_loss=chunk_loss)
    config = make_config(
        SingleConfig(), 1, steps=2, eval_every=1, eval_batches=1, memory=memory
    )
    assert run_ranks(1, count_full_losses, config)[0] == (0 if chunk_loss else 6)


def histories(configs: list[Config]) -> list[list[StepMetrics]]:
    """Metrics of the steps of each configuration."""
    results = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        results.append(trainer.history)
    return results


def numbers(history: list[StepMetrics]) -> list[float]:
    """Loss and norm of all steps."""
    return [number for step in history for number in (step.loss, step.grad_norm)]


def losses(history: list[StepMetrics]) -> list[float]:
    return [step.loss for step in history]


def evaluations(history: list[StepMetrics]) -> list[float | None]:
    return [step.eval_loss for step in history]


def test_sums_over_ranks_round_in_their_dtype() -> None:
    """Oracle: in float64 DDP and FSDP2 agree bitwise where a reduction adds two numbers; in float32
    they do not, since each adds up the squares of its own pieces of the gradients, and all are as
    close as float32 is.
    """
    configs = [
        make_config(parallel, 2, deterministic=False, steps=6, sum_dtype=dtype)
        for dtype in (SumDType.float64, SumDType.float32)
        for parallel in (DDPConfig(), FSDP2Config())
    ]
    ddp, fsdp2, *rounded = map(numbers, run_ranks(2, histories, configs)[0])
    assert ddp == fsdp2 and rounded[0] != rounded[1] and ddp not in rounded
    for row in rounded:
        assert row == pytest.approx(ddp, rel=2e-6)


@pytest.mark.parametrize(
    "dtype, expected", [("auto", "float32"), ("float32", "float32"), ("float64", None)]
)
def test_sum_dtype_defaults_to_float64_where_collectives_support_it(
    dtype: str, expected: str | None
) -> None:
    """Oracle: HCCL's dtypes, which exclude float64 reductions."""
    for device_type, chosen in (
        ("npu", expected),
        ("cuda", "float64" if dtype == "auto" else dtype),
    ):
        config = compose_config(
            ["model=llama_debug", "parallel=fsdp2", f"train.sum_dtype={dtype}"]
        )
        if chosen is None:
            with pytest.raises(
                ConfigError,
                match=r"^train.sum_dtype=float64 needs collectives",
            ):
                config.validate(2, device_type)
        else:
            config.validate(2, device_type)
            assert (
                config.train.sum_dtype.value == chosen
                and config.train.sum_dtype.torch == getattr(torch, chosen)
            )


def test_evaluation_agrees_across_strategies_and_does_not_affect_training() -> None:
    """Oracle: one process that evaluates the same sequences; and a run that never evaluates."""
    sizes = {"eval_every": 2, "steps": 4, "grad_accum": 1}
    one = make_config(SingleConfig(simulated_ranks=2), 1, eval_batches=4, **sizes)
    (reference,) = run_ranks(1, histories, [one])[0]
    assert [loss is not None for loss in evaluations(reference)] == [
        False,
        True,
        False,
        True,
    ]
    configs = [
        make_config(parallel, 2, eval_batches=2, **sizes) for parallel in STRATEGIES
    ]
    configs.append(make_config(FSDP2Config(), 2, steps=4, grad_accum=1))
    for first, second in zip(*run_ranks(2, histories, configs), strict=True):
        assert (numbers(first), evaluations(first)) == (
            numbers(second),
            evaluations(second),
        )
        assert losses(first) == losses(reference)
        assert evaluations(first)[0] is None and evaluations(first)[2] is None
        if evaluations(first)[1] is not None:
            assert evaluations(first)[1::2] == pytest.approx(
                evaluations(reference)[1::2], rel=1e-6
            )


@pytest.mark.extended
def test_loss_falls_to_the_entropy_of_the_data() -> None:
    """Oracle: the source's conditional entropy, log 2, far below its unigram entropy, log 67."""
    optim = AdamWConfig(lr=1e-2)
    data = SyntheticConfig(branching=2)
    sizes = {"steps": 150, "grad_accum": 1, "batch_size": 16, "max_grad_norm": 1.0}
    config = make_config(SingleConfig(), 1, optim=optim, data=data, **sizes)
    history = losses(run_ranks(1, histories, [config])[0][0])
    assert history[0] == pytest.approx(math.log(67), rel=0.02)
    assert math.log(2) < sum(history[-10:]) / 10 < math.log(2) + 0.1


def test_all_ranks_stop_after_the_step_that_exceeds_the_time_limit() -> None:
    """Oracle: the first rank's number of steps; a limit exceeded by the first step stops after it
    and an evaluation."""
    configs = [
        make_config(parallel, 2, max_seconds=1e-9, eval_every=100, steps=100)
        for parallel in STRATEGIES
    ]
    for ranks in run_ranks(2, histories, configs):
        assert all(
            len(history) == 1 and history[0].eval_loss is not None for history in ranks
        )


def loss_and_sum(config: Config) -> tuple[float, float]:
    """Loss of the first step, and sum of the first parameter."""
    trainer = Trainer(config)
    trainer.train()
    return trainer.history[0].loss, next(iter(trainer.strategy.full_parameters()))[
        1
    ].sum().item()


@pytest.mark.usefixtures("unmeasured")
def test_each_seed_affects_its_purpose_and_the_common_seed_all() -> None:
    """Oracle: changes of the data (loss of the first step) and of the initial values."""
    optim = AdamWConfig(lr=0.0)
    seeds: list[dict[str, Any]] = [
        {},
        {"seed": 0},
        {"data_seed": 1},
        {"init_seed": 1},
        {"seed": 1},
    ]
    configs = [
        make_config(SingleConfig(), 1, steps=1, max_grad_norm=None, optim=optim, **seed)
        for seed in seeds
    ]
    base, same, data, init, common = run_ranks(
        1, lambda: [loss_and_sum(config) for config in configs]
    )[0]
    assert same == base
    assert data[0] != base[0] and data[1] == base[1]
    assert init[0] != base[0] and init[1] != base[1]
    assert common[1] == init[1] and common[0] not in (init[0], data[0])


def hashes_around_an_evaluation(config: Config) -> list[dict[str, str]]:
    trainer = Trainer(config)
    before = hash_parameters(trainer)
    trainer.evaluate(0)
    return [before, hash_parameters(trainer)]


@pytest.mark.parametrize("parallel", STRATEGIES, ids=lambda parallel: parallel.name)
def test_parameters_are_readable_after_a_forward_without_backward(
    parallel: ParallelConfig,
) -> None:
    """Oracle: the parameters before the forward, which leaves units gathered for a backward."""
    before, after = run_ranks(2, hashes_around_an_evaluation, make_config(parallel, 2))[
        0
    ]
    assert after == before


class Node:
    """A reference cycle of one object."""

    def __init__(self) -> None:
        self.itself = self


def train_and_watch(
    every: int, failing_step: int | None
) -> tuple[list[bool], list[int], bool]:
    """Of each step, whether the collector was on and how many cycles were alive; and whether it is
    on at the end.

    Each step makes a cycle; ``failing_step`` raises.
    """
    config = make_config(SingleConfig(), 1, steps=6, gc_every=every)
    trainer = Trainer(config)
    enabled = []
    alive = []
    nodes = []

    def on_phase(step: int, phase: str) -> None:
        if phase == "optimizer":
            enabled.append(gc.isenabled())
            alive.append(sum(node() is not None for node in nodes))
            nodes.append(weakref.ref(Node()))
            if step == failing_step:
                raise ZeroDivisionError

    trainer.on_phase = on_phase
    try:
        trainer.train()
    except ZeroDivisionError:
        assert failing_step is not None
    return enabled, alive, gc.isenabled()


@pytest.mark.parametrize(("every", "failing_step"), [(2, None), (2, 3), (0, None)])
def test_collector_is_off_in_steps_and_on_again_after_training_or_an_error(
    every: int, failing_step: int | None
) -> None:
    """Oracle: ``gc.isenabled()`` in every step and at the end; a cycle lives until the next
    multiple of 2 steps. Zero leaves the collector on."""
    [(enabled, alive, after)] = run_ranks(1, train_and_watch, every, failing_step)
    steps = failing_step or 6
    assert enabled == [every == 0] * steps and after
    assert every == 0 or alive == [0, 1, 0, 1, 0, 1][:steps]
