"""What a type of device is. A new accelerator is a new row of ``KINDS``.

The row alone makes ``launch.device=NAME`` valid. Checks of settings, environment variables,
profiles, out-of-memory reports and records of runs read its facts here.

Not covered: kernels of a maker's own library (``config/kernel_choice.py``), a profiler of its own
(``profiler/trace.py``) and predictions (``configs/hardware/``, ``plan/trace/``).
Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html,
https://docs.nvidia.com/cuda/cublas/, the headers and messages of the torch_npu 2.13.0 wheel, and
CANN's reference of environment variables on hiascend.com. Facts of NPUs have not been tried on one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

ALLOC_CONF = "PYTORCH_ALLOC_CONF"  # The allocator's settings for all devices; unknown to torch 2.7
COMMON_NAMES = torch.__version__ >= "2.10"
"""Whether PyTorch prefers the variables' names that all devices share."""

GRACE_SECONDS = 60  # Margin of HCCL's own timeout over ours

LEAST_CONNECT_SECONDS = 120  # HCCL's default timeout for connecting, and the smallest
MOST_CONNECT_SECONDS = 7200


@dataclass(frozen=True)
class Kind:
    """Facts of a type of device."""

    backend: str
    """Of collectives on device tensors."""
    package: str | None = None
    """The package that adds the device to PyTorch; None if PyTorch has it."""
    float64_collectives: bool = True
    """Whether collectives reduce float64."""
    splits_groups: bool = False
    """Whether communicators can be split."""
    has_float8: bool = False
    """Whether float8 matmuls run, in hardware or emulated."""
    attention_backends: tuple[str, ...] = ()
    """Backends of ``scaled_dot_product_attention``, as in ``models.attention.BACKENDS``."""
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Part of the device's name → peak dense bf16 FLOP/s; the longest match counts."""
    profiler_activity: str | None = None
    """Of ``torch.profiler.ProfilerActivity``; None records operators on the host only."""
    device_memory_errors: tuple[str, ...] = ()
    """Texts of errors that mean that device memory ran out."""
    host_memory_errors: tuple[str, ...] = ()
    """Texts of errors that mean that host memory ran out."""
    allocator_variables: tuple[str, ...] = ()
    """Names of the variable of the allocator's settings; we set the first."""
    takes_one_allocator_variable: bool = False
    """Whether an allocator fails if several of these names are set."""
    deterministic_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables for bitwise reproducible runs."""
    collective_variables: Callable[[float], dict[str, str]] = lambda timeout_seconds: {}
    """Variables of the library of collectives, by their timeout in seconds."""
    recorded_variables: tuple[str, ...] = ()
    """Further variables that affect speed and memory."""
    recorded_versions: tuple[str, ...] = ()
    """Of ``torch.version``."""


def nccl_variables(timeout_seconds: float) -> dict[str, str]:
    """Return NCCL's variables: its flight recorder keeps each rank's last collectives for hangs.

    Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    # 2.13 warns of the old name.
    size = "TORCH_FR_BUFFER_SIZE" if COMMON_NAMES else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    return {size: "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def hccl_variables(timeout_seconds: float) -> dict[str, str]:
    """Return HCCL's variables: timeouts not shorter than ours, and the flight recorder.

    HCCL's defaults are 120 s for connecting, too short while a rank still reads its weights, and
    1836 s for a collective. Our timeout names the missing rank. CANN requires the second above the
    first (its description of EI0002).
    """
    connect_seconds = int(
        min(max(timeout_seconds, LEAST_CONNECT_SECONDS), MOST_CONNECT_SECONDS)
    )
    collective_seconds = max(int(timeout_seconds), connect_seconds) + GRACE_SECONDS
    return {
        "HCCL_CONNECT_TIMEOUT": str(connect_seconds),
        "HCCL_EXEC_TIMEOUT": str(collective_seconds),
        # torch_npu's flight recorder needs all three.
        "TORCH_HCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_HCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_HCCL_ENABLE_MONITORING": "1",
    }


# torch 2.9.1 ignores the common name on CUDA (https://github.com/pytorch/pytorch/issues/183387),
# 2.10 and 2.11 warn of CUDA's own; later ones read either.
CUDA_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", ALLOC_CONF)

KINDS = {
    "cuda": Kind(
        "nccl",
        splits_groups=True,
        has_float8=True,
        attention_backends=("cudnn", "flash", "efficient", "math"),
        # From NVIDIA's data sheets, with float32 accumulation (2:1 sparsity taken out)
        peak_flops={
            "H200": 989e12,
            "H200 NVL": 835e12,
            "H100 PCIe": 756e12,
            "H100 NVL": 835e12,
            "H100": 989e12,
            "GH200": 989e12,
            "A100": 312e12,
            "A800": 312e12,
            "H800": 989e12,
            "H800 PCIe": 756e12,
            "H20": 148e12,
            "B200": 2250e12,
            "L40S": 362e12,
            "L40": 181e12,
            "L4": 121e12,
            "A10G": 70e12,
            "RTX 4090": 165e12,
            "RTX 3090": 71e12,
        },
        profiler_activity="CUDA",
        device_memory_errors=(
            "CUDA error: out of memory",
            "CUBLAS_STATUS_ALLOC_FAILED",
        ),
        allocator_variables=CUDA_ALLOCATOR[::-1] if COMMON_NAMES else CUDA_ALLOCATOR,
        # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        deterministic_variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        collective_variables=nccl_variables,
        recorded_versions=("cuda", "hip"),
    ),
    "npu": Kind(
        "hccl",
        package="torch_npu",
        float64_collectives=False,
        # Huawei's figure (jdc.huawei.com, viewthread 1175654): 20 cores × 8,192 FLOP a cycle ×
        # 1.91 GHz. Other variants of the 910B differ in cores and clock; no figure is published.
        peak_flops={"Ascend910B3": 313e12},
        device_memory_errors=("NPU out of memory",),
        host_memory_errors=("Malloc pin memory failed",),
        allocator_variables=("PYTORCH_NPU_ALLOC_CONF", ALLOC_CONF),
        takes_one_allocator_variable=True,
        # Reductions in a fixed order; the default is the fastest one.
        deterministic_variables={"HCCL_DETERMINISTIC": "true"},
        collective_variables=hccl_variables,
        recorded_variables=(
            "MULTI_STREAM_MEMORY_REUSE",
            "TASK_QUEUE_ENABLE",
            "ASCEND_LAUNCH_BLOCKING",
            "HCCL_BUFFSIZE",
            "HCCL_DETERMINISTIC",
        ),
        recorded_versions=("cann",),
    ),
    "cpu": Kind(
        "gloo",
        has_float8=True,
        attention_backends=("flash", "math"),
        host_memory_errors=(
            "DefaultCPUAllocator",
            "not enough memory: you tried to allocate",
        ),
    ),
}

DEVICE_TYPES = tuple(KINDS)


def float64_collectives(device_type: str) -> bool:
    """Return whether the device's collectives reduce float64."""
    return KINDS[device_type].float64_collectives
