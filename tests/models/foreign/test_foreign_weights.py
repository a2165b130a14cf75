"""Weights of transformers models in the names and tensors of their folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fsdptoys.checkpoint.safetensors_io import slices
from fsdptoys.models import TransformersConfig
from fsdptoys.models.foreign.weights import (
    TransformersFormat,
    match_names,
    split_weights,
)
from tests.harness.foreign_families import SETTINGS
from tests.harness.foreign_folders import build_original
from tests.harness.run_tables import extended
from tests.harness.transformers_oracle import import_transformers

SHORT = ("llama", "qwen3_moe", "gpt2", "deepseek_v3", "gpt_oss", "gemma3_text")
ROWS = [name if name in SHORT else extended(name) for name in SETTINGS]


def draw(original: Any) -> None:
    """Give every weight and stored buffer values of its own."""
    generator = torch.Generator().manual_seed(1)
    for tensor in original.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))


def own_format(original: Any) -> TransformersFormat:
    names = match_names(original, original)
    return TransformersFormat(original, names, TransformersConfig())


def weights_of(original: Any) -> dict[str, Tensor]:
    """Weights and stored buffers, of shared ones the first."""
    state = original.state_dict()
    return {name: state[name] for name in match_names(original, original).values()}


@pytest.mark.oracle
@pytest.mark.parametrize("family", ROWS)
def test_pieces_are_the_tensors_that_transformers_writes(
    family: str, tmp_path: Path
) -> None:
    """Oracle: the bytes of ``save_pretrained``; every tensor is one region of one weight."""
    import_transformers()
    original = build_original(family)
    draw(original)
    original.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    style = own_format(original)
    for name, weight in weights_of(original).items():
        for piece in style.pieces(name, tuple(weight.shape)):
            region = weight[slices(piece.region)]
            region = region.reshape(region.shape[-len(piece.tensor_shape) :])
            region = region.mT if piece.transposed else region
            assert torch.equal(stored.pop(piece.tensor), region), piece.tensor
    assert not stored


@pytest.mark.oracle
@pytest.mark.parametrize("family", ROWS)
def test_a_folder_of_this_version_is_found_by_its_own_names(
    family: str, tmp_path: Path
) -> None:
    """Oracle: the pieces that are written, for the names that ``save_pretrained`` writes."""
    import_transformers()
    original = build_original(family)
    style = own_format(original)
    weights = weights_of(original)
    pieces = {
        name: style.pieces(name, tuple(weight.shape))
        for name, weight in weights.items()
    }
    stored = [piece.tensor for parts in pieces.values() for piece in parts]
    layout = style.layout(stored)
    assert not layout.unused
    for name, weight in weights.items():
        assert layout.pieces(name, tuple(weight.shape)) == pieces[name]


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_names_without_the_base_model_and_fused_experts_are_found(family: str) -> None:
    """Oracle: the names that were changed: without ``model.``, and experts as the model has
    them."""
    import_transformers()
    original = build_original(family)
    style = own_format(original)
    weights = weights_of(original)
    bare = {name.removeprefix("model."): name for name in weights}
    layout = style.layout(bare)
    for name, weight in weights.items():
        (piece,) = layout.pieces(name, tuple(weight.shape))
        assert bare[piece.tensor] == name
        assert piece.tensor_shape == tuple(weight.shape)


@pytest.mark.oracle
def test_tied_weights_are_found_under_either_name_and_compared() -> None:
    """Oracle: the two names."""
    import_transformers()
    original = build_original("gemma3_text")
    style = own_format(original)
    shape = tuple(original.lm_head.weight.shape)
    names = [
        piece.tensor
        for name, weight in weights_of(original).items()
        for piece in style.pieces(name, tuple(weight.shape))
    ]
    embedding = "model.embed_tokens.weight"
    both = style.layout([*names, "lm_head.weight"])
    assert both.copies == {"lm_head.weight": embedding}
    others = [name for name in names if name != embedding]
    head_alone = style.layout([*others, "lm_head.weight"])
    assert [piece.tensor for piece in head_alone.pieces(embedding, shape)] == [
        "lm_head.weight"
    ]
    assert not head_alone.copies


@pytest.mark.oracle
def test_tensors_that_transformers_ignores_are_unused() -> None:
    """Oracle: transformers' own list, which has the layer of DeepSeek that predicts a second
    token, and frequencies that older folders stored."""
    import_transformers()
    style = own_format(build_original("deepseek_v3"))
    ignored = {
        "model.layers.61.embed_tokens.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    }
    unknown = {"model.layers.5.self_attn.q_proj.weight"}
    assert style.layout(ignored | unknown).unused == ignored


@pytest.mark.oracle
def test_a_tensor_of_two_weights_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the message, for a conversion that joins two weights."""
    transformers = import_transformers()
    original = build_original("llama")

    def join(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        norms = [state.pop(name) for name in list(state) if "layernorm" in name]
        return state | {"norms": torch.cat(norms)}

    monkeypatch.setattr(
        transformers.core_model_loading, "revert_weight_conversion", join
    )
    shapes = {name: tuple(w.shape) for name, w in original.state_dict().items()}
    with pytest.raises(ValueError, match="LlamaForCausalLM stores norms in a form"):
        split_weights(original, shapes)


@pytest.mark.oracle
def test_routers_that_transformers_keeps_in_float32_stay_so() -> None:
    """Oracle: the list of the model's class."""
    import_transformers()
    style = own_format(build_original("deepseek_v3"))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert style.keeps_float32(bias)
    assert not style.keeps_float32("model.layers.1.mlp.experts.0.gate_proj.weight")
