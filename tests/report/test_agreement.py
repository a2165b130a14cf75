"""Losses that should agree: real runs that do, and runs with real mistakes that do not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.metrics import StepMetrics
from fsdptoys.optim import AdamWConfig, WeightDecayOn
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.parallel.precision import DType
from fsdptoys.report.loss_agreement import (
    COARSE,
    FINE,
    HELD_OUT,
    Tolerance,
    find_disagreements,
)
from fsdptoys.report.runs_table import Record
from fsdptoys.train.gradient_scale import GradientScale, StepScale
from tests.harness.coverage import without_coverage
from tests.harness.ranks import run_ranks
from tests.harness.recorded_runs import (
    STEP,
    changed,
    record_of,
    run_of,
    train_into,
    write_records,
)
from tests.harness.tiny import make_config

EXACT = Tolerance(0.0, 0.0, 1.0, 0.0, 0.0)
ADAMW = AdamWConfig(lr=1e-2, weight_decay_on=WeightDecayOn.all)
CHUNKED = MemoryConfig(
    chunk_loss=True,
    chunk_tokens="20",
    gradient_checkpointing=GradientCheckpointing.full,
)
BF16 = DType.bfloat16


def config_of(parallel: ParallelConfig, world_size: int, **changes: Any) -> Config:
    """Three steps: the last is the first that shows a wrong momentum."""
    return make_config(
        parallel, world_size, **{"deterministic": False, "steps": 3} | changes
    )


def right() -> dict[str, Config]:
    """Three trainings, each in several layouts."""
    return {
        "ddp": config_of(DDPConfig(), 2),
        "fsdp1": config_of(FSDP1Config(), 2),
        "fsdp2": config_of(FSDP2Config(), 2),
        "fsdp2 chunked": config_of(FSDP2Config(), 2, memory=CHUNKED),
        "fsdp2 cpu": config_of(FSDP2Config(), 2, memory=MemoryConfig(cpu_offload=True)),
        "fsdp2 smaller": config_of(FSDP2Config(), 2, batch_size=1, grad_accum=4),
        "fsdp2 shared sequences": config_of(FSDP2Config(), 2, cp_size=2, batch_size=4),
        "ddp bf16": config_of(DDPConfig(param_dtype=BF16), 2),
        "fsdp1 bf16": config_of(FSDP1Config(param_dtype=BF16), 2),
        "fsdp2 bf16": config_of(FSDP2Config(param_dtype=BF16), 2, memory=CHUNKED),
        "ddp bits": config_of(DDPConfig(), 2, deterministic=True),
        "fsdp2 bits": config_of(FSDP2Config(), 2, deterministic=True),
        "fsdp2 bits, shared sequences": config_of(
            FSDP2Config(), 2, deterministic=True, cp_size=2, batch_size=4
        ),
    }


def wrong() -> dict[str, Config]:
    """Runs with a mistake that their config.yaml does not record."""
    return {
        "seed": config_of(FSDP2Config(), 2, init_seed=7),
        "data": config_of(FSDP2Config(), 2, data_seed=7),
        "rate": config_of(FSDP2Config(), 2, optim=replace(ADAMW, lr=1.01e-2)),
        "momentum": config_of(FSDP2Config(), 2, optim=replace(ADAMW, beta1=0.8)),
    }


def train_all(folder: Path) -> None:
    train_into(folder, right() | wrong())
    of = GradientScale.of

    def doubled(self: GradientScale, *args: Any) -> StepScale:
        scale = of(self, *args)
        return scale._replace(per_token=2 * scale.per_token)

    GradientScale.of = doubled  # type: ignore[method-assign]
    train_into(folder, {"gradient": config_of(FSDP2Config(), 2)})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with without_coverage():
        run_ranks(2, train_all, folder)
        single = config_of(SingleConfig(simulated_ranks=2), 1)
        run_ranks(1, train_into, folder, {"single": single})
    for name in wrong():
        path = folder / name / "config.yaml"
        recorded = {
            "train.init_seed": 0,
            "train.data_seed": 0,
            "optim.lr": 1e-2,
            "optim.beta1": 0.9,
        }
        path.write_text(
            yaml.safe_dump(changed(yaml.safe_load(path.read_text()), recorded))
        )
    return folder


def test_layouts_and_memory_switches_agree_in_every_dtype(trained: Path) -> None:
    """Oracle: they are one training (tests/parallel/test_equality.py checks equal bits, or
    1e-6)."""
    assert (
        find_disagreements([record_of(trained / name) for name in [*right(), "single"]])
        == []
    )


@pytest.mark.parametrize(
    "name, quantity, step",
    [
        ("seed", "loss", 1),
        ("data", "valid tokens", 1),
        ("gradient", "gradient norm", 1),
        ("rate", "learning rate", 1),
        ("momentum", "loss", 3),
    ],
)
def test_disagreeing_training_is_marked(
    trained: Path, name: str, quantity: str, step: int
) -> None:
    """Oracle: the first quantity that the mistake changes: values, samples, doubled gradients, the
    rate, updates."""
    (disagreement,) = find_disagreements(
        [record_of(trained / run) for run in ("ddp", "fsdp2", name)]
    )
    assert (
        disagreement.name,
        disagreement.reference,
        disagreement.quantity,
        disagreement.step,
    ) == (
        name,
        "ddp",
        quantity,
        step,
    )
    assert disagreement.sentence.startswith(
        f"{name} does not agree with ddp, which trains the same: from step {step} on"
    )
    assert name != "gradient" or disagreement.value == pytest.approx(
        2 * disagreement.expected, rel=1e-5
    )


def test_one_wrong_row_is_marked_at_any_position(trained: Path) -> None:
    """Oracle: the row with the mistake, which is the first: most others agree with each other."""
    records = [record_of(trained / name) for name in ("seed", "ddp", "fsdp2", "fsdp1")]
    (disagreement,) = find_disagreements(records)
    assert (disagreement.name, disagreement.reference) == ("seed", "ddp")


def pair(
    tmp_path: Path, alter: Callable[[StepMetrics], StepMetrics], **options: Any
) -> list[Record]:
    """Two runs of twelve steps that differ only in the settings ``second``, the second with altered
    steps."""
    both = options.get("both", {})
    altered = [alter(step) for step in run_of(12)]
    other = [altered, both | options.get("second", {}), options.get("environment")]
    return write_records(tmp_path, a=[run_of(12), both], b=other)


def apart(share: float, quantity: str, at: int) -> Callable[[StepMetrics], StepMetrics]:
    return lambda step: (
        replace(step, **{quantity: getattr(step, quantity) * (1 + share)})
        if step.step == at
        else step
    )


@pytest.mark.parametrize("quantity", ["loss", "grad_norm"])
@pytest.mark.parametrize(
    "both, tolerance",
    [
        ({}, FINE),
        ({"parallel.param_dtype": "bfloat16"}, COARSE),
        ({"train.deterministic": True}, EXACT),
    ],
    ids=["float32", "bfloat16", "deterministic"],
)
def test_rows_may_differ_by_the_rounding_of_their_dtype(
    tmp_path: Path, both: dict[str, Any], tolerance: Any, quantity: str
) -> None:
    """Oracle: the tolerance itself, a little less and a little more; of equal bits, one bit."""
    name = {"loss": "loss", "grad_norm": "gradient norm"}[quantity]
    allowed = tolerance.at(name, 5)
    assert (
        find_disagreements(
            pair(tmp_path / "less", apart(0.99 * allowed, quantity, 5), both=both)
        )
        == []
    )
    (disagreement,) = find_disagreements(
        pair(
            tmp_path / "more",
            apart(1.01 * allowed / (1 - 1.01 * allowed) + 1e-15, quantity, 5),
            both=both,
        )
    )
    assert (
        disagreement.name,
        disagreement.step,
        disagreement.quantity,
        disagreement.allowed,
    ) == (
        "b",
        5,
        name,
        allowed,
    )


SETTINGS = yaml.safe_load(
    Path(__file__).with_name("other_settings.yaml").read_text(encoding="utf-8")
)
LOSSES_APART = apart(0.5, "loss", 3)


@pytest.mark.parametrize("second", SETTINGS["another"], ids=str)
def test_different_trainings_are_not_compared(
    tmp_path: Path, second: dict[str, Any]
) -> None:
    """Oracle: losses far apart, which are no mistake if a setting explains them."""
    assert find_disagreements(pair(tmp_path, LOSSES_APART, second=second)) == []


@pytest.mark.parametrize("second", SETTINGS["same"], ids=str)
def test_same_training_in_another_layout_is_compared(
    tmp_path: Path, second: dict[str, Any]
) -> None:
    """Oracle: losses far apart, which none of these changes explains."""
    (disagreement,) = find_disagreements(pair(tmp_path, LOSSES_APART, second=second))
    assert (disagreement.name, disagreement.step) == ("b", 3)


def test_experts_with_other_balancing_are_not_compared(tmp_path: Path) -> None:
    """Oracle: arXiv:2501.11873: with several micro-batches a backward balances by those so far."""
    experts = {"model.n_experts": 4, "model.router_aux_loss_coef": 0.1}
    other = {"train.batch_size": 1, "train.grad_accum": 4}
    assert (
        find_disagreements(
            pair(tmp_path / "a", LOSSES_APART, both=experts, second=other)
        )
        == []
    )
    unbalanced = experts | {"model.router_aux_loss_coef": 0.0}
    assert find_disagreements(
        pair(tmp_path / "b", LOSSES_APART, both=unbalanced, second=other)
    )


@pytest.mark.parametrize(
    "part", [{"device.type": "cuda"}, {"versions.torch": "2.7.1"}], ids=str
)
def test_rows_of_other_devices_or_versions_are_not_compared(
    tmp_path: Path, part: dict[str, Any]
) -> None:
    """Oracle: losses far apart: no measured bound exists for such pairs."""
    assert find_disagreements(pair(tmp_path, LOSSES_APART, environment=part)) == []


def test_nan_loss_agrees_only_with_nan(tmp_path: Path) -> None:
    """Oracle: NaN in both, and in one."""
    steps = [*run_of(3), replace(STEP, step=4, loss=float("nan"))]
    (disagreement,) = find_disagreements(
        write_records(tmp_path, a=[steps], b=[steps], c=[run_of(4)])
    )
    assert (disagreement.name, disagreement.reference, disagreement.step) == (
        "c",
        "a",
        4,
    )
    assert "they are not both finite" in disagreement.sentence


def test_run_resumed_with_other_settings_is_not_compared(tmp_path: Path) -> None:
    """Oracle: a resume that changed the learning rate, and one that changed the layout alone."""
    records = pair(tmp_path, apart(0.5, "loss", 9))
    line = {
        "time": "",
        "step": 5,
        "checkpoint": "x",
        "world_size_before": 2,
        "world_size": 2,
        "moved_to": None,
    }
    for key, count in (("optim.lr", 0), ("parallel.wrap", 1)):
        (tmp_path / "b" / "resumes.jsonl").write_text(
            json.dumps(line | {"changed": {key: [1, 2]}}) + "\n"
        )
        assert len(find_disagreements(records)) == count


def test_held_out_losses_are_compared_over_equal_samples(tmp_path: Path) -> None:
    """Oracle: 4.0 and 4.4 after step 5, and none after it in one of the rows; other samples may
    have another loss."""

    def steps_with(losses: dict[int, float]) -> list[StepMetrics]:
        return [replace(step, eval_loss=losses.get(step.step)) for step in run_of(12)]

    records = write_records(
        tmp_path,
        a=[steps_with({5: 4.0, 12: 1.0})],
        b=[steps_with({5: 4.4}), {"parallel.name": "ddp"}],
        c=[steps_with({5: 4.4}), {"train.eval_batches": 3}],
        d=[steps_with({5: 4.0 * (1 + 1e-5)})],
    )
    (disagreement,) = find_disagreements(records)
    assert (
        disagreement.name,
        disagreement.quantity,
        disagreement.step,
        disagreement.value,
    ) == (
        "b",
        "held-out loss",
        5,
        4.4,
    )
    assert disagreement.expected == pytest.approx(4.0, rel=1e-4)


@pytest.mark.parametrize("device, count", [("cuda", 0), ("cpu", 1)])
def test_optimizer_steps_on_the_host_are_bitwise_equal_on_cpus_only(
    tmp_path: Path, device: str, count: int
) -> None:
    """Oracle: an accelerator's AdamW is another kernel than the host's, so that one bit may differ;
    on a CPU none."""
    both = {"train.deterministic": True}
    environment = {"device.type": device}
    steps = [apart(1e-9, "loss", 3)(step) for step in run_of(3)]
    offloaded = both | {"memory.cpu_offload": True}
    records = write_records(
        tmp_path, a=[run_of(3), both, environment], b=[steps, offloaded, environment]
    )
    assert len(find_disagreements(records)) == count


@pytest.mark.parametrize(
    ("step", "loss", "grad_norm", "held_out"),
    [(5, 2e-5, 2e-4, 2.2e-5), (10**6, 0.01, 0.1, 0.01)],
)
def test_tolerances_grow_with_the_steps_up_to_their_maximum(
    step: int, loss: float, grad_norm: float, held_out: float
) -> None:
    """Oracle: 1e-5 and 1e-4, once more every five steps, and the maxima; a held-out loss is of the
    step after it."""
    quantities = ("loss", "gradient norm", HELD_OUT, "learning rate")
    allowed = [FINE.at(quantity, step) for quantity in quantities]
    assert allowed == pytest.approx([loss, grad_norm, held_out, 0.0], rel=1e-12)


def test_rows_without_common_steps_are_not_compared(tmp_path: Path) -> None:
    """Oracle: no common steps to compare."""
    late = [replace(step, loss=1.0) for step in run_of(5)[2:]]
    assert (
        find_disagreements(
            write_records(tmp_path, a=[run_of(5)], none=[[]], late=[late])
        )
        == []
    )
