"""Strategies, families and settings that train as one process does, bit for bit."""

from dataclasses import replace
from itertools import product
from typing import Any

from fsdptoys.memory import CPUOffloadExecutor, GradientCheckpointing, MemoryConfig
from fsdptoys.optim import (
    AdamWConfig,
    Implementation,
    OptimConfig,
    SGDConfig,
    WeightDecayOn,
)
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    ToyFSDPConfig,
)
from fsdptoys.parallel.fsdp import ReshardAfterForward, Wrap
from fsdptoys.parallel.precision import DType
from tests.harness.run_tables import Row
from tests.harness.tiny import TINY, WRAPS, supported, with_sizes

FULL = GradientCheckpointing.full
SELECTIVE = GradientCheckpointing.selective
CHECKPOINTED = MemoryConfig(gradient_checkpointing=FULL, checkpointing_start_index=1)
OFFLOADED = MemoryConfig(cpu_offload=True)
FLAT = FSDP1Config(use_orig_params=False)
PARTS = Wrap.block_attn_mlp

STRATEGIES: dict[str, tuple[ParallelConfig, int]] = {
    "ddp": (DDPConfig(), -1),
    "fsdp1": (FSDP1Config(), -1),
    "fsdp1 flat": (FLAT, -1),
    "fsdp2": (FSDP2Config(), -1),
    "hsdp1": (FSDP1Config(), 2),
    "hsdp2": (FSDP2Config(), 2),
}
SHARED = ("ddp", "fsdp1", "fsdp2")


def strategies_on(world_size: int) -> dict[str, tuple[ParallelConfig, int]]:
    """Return the strategies; HSDP needs two axes."""
    rows = (
        STRATEGIES
        if world_size == 4
        else {name: row for name, row in STRATEGIES.items() if "hsdp" not in name}
    )
    return supported(rows)


def layouts() -> dict[str, Row]:
    """Return all strategies on 1, 2 and 4 ranks; in bf16 on four ranks only those that need them.

    The second step of four ranks already starts from sharded states.
    """
    rows = {}
    for ranks, dtype in product((1, 2, 4), (DType.float32, DType.bfloat16)):
        for name, (parallel, fsdp_size) in strategies_on(ranks).items():
            if ranks < 4 or dtype is DType.float32 or name.startswith("hsdp"):
                options = {"steps": 2} if ranks == 4 else {}
                parallel = replace(parallel, param_dtype=dtype)
                rows[f"{name} {dtype.value} on {ranks}"] = Row(
                    parallel, ranks, {"fsdp_size": fsdp_size}, options
                )
    return rows


def families() -> dict[str, Row]:
    """Return every other family under each strategy, with experts and their losses.

    The dtypes alternate over rows and over families, so that any two of family, row and dtype meet.
    On four ranks FSDP2 shards experts along another dim.
    """
    rows: dict[str, Row] = {}
    for number, (family, model) in enumerate(TINY.items()):
        feed_forward = {"gpt2": "GELUFeedForward", "qwen3_moe": "Experts"}.get(
            family, "SwiGLU"
        )
        classes = ["Attention", feed_forward]
        linear = ["Linear", "Experts"] if "moe" in family else ["Linear"]
        checkpointed = {"memory": CHECKPOINTED}
        of_family = {
            name: Row(
                parallel,
                4 if name == "fsdp2" or fsdp_size > 0 else 2,
                {"fsdp_size": fsdp_size},
            )
            for name, (parallel, fsdp_size) in STRATEGIES.items()
        } | {
            "fsdp2 checkpointing": Row(FSDP2Config(), 2, checkpointed),
            "fsdp2 parts": Row(FSDP2Config(wrap=PARTS)),
            "fsdp2 cpu offload": Row(FSDP2Config(), 2, {"memory": OFFLOADED}),
            "fsdp1 by class": Row(FSDP1Config(wrap_classes=classes), 2, checkpointed),
            "fsdp2 by class": Row(FSDP2Config(wrap_classes=linear)),
            "toy_fsdp by size": Row(ToyFSDPConfig(min_params=40), 2, checkpointed),
            "hsdp2 by class": Row(
                FSDP2Config(wrap_classes=classes), 4, {"fsdp_size": 2}
            ),
        }
        for index, (name, row) in enumerate(of_family.items()):
            dtype = (DType.float32, DType.bfloat16)[(index + number) % 2]
            options = {"model": model, "steps": 2, "grad_accum": 4 // row.ranks}
            rows[f"{family} {name}"] = replace(
                row, parallel=replace(row.parallel, param_dtype=dtype), options=options
            )
    return rows


def settings() -> dict[str, Row]:
    """Return all FSDP settings that must not change a bit, with tied embeddings.

    Any two values of wrapping, resharding and checkpointing meet under each of the FSDPs.
    """
    rows: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
        "ddp checkpointing": (DDPConfig(), {"memory": CHECKPOINTED}),
        "ddp small buckets": (DDPConfig(bucket_cap_mb=1), {}),
        "fsdp2 without backward prefetch": (FSDP2Config(backward_prefetch=0), {}),
        "fsdp2 cpu offload": (FSDP2Config(), {"memory": OFFLOADED}),
    }
    for (first, (wrap, choice)), (second, reshard) in product(
        enumerate(WRAPS.items()), enumerate(ReshardAfterForward)
    ):
        memory = {"memory": CHECKPOINTED} if (first + second) % 2 == 1 else {}
        label = f"{wrap} reshard={reshard.value}"
        fsdp1 = FSDP1Config(
            reshard_after_forward=reshard,
            forward_prefetch=1,
            backward_prefetch=0,
            **choice,
        )
        fsdp2 = FSDP2Config(
            reshard_after_forward=reshard,
            forward_prefetch=2,
            backward_prefetch=2,
            **choice,
        )
        rows |= {f"fsdp1 {label}": (fsdp1, memory), f"fsdp2 {label}": (fsdp2, memory)}
    options = {"tie_embeddings": True, "steps": 2}
    return {
        name: Row(parallel, 2, layout, options)
        for name, (parallel, layout) in rows.items()
    }


def checkpointing() -> dict[str, Row]:
    """Return ways to checkpoint and to move the saved tensors, under strategies with hooks on
    different modules."""
    bf16 = DType.bfloat16
    never = ReshardAfterForward.never
    strategies: dict[str, tuple[ParallelConfig, int, dict[str, Any], str]] = {
        "fsdp2 parts": (
            FSDP2Config(wrap=PARTS, forward_prefetch=1),
            2,
            {},
            "qwen3_moe",
        ),
        "fsdp2 bf16": (
            FSDP2Config(param_dtype=bf16, reshard_after_forward=never),
            2,
            {},
            "gpt2",
        ),
        "hsdp2": (FSDP2Config(), 4, {"fsdp_size": 2}, "qwen3"),
        "fsdp1 parts": (FSDP1Config(wrap=PARTS), 2, {}, "llama4"),
        "fsdp1 bf16 flat": (replace(FLAT, param_dtype=bf16), 2, {}, "qwen3_moe"),
        "ddp": (DDPConfig(), 2, {}, "qwen3_moe"),
    }
    ways: dict[str, dict[str, Any]] = {
        "full every 2": {"gradient_checkpointing": FULL, "checkpointing_every": 2},
        "full, offload": {"gradient_checkpointing": FULL, "activation_offload": True},
        "selective": {"gradient_checkpointing": SELECTIVE},
        "selective, offload": {
            "gradient_checkpointing": SELECTIVE,
            "activation_offload": True,
        },
    }
    rows = {
        f"{name} {way}": Row(
            parallel,
            ranks,
            layout | {"memory": MemoryConfig(**memory)},
            {"model": with_sizes(TINY[family], n_layers=4), "steps": 2},
        )
        for (name, (parallel, ranks, layout, family)), (way, memory) in product(
            strategies.items(), ways.items()
        )
    }
    for name, tied in product(SHARED, (False, True)):
        parallel = replace(STRATEGIES[name][0], param_dtype=bf16)
        options = {"tie_embeddings": tied, "steps": 2}
        rows[f"{name} bf16 {'tied' if tied else 'untied'}"] = Row(
            parallel, 2, {"memory": CHECKPOINTED}, options
        )
    return rows


def all_switches() -> dict[str, Row]:
    """Return all memory switches together; the chunked loss alone changes the order of addition."""
    chunks = {"chunk_loss": True, "chunk_tokens": "20"}
    moved = MemoryConfig(
        **chunks,
        gradient_checkpointing=SELECTIVE,
        activation_offload=True,
        optimizer_offload=True,
        offload_fraction=0.8,
        offload_bucket_mib=1,
    )
    on_cpu = MemoryConfig(
        **chunks, cpu_offload=True, cpu_offload_executor=CPUOffloadExecutor.overlapped
    )
    # Of the three steps one follows the evaluation.
    options = {
        "label_smoothing": 0.1,
        "z_loss_coef": 1e-3,
        "eval_every": 2,
        "eval_batches": 1,
        "tie_embeddings": True,
    }
    options |= {"steps": 3, "memory": MemoryConfig(**chunks)}
    rows: dict[str, Row] = {}
    for dtype in (DType.float32, DType.bfloat16):
        for name, (parallel, _) in strategies_on(2).items():
            rows[f"all switches {name} {dtype.value}"] = Row(
                replace(parallel, param_dtype=dtype), 2, {"memory": moved}, options
            )
        parallel = FSDP2Config(param_dtype=dtype)
        rows[f"all switches fsdp2 on the cpu {dtype.value}"] = Row(
            parallel, 2, {"memory": on_cpu}, options
        )
    return rows


def optimizers() -> dict[str, Row]:
    """Return optimizers over shards; decay applies to matrices only although shards are flat."""
    optims: dict[str, OptimConfig] = {
        "sgd": SGDConfig(lr=0.1, momentum=0.9, nesterov=True),
        "adamw": AdamWConfig(lr=1e-2, weight_decay_on=WeightDecayOn.matrices),
        "foreach": AdamWConfig(lr=1e-2, implementation=Implementation.foreach),
        "for_loop": AdamWConfig(lr=1e-2, implementation=Implementation.for_loop),
    }
    rows = {
        f"{name} {optim}": Row(
            STRATEGIES[name][0], 2, {}, {"optim": optims[optim], "steps": 3}
        )
        for name, optim in product(SHARED, optims)
    }
    # FSDP1 cannot keep an unreduced bf16 gradient of a weight with two names.
    alone = {"tie_embeddings": True, "deterministic": False, "grad_accum": 3}
    for name in SHARED:
        parallel = replace(STRATEGIES[name][0], param_dtype=DType.bfloat16)
        rows[f"{name} accumulates tied bf16 alone"] = Row(parallel, 1, {}, alone)
    return rows


ROWS = supported(
    layouts()
    | families()
    | settings()
    | checkpointing()
    | all_switches()
    | optimizers()
)
SHORT = {
    *(f"{name} float32 on 2" for name in strategies_on(2)),
    "fsdp1 bfloat16 on 2",
    "fsdp2 bfloat16 on 2",
    "fsdp2 float32 on 1",
    "hsdp1 float32 on 4",
    "hsdp2 bfloat16 on 4",
    "qwen3 fsdp1",
    "qwen3_moe fsdp2 by class",
    "qwen3_moe ddp",
    "llama4 fsdp2 cpu offload",
    "llama4 fsdp1 by class",
    "qwen2 fsdp2 parts",
    "mistral ddp",
    "gpt2 fsdp2 parts",
    "gpt2 fsdp1 flat",
    "gpt2 toy_fsdp by size",
    "fsdp1 parts reshard=always",
    "fsdp1 classes reshard=never",
    "fsdp1 size reshard=default",
    "fsdp2 parts reshard=always",
    "fsdp2 classes reshard=never",
    "fsdp2 size reshard=default",
    "ddp small buckets",
    "fsdp2 without backward prefetch",
    "fsdp2 parts full, offload",
    "fsdp1 bf16 flat full every 2",
    "fsdp1 parts selective, offload",
    "ddp selective",
    "fsdp1 bf16 tied",
    "all switches ddp float32",
    "all switches fsdp1 flat float32",
    "all switches fsdp2 bfloat16",
    "all switches fsdp2 on the cpu bfloat16",
    "fsdp1 sgd",
    "fsdp2 sgd",
    "fsdp1 adamw",
    "fsdp2 foreach",
    "fsdp1 accumulates tied bf16 alone",
}
