"""Environment variables that a device wants and that must stand before a worker starts.

Each is set only where the user has not set it. What is left to its default, and why, stands in docs/ascend.md for NPUs.
Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html, https://docs.nvidia.com/cuda/cublas/, the headers and
messages of the torch_npu 2.13.0 wheel, and CANN's reference of environment variables on hiascend.com. None of those for
NPUs has been tried on one.
"""

from collections.abc import Mapping

import torch

from fsdptoys.errors import ConfigError

DETERMINISTIC = {
    # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    # Reductions add in one order; the default is the fastest.
    "npu": {"HCCL_DETERMINISTIC": "true"},
}
"""What a device's libraries want set for the same bits from run to run."""

ALLOCATOR = {"cuda": "PYTORCH_CUDA_ALLOC_CONF", "npu": "PYTORCH_NPU_ALLOC_CONF"}

GRACE_SECONDS = 60
"""HCCL's own limit lies so far above ours."""

CONNECT_SECONDS = 120, 7200
"""HCCL's default for meeting the other ranks, which is also the least it takes, and the most."""


def check_allocator_settings(device_type: str, present: Mapping[str, str]) -> None:
    """Refuse two settings of one allocator, which torch_npu ends with.

    Raises:
        ConfigError: with the one to unset.
    """
    if device_type == "npu" and "PYTORCH_ALLOC_CONF" in present and ALLOCATOR["npu"] in present:
        raise ConfigError(
            f"PYTORCH_ALLOC_CONF and {ALLOCATOR['npu']} are both set, of which torch_npu takes one alone; "
            "unset PYTORCH_ALLOC_CONF"
        )


def device_environment(
    device_type: str, deterministic: bool, timeout_seconds: float, present: Mapping[str, str]
) -> dict[str, str]:
    """What a type of device wants.

    Args:
        device_type: ``cuda``, ``npu`` or ``cpu``.
        deterministic: whether the same bits are asked for.
        timeout_seconds: after which a collective ends the run.
        present: the environment so far, of which the allocator's settings count.
    """
    wanted: dict[str, str] = {}
    # Segments that grow keep a sharded model's ever-changing sizes from fragmenting the reserved memory. The name for
    # all devices, PYTORCH_ALLOC_CONF, is unknown to torch 2.7 and ignored by 2.9.1 on CUDA
    # (https://github.com/pytorch/pytorch/issues/183387); torch_npu refuses both names at once.
    if device_type in ALLOCATOR and "PYTORCH_ALLOC_CONF" not in present:
        wanted[ALLOCATOR[device_type]] = "expandable_segments:True"
    if deterministic:
        wanted |= DETERMINISTIC.get(device_type, {})
    if device_type == "cuda":
        # A collective that hangs leaves behind what each rank's last collectives were (NCCL's flight recorder,
        # https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html). 2.13 warns of the old name.
        new_name = torch.__version__ >= "2.10"
        wanted["TORCH_FR_BUFFER_SIZE" if new_name else "TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"
        wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    if device_type == "npu":
        wanted |= _hccl(timeout_seconds)
    return wanted


def _hccl(timeout_seconds: float) -> dict[str, str]:
    least, most = CONNECT_SECONDS
    connect_seconds = int(min(max(timeout_seconds, least), most))
    return {
        # HCCL's own limits are 120 s for the ranks to find each other, which one that still reads its weights may need
        # longer for, and 1836 s for a collective. Ours is to end a hang, since it tells which rank did not arrive:
        # theirs come with it, or behind. CANN wants the second above the first (its description of EI0002).
        "HCCL_CONNECT_TIMEOUT": str(connect_seconds),
        "HCCL_EXEC_TIMEOUT": str(max(int(timeout_seconds), connect_seconds) + GRACE_SECONDS),
        # torch_npu's flight recorder, which writes only with all three.
        "TORCH_HCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_HCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_HCCL_ENABLE_MONITORING": "1",
    }
