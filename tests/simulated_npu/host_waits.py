"""Calls of a training step for which an accelerator's host waits, counted on simulated NPUs.

    python -m tests.simulated_npu.host_waits

prints the calls of each step from the third on, by kind of run: reads of numbers, blocking copies, and synchronizations
of streams, events and the device. The simulated device notes them where PyTorch asks it, in Python and in C++ alike.
PyTorch's own are listed apart: FSDP1 limits by events how far the host runs ahead.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsdptoys.config.schema import Config, SumDType
from fsdptoys.data import SyntheticConfig
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.optim import AdamWConfig, Implementation, fused_adamw
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.parallel.precision import DType
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import LoRAConfig
from tests.parallel.runs import PLAIN_KERNELS, TINY, make_config, tiny_model
from tests.simulated_npu.ranks import run_npu_ranks, simulated_npu

STEPS = 6
FIRST = 3
"""The first step that is counted: optimizer states and buffers exist."""

EVEN = replace(tiny_model(), n_heads=4, n_kv_heads=2, ffn_dim=52, vocab_size=68, dim=40)
UNLOGGED: dict[str, Any] = {"skip_nonfinite": False}
ROWS: dict[str, tuple[int, ParallelConfig, dict[str, Any]]] = {
    "single": (1, SingleConfig(), {}),
    "ddp": (2, DDPConfig(), {}),
    "fsdp1": (2, FSDP1Config(), {}),
    "fsdp2": (2, FSDP2Config(), {}),
    "hsdp2": (4, FSDP2Config(), {"fsdp_size": 2}),
    "fsdp2, chunked loss": (2, FSDP2Config(), {"memory": MemoryConfig(chunk_loss=True, chunk_tokens="20")}),
    "fsdp2, checkpointing": (
        2,
        FSDP2Config(),
        {"memory": MemoryConfig(gradient_checkpointing=GradientCheckpointing.full)},
    ),
    "fsdp2, experts": (2, FSDP2Config(), {"model": TINY["qwen3_moe"]}),
    "fsdp2, documents": (2, FSDP2Config(), {"data": SyntheticConfig(branching=60, mask_documents=True)}),
    "fsdp2, accumulation": (2, FSDP2Config(), {"grad_accum": 4}),
    "fsdp2, bf16": (2, FSDP2Config(param_dtype=DType.bfloat16), {}),
    "fsdp2, fused": (2, FSDP2Config(), {"optim": AdamWConfig(implementation=Implementation.fused)}),
    "fsdp2, float16": (2, FSDP2Config(param_dtype=DType.float16), {}),
    "fsdp2, adapters": (2, FSDP2Config(), {"tune": LoRAConfig(rank=4, dropout=0.2)}),
    "fsdp2, shared sequences": (2, FSDP2Config(), {"cp_size": 2}),
    "fsdp2, split features": (2, FSDP2Config(), {"tp_size": 2, "model": EVEN}),
    "single, no skipping": (1, SingleConfig(), UNLOGGED),
    "ddp, no skipping": (2, DDPConfig(), UNLOGGED),
    "fsdp2, no skipping": (2, FSDP2Config(), UNLOGGED),
    "fsdp2, experts, no skipping": (2, FSDP2Config(), {"model": TINY["qwen3_moe"], **UNLOGGED}),
    "fsdp2, accumulation, no skipping": (2, FSDP2Config(), {"grad_accum": 4, **UNLOGGED}),
}
"""Kind of run → ranks, strategy and settings."""


def configs() -> dict[int, dict[str, Config]]:
    """Number of ranks → kind of run → configuration."""
    made: dict[int, dict[str, Config]] = {}
    for name, (ranks, parallel, options) in ROWS.items():
        common: dict[str, Any] = {
            "kernels": PLAIN_KERNELS,
            "deterministic": False,
            "sum_dtype": SumDType.float32,
            "grad_accum": 1,
            "steps": STEPS,
        }
        config = make_config(parallel, ranks, device="npu", **{**common, **options})
        made.setdefault(ranks, {})[name] = replace(config, metrics=replace(config.metrics, log_every=100))
    return made


def count(rows: dict[str, Config]) -> dict[str, list[Counter[str]]]:
    """Kind of run → calls of each counted step; an entry names the call and the function that made it."""
    extension = simulated_npu.extension
    fused_adamw.IGNORED_ON = frozenset()  # the simulated kernel is the CPU's, which skips on the device as CUDA's does
    found = {}
    for name, config in rows.items():
        trainer = Trainer(config)
        steps: list[Counter[str]] = []
        trainer.on_phase = _splits_steps(steps, extension.take_waits)
        extension.record_waits(True)
        trainer.train()
        extension.record_waits(False)
        extension.take_waits()
        found[name] = steps
    return found


def _splits_steps(steps: list[Counter[str]], take: Callable[[], list[dict[str, Any]]]) -> Callable[[int, str], None]:
    """A callback for phases that appends each step's calls: those from its beginning to that of the next."""

    def on_phase(step: int, phase: str) -> None:
        if phase == "data":
            calls = Counter(f"{wait['call']} in {_caller(wait['frames'])}" for wait in take())
            if step > FIRST:
                steps.append(calls)

    return on_phase


def _caller(frames: list[dict[str, Any]]) -> str:
    """The innermost function of this project, of PyTorch's FSDP, or of the optimizer."""
    for frame in frames:
        path = frame["filename"]
        for folder in ("fsdptoys/", "torch/distributed/fsdp/", "torch/optim/"):
            if folder in path:
                return f"{folder}{path.rpartition(folder)[2]}:{frame['name']}"
    return "C++"


def of_project(calls: Counter[str]) -> Counter[str]:
    """Calls without those of PyTorch's FSDP."""
    return Counter({call: times for call, times in calls.items() if "torch/distributed/fsdp/" not in call})


def count_all() -> dict[str, list[Counter[str]]]:
    """Kind of run → calls of each counted step on rank 0."""
    found: dict[str, list[Counter[str]]] = {}
    for ranks, rows in configs().items():
        found |= run_npu_ranks(ranks, count, rows)[0]
    return {name: found[name] for name in ROWS}


def main() -> None:
    """Print the table and the calls."""
    for name, steps in count_all().items():
        own, others = (
            [sum(calls.values()) for calls in counts]
            for counts in (map(of_project, steps), (calls - of_project(calls) for calls in steps))
        )
        print(f"{name:34} {sum(own) / len(own):6.2f}   PyTorch's FSDP {sum(others) / len(others):6.2f}")
        for call, times in sorted(Counter(itertools.chain(*(calls.elements() for calls in steps))).items()):
            print(f"    {times / len(steps):6.2f}  {call}")


if __name__ == "__main__":
    main()
