"""A new family outside of the package, with values per channel. Its layers are one class each, and
keep the promise of the layout mode."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn

from fsdptoys.models.exchange import Split
from fsdptoys.models.initial import Initial, ones, residual, zeros
from fsdptoys.models.layers import SwiGLU
from fsdptoys.models.ops import Layer
from fsdptoys.models.rotary import RotaryConfig
from fsdptoys.models.self_attention import Attention
from fsdptoys.parallel import FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.precision import DType
from tests.harness.ranks import run_ranks
from tests.harness.tiny import SIZES, make_config
from tests.parallel.numeric_outcomes import Outcome, assert_close, train_all


class Affine(Layer):
    """A scale and a bias per channel of the residual stream, or of a head."""

    split = Split.replicated
    initial: Mapping[str, Initial] = {"scale": ones, "bias": zeros}

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Apply to the last dim."""
        return self.per_channel(
            lambda hidden, scale, bias: hidden * scale + bias,
            hidden_BTD,
            self.scale,
            self.bias,
        )


class Gate(Layer):
    """A sigmoid gate per hidden channel; ranks split the channels."""

    split = Split.columns
    initial: Mapping[str, Initial] = {"logits": residual}

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.empty(dim))

    def forward(self, hidden_BTF: Tensor) -> Tensor:
        """Apply to the last dim."""
        return self.per_channel(
            lambda hidden, logits: hidden * torch.sigmoid(hidden + logits),
            hidden_BTF,
            self.logits,
        )


class GatedSwiGLU(SwiGLU):
    """Scale before, and gate within."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__(dim, ffn_dim)
        self.affine = Affine(dim)
        self.gate = Gate(ffn_dim)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Apply to the last dim."""
        hidden_BTD = self.exchange.enter(self.affine(hidden_BTD))
        hidden_BTF = self.ops.swiglu(
            self.gate_proj(hidden_BTD), self.up_proj(hidden_BTD)
        )
        return self.down_proj(self.gate(hidden_BTF))


@dataclass
class GatedConfig(RotaryConfig):
    """Llama blocks with these layers."""

    family: ClassVar[str] = "gated"

    def attention(self, layer: int) -> Attention:
        """Scale queries in place of a norm."""
        attention = super().attention(layer)
        attention.q_norm = Affine(self.head_width)
        return attention

    def feed_forward(self, layer: int) -> nn.Module:
        """Gate the hidden channels."""
        return GatedSwiGLU(self.dim, self.ffn_dim)


MODEL = GatedConfig(
    **{**SIZES, "n_kv_heads": 2, "ffn_dim": 44, "vocab_size": 68}, n_layers=2
)
LAYOUT: dict[str, Any] = {"deterministic": "layout", "grains": 4, "slices": 2}


def train(
    ranks: int, parallel: ParallelConfig, dtype: DType, **options: Any
) -> Outcome:
    parallel.param_dtype = dtype
    settings = {"model": MODEL, "steps": 2, "batch_size": 4, "grad_accum": 1, **options}
    config = make_config(parallel, ranks, **settings)
    outcome: Outcome = run_ranks(ranks, train_all, [config])[0][0]
    return outcome


def bits(tensors: dict[str, numpy.ndarray]) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def test_initial_values_are_those_that_layers_declare() -> None:
    """Oracle: the values by hand."""
    init_rows = MODEL.build().row_initializer()
    ffn = "layers.1.mlp"
    expected = {
        f"{ffn}.affine.scale": (1.0, 0.0),
        f"{ffn}.affine.bias": (0.0, 0.0),
        f"{ffn}.gate.logits": (0.0, 0.01),
        f"{ffn}.gate_proj.weight": (0.0, 0.02),
        "layers.0.attn.q_norm.scale": (1.0, 0.0),
    }
    for name, (mean, std) in expected.items():
        rows = torch.empty(4096, 64)
        init_rows(name, rows, torch.Generator().manual_seed(0))
        assert rows.mean().item() == pytest.approx(mean, abs=1e-3), name
        assert rows.std().item() == pytest.approx(std, rel=0.01), name


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_layers_with_a_value_per_channel_have_the_bits_of_one_process(
    dtype: DType,
) -> None:
    """Oracle: one process and one micro-batch, against two micro-batches and against two ranks that
    split features; plain operations give the same numbers up to rounding."""
    whole = train(1, SingleConfig(), dtype, **LAYOUT)
    layouts = [train(1, SingleConfig(), dtype, **LAYOUT, batch_size=2, grad_accum=2)]
    if fsdp2_can_sum():
        layouts.append(train(2, FSDP2Config(), dtype, **LAYOUT, tp_size=2))
    for outcome in layouts:
        assert outcome.losses == whole.losses and outcome.norms == whole.norms
        assert bits(outcome.grads) == bits(whole.grads)
        assert bits(outcome.parameters) == bits(whole.parameters)
    if dtype is DType.float32:
        plain = train(1, SingleConfig(), dtype)
        assert_close(plain, whole, tolerance=1e-4, tensors=False)
        features = train(2, FSDP2Config(), dtype, tp_size=2)
        assert_close(features, plain, tolerance=1e-4, tensors=False)
