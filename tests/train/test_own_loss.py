"""Runs with a user's loss: equal on every layout, and refused where it cannot work."""

import pytest

from fsdptoys.config.schema import Config
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.loss import LossConfig
from fsdptoys.memory import MemoryConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from tests.harness.own_losses import FocalConfig, OwnConfig, WholeConfig
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config, refusal, tiny_model, with_sizes

Step = tuple[float, float, float, float]


def train(config: Config) -> list[Step]:
    """Loss, gradient norm and both held-out losses of each step; -1 for a missing one."""
    trainer = Trainer(config)
    trainer.train()
    return [
        (
            step.loss,
            step.grad_norm,
            -1.0 if step.eval_loss is None else step.eval_loss,
            -1.0 if step.eval_own_loss is None else step.eval_own_loss,
        )
        for step in trainer.history
    ]


def configure(
    parallel: ParallelConfig, ranks: int, loss: LossConfig | None, **options: object
) -> Config:
    settings = {
        "data": SyntheticConfig(branching=4, ragged=True, eval_samples=16),
        "grad_accum": 4 // ranks,
        "eval_batches": 4 // ranks,
        "eval_every": 2,
        "steps": 3,
    }
    return make_config(parallel, ranks, loss=loss, **(settings | options))  # type: ignore[arg-type]


LAYOUTS: dict[str, tuple[ParallelConfig, dict[str, object]]] = {
    "ddp": (DDPConfig(), {}),
    "fsdp1": (FSDP1Config(), {}),
    "fsdp2": (FSDP2Config(), {}),
    "fsdp2 chunked": (
        FSDP2Config(),
        {"memory": MemoryConfig(chunk_loss=True, chunk_tokens="32")},
    ),
    "context": (FSDP2Config(), {"cp_size": 2, "grad_accum": 4, "eval_batches": 4}),
    "pipeline": (
        FSDP2Config(),
        {"pp_size": 2, "eval_batches": 4, "grad_accum": 4, "deterministic": False},
    ),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.extended)
        if name in ("ddp", "context", "pipeline")
        else name
        for name in LAYOUTS
    ],
)
def test_focal_loss_is_the_same_on_every_layout(layout: str) -> None:
    """Oracle: one process without sharding and chunks, over as many sequences."""
    parallel, options = LAYOUTS[layout]
    (alone,) = run_ranks(1, train, configure(SingleConfig(), 1, FocalConfig()))
    first, *others = run_ranks(
        2, train, configure(parallel, 2, FocalConfig(), **options)
    )
    assert others == [first]
    assert [values[3] > 0 for values in first] == [False, True, True]
    for step, expected in zip(first, alone, strict=True):
        assert step == pytest.approx(expected, rel=2e-5)


def test_own_cross_entropy_trains_as_the_built_in_one() -> None:
    """Oracle: the run with ``loss=cross_entropy``; evaluations report both."""
    (built_in,) = run_ranks(1, train, configure(SingleConfig(), 1, None))
    for loss in (OwnConfig(), WholeConfig()):
        (own,) = run_ranks(1, train, configure(SingleConfig(), 1, loss))
        for values, expected in zip(own, built_in, strict=True):
            assert values[:3] == pytest.approx(expected[:3], rel=1e-5)
            assert values[3] == pytest.approx(values[2], rel=1e-6)
            assert expected[3] == -1.0


@pytest.mark.extended
def test_float16_scales_the_gradients_of_an_own_loss() -> None:
    """Oracle: the built-in loss in float16, whose small gradients would become zero unscaled."""
    memory = MemoryConfig(chunk_loss=True, chunk_tokens="32")
    runs = [
        run_ranks(
            1,
            train,
            configure(
                SingleConfig(param_dtype=DType.float16), 1, loss, memory=memory, steps=4
            ),
        )[0]
        for loss in (None, OwnConfig())
    ]
    for values, expected in zip(*runs, strict=True):
        assert values[:2] == pytest.approx(expected[:2], rel=2e-3)


REFUSED = {
    "tensor": (
        FSDP2Config(),
        {"tp_size": 2, "model": with_sizes(tiny_model(), vocab_size=68)},
        "loss=focal takes the logits of all classes, of which a rank of mesh.tp_size=2 has some; "
        "set loss=cross_entropy or mesh.tp_size=1",
    ),
    "layout": (
        FSDP2Config(),
        {"deterministic": Deterministic.layout},
        "loss=focal has no form whose bits are the same on every layout; set loss=cross_entropy "
        "or train.deterministic=true",
    ),
    "smoothing": (
        FSDP2Config(),
        {"label_smoothing": 0.1},
        "train.label_smoothing=0.1 has no effect unless loss=cross_entropy; leave it out, or give "
        "loss=focal an option for it",
    ),
    "z-loss": (
        FSDP2Config(),
        {"z_loss_coef": 0.1},
        "train.z_loss_coef=0.1 has no effect unless loss=cross_entropy; leave it out, or give "
        "loss=focal an option for it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_own_loss_lacks_is_refused(case: str) -> None:
    """Oracle: the expected sentence."""
    parallel, options, sentence = REFUSED[case]
    assert refusal(parallel, 2, loss=FocalConfig(), **options) == sentence


def test_whole_loss_takes_no_chunks() -> None:
    """Oracle: the expected sentence."""
    memory = MemoryConfig(chunk_loss=True)
    assert refusal(SingleConfig(), 1, loss=WholeConfig(), memory=memory) == (
        "memory.chunk_loss=true has no effect with loss=whole, which computes the logits itself; "
        "set memory.chunk_loss=false"
    )
