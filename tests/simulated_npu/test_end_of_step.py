"""Memory between steps: gradients and the buffers of offload are gone when the optimizer has stepped."""

import gc
from dataclasses import replace
from typing import Any

from fsdptoys.config.schema import Config
from fsdptoys.device import Device
from fsdptoys.memory import MemoryConfig
from fsdptoys.parallel import FSDP1Config, FSDP2Config, ParallelConfig
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_tensor
from tests.parallel.runs import tiny_model
from tests.simulated_npu.ranks import run_npu_ranks
from tests.simulated_npu.test_training import config_for

ROWS: dict[str, tuple[ParallelConfig, MemoryConfig, int]] = {
    "fsdp1": (FSDP1Config(), MemoryConfig(), 12),
    "fsdp1 flat": (FSDP1Config(use_orig_params=False), MemoryConfig(), 12),
    "fsdp2": (FSDP2Config(), MemoryConfig(), 12),
    "fsdp1, optimizer offload": (FSDP1Config(), MemoryConfig(optimizer_offload=True), 4),
    "fsdp2, optimizer offload": (FSDP2Config(), MemoryConfig(optimizer_offload=True), 4),
    "fsdp1, CPU offload": (FSDP1Config(), MemoryConfig(cpu_offload=True), 0),
}
"""Strategy, switches, and bytes on the device for each element that a rank holds."""


def device_bytes(configs: list[Config]) -> list[tuple[int, int]]:
    """For each run: bytes on the device after its steps over those before the model, and elements of a rank."""
    measured = []
    for config in configs:
        gc.collect()
        device = Device("npu")
        before = device.memory().allocated_bytes
        made = Trainer(config)
        made.train()
        elements = sum(local_tensor(param).numel() for _, param in made.strategy.named_parameters())
        measured.append((device.memory().allocated_bytes - before, elements))
        del made
    return measured


def test_step_leaves_no_gradients_and_buffers_on_a_device() -> None:
    """Oracle: the simulated device's count: 4 bytes an element for parameters, 8 for AdamW's states, if not offloaded.

    Its allocator rounds up, which half the bytes of gradients allow for.
    """
    options: dict[str, Any] = {"model": replace(tiny_model(), dim=96, ffn_dim=256), "seq_len": 8, "batch_size": 1}
    configs = [config_for("npu", parallel, 2, memory=memory, **options) for parallel, memory, _ in ROWS.values()]
    measured = run_npu_ranks(2, device_bytes, configs)[0]
    for name, (_, _, bytes_each), (held, elements) in zip(ROWS, ROWS.values(), measured, strict=True):
        assert abs(held - bytes_each * elements) < 2 * elements, (name, held / elements)
