"""Pipeline parallelism: ranks with some of the layers train like one process, with every schedule and other axis."""

import dataclasses
from typing import Any

import pytest

from fsdptoys.data import SyntheticConfig
from fsdptoys.parallel import FSDP2Config
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.parallel.precision import DType
from tests.parallel import test_layout_mode
from tests.parallel.runs import TINY, tiny_model
from tests.parallel.test_layout_mode import CHUNKED, FULL, SELECTIVE, Case, assert_bits_of_one_process

needs_sums = pytest.mark.skipif(not fsdp2_can_sum(), reason="FSDP2 of this torch cannot sum gradients")
EXPERTS: dict[str, Any] = {"n_experts": 4, "expert_ffn_dim": 24}
EVEN: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "ffn_dim": 52, "vocab_size": 68, "dim": 40}
MODELS: dict[str, Any] = {
    "llama": dataclasses.replace(tiny_model(), n_layers=4, **EVEN),
    "qwen3": dataclasses.replace(TINY["qwen3"], n_layers=4),
    "qwen3_moe": dataclasses.replace(TINY["qwen3_moe"], n_layers=4, **EXPERTS, **EVEN),
    "llama4": dataclasses.replace(TINY["llama4"], **EXPERTS, attention_chunk_len=12),
    "gpt2": dataclasses.replace(TINY["gpt2"], n_layers=5, tie_embeddings=False),
}
DOCUMENTS = SyntheticConfig(branching=60, mask_documents=True)


def pipeline(name: str, **options: Any) -> FSDP2Config:
    return FSDP2Config(schedule=PipelineSchedule(name), **options)


@pytest.mark.usefixtures("unmeasured")
@needs_sums
def test_layout_mode_has_the_bits_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: one process, whose micro-batch is the global batch: losses, held-out losses, gradients, parameters."""
    monkeypatch.setattr(test_layout_mode, "MODELS", MODELS)
    two = {"pp_size": 2}
    cases: list[Case] = [
        (
            *("llama", DType.float32, {"slices": 2}),
            {"shard": (pipeline("1f1b"), two), "tp": (pipeline("zero_bubble"), two | {"tp_size": 2})},
        ),
        (
            "qwen3",
            DType.bfloat16,
            {"data": DOCUMENTS},
            {"pp 4": (pipeline("1f1b"), {"pp_size": 4, "memory": SELECTIVE})},
        ),
        (
            *("qwen3_moe", DType.bfloat16, {"memory": CHUNKED}),
            {
                "ep": (pipeline("zero_bubble"), two | {"ep_size": 2}),
                "cp": (pipeline("interleaved"), two | {"cp_size": 2}),
            },
        ),
        (
            *("llama4", DType.float32, {}),
            {
                "cp ep": (
                    pipeline("gpipe", context=ContextForm.gathered),
                    two | {"cp_size": 2, "ep_size": 2, "memory": FULL},
                ),
                "hsdp": (pipeline("interleaved"), two | {"fsdp_size": 1}),
            },
        ),
        ("gpt2", DType.float32, {"data": DOCUMENTS}, {"shard": (pipeline("interleaved"), two)}),
    ]
    assert_bits_of_one_process(4, cases)
