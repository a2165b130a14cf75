"""Context parallelism: ranks that share sequences train like one process."""

from typing import Any

import pytest

from fsdptoys.config.schema import Config
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import FSDP2Config, SingleConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.train.trainer import Trainer
from scripts.ranks import run_ranks
from tests.parallel.runs import TINY, make_config, tiny_model

FORMS = [form for form in ContextForm if form is not ContextForm.auto]
MODELS: dict[str, ModelConfig] = {"llama": tiny_model(), **TINY}
LAYOUTS: dict[str, dict[str, int]] = {"cp 4": {"cp_size": 4}, "cp 2": {"cp_size": 2}}
LAYOUTS["hsdp cp 2"] = {"cp_size": 2, "fsdp_size": 2}
"""Layouts of four ranks."""

Losses = list[tuple[float, float]]


def train(configs: list[Config]) -> list[Losses]:
    """Losses and gradient norms of each run."""
    results = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        results.append([(step.loss, step.grad_norm) for step in trainer.history])
    return results


def assert_alike(found: Losses, expected: Losses, case: str, loss: float = 2e-6, norm: float = 1e-5) -> None:
    for (loss_found, norm_found), (loss_expected, norm_expected) in zip(found, expected, strict=True):
        assert loss_found == pytest.approx(loss_expected, rel=loss), case
        assert norm_found == pytest.approx(norm_expected, rel=norm), case


def of_one_process(data_ranks: int, cases: list[dict[str, Any]]) -> list[Losses]:
    """The same runs in one process."""
    configs = [make_config(SingleConfig(simulated_ranks=data_ranks), 1, **case) for case in cases]
    found: list[Losses] = run_ranks(1, train, configs)[0]
    return found


@pytest.fixture(scope="module")
def expected_of_families() -> dict[int, dict[str, Losses]]:
    """Data ranks → family → losses and norms in one process."""
    cases = [{"model": model, "steps": 2, "deterministic": False} for model in MODELS.values()]
    return {ranks: dict(zip(MODELS, of_one_process(ranks, cases), strict=True)) for ranks in (1, 2)}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
def test_families_train_like_one_process(form: ContextForm, expected_of_families: dict[int, dict[str, Losses]]) -> None:
    """Oracle: losses and norms of one process over two steps of two micro-batches with ragged padding."""
    cases = [(family, layout) for family in MODELS for layout in LAYOUTS if form_takes(form, family, layout)]
    configs = [
        make_config(
            *(FSDP2Config(context=form), 4), **LAYOUTS[layout], model=MODELS[family], steps=2, deterministic=False
        )
        for family, layout in cases
    ]
    for (family, layout), found in zip(cases, run_ranks(4, train, configs)[0], strict=True):
        assert_alike(found, expected_of_families[4 // LAYOUTS[layout]["cp_size"]][family], f"{family}, {layout}")


def form_takes(form: ContextForm, family: str, layout: str) -> bool:
    """Whether a form can share the sequences of a model; six heads on four ranks cannot be exchanged."""
    return form is not ContextForm.ulysses or layout != "cp 4"
