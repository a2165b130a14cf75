"""The presets, compared with the published models."""

from typing import Any

import pytest
import torch
import yaml

from fsdptoys.config.choices import CONFIGS
from fsdptoys.config.compose import compose_config
from fsdptoys.models import DecoderModel, Llama4Config, RotaryConfig
from tests.harness.transformers_oracle import import_transformers

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mistral_7b": 7_248_023_552,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen2.5_72b": 72_706_203_648,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_moe_30b_a3b": 30_532_122_624,
}


def build(name: str) -> DecoderModel:
    with torch.device("meta"):
        return compose_config([f"model={name}"]).model.build()


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    """Oracle: the counts of the published weights (safetensors headers on the models' pages)."""
    model = build(name)
    assert model.parameter_counts().total == PUBLISHED[name]
    assert model.config.name == name


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3_moe_30b_a3b", 30.5e9, 3.3e9),
        ("llama4_scout", 107.8e9, 17e9),
        ("qwen3_0.6b", 0.6e9, 0.6e9),
    ],
)
def test_active_parameters_match_the_published_counts(
    name: str, total: float, active: float
) -> None:
    """Oracle: the models' pages: 30.5B with 3.3B active; 17B active (109B, of which the vision
    model is 0.9B); 0.6B."""
    counts = build(name).parameter_counts()
    assert counts.total == pytest.approx(total, rel=0.01)
    assert counts.active == pytest.approx(active, rel=0.02)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "llama3_1b",
        "llama4_scout",
        "mistral_7b",
        "qwen2.5_0.5b",
        "qwen3_0.6b",
        "qwen3_1.7b",
        "qwen3_moe_30b_a3b",
    ],
)
def test_preset_has_the_parameter_count_of_transformers(name: str) -> None:
    """Oracle: transformers' model on the meta device; Scout's configuration is transformers'
    default."""
    transformers = import_transformers()
    model = build(name)
    tree: dict[str, Any] = model.config.hugging_face.write_config(model.config)
    (architecture,) = tree.pop("architectures")
    if name == "llama4_scout":
        tree = {"model_type": "llama4_text"}
    with torch.device("meta"):
        oracle = getattr(transformers, architecture)(
            transformers.AutoConfig.for_model(**tree)
        )
    assert (
        sum(param.numel() for param in oracle.parameters())
        == model.parameter_counts().total
    )


@pytest.mark.parametrize(
    "name", [name for name in PUBLISHED if name.startswith("llama3")]
)
def test_llama3_presets_scale_rope_from_8192_to_131072_tokens(name: str) -> None:
    """Oracle: ``rope_scaling`` and ``max_position_embeddings`` of the published config.json
    files."""
    config = compose_config([f"model={name}"]).model
    assert isinstance(config, RotaryConfig)
    scaling = config.rope_scaling
    assert (config.max_seq_len, config.rope_theta, config.norm_eps) == (
        131072,
        500000.0,
        1e-5,
    )
    assert (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_seq_len,
    ) == (
        1.0,
        4.0,
        8192,
    )
    assert scaling.factor == (32.0 if config.tie_embeddings else 8.0)


@pytest.mark.oracle
def test_scout_is_the_default_llama4_of_transformers_except_its_context() -> None:
    """Oracle: defaults of transformers' Llama4TextConfig: Scout's except for context and rotary
    scaling."""
    transformers = import_transformers()
    defaults = transformers.AutoConfig.for_model("llama4_text").to_dict()
    config = compose_config(["model=llama4_scout"]).model
    assert isinstance(config, Llama4Config)
    tree = config.hugging_face.write_config(config)
    their_keys = {
        "architectures",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
    }
    # which transformers does not use for this family
    our_keys = {"router_aux_loss_coef"}
    assert {
        key: value for key, value in tree.items() if defaults.get(key, value) != value
    }.keys() <= their_keys | our_keys


def test_every_preset_is_named_after_its_file() -> None:
    """Oracle: the file names; titles of runs use the preset's name."""
    files = list((CONFIGS / "model").glob("*.yaml"))
    assert len(files) > 20
    for file in files:
        assert yaml.safe_load(file.read_text(encoding="utf-8"))["name"] == file.stem
