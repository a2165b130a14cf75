"""Scalings of rotary frequencies, compared with transformers'."""

from typing import Any

import pytest
import torch

from fsdptoys.models import LlamaConfig
from fsdptoys.models.rope_scaling import (
    RopeKind,
    RopeScaling,
    read_scaling,
    rope_inv_freq,
)
from tests.harness.families import ROTARY
from tests.harness.transformers_oracle import import_transformers

YARN = {"rope_type": "yarn", "factor": 4.0}
SECTIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear as transformers 4 wrote it": {"type": "linear", "factor": 3},
    "yarn": YARN | {"original_max_position_embeddings": 32768},
    "yarn of the whole context": YARN,
    "yarn of nulls": YARN | dict.fromkeys(("beta_fast", "beta_slow", "mscale")),
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn, one magnitude": YARN | {"mscale": 0.7},
    "yarn, two magnitudes": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn, attention factor": YARN | {"attention_factor": 1.25, "mscale": 0.7},
    "yarn of a short context": YARN | {"original_max_position_embeddings": 2},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.oracle
@pytest.mark.parametrize("case", SECTIONS)
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_frequencies_have_the_bits_of_transformers(case: str, theta: float) -> None:
    """Oracle: ``ROPE_INIT_FUNCTIONS`` of transformers for the same section of ``config.json``."""
    transformers = import_transformers()
    utils = import_transformers("transformers.modeling_rope_utils")
    section = SECTIONS[case]
    their_config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": theta, **section},
    )
    kind = their_config.rope_parameters["rope_type"]
    scaling = read_scaling(section, 4096, "llama")
    inv_freq = rope_inv_freq(128, theta, scaling)
    if kind == "default":
        assert scaling == RopeScaling()
        return
    expected, factor = utils.ROPE_INIT_FUNCTIONS[kind](
        their_config, torch.device("cpu")
    )
    assert torch.equal(inv_freq, expected)
    assert scaling.table_factor == factor


def test_yarn_needs_a_base_above_one() -> None:
    """Oracle: the message; the channels are found by the logarithm of the base."""
    scaling = read_scaling(YARN, 64, "llama")
    with pytest.raises(ValueError, match=r"^model.rope_theta=1.0 must be above 1 with"):
        LlamaConfig(**ROTARY, rope_theta=1.0, rope_scaling=scaling)


def test_the_original_context_may_stand_outside_of_the_section() -> None:
    """Oracle: transformers, which prefers the key of the whole configuration."""
    config = LlamaConfig(**ROTARY, rope_scaling=read_scaling(YARN, 64, "llama"))
    tree = LlamaConfig.hugging_face.write_config(config)
    fields = LlamaConfig.hugging_face.read_config(
        tree | {"original_max_position_embeddings": 16}
    )
    assert fields["rope_scaling"].original_max_seq_len == 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": RopeKind.yarn}, "kind=yarn has no effect with .*factor=1.0; set"),
        ({"factor": 2.0, "beta_fast": 16.0}, "beta_fast=16.0 has no effect with"),
        (
            {"factor": 2.0, "kind": RopeKind.linear, "truncate": False},
            "truncate=false has no effect with model.rope_scaling.kind=linear; set",
        ),
    ],
)
def test_settings_of_another_kind_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    """Oracle: the message, since an option that is accepted has an effect."""
    with pytest.raises(ValueError, match=message):
        RopeScaling(**settings)
