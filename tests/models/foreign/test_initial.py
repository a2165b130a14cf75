"""Initial values and buffers of transformers models, against transformers' own construction."""

import math
from typing import Any

import pytest
import torch

from fsdptoys.models import TransformersConfig
from fsdptoys.models.foreign.adapter import TransformersModel
from fsdptoys.models.foreign.build import build_causal_lm
from fsdptoys.parallel import seeded
from fsdptoys.parallel.init_weights import init_buffers, materialize
from tests.harness.foreign_families import SETTINGS
from tests.harness.foreign_runs import tiny_model
from tests.harness.levels import by_level
from tests.harness.transformers_oracle import import_transformers

pytestmark = pytest.mark.oracle
FAMILIES = [family for family in SETTINGS if family != "apertus"]
SHORT = ("gpt2", "gemma3_text", "mamba2", "minimax", "gpt_oss")
CPU = torch.device("cpu")


def drawn(config: TransformersConfig, dtype: torch.dtype) -> TransformersModel:
    """A model of this project on the CPU, with initial values of seed 0."""
    with torch.device("meta"):
        model = config.build()
    assert isinstance(model, TransformersModel)
    fill = seeded(model.row_initializer(), 0, 1, model.zero_rows())
    materialize(model, CPU, fill)
    init_buffers(model, CPU, torch.float32, dtype)
    return model


def constructed(config: TransformersConfig, dtype: torch.dtype) -> Any:
    """transformers' model, constructed on the CPU."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        return build_causal_lm(config, dtype)


@pytest.mark.parametrize("family", by_level(FAMILIES, SHORT))
def test_initial_values_have_the_distributions_of_transformers(family: str) -> None:
    """Oracle: mean and deviation of each parameter of transformers' own model."""
    import_transformers()
    config = tiny_model(family)
    model = drawn(config, torch.float32)
    oracle = constructed(config, torch.float32)
    for name, param in model.named_parameters():
        expected = oracle.get_parameter(model.hugging_face_names[name])
        assert (param == 0).sum() == (expected == 0).sum(), name
        if expected.numel() == 1 or expected.std() == 0:
            assert torch.equal(param, expected), name
            continue
        count = expected.numel()
        deviation = expected.std().item()
        assert param.std().item() == pytest.approx(
            deviation, rel=6 / math.sqrt(count)
        ), name
        assert param.mean().item() == pytest.approx(
            expected.mean().item(), abs=9 * deviation / math.sqrt(count)
        ), name


ROUNDED = ("gptj",)
"""Families of which transformers computes buffers in the dtype that it constructs a model in; here
they are those of a float32 model."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", by_level(FAMILIES, SHORT))
def test_buffers_equal_those_of_transformers(family: str, dtype: torch.dtype) -> None:
    """Oracle: values and dtypes of the buffers of transformers' own model, bit for bit."""
    import_transformers()
    config = tiny_model(family)
    model = drawn(config, dtype)
    oracle = dict(constructed(config, dtype).named_buffers())
    if family in ROUNDED:
        exact = dict(constructed(config, torch.float32).named_buffers())
        oracle = {name: exact[name].to(value.dtype) for name, value in oracle.items()}
    buffers = dict(model.named_buffers())
    assert {model.hugging_face_names[name] for name in buffers} <= set(oracle)
    for name, buffer in buffers.items():
        expected = oracle[model.hugging_face_names[name]]
        assert buffer.dtype == expected.dtype, name
        assert torch.equal(buffer, expected), name
