"""Auxiliary losses of routers over the global batch: values and gradients."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.metrics.step import RoutingMetrics
from fsdptoys.models import DecoderModel, MoEConfig, routers
from fsdptoys.models.moe import Router, Scores
from fsdptoys.optim import SGDConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.train.trainer import Trainer
from tests.harness.ranks import run_ranks
from tests.harness.tiny import TINY, make_config
from tests.harness.transformers_oracle import import_transformers
from tests.train.plain_model import plain_model

# large, so that a wrong gradient cannot hide behind the cross entropy's
AUX_COEF = 3.0
Z_COEF = 0.5


def config_of(
    family: str,
    parallel: ParallelConfig,
    world_size: int,
    grad_accum: int,
    checkpointing: bool,
) -> Config:
    model = replace(
        TINY[family], router_aux_loss_coef=AUX_COEF, router_z_loss_coef=Z_COEF
    )  # type: ignore[call-arg]
    return make_config(
        parallel,
        world_size,
        model=model,
        optim=SGDConfig(lr=1.0, momentum=0.0, weight_decay=0.0, warmup_steps=0),
        memory=MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
        if checkpointing
        else None,
        steps=1,
        grad_accum=grad_accum,
        max_grad_norm=None,
        deterministic=False,
    )


def routed_forward(
    model: DecoderModel, tokens_BT: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Logits, and the inputs of each router."""
    inputs: list[Tensor] = []
    hooks = [
        router.register_forward_pre_hook(
            lambda router, args: inputs.append(F.linear(args[0], router.weight))
        )
        for router in routers(model)
    ]
    logits_BTV = model(tokens_BT)
    for hook in hooks:
        hook.remove()
    return logits_BTV, inputs


def gradients(trainer: Trainer) -> tuple[dict[str, Tensor], float, float]:
    """Gradients by the definition in one plain module, and both auxiliary losses of the step."""
    model = plain_model(trainer)
    config = trainer.config
    train = config.train
    moe = config.model
    assert isinstance(moe, MoEConfig)
    samples = trainer.strategy.data_ranks * train.batch_size * train.grad_accum
    rows = [trainer.data.dataset.train[i] for i in range(samples)]
    tokens, labels = (
        torch.stack([torch.from_numpy(row[i]) for row in rows]) for i in (0, 1)
    )
    valid = (labels != -100).sum()
    # Micro-batch m of all ranks: consecutive samples, as the batch stream deals them out.
    counts: list[Tensor] = []
    probability_sums: list[Tensor] = []
    z_sum = 0.0
    for part_tokens, part_labels in zip(
        tokens.chunk(train.grad_accum), labels.chunk(train.grad_accum), strict=True
    ):
        logits_BTV, router_logits = routed_forward(model, part_tokens)
        loss = F.cross_entropy(
            logits_BTV.flatten(0, 1),
            part_labels.flatten(),
            ignore_index=-100,
            reduction="sum",
        )
        loss = loss / valid
        for layer, logits_NE in enumerate(router_logits):
            sigmoid = routers(model)[layer].scores is Scores.sigmoid
            odds_NE = logits_NE.sigmoid() if sigmoid else logits_NE.softmax(-1)
            probabilities_NE = odds_NE / odds_NE.sum(-1, keepdim=True)
            chosen_NK = logits_NE.topk(moe.top_k, dim=-1).indices
            chosen_E = torch.bincount(chosen_NK.flatten(), minlength=moe.n_experts)
            if layer == len(counts):
                counts.append(torch.zeros_like(chosen_E))
                probability_sums.append(torch.zeros(moe.n_experts))
            counts[layer] = counts[layer] + chosen_E
            probability_sums[layer] += probabilities_NE.detach().sum(0)
            shares_E = counts[layer] * moe.top_k / counts[layer].sum()
            aux = (
                moe.n_experts
                * (shares_E * probabilities_NE.sum(0)).sum()
                / tokens.numel()
            )
            z = logits_NE.logsumexp(-1).square().sum() / tokens.numel()
            loss = loss + (AUX_COEF * aux + Z_COEF * z) / len(router_logits)
            z_sum += z.item() / len(router_logits)
        loss.backward()
    aux_loss = sum(
        (moe.n_experts * (count / tokens.numel() * sums / tokens.numel()).sum()).item()
        for count, sums in zip(counts, probability_sums, strict=True)
    ) / len(counts)
    return (
        {name: param.grad for name, param in model.named_parameters()},
        aux_loss,
        z_sum,
    )


def check_first_update(config: Config) -> None:
    """Compare auxiliary losses, and SGD's first update of every parameter, with the oracle."""
    trainer = Trainer(config)
    before = {name: param.clone() for name, param in trainer.strategy.full_parameters()}
    expected, aux_loss, z_loss = gradients(trainer)
    trainer.train()
    for name, param in trainer.strategy.full_parameters():
        assert (
            relative_error(before[name] - param, expected[name], before[name]) < 1e-5
        ), name
    routing = trainer.history[0].routing
    assert routing is not None
    assert routing.aux_loss == pytest.approx(aux_loss, rel=1e-5)
    assert routing.z_loss == pytest.approx(z_loss, rel=1e-5)


def relative_error(update: Tensor, gradient: Tensor, param: Tensor) -> float:
    """Beyond the error that the subtraction from the parameter rounds away."""
    rounding = 2**-23 * param.norm()
    return ((update - gradient).norm() - rounding).clamp(
        min=0
    ).item() / gradient.norm().item()


EXTENDED = pytest.mark.extended


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("family", "parallel", "ranks", "grad_accum", "checkpointing"),
    [
        ("qwen3_moe", DDPConfig(), 2, 2, False),
        ("qwen3_moe", FSDP1Config(), 2, 2, False),
        pytest.param("qwen3_moe", FSDP2Config(), 2, 1, False, marks=EXTENDED),
        ("qwen3_moe", FSDP2Config(), 2, 2, True),
        ("qwen3_moe", SingleConfig(simulated_ranks=2), 1, 2, False),
        pytest.param("llama4", DDPConfig(), 2, 2, False, marks=EXTENDED),
        pytest.param("llama4", FSDP1Config(), 2, 2, False, marks=EXTENDED),
        pytest.param("llama4", FSDP2Config(), 2, 1, False, marks=EXTENDED),
        ("llama4", FSDP2Config(), 2, 2, True),
        pytest.param(
            "llama4", SingleConfig(simulated_ranks=2), 1, 2, False, marks=EXTENDED
        ),
    ],
)
def test_auxiliary_loss_gradients_cover_the_global_batch(
    family: str,
    parallel: ParallelConfig,
    ranks: int,
    grad_accum: int,
    checkpointing: bool,
) -> None:
    """Oracle: the definition in one plain module over all ranks' tokens, by autograd; updates to
    1e-5 relative."""
    run_ranks(
        ranks,
        check_first_update,
        config_of(family, parallel, ranks, grad_accum, checkpointing),
    )


@pytest.mark.oracle
def test_load_balancing_loss_of_a_layer_equals_transformers() -> None:
    """Oracle: transformers' load_balancing_loss_func, for one layer; value and gradient."""
    qwen = import_transformers("transformers.models.qwen3_moe.modeling_qwen3_moe")
    torch.manual_seed(0)
    router = Router(16, 8, 3, Scores.normalized_softmax)
    torch.nn.init.normal_(router.weight)
    hidden_ND = torch.randn(50, 16)
    loss = qwen.load_balancing_loss_func((F.linear(hidden_ND, router.weight),), 8, 3)
    (expected,) = torch.autograd.grad(loss, router.weight)

    _, weights_NK = router(hidden_ND)
    shares_E = router.counts_E / 50
    assert (8 * (shares_E * router.sums[:-1] / 50).sum()).item() == pytest.approx(
        loss.item(), rel=1e-6
    )
    # After the forward, as in training
    router.sums_grad.copy_(torch.cat([8 * shares_E / 50, torch.zeros(1)]))
    (gradient,) = torch.autograd.grad(weights_NK.sum() * 0, router.weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def metrics_of(config: Config) -> list[RoutingMetrics | None]:
    steps: list[RoutingMetrics | None] = []
    Trainer(config).train(lambda step: steps.append(step.routing))
    return steps


@pytest.mark.parametrize("aux_coef", [0.0, 0.1])
def test_token_counts_sum_over_ranks_and_micro_batches(aux_coef: float) -> None:
    """Oracle: one process that runs the same micro-batches; K tokens for each position of each
    layer."""

    model = replace(TINY["qwen3_moe"], router_aux_loss_coef=aux_coef)  # type: ignore[call-arg]
    one = make_config(SingleConfig(simulated_ranks=2), 1, model=model, steps=2)
    (expected,) = run_ranks(1, metrics_of, one)
    for metrics in run_ranks(
        2, metrics_of, make_config(FSDP2Config(), 2, model=model, steps=2)
    ):
        assert [step.counts for step in metrics] == [step.counts for step in expected]
    for step in expected:
        assert step is not None
        # Ranks, micro-batches, batch, T, K
        assert [sum(layer) for layer in step.counts] == [2 * 2 * 2 * 24 * 2] * 2
        loads = [[count * 3 / sum(layer) for count in layer] for layer in step.counts]
        assert step.max_load == pytest.approx(max(map(max, loads)))
        assert step.min_load == pytest.approx(min(map(min, loads)))
        shares = [[load / 3 for load in layer] for layer in loads]
        entropy = -sum(
            share * math.log(share) for layer in shares for share in layer if share
        ) / len(shares)
        assert step.entropy == pytest.approx(entropy / math.log(3))


@pytest.mark.extended
def test_balancing_loss_reduces_the_maximum_load() -> None:
    """Oracle: the same training without it; the busiest expert is at most half as far above the
    mean."""

    def excess_load(aux_coef: float) -> float:
        model = replace(
            TINY["qwen3_moe"],
            router_aux_loss_coef=aux_coef,
            router_z_loss_coef=0.0,
            init_std=0.5,
        )  # type: ignore[call-arg]
        config = make_config(
            SingleConfig(), 1, model=model, steps=40, batch_size=8, deterministic=False
        )
        last = run_ranks(1, metrics_of, config)[0][-1]
        assert last is not None
        excess: float = last.max_load - 1
        return excess

    assert excess_load(1.0) < excess_load(0.0) / 2


@pytest.mark.parametrize("scores", Scores)
def test_router_gradients_are_finite_for_extreme_logits(scores: Scores) -> None:
    """Oracle: finiteness; sigmoids of -240 are zeros in float32, and so is their sum."""
    router = Router(4, 3, 2, scores)
    torch.nn.init.ones_(router.weight)
    hidden_ND = torch.tensor([[-60.0] * 4, [60.0] * 4, [0.0] * 4])
    _, weights_NK = router(hidden_ND)
    weights_NK.sum().backward()
    assert (
        router.weight.grad is not None
        and router.weight.grad.isfinite().all()
        and router.sums.isfinite().all()
    )
