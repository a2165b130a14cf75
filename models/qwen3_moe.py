"""Qwen3-MoE: Qwen3's blocks with experts in place of the feed-forward, chosen by a normalized
softmax.

Source: arXiv:2505.09388. Tested against transformers' Qwen3MoeForCausalLM
(``tests/models/test_families.py``). The auxiliary losses are in ``moe``. Not covered: sliding
windows, biases, dropout, ``mlp_only_layers``.
"""

from dataclasses import dataclass
from typing import ClassVar

from .huggingface import Piece, whole
from .moe import Scores
from .moe_config import MoEConfig
from .qwen3 import QWEN3_FIXED, Qwen3Config
from .rotary import ROTARY_DEFAULTS, ROTARY_KEYS, ROTARY_NAMES, RotaryFormat


@dataclass(frozen=True)
class Qwen3MoEFormat(RotaryFormat):
    """Hugging Face has one tensor per expert and projection."""

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        """Split stacked parameters into experts, and gate from up."""
        prefix, _, kind = name.rpartition(".experts.")
        if not prefix:
            return super().pieces(name, shape)
        parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
        rows = shape[1] // len(parts)
        return [
            Piece(
                region=(
                    (expert, expert + 1),
                    (part * rows, (part + 1) * rows),
                    (0, shape[2]),
                ),
                tensor=f"{self.tensor_name(prefix)}.experts.{expert}.{parts[part]}.weight",
                tensor_shape=(rows, shape[2]),
                tensor_region=whole((rows, shape[2])),
            )
            for expert in range(shape[0])
            for part in range(len(parts))
        ]


@dataclass
class Qwen3MoEConfig(Qwen3Config, MoEConfig):
    """A Qwen3 model with experts."""

    family: ClassVar[str] = "qwen3_moe"
    hugging_face: ClassVar[RotaryFormat] = Qwen3MoEFormat(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        keys={
            **ROTARY_KEYS,
            "n_experts": "num_experts",
            "top_k": "num_experts_per_tok",
            "expert_ffn_dim": "moe_intermediate_size",
            "moe_every": "decoder_sparse_step",
            "norm_topk_prob": "norm_topk_prob",
            "router_aux_loss_coef": "router_aux_loss_coef",
        },
        names={**ROTARY_NAMES, "router": "gate"},
        aliases={"num_experts": "num_local_experts"},  # as transformers 5 writes it
        fixed={**QWEN3_FIXED, "mlp_only_layers": []},
        defaults={
            **ROTARY_DEFAULTS,
            "moe_every": 1,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
    )

    name: str = "qwen3_moe"
    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum."""

    @property
    def scores(self) -> Scores:
        """A softmax, normalized or not."""
        return Scores.normalized_softmax if self.norm_topk_prob else Scores.softmax
