"""Families of transformers: training here equals a plain loop over their own classes."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import TransformersConfig
from fsdptoys.models.foreign import adapter
from fsdptoys.models.foreign.head import HeadForm
from fsdptoys.parallel import FSDP2Config, ParallelConfig, init_weights
from fsdptoys.parallel.ddp import DDPConfig
from fsdptoys.parallel.fsdp1 import FSDP1Config
from tests.harness.coverage import without_coverage
from tests.harness.foreign_families import ROPES, SETTINGS, rope_settings
from tests.harness.foreign_runs import (
    Curve,
    curves,
    foreign_config,
    plain_curves,
    single_config,
    tiny_model,
)
from tests.harness.levels import by_level
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import selected
from tests.harness.transformers_oracle import import_transformers

pytestmark = pytest.mark.oracle

SHORT = (
    *("mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "gemma2", "gemma3_text"),
    *("phi3", "olmo2", "smollm3", "granite", "gpt_oss", "llama", "deepseek_v3", "glm4"),
    *("gpt_neox", *(f"llama {kind}" for kind in ROPES)),
)
ROWS = (*SETTINGS, *(f"llama {kind}" for kind in ROPES))
UNTRAINED = ("apertus",)
"""Families without initial values."""
WITHOUT_DDP = ("glm_moe_dsa", "deepseek_v32", "deepseek_v4")
"""Families with parameters that no loss reaches."""
BOUND = 1e-5
CHUNKED = MemoryConfig(chunk_loss=True, chunk_tokens="8")
RECOMPUTED = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
LAYOUTS: dict[str, tuple[ParallelConfig, MemoryConfig]] = {
    "fsdp2, chunked loss": (FSDP2Config(), CHUNKED),
    "fsdp1, checkpointing": (FSDP1Config(), RECOMPUTED),
}


def model_of(row: str) -> TransformersConfig:
    """The tiny model of a row: a family, and maybe a kind of rotary positions."""
    family, _, rope = row.partition(" ")
    return tiny_model(family, **(rope_settings(rope) if rope else {}))


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Any]]:
    """(row, layout) → its losses and norms; of the rows that this session runs, in two groups of
    processes."""
    import_transformers()
    rows = [row for row in selected(request, "row") if row not in UNTRAINED]
    models = {row: model_of(row) for row in rows}
    alone = [single_config(model) for model in models.values()]
    shared = [
        (row, label, foreign_config(models[row], parallel, 2, memory))
        for row in rows
        for label, (parallel, memory) in LAYOUTS.items()
    ]
    with without_coverage():
        plain, single = run_ranks(1, _alone, alone)[0]
        split = run_ranks(2, curves, [config for _, _, config in shared])[0]
    results: dict[tuple[str, str], Any] = {}
    for row, expected, run in zip(rows, plain, single, strict=True):
        results[row, "plain"] = expected
        results[row, "single"] = run
    for (row, label, _), run in zip(shared, split, strict=True):
        results[row, label] = run
    yield results


def _alone(configs: list[Any]) -> tuple[list[Any], list[Any]]:
    return plain_curves(configs), curves(configs)


@pytest.mark.parametrize("row", by_level(ROWS, SHORT))
def test_training_equals_a_plain_loop(
    row: str, trained: dict[tuple[str, str], Any]
) -> None:
    """Oracle: AutoModelForCausalLM, AdamW and clipping of PyTorch in one process, five steps."""
    if row in UNTRAINED:
        with pytest.raises(ValueError, match="has none: transformers does not init"):
            model_of(row).check()
        return
    expected = trained[row, "plain"]
    assert isinstance(expected, Curve), expected
    for label in ("single", *LAYOUTS):
        run = trained[row, label]
        assert isinstance(run, Curve), (label, run)
        assert run.error(expected) < BOUND, (label, run, expected)


def _ignored_form(*_: Any) -> HeadForm:
    return HeadForm()


def _zeros(model: Any, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.zeros_like(buffer, device=device)


def _first_rows(param: Any) -> tuple[tuple[int, int], ...]:
    bounds = _bounds(param)
    first, last = bounds[0]
    return ((0, last - first), *bounds[1:])


_bounds = init_weights.local_bounds
FAULTS: dict[str, tuple[str, str, Any, Any, Any]] = {
    "dropped logit scale": ("granite", "single", adapter, "find_form", _ignored_form),
    "dropped soft cap": ("gemma2", "fsdp2", adapter, "find_form", _ignored_form),
    "untied head": (
        "gemma",
        "single",
        init_weights,
        "shared_parameters",
        lambda model: {},
    ),
    "skipped inv_freq": ("llama", "single", adapter, "compute_buffers", _zeros),
    "same rows on each rank": (
        "llama",
        "fsdp2",
        init_weights,
        "local_bounds",
        _first_rows,
    ),
}
"""Fault → family, layout, module, function and what replaces it."""


def _faulty(configs: list[Any], module: Any, name: str, fault: Any) -> list[Any]:
    with mock.patch.object(module, name, fault):
        return curves(configs)


@pytest.mark.parametrize("fault", FAULTS)
def test_injected_faults_are_seen(fault: str) -> None:
    """Oracle: the plain loop, from which each fault departs by far more than the bound."""
    import_transformers()
    family, layout, module, name, replacement = FAULTS[fault]
    model = model_of(family)
    config = single_config(model)
    (expected,) = run_ranks(1, plain_curves, [config])[0]
    ranks = 1 if layout == "single" else 2
    if layout == "fsdp2":
        config = foreign_config(model, FSDP2Config(), 2)
    (run,) = run_ranks(ranks, _faulty, [config], module, name, replacement)[0]
    assert isinstance(expected, Curve)
    assert not isinstance(run, Curve) or run.error(expected) > 30 * BOUND, run


@pytest.mark.parametrize("family", by_level(WITHOUT_DDP, WITHOUT_DDP[:1]))
def test_ddp_refuses_models_with_parameters_that_no_loss_reaches(family: str) -> None:
    """Oracle: the sentence, without which DDP fails in its second step."""
    import_transformers()
    with pytest.raises(ValueError, match="waits for the gradient of every parameter"):
        foreign_config(model_of(family), DDPConfig(), 2)
