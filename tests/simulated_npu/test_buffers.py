"""Memory besides a step: checkpoints go through pinned buffers, and a step leaves neither gradients
nor buffers."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptoys.checkpoint import pinned_copy, shard_format
from fsdptoys.checkpoint.sharded_io import load_tensors, save_tensors
from fsdptoys.checkpoint.storage import open_storage
from fsdptoys.device import Device
from fsdptoys.memory import MemoryConfig
from fsdptoys.parallel import FSDP1Config, FSDP2Config, ParallelConfig
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.dtensor import local_tensor
from tests.harness.tiny import tiny_model
from tests.simulated_npu.ranks import (
    BOTH_MODES,
    config_for,
    run_npu_ranks,
    run_on_npu,
    simulated_npu,
)

BUFFER_BYTES = 96


def tensors(device: str) -> dict[str, Tensor]:
    """Tensors smaller and larger than a buffer, of every alignment, one of them on the CPU in any
    case."""
    on_cpu = {
        "matrix": torch.arange(91.0).view(7, 13),
        "transposed": torch.arange(30, dtype=torch.bfloat16).view(5, 6).t(),
        "flags": torch.arange(301) % 3 == 0,
        "scalar": torch.tensor(5.0),
        "empty": torch.empty(0, 3),
    }
    placed = {name: tensor.to(device) for name, tensor in on_cpu.items()}
    return placed | {"host": torch.arange(50, dtype=torch.int32)}


def save_and_load(folder: str) -> tuple[str, bool, int]:
    """The digest of the written file, whether loading restores every bit, and the most bytes
    pinned."""
    patch = pytest.MonkeyPatch()
    for module in (pinned_copy, shard_format):
        patch.setattr(module, "BUFFER_BYTES", BUFFER_BYTES)
    storage = open_storage(folder)
    saved = tensors("npu")
    pinned = []
    storage.make("a")
    read_into = pinned_copy.PinnedBuffers.take

    def take(self: Any, nbytes: int) -> Tensor:
        pinned.append(simulated_npu.extension.pinned_bytes())
        return read_into(self, nbytes)

    patch.setattr(pinned_copy.PinnedBuffers, "take", take)
    save_tensors(storage, "a", saved, None)
    filled = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load_tensors(storage, "a", filled, None)
    same = all(torch.equal(filled[name].cpu(), saved[name].cpu()) for name in saved)
    digest = hashlib.sha256(
        (Path(folder) / "a/tensors-00000.safetensors").read_bytes()
    ).hexdigest()
    return digest, same, max(pinned)


@BOTH_MODES
def test_files_of_an_accelerator_hold_the_bytes_of_a_cpus(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the file that a CPU writes, without buffers; in delayed mode a missing wait shows as
    other bytes."""
    (tmp_path / "cpu").mkdir()
    storage = open_storage(str(tmp_path / "cpu"))
    storage.make("a")
    with monkeypatch.context() as patch:
        patch.delattr(pinned_copy.PinnedBuffers, "__init__")  # takes no device then
        save_tensors(storage, "a", tensors("cpu"), None)
    expected = hashlib.sha256(
        (tmp_path / "cpu/a/tensors-00000.safetensors").read_bytes()
    ).hexdigest()
    (tmp_path / "npu").mkdir()
    digest, same, pinned = run_on_npu(save_and_load, str(tmp_path / "npu"), mode=mode)
    assert (digest, same, pinned) == (expected, True, 2 * BUFFER_BYTES)


def order_of_work() -> list[str]:
    events: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(pinned_copy, "BUFFER_BYTES", BUFFER_BYTES)
    begin = pinned_copy.PinnedBuffers.copy

    def copy(self: Any, target: Tensor, source: Tensor) -> Any:
        events.append(f"copy {float(source.view(torch.float32)[0])}")
        return begin(self, target, source)

    patch.setattr(pinned_copy.PinnedBuffers, "copy", copy)
    for part in pinned_copy.host_bytes([torch.arange(80.0, device="npu")]):
        events.append(f"write {float(part.view(torch.float32)[0])}")
    return events


def test_next_part_is_copied_while_one_is_written() -> None:
    """Oracle: by hand, 4 parts of 24 numbers or less: the copy of each begins before the write of
    the one before."""
    order = "copy 0, copy 24, write 0, copy 48, write 24, copy 72, write 48, write 72"
    assert run_on_npu(order_of_work, mode="delayed") == [
        f"{part}.0" for part in order.split(", ")
    ]


@pytest.mark.parametrize(
    ("parallel", "switch", "bytes_each"),
    [
        (FSDP1Config(), None, 12),
        (FSDP1Config(use_orig_params=False), None, 12),
        (FSDP2Config(), None, 12),
        (FSDP1Config(), "optimizer_offload", 4),
        (FSDP2Config(), "optimizer_offload", 4),
        (FSDP1Config(), "cpu_offload", 0),
    ],
    ids=[
        "fsdp1",
        "fsdp1 flat",
        "fsdp2",
        "fsdp1 optimizer",
        "fsdp2 optimizer",
        "fsdp1 parameters",
    ],
)
def test_step_leaves_no_gradients_and_buffers_on_a_device(
    parallel: ParallelConfig, switch: str | None, bytes_each: int
) -> None:
    """Oracle: the simulated device's count: 4 bytes an element for parameters, 8 for AdamW's
    states, if not offloaded.

    Its allocator rounds up, which half the bytes of gradients allow for.
    """
    memory = MemoryConfig(**({switch: True} if switch else {}))
    model = replace(tiny_model(), dim=96, ffn_dim=256)
    config = config_for(
        "npu", parallel, 2, model=model, seq_len=8, batch_size=1, memory=memory
    )

    def bytes_and_elements() -> tuple[int, int]:
        device = Device("npu")
        before = device.memory().allocated_bytes
        trainer = Trainer(config)
        trainer.train()
        elements = sum(
            local_tensor(param).numel()
            for _, param in trainer.strategy.named_parameters()
        )
        return device.memory().allocated_bytes - before, elements

    allocated, elements = run_npu_ranks(2, bytes_and_elements)[0]
    assert abs(allocated - bytes_each * elements) < 2 * elements, allocated / elements
