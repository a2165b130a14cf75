"""Every family compared with transformers, with weights imported from transformers' own files."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fsdptoys.checkpoint import open_init_from, write_hugging_face
from fsdptoys.errors import ConfigError
from fsdptoys.loss import cross_entropy_sum
from fsdptoys.models import (
    NATIVE_MODELS,
    Llama4Config,
    LlamaConfig,
    RotaryConfig,
    choose_ops,
    use_ops,
)
from fsdptoys.models.grouped import Looped
from fsdptoys.models.self_attention import Attention
from fsdptoys.parallel import SingleConfig
from fsdptoys.tune import LoRAConfig
from tests.harness.families import CONVERTIBLE, LLAMA2, ROTARY, SMALL
from tests.harness.folders import build, load
from tests.harness.tiny import make_config
from tests.harness.transformers_oracle import build_oracle, import_transformers

LENGTHS = [
    pytest.param(seq_len, case, marks=[pytest.mark.extended] if seq_len == 17 else [])
    for case, config in CONVERTIBLE.items()
    for seq_len in (
        (1, 17, 24, 65, 128) if isinstance(config, Llama4Config) else (1, 17, 128)
    )
]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.oracle
@pytest.mark.parametrize("seq_len, case", LENGTHS)
def test_logits_and_gradients_equal_transformers(
    case: str, seq_len: int, tmp_path: Path
) -> None:
    """Oracle: transformers' model with its weights imported from its files; logits and gradients to
    1e-5 relative.

    65 and 128 tokens cross the chunks of local attention, which llama4 alone has, and 24 fill one.
    """
    config = SMALL[case]
    oracle = build_oracle(config)
    oracle.save_pretrained(tmp_path / "weights")
    model = load(tmp_path / "weights")
    tokens_BT = torch.randint(
        0, config.vocab_size, (2, seq_len), generator=torch.Generator().manual_seed(1)
    )
    labels_BT = torch.randint(
        0, config.vocab_size, (2, seq_len), generator=torch.Generator().manual_seed(2)
    )
    labels_BT[0, : seq_len // 2] = -100

    logits_BTV = model(tokens_BT)
    oracle_logits_BTV = oracle(tokens_BT, use_cache=False).logits
    torch.testing.assert_close(logits_BTV, oracle_logits_BTV, rtol=1e-5, atol=1e-5)

    loss = model(tokens_BT, labels_BT, cross_entropy_sum)
    oracle_loss = F.cross_entropy(
        oracle_logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, oracle_loss, rtol=1e-5, atol=1e-6)
    loss.backward()
    oracle_loss.backward()
    # Convert their gradients to our names through files, like the weights.
    with torch.no_grad():
        for param in oracle.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    oracle.save_pretrained(tmp_path / "gradients")
    expected = dict(load(tmp_path / "gradients").named_parameters())
    whole_norm = torch.nn.utils.get_total_norm(list(expected.values()))
    for name, param in model.named_parameters():
        assert param.grad is not None
        if expected[name].norm() <= 1e-6 * whole_norm:
            # The exact gradient is zero (a token that sees itself alone; the bias of keys): both
            # have rounding noise.
            assert param.grad.norm() <= 1e-6 * whole_norm, name
        else:
            assert (param.grad - expected[name]).norm() <= 1e-5 * expected[
                name
            ].norm(), name


@pytest.mark.parametrize("case", SMALL)
def test_flops_per_token_match_torchs_counter(case: str) -> None:
    """Oracle: torch's FlopCounterMode to 1%, which counts the full square of attention: twice our
    count."""
    # The counter supports torch's own matmuls only, and counts padding rows of other
    # implementations.
    model = build(SMALL[case])
    seq_len = 96  # four whole chunks
    use_ops(model, replace(choose_ops({}), grouped_matmul=lambda *_: Looped()))
    tokens_BT = torch.randint(0, 96, (2, seq_len))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens_BT, tokens_BT, cross_entropy_sum).backward()
    other_half = sum(
        module.own_flops(seq_len)
        for module in model.modules()
        if isinstance(module, Attention)
    )
    per_token = counter.get_total_flops() / tokens_BT.numel()
    assert model.flops_per_token(seq_len) + other_half == pytest.approx(
        per_token, rel=0.01
    )


def test_chunked_attention_flops_count_pairs_within_the_chunk() -> None:
    """Oracle: the pairs of positions that may meet, counted one by one; half of the squares differs
    by the diagonal."""
    attention = Attention(8, 2, 2, 4, chunk_len=24)
    for seq_len in (10, 24, 65, 128):
        pairs = sum(token % 24 + 1 for token in range(seq_len))
        diagonal = seq_len / 2
        assert attention.own_flops(seq_len) == pytest.approx(
            12 * 2 * 4 * (pairs - diagonal) / seq_len
        )


@pytest.mark.parametrize("case", SMALL)
def test_parameter_counts_match_the_model(case: str) -> None:
    """Oracle: gradients of one token's loss, which are zero for the experts that it was not routed
    to."""
    model = build(SMALL[case])
    counts = model.parameter_counts()
    assert counts.total == sum(param.numel() for param in model.parameters())
    token = torch.tensor([[5]])
    model(token, token, cross_entropy_sum).backward()
    idle = sum(
        int((param.grad.flatten(1) == 0).all(1).sum()) * param[0].numel()
        for name, param in model.named_parameters()
        if ".experts." in name and param.grad is not None
    )
    assert counts.active == counts.total - idle
    assert counts.experts == sum(
        param.numel() for name, param in model.named_parameters() if ".experts." in name
    )
    assert counts.embedding == sum(
        param.numel() for name, param in model.named_parameters() if "embed_" in name
    )
    assert counts.dense == counts.total - counts.embedding - counts.experts > 0


@pytest.mark.parametrize("case", SMALL)
def test_initial_values_follow_the_config(case: str) -> None:
    """Oracle: the formula: norms 1, biases 0, the rest init_std, less by sqrt(2·layers) into the
    residual stream."""
    config = SMALL[case]
    model = config.build()
    init_rows = model.row_initializer()
    for name, _ in model.named_parameters():
        rows = torch.empty(4096, 64)
        init_rows(name, rows, torch.Generator().manual_seed(0))
        is_norm = name.endswith("norm.weight")
        is_bias = name.endswith(".bias")
        into_residual = "o_proj" in name or "down_proj" in name
        std = 0.02 / (2 * config.n_layers) ** 0.5 if into_residual else 0.02
        assert rows.std().item() == pytest.approx(
            0.0 if is_norm or is_bias else std, rel=0.01
        ), name
        assert rows.mean().item() == pytest.approx(1.0 if is_norm else 0.0, abs=1e-3), (
            name
        )


def test_cases_cover_all_families() -> None:
    """Oracle: the registry of families."""
    assert {config.family for config in SMALL.values()} == set(NATIVE_MODELS)


@dataclass
class OwnConfig(LlamaConfig):
    """A family that Hugging Face lacks."""

    family: ClassVar[str] = "own"
    hugging_face = None
    name: str = "own_debug"


def test_a_family_without_hugging_face_format_is_neither_imported_nor_exported(
    tmp_path: Path,
) -> None:
    """Oracle: one message that names the family and the settings that it needs."""
    model = replace(OwnConfig(**ROTARY), init_from=str(tmp_path))
    message = "family own, which has no Hugging Face format; set model.init_from=null"
    with pytest.raises(ConfigError, match=message):
        open_init_from(model.build())
    with pytest.raises(ConfigError, match=message):
        write_hugging_face(
            tmp_path / "out", model, lambda *_: torch.empty(0), torch.float32
        )
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=message):
        make_config(SingleConfig(), 1, model=OwnConfig(**ROTARY), tune=LoRAConfig())
    make_config(SingleConfig(), 1, model=OwnConfig(**ROTARY))


def test_labels_without_a_loss_function_are_refused() -> None:
    """Oracle: the message; the head has no default loss."""
    model = build(LLAMA2)
    with pytest.raises(ValueError, match="without a loss_fn"):
        model(
            torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
        )


@pytest.mark.oracle
@pytest.mark.parametrize(
    "family",
    [
        family
        for family, config in NATIVE_MODELS.items()
        if issubclass(config, RotaryConfig)
    ],
)
def test_missing_config_keys_default_like_transformers(family: str) -> None:
    """Oracle: transformers' configuration where ``config.json`` lacks all keys that have a default
    here."""
    transformers = import_transformers()
    config = next(config for config in SMALL.values() if config.family == family)
    style = config.hugging_face
    optional = {style.keys[name] for name in style.defaults} | {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
    }
    tree = {
        key: value
        for key, value in style.write_config(config).items()
        if key not in optional
    }
    their_config = transformers.AutoConfig.for_model(
        **{key: value for key, value in tree.items() if key != "architectures"}
    )
    our_config = NATIVE_MODELS[family](**style.read_config(tree))
    assert isinstance(our_config, RotaryConfig)
    assert our_config.rope_theta == their_config.rope_parameters["rope_theta"]
    assert our_config.head_width == (
        getattr(their_config, "head_dim", None)
        or their_config.hidden_size // their_config.num_attention_heads
    )
    for name in style.defaults.keys() - {"head_dim"}:
        assert getattr(our_config, name) == getattr(their_config, style.keys[name]), (
            name
        )
