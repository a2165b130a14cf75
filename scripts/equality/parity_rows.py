"""Rows and modes of ``parity.py``: overrides of each, and which rows have the same arithmetic."""

from fsdptoys.config.kernel_choice import KernelConfig
from fsdptoys.models import MODELS

PRESETS = [f"{family}_debug" for family in MODELS]
"""One small model of every family."""

STRATEGIES = {
    "ddp": "parallel=ddp",
    "fsdp1": "parallel=fsdp1",
    "fsdp1-flat": "parallel=fsdp1 parallel.use_orig_params=false",
    "fsdp2": "parallel=fsdp2",
    "hsdp1": "parallel=fsdp1 mesh.fsdp_size=2",
    "hsdp2": "parallel=fsdp2 mesh.fsdp_size=2",
    "toy-ddp": "parallel=toy_ddp",
    "toy-zero1": "parallel=toy_zero1",
    "toy-zero2": "parallel=toy_zero2",
    "toy-zero3": "parallel=toy_zero3",
    "toy-fsdp": "parallel=toy_fsdp",
}
"""Row of the table → overrides that make it."""

FSDP2_ON_THE_SAME_MESH = {"fsdp1": "fsdp2", "fsdp1-flat": "fsdp2", "hsdp1": "hsdp2"}
"""Row → the row that it must equal in default mode, where reductions add two numbers."""

NATIVE = {"toy-ddp": "ddp", "toy-zero1": "ddp", "toy-fsdp": "fsdp2"}
"""Row → the row with the same arithmetic, which it must equal in every mode, on any number of
ranks."""

SHARDS_OTHERWISE = ("toy-zero1",)
"""The one of these that adds norms in another order, which shows in portable mode."""

REDUCES_OFTENER = {"toy-zero2": "ddp", "toy-zero3": "ddp"}
"""Row → the row that it must equal in default mode with one micro-batch, where reductions add two
numbers."""

FLOAT32_ONLY = ("toy-zero3",)
"""Rows that compute in the dtype of the parameters."""

MODES = {
    "deterministic": ["train.deterministic=true"],
    "default": ["train.deterministic=false"],
    "portable": [
        "train.deterministic=false",
        "train.sum_dtype=float32",
        "optim.implementation=for_loop",
        *(
            f"kernels.{operation}=torch"
            for operation in KernelConfig().names()
            if operation != "grouped_matmul"
        ),
        "kernels.grouped_matmul=looped",
    ],
}
"""Mode → overrides that make it."""
