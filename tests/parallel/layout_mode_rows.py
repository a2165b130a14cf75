"""Layouts of a global batch under ``train.deterministic=layout``, each beside one process."""

import dataclasses
from typing import Any

from fsdptoys.config.rules.pipeline import ZERO_BUBBLE_SINCE
from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.parallel.precision import DType
from tests.harness.run_tables import Row
from tests.harness.tiny import (
    DOCUMENTS,
    EXPERTS,
    TINY,
    make_config,
    tiny_model,
    with_sizes,
)
from tests.parallel.split_models import BIASED, FEATURES, SELECTIVE, SMOOTH, STAGES

BATCH = 4
"""Sequences of a global batch."""

MODELS: dict[str, ModelConfig] = {
    "llama": tiny_model(),
    "llama tied": tiny_model(tie_embeddings=True),
    "qwen3": TINY["qwen3"],
    "qwen3_moe": with_sizes(TINY["qwen3_moe"], **EXPERTS),
    # Chunks of two grains, so that ranks with parts of sequences have whole grains of them.
    "llama4": with_sizes(TINY["llama4"], **EXPERTS, attention_chunk_len=12),
    "gpt2": TINY["gpt2"],
    "qwen2": TINY["qwen2"],
    "mistral": TINY["mistral"],
}

LAST = PipelineSchedule("zero_bubble" if TORCH >= ZERO_BUBBLE_SINCE else "interleaved")

# FSDP2 of torch 2.7 only averages, which the mode refuses.
Sharded = FSDP2Config if fsdp2_can_sum() else FSDP1Config

FULL = MemoryConfig(
    gradient_checkpointing=GradientCheckpointing.full, checkpointing_start_index=1
)
CHUNKED = MemoryConfig(chunk_loss=True, chunk_tokens="20")
MASKED = {"data": DOCUMENTS}


def settings_of(ranks: int, **options: Any) -> dict[str, Any]:
    """Return two steps on the global batch, by four grains a sequence and micro-batches of one
    sequence unless given.

    Then an evaluation on as many held-out sequences.
    """
    shares = ranks // (
        options.get("cp_size", 1)
        * options.get("tp_size", 1)
        * options.get("pp_size", 1)
    )
    size = options.get("batch_size", 1)
    count = BATCH // shares // size
    settings = {
        "batch_size": size,
        "grad_accum": count,
        "steps": 2,
        "eval_every": 2,
        "eval_batches": count,
    }
    settings |= {"deterministic": "layout"} | options
    return (
        settings if settings["deterministic"] != "layout" else {"grains": 4} | settings
    )


def config(
    parallel: ParallelConfig, ranks: int, model: ModelConfig, **options: Any
) -> Config:
    return make_config(parallel, ranks, model=model, **settings_of(ranks, **options))


def layout_row(
    ranks: int,
    model: ModelConfig,
    dtype: DType,
    parallel: ParallelConfig,
    layout: dict[str, Any],
    shared: dict[str, Any] | None = None,
) -> Row:
    """Return a layout of a global batch, to be compared with one process that takes it as one
    micro-batch."""
    shared = {"model": model, **(shared or {})}
    alone = settings_of(1, batch_size=BATCH, **shared)
    parallel = dataclasses.replace(parallel, param_dtype=dtype)
    return Row(
        parallel, ranks, settings_of(ranks, **{**shared, **layout}), shared, alone
    )


def layouts() -> dict[str, Row]:
    """Return layouts of two and four ranks: every axis alone and together with others, every
    switch, every family."""
    float32 = DType.float32
    bfloat16 = DType.bfloat16
    fsdp2 = FSDP2Config()
    gathered, ulysses = (
        FSDP2Config(context=form)
        for form in (ContextForm.gathered, ContextForm.ulysses)
    )
    one_f_one_b, interleaved, last = (
        FSDP2Config(schedule=schedule)
        for schedule in (
            PipelineSchedule("1f1b"),
            PipelineSchedule("interleaved"),
            LAST,
        )
    )
    hsdp, cp, ep, tp, pp = (
        {f"{axis}_size": 2} for axis in ("fsdp", "cp", "ep", "tp", "pp")
    )
    smooth = {**SMOOTH, "memory": CHUNKED}
    slices: dict[str, Any] = {"slices": 2}
    whole = {"batch_size": 2}
    tied, moe, llama4, gpt2 = (
        MODELS[name] for name in ("llama tied", "qwen3_moe", "llama4", "gpt2")
    )
    rows = {
        "ddp, selective": layout_row(
            2, tied, float32, DDPConfig(), {"memory": SELECTIVE}
        ),
        "fsdp1, chunked loss": layout_row(2, tied, bfloat16, FSDP1Config(), {}, smooth),
        "fsdp2, chunked loss": layout_row(2, tied, bfloat16, Sharded(), {}, smooth),
        "fsdp1, experts": layout_row(2, moe, bfloat16, FSDP1Config(), {"memory": FULL}),
        "fsdp2, chunks": layout_row(
            2, llama4, float32, Sharded(), {"memory": SELECTIVE, "batch_size": 2}
        ),
        "ddp, documents": layout_row(
            2, gpt2, bfloat16, DDPConfig(), {"memory": FULL}, MASKED
        ),
        "fsdp2, documents": layout_row(
            2, TINY["qwen3"], float32, Sharded(), {}, {"grains": 3, **MASKED}
        ),
    }
    sums = {
        "hsdp": layout_row(4, MODELS["llama"], bfloat16, fsdp2, hsdp, {"grains": 8}),
        "cp 4": layout_row(
            4, MODELS["llama"], bfloat16, gathered, {"cp_size": 4}, {"grains": 8}
        ),
        "hsdp1": layout_row(4, TINY["qwen3"], float32, FSDP1Config(), hsdp),
        "cp ulysses": layout_row(4, TINY["qwen3"], float32, ulysses, cp),
        "hsdp cp, documents": layout_row(4, gpt2, float32, gathered, hsdp | cp, MASKED),
        "ep hsdp": layout_row(4, llama4, bfloat16, fsdp2, hsdp | ep),
        "hsdp cp, chunks": layout_row(4, llama4, bfloat16, gathered, hsdp | cp),
        "ep cp": layout_row(4, moe, float32, ulysses, cp | {"ep_size": 4}),
        "ep": layout_row(4, moe, float32, fsdp2, ep),
        "tp 4": layout_row(
            4,
            FEATURES["four key heads"],
            float32,
            fsdp2,
            {"tp_size": 4},
            {"slices": 4, "grains": 8},
        ),
        "tp cp, selective": layout_row(
            4,
            FEATURES["qwen3_moe"],
            bfloat16,
            gathered,
            tp | cp | {"memory": SELECTIVE},
            slices,
        ),
        "tp ep, chunked loss": layout_row(
            4,
            FEATURES["llama4"],
            bfloat16,
            fsdp2,
            tp | {"ep_size": 4},
            slices | smooth,
        ),
        "tp cp, documents": layout_row(
            4,
            FEATURES["gpt2"],
            float32,
            fsdp2,
            tp | cp | {"memory": FULL},
            slices | MASKED,
        ),
        "fsdp1 of slices": layout_row(
            4, FEATURES["gpt2"], float32, FSDP1Config(), {}, slices | MASKED
        ),
        "cp on 2": layout_row(2, TINY["qwen3"], float32, ulysses, cp | whole),
        "cp gathered on 2": layout_row(2, gpt2, bfloat16, gathered, cp | whole, MASKED),
        "ep on 2": layout_row(2, moe, bfloat16, fsdp2, ep | whole),
        "tp on 2": layout_row(
            2, FEATURES["llama4"], bfloat16, fsdp2, tp | whole, slices | smooth
        ),
        "biases": layout_row(4, BIASED, float32, gathered, tp | cp, slices),
        "biases, fsdp1": layout_row(2, MODELS["qwen2"], bfloat16, FSDP1Config(), {}),
        "scaled rotations": layout_row(
            2, MODELS["mistral"], float32, ulysses, cp | whole
        ),
        "pp of biases": layout_row(2, STAGES["qwen2"], float32, interleaved, pp),
        "pp on 2": layout_row(2, STAGES["qwen3"], float32, interleaved, pp),
        "pp": layout_row(4, STAGES["llama"], float32, one_f_one_b, pp, slices),
        "pp tp": layout_row(4, STAGES["llama"], float32, last, pp | tp, slices),
        "pp 4": layout_row(
            4,
            STAGES["qwen3"],
            bfloat16,
            one_f_one_b,
            {"pp_size": 4, "memory": SELECTIVE},
            MASKED,
        ),
        "pp ep": layout_row(
            4, STAGES["qwen3_moe"], bfloat16, last, pp | ep, {"memory": CHUNKED}
        ),
        "pp cp": layout_row(
            4, STAGES["qwen3_moe"], bfloat16, interleaved, pp | cp, {"memory": CHUNKED}
        ),
        "pp cp ep": layout_row(
            4, STAGES["llama4"], float32, gathered, pp | cp | ep | {"memory": FULL}
        ),
        "pp hsdp": layout_row(
            4, STAGES["llama4"], float32, interleaved, pp | {"fsdp_size": 1}
        ),
        "pp, documents": layout_row(
            4, STAGES["gpt2"], float32, interleaved, pp, MASKED
        ),
    }
    rows |= sums if fsdp2_can_sum() else {}
    for name in ("qwen3_moe", "gpt2"):
        rows |= {
            f"{name} 1 x 4": layout_row(1, MODELS[name], float32, SingleConfig(), {}),
            f"{name} 2 x 2": layout_row(
                1, MODELS[name], float32, SingleConfig(), {"batch_size": 2}
            ),
            f"{name} 2 x 2 of 2 ranks": layout_row(
                1,
                MODELS[name],
                float32,
                SingleConfig(simulated_ranks=2),
                {"batch_size": 2, "grad_accum": 1},
            ),
        }
    for name, model in MODELS.items():
        # Of the masks of twelve grains, layers of chunks need half.
        shared = {"steps": 1, "eval_every": 1} | (
            {"grains": 12} if name == "llama4" else {}
        )
        for label, memory in (("full", FULL), ("selective", SELECTIVE)):
            layout = {"memory": memory, "batch_size": 2}
            rows[f"{name}, {label}"] = layout_row(
                1, model, float32, SingleConfig(), layout, shared
            )
            if name == "llama4":
                rows[f"{name}, {label} on 2"] = layout_row(
                    2, model, float32, Sharded(), layout, shared
                )
    return rows


ROWS = layouts()
SHORT = {
    "ddp, selective",
    "fsdp1, chunked loss",
    "fsdp2, chunked loss",
    "ddp, documents",
    "fsdp2, documents",
    "hsdp",
    "cp on 2",
    "cp gathered on 2",
    "ep on 2",
    "tp on 2",
    "pp on 2",
    "biases, fsdp1",
    "llama4, full",
    "gpt2 1 x 4",
    "qwen3_moe 2 x 2 of 2 ranks",
}
