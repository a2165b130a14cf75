"""Llama against transformers' LlamaForCausalLM."""

import pytest
import torch

from fsdptoys.memory import cross_entropy_sum
from fsdptoys.models import LlamaConfig, LlamaModel
from fsdptoys.models.llama import RopeScaling

LLAMA2 = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=112, vocab_size=96, max_seq_len=128)
LLAMA3 = LlamaConfig(
    dim=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=112,
    vocab_size=96,
    max_seq_len=128,
    rope_theta=500.0,
    rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32),
    tie_embeddings=True,
)

NAMES = {
    "embed_tokens": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "mlp_norm": "post_attention_layernorm",
}
"""Part of our parameters' names → of theirs."""


def build(config: LlamaConfig) -> LlamaModel:
    torch.manual_seed(0)
    model = LlamaModel(config)
    model.init_buffers(torch.device("cpu"))
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    return model


def build_oracle(config: LlamaConfig, model: LlamaModel) -> tuple[torch.nn.Module, dict[str, str]]:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling.factor != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_seq_len,
        }
    oracle = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    names = {name: ".".join(NAMES.get(part, part) for part in name.split(".")) for name, _ in model.named_parameters()}
    missing = oracle.load_state_dict(
        {names[name]: param.detach() for name, param in model.named_parameters()}, strict=False
    )
    assert not missing.unexpected_keys
    assert missing.missing_keys == (["lm_head.weight"] if config.tie_embeddings else [])
    return oracle, names


@pytest.mark.oracle
@pytest.mark.parametrize("config", [LLAMA2, LLAMA3], ids=["llama2", "llama3_scaled_tied"])
@pytest.mark.parametrize("seq_len", [1, 17, 128])
def test_logits_and_gradients_equal_transformers(config: LlamaConfig, seq_len: int) -> None:
    """Oracle: transformers' LlamaForCausalLM with the same weights; logits to 1e-5, gradients to 1e-5 relative."""
    model = build(config)
    oracle, names = build_oracle(config, model)
    tokens_BT = torch.randint(0, config.vocab_size, (2, seq_len), generator=torch.Generator().manual_seed(1))
    labels_BT = torch.randint(0, config.vocab_size, (2, seq_len), generator=torch.Generator().manual_seed(2))
    labels_BT[0, : seq_len // 2] = -100

    logits_BTV, oracle_logits_BTV = model(tokens_BT), oracle(tokens_BT).logits
    torch.testing.assert_close(logits_BTV, oracle_logits_BTV, rtol=1e-5, atol=1e-5)

    loss = model(tokens_BT, labels_BT, cross_entropy_sum)
    oracle_loss = torch.nn.functional.cross_entropy(
        oracle_logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, oracle_loss, rtol=1e-5, atol=1e-6)
    loss.backward()
    oracle_loss.backward()
    oracle_grads = {name: param.grad for name, param in oracle.named_parameters()}
    for name, param in model.named_parameters():
        expected = oracle_grads[names[name]]
        assert (param.grad - expected).norm() <= 1e-5 * expected.norm().clamp(min=1e-6), name


def test_flops_per_token_match_torchs_counter() -> None:
    """Oracle: torch's FlopCounterMode, which counts the whole square of attention: 6·T·D·L more than its half."""
    from torch.utils.flop_counter import FlopCounterMode

    model, seq_len = build(LLAMA2), 64
    tokens_BT = torch.randint(0, LLAMA2.vocab_size, (2, seq_len))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens_BT, tokens_BT, cross_entropy_sum).backward()
    other_half = 6 * LLAMA2.n_layers * LLAMA2.dim * seq_len
    per_token = counter.get_total_flops() / tokens_BT.numel()
    assert model.flops_per_token(seq_len) + other_half == pytest.approx(per_token, rel=0.01)


def test_initial_values_follow_the_config() -> None:
    """Oracle: the formula: ones for norms, init_std for matrices, less by sqrt(2·layers) into the residual stream."""
    model = LlamaModel(LLAMA2)
    expected = {
        "norm.weight": 0.0,
        "layers.0.attn_norm.weight": 0.0,
        "embed_tokens.weight": 0.02,
        "layers.0.attn.q_proj.weight": 0.02,
        "layers.0.attn.o_proj.weight": 0.02 / 2,
        "layers.1.mlp.down_proj.weight": 0.02 / 2,
        "lm_head.weight": 0.02,
    }
    for name, std in expected.items():
        rows = torch.empty(4096, 64)
        model.init_rows(name, rows, torch.Generator().manual_seed(0))
        assert rows.std().item() == pytest.approx(std, rel=0.01)
        assert rows.mean().item() == pytest.approx(0.0 if std else 1.0, abs=1e-3)


def test_labels_without_a_loss_function_are_refused() -> None:
    """The head cannot guess which loss is meant."""
    model = build(LLAMA2)
    with pytest.raises(ValueError, match="without a loss_fn"):
        model(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
