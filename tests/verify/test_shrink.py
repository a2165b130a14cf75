"""Small forms of models: few parameters, the same kinds of layers."""

import json
from pathlib import Path

import pytest
import torch

from fsdptoys.config.choices import list_choices
from fsdptoys.config.compose import compose_presets
from fsdptoys.models import MoEConfig, NativeConfig, RotaryConfig
from fsdptoys.verify.shrink import shrink_model
from fsdptoys.verify.shrink_folder import write_small_folder
from tests.harness.levels import by_level

PRESETS = list_choices()["model"]


def test_every_preset_has_a_small_form_with_its_kinds_of_layers() -> None:
    """Oracle: the classes of the full model's modules, and the kinds of its first layers."""
    for config in compose_presets(PRESETS):
        if not isinstance(config, NativeConfig):
            continue
        small = config.with_settings(**shrink_model(config))
        assert small.vocab_size <= 512 and 2 <= small.n_layers <= 4
        with torch.device("meta"):
            model = small.build()
            full = config.with_settings(n_layers=small.n_layers).build()
        assert sum(param.numel() for param in model.parameters()) < 10**6
        kinds = [[type(module) for module in form.modules()] for form in (model, full)]
        assert kinds[0] == kinds[1]
        names = [
            [name for name, _ in form.named_parameters()] for form in (model, full)
        ]
        assert names[0] == names[1]
        if isinstance(config, RotaryConfig):
            is_grouped = config.n_heads > config.n_kv_heads
            assert is_grouped == (small.n_heads > small.n_kv_heads)
        if isinstance(config, MoEConfig):
            assert small.top_k < small.n_experts


FOLDERS = {
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000},
    "gemma3_text": {
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "vocab_size": 262144,
        "pad_token_id": 0,
        "eos_token_id": 200000,
        "sliding_window": 512,
    },
    "deepseek_v3": {"num_hidden_layers": 61, "vocab_size": 129280},
    "qwen3_moe": {"num_hidden_layers": 48, "num_experts": 128},
    "gpt2": {"n_embd": 768, "n_layer": 12, "vocab_size": 50257},
}


@pytest.mark.parametrize("model_type", by_level(FOLDERS, {"gemma3_text"}))
def test_a_folder_has_a_small_form_that_transformers_computes(
    model_type: str, tmp_path: Path
) -> None:
    """Oracle: the attempt itself, which needs finite logits; sizes by key."""
    source = tmp_path / "full"
    target = tmp_path / "small"
    for folder in (source, target):
        folder.mkdir()
    tree = {"model_type": model_type} | FOLDERS[model_type]
    (source / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    (sentence,) = write_small_folder(source, target)
    assert sentence.startswith("small form: ")
    small = json.loads((target / "config.json").read_text(encoding="utf-8"))
    assert small["vocab_size"] == 256
    assert 2 <= small.get("num_hidden_layers", small.get("n_layer")) <= 6
    assert small.get("hidden_size", small.get("n_embd")) <= 128
    assert small.get("eos_token_id", 0) in (None, *range(256))
    if model_type == "gemma3_text":
        assert set(small["layer_types"]) == {"sliding_attention", "full_attention"}
        assert small["sliding_window"] < 64


def test_a_folder_without_a_small_form_is_refused_by_name(tmp_path: Path) -> None:
    """Oracle: the file and the fix."""
    tree = {"model_type": "llama", "hidden_act": "no_such_function"}
    (tmp_path / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(ValueError, match=r"no small form: .*with --full"):
        write_small_folder(tmp_path, tmp_path)
