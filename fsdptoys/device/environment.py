"""Environment variables of a device's libraries, to be set before a rank starts, unless the user
has set them.

docs/ascend.md lists the defaults kept for NPUs, with reasons.
Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html,
https://docs.nvidia.com/cuda/cublas/, the headers and messages of the torch_npu 2.13.0 wheel, and
CANN's reference of environment variables on hiascend.com. Those for NPUs have not been tried on
one.
"""

from collections.abc import Mapping

import torch

from fsdptoys.errors import ConfigError

DETERMINISTIC = {
    # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    # Reductions in a fixed order; the default is the fastest one.
    "npu": {"HCCL_DETERMINISTIC": "true"},
}
"""Variables for bitwise reproducible runs."""

ALLOC_CONF = "PYTORCH_ALLOC_CONF"  # The allocator's settings for all devices; unknown to torch 2.7

# torch 2.9.1 ignores the common name on CUDA (https://github.com/pytorch/pytorch/issues/183387),
# 2.10 and 2.11 warn of CUDA's own; later ones read either. torch_npu 2.13.0 refuses both names at
# once.
ALLOCATOR = {
    "cuda": ALLOC_CONF if torch.__version__ >= "2.10" else "PYTORCH_CUDA_ALLOC_CONF",
    "npu": "PYTORCH_NPU_ALLOC_CONF",
}
"""Variable of the allocator's settings as the running PyTorch reads it without a warning, where one
is."""

USERS_ALLOCATOR = {
    "cuda": (ALLOC_CONF, "PYTORCH_CUDA_ALLOC_CONF"),
    "npu": (ALLOC_CONF, "PYTORCH_NPU_ALLOC_CONF"),
}
"""Names under which a user may have set them."""

GRACE_SECONDS = 60  # Margin of HCCL's own timeout over ours

CONNECT_SECONDS = 120, 7200
"""Least (also the default) and largest value of HCCL's timeout for connecting."""


def check_allocator_settings(device_type: str, present: Mapping[str, str]) -> None:
    """Raise a ConfigError for both settings of the allocator, with which torch_npu fails."""
    if device_type == "npu" and ALLOC_CONF in present and ALLOCATOR["npu"] in present:
        raise ConfigError(
            f"{ALLOC_CONF} and {ALLOCATOR['npu']} are both set, of which torch_npu takes one "
            f"alone; unset {ALLOC_CONF}"
        )


def allocator_environment(
    device_type: str, present: Mapping[str, str]
) -> dict[str, str]:
    """Return the allocator's settings; empty if ``present`` has any of its own.

    They must be set before the device is initialized, as by a query of its name: the allocator
    reads them once, when it is created.
    """
    if device_type not in ALLOCATOR or any(
        name in present for name in USERS_ALLOCATOR[device_type]
    ):
        return {}
    # Expandable segments avoid fragmentation by a sharded model's varying sizes.
    return {ALLOCATOR[device_type]: "expandable_segments:True"}


def device_environment(
    device_type: str,
    deterministic: bool,
    timeout_seconds: float,
    present: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment variables for a type of device; ``present`` is searched for settings
    of the allocator."""
    environment = allocator_environment(device_type, present)
    if deterministic:
        environment |= DETERMINISTIC.get(device_type, {})
    if device_type == "cuda":
        # NCCL's flight recorder keeps each rank's last collectives for hangs
        # (https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html). 2.13 warns of
        # the old name.
        new_name = torch.__version__ >= "2.10"
        environment[
            "TORCH_FR_BUFFER_SIZE" if new_name else "TORCH_NCCL_TRACE_BUFFER_SIZE"
        ] = "2000"
        environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    if device_type == "npu":
        # HCCL's defaults are 120 s for connecting, too short while a rank still reads its weights,
        # and 1836 s for a collective. Our timeout names the missing rank, so HCCL's must not be
        # shorter. CANN requires the second above the first (its description of EI0002).
        least, most = CONNECT_SECONDS
        connect_seconds = int(min(max(timeout_seconds, least), most))
        environment["HCCL_CONNECT_TIMEOUT"] = str(connect_seconds)
        environment["HCCL_EXEC_TIMEOUT"] = str(
            max(int(timeout_seconds), connect_seconds) + GRACE_SECONDS
        )
        # torch_npu's flight recorder needs all three.
        environment["TORCH_HCCL_TRACE_BUFFER_SIZE"] = "2000"
        environment["TORCH_HCCL_DUMP_ON_TIMEOUT"] = environment[
            "TORCH_HCCL_ENABLE_MONITORING"
        ] = "1"
    return environment
