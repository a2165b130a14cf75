"""Memory between steps: gradients and the buffers of offload are gone when the optimizer has stepped."""

from dataclasses import replace

import pytest

from fsdptoys.device import Device
from fsdptoys.memory import MemoryConfig
from fsdptoys.parallel import FSDP1Config, FSDP2Config, ParallelConfig
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_tensor
from tests.parallel.runs import tiny_model
from tests.simulated_npu.ranks import config_for, run_npu_ranks

FLAT = FSDP1Config(use_orig_params=False)
MODEL = replace(tiny_model(), dim=96, ffn_dim=256)


@pytest.mark.parametrize(
    ("parallel", "switch", "bytes_each"),
    [
        (FSDP1Config(), None, 12),
        (FLAT, None, 12),
        (FSDP2Config(), None, 12),
        (FSDP1Config(), "optimizer_offload", 4),
        (FSDP2Config(), "optimizer_offload", 4),
        (FSDP1Config(), "cpu_offload", 0),
    ],
    ids=["fsdp1", "fsdp1 flat", "fsdp2", "fsdp1 optimizer", "fsdp2 optimizer", "fsdp1 parameters"],
)
def test_step_leaves_no_gradients_and_buffers_on_a_device(
    parallel: ParallelConfig, switch: str | None, bytes_each: int
) -> None:
    """Oracle: the simulated device's count: 4 bytes an element for parameters, 8 for AdamW's states, if not offloaded.

    Its allocator rounds up, which half the bytes of gradients allow for.
    """
    memory = MemoryConfig(**({switch: True} if switch else {}))
    config = config_for("npu", parallel, 2, model=MODEL, seq_len=8, batch_size=1, memory=memory)

    def bytes_and_elements() -> tuple[int, int]:
        device = Device("npu")
        before = device.memory().allocated_bytes
        trainer = Trainer(config)
        trainer.train()
        elements = sum(local_tensor(param).numel() for _, param in trainer.strategy.named_parameters())
        return device.memory().allocated_bytes - before, elements

    allocated, elements = run_npu_ranks(2, bytes_and_elements)[0]
    assert abs(allocated - bytes_each * elements) < 2 * elements, allocated / elements
