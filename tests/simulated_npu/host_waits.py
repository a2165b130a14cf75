"""Calls of a training step for which an accelerator's host waits, counted on simulated NPUs.

They are reads of numbers, blocking copies, and synchronizations of streams, events and the device. The simulated device
notes them where PyTorch asks it, in Python and in C++ alike. PyTorch's own are left out: FSDP1 limits by events how far
the host runs ahead.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from fsdptoys.config.schema import SumDType
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.optim import AdamWConfig, Implementation, fused_adamw
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import LoRAConfig
from tests.parallel.runs import DOCUMENTS, EVEN, TINY, make_config, tiny_model
from tests.simulated_npu.ranks import run_npu_ranks, simulated_npu

STEPS = 5
FIRST = 3
"""The first step that is counted: optimizer states and buffers exist."""

UNLOGGED: dict[str, Any] = {"skip_nonfinite": False}
FUSED = AdamWConfig(implementation=Implementation.fused)
CHECKPOINTING = MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)
ROWS: dict[str, tuple[int, ParallelConfig, dict[str, Any]]] = {
    "single": (1, SingleConfig(), {}),
    "ddp": (2, DDPConfig(), {}),
    "fsdp1": (2, FSDP1Config(), {}),
    "fsdp2": (2, FSDP2Config(), {}),
    "hsdp2": (4, FSDP2Config(), {"fsdp_size": 2}),
    "fsdp2, chunked loss": (2, FSDP2Config(), {"memory": MemoryConfig(chunk_loss=True, chunk_tokens="20")}),
    "fsdp2, checkpointing": (2, FSDP2Config(), {"memory": CHECKPOINTING}),
    "fsdp2, experts": (2, FSDP2Config(), {"model": TINY["qwen3_moe"]}),
    "fsdp2, documents": (2, FSDP2Config(), {"data": DOCUMENTS}),
    "fsdp2, accumulation": (2, FSDP2Config(), {"grad_accum": 4}),
    "fsdp2, bf16": (2, FSDP2Config(param_dtype=DType.bfloat16), {}),
    "fsdp2, fused": (2, FSDP2Config(), {"optim": FUSED}),
    "fsdp2, float16": (2, FSDP2Config(param_dtype=DType.float16), {}),
    "fsdp2, adapters": (2, FSDP2Config(), {"tune": LoRAConfig(rank=4, dropout=0.2)}),
    "fsdp2, shared sequences": (2, FSDP2Config(), {"cp_size": 2}),
    "fsdp2, split features": (2, FSDP2Config(), {"tp_size": 2, "model": replace(tiny_model(), **EVEN)}),
    "single, no skipping": (1, SingleConfig(), UNLOGGED),
    "ddp, no skipping": (2, DDPConfig(), UNLOGGED),
    "fsdp2, no skipping": (2, FSDP2Config(), UNLOGGED),
    "fsdp2, experts, no skipping": (2, FSDP2Config(), {"model": TINY["qwen3_moe"], **UNLOGGED}),
    "fsdp2, accumulation, no skipping": (2, FSDP2Config(), {"grad_accum": 4, **UNLOGGED}),
}
"""Kind of run → ranks, strategy and settings."""


def count_waits(name: str) -> list[Counter[str]]:
    """Return the calls of each counted step on rank 0; an entry names the call and the function that made it."""
    ranks, parallel, options = ROWS[name]
    common: dict[str, Any] = {"deterministic": False, "sum_dtype": SumDType.float32, "grad_accum": 1, "steps": STEPS}
    config = make_config(parallel, ranks, device="npu", **{**common, **options})
    config = replace(config, metrics=replace(config.metrics, log_every=100))

    def count() -> list[Counter[str]]:
        extension = simulated_npu.extension
        fused_adamw.IGNORED_ON = frozenset()  # the simulated kernel is the CPU's, which skips as CUDA's does
        trainer = Trainer(config)
        steps: list[Counter[str]] = []

        def on_phase(step: int, phase: str) -> None:
            if phase == "data":  # the calls of a step are those up to the next one's beginning
                callers = [(wait["call"], _caller(wait["frames"])) for wait in extension.take_waits()]
                calls = Counter(f"{call} in {caller}" for call, caller in callers if "distributed/fsdp/" not in caller)
                if step > FIRST:
                    steps.append(calls)

        trainer.on_phase = on_phase
        extension.record_waits(True)
        trainer.train()
        return steps

    return run_npu_ranks(ranks, count)[0]


def _caller(frames: list[dict[str, Any]]) -> str:
    """Return the innermost function of this project, of PyTorch's FSDP, or of the optimizer."""
    for frame in frames:
        path = frame["filename"]
        for folder in ("fsdptoys/", "torch/distributed/fsdp/", "torch/optim/"):
            if folder in path:
                return f"{folder}{path.rpartition(folder)[2]}:{frame['name']}"
    return "C++"
