"""The presets, held against the published models."""

import pytest
import torch

from fsdptoys.compose import compose_config
from fsdptoys.models import build_model

PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    """Oracle: the counts of the published weights (safetensors headers on the models' pages)."""
    config = compose_config([f"model={name}"]).model
    with torch.device("meta"):
        model = build_model(config)
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[name]
    assert config.name == name


@pytest.mark.parametrize("name", ["llama3_1b", "llama3_3b", "llama3_8b", "llama3_70b"])
def test_llama3_presets_reach_131072_tokens_by_stretching_8192(name: str) -> None:
    """Oracle: ``rope_scaling`` and ``max_position_embeddings`` of the published config.json files."""
    config = compose_config([f"model={name}"]).model
    scaling = config.rope_scaling
    assert (config.max_seq_len, config.rope_theta, config.norm_eps) == (131072, 500000.0, 1e-5)
    assert (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_seq_len) == (1.0, 4.0, 8192)
    assert scaling.factor == (32.0 if config.tie_embeddings else 8.0)
