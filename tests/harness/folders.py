"""Small folders in Hugging Face format, and small checkpoints with all values derived from the
step."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from fsdptoys.checkpoint import (
    MAX_FILE_BYTES,
    Checkpoint,
    CheckpointConfig,
    Checkpointer,
    HuggingFaceFolder,
    ReadRegion,
    Written,
    peek,
    write_hugging_face,
)
from fsdptoys.checkpoint.manifest import MANIFEST_FILE, Manifest
from fsdptoys.checkpoint.safetensors_io import slices
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel, ModelConfig
from fsdptoys.models.huggingface import Bounds
from fsdptoys.utils.sealed_folder import sum_path


def build(config: ModelConfig) -> DecoderModel:
    """A model with values far from those of its initialization."""
    torch.manual_seed(0)
    model = config.build()
    model.init_buffers(torch.device("cpu"))
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    return model


def build_empty(config: ModelConfig) -> DecoderModel:
    """A model full of NaN."""
    model = config.build()
    model.init_buffers(torch.device("cpu"))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    return model


def regions_of(model: DecoderModel) -> ReadRegion:
    parameters = dict(model.named_parameters())

    def read(name: str, region: Bounds) -> Tensor:
        return parameters[name].detach()[slices(region)]

    return read


def write(
    folder: Path,
    model: DecoderModel,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Written:
    return write_hugging_face(
        folder, model.config, regions_of(model), dtype, max_file_bytes
    )


def load(folder: Path) -> DecoderModel:
    """The model that a folder holds."""
    source = HuggingFaceFolder(folder)
    model = build_empty(source.model_config())
    source.check(model)
    for name, param in model.named_parameters():
        source.fill(param, name)
    return model


def full_tensors(step: int) -> dict[str, Tensor]:
    """Tensors of several dtypes, shapes and strides; none divides evenly over 2 or 4 ranks."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.embed.weight": torch.randn(7, 5, generator=generator),
        "model.norm.weight": torch.randn(5, generator=generator).bfloat16(),
        "optim.embed.weight.exp_avg": torch.randn(5, 7, generator=generator).t(),
        "optim.embed.weight.step": torch.tensor(float(step)),
        "optim.norm.weight.count": torch.tensor([step, -step]),
    }


def facts(step: int) -> dict[str, Any]:
    """Floats with many digits, and all other JSON types."""
    return {
        "loss": 1 / (step + 3),
        "tiny": 5e-324,
        "minus": -0.0,
        "config": {
            "optim": {"lr": 1e-3},
            "files": ["a", "ü"],
            "none": None,
            "yes": True,
        },
        "offsets": {"metrics.jsonl": 2**60 + step},
    }


def own_facts(step: int, rank: int = 0) -> dict[str, Any]:
    return {"rng": bytes([step % 256, rank, 255]).hex(), "rank": rank}


def distributed(
    tensors: dict[str, Tensor], placements: Sequence[Placement] = (Shard(0),)
) -> dict[str, Tensor]:
    """Distribute tensors over all ranks; tensors with too few dims for a placement stay plain."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, placements)
        if all(
            isinstance(placement, Replicate) or placement.dim < tensor.ndim
            for placement in placements
        )  # type: ignore[attr-defined]
        else tensor.clone()
        for name, tensor in tensors.items()
    }


def whole(tensors: dict[str, Tensor]) -> Any:
    """Gather tensors one by one on rank 0."""
    for name in sorted(tensors):
        tensor = (
            tensors[name].full_tensor()
            if isinstance(tensors[name], DTensor)
            else tensors[name]
        )
        yield name, tensor if dist.get_rank() == 0 else None


def save(checkpoints: Checkpointer, step: int) -> bool:
    return checkpoints.save(step, full_tensors(step), facts(step), own_facts(step))


def check(checkpoint: Checkpoint | None, step: int) -> None:
    """Check that the checkpoint equals the one saved for this step by one process."""
    assert checkpoint is not None and (checkpoint.step, checkpoint.name) == (
        step,
        f"step-{step:08d}",
    )
    assert checkpoint.facts == facts(step) | {"step": step, "world_size": 1}
    assert checkpoint.own_facts == own_facts(step)
    check_tensors(checkpoint, step)


def check_tensors(checkpoint: Checkpoint, step: int) -> None:
    tensors = {
        name: torch.full_like(tensor, 77) for name, tensor in full_tensors(step).items()
    }
    checkpoint.load(tensors)
    for name, tensor in full_tensors(step).items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(
            tensors[name], tensor
        ), name


def make_series(folder: Path, steps: Sequence[int] = (1, 2, 3), **config: Any) -> None:
    checkpoints = Checkpointer(
        CheckpointConfig(every=1, keep=len(steps), **config), str(folder)
    )
    for step in steps:
        assert save(checkpoints, step)


def resume(
    folder: Path | str, resume: str = "auto", restarted: bool = False
) -> tuple[Checkpoint | None, list[str]]:
    """Resume in one process; return the checkpoint and the messages."""
    messages: list[str] = []
    config = CheckpointConfig(every=1, resume=resume)
    return Checkpointer(config, str(folder), message=messages.append).resume(
        restarted
    ), messages


def refusal(folder: Path | str, word: str) -> str:
    """Return the message of the launcher, which the start of a run repeats."""
    config = CheckpointConfig(resume=word)
    messages = []
    for look in (
        lambda: peek(config, str(folder)),
        lambda: Checkpointer(config, str(folder)).resume(),
    ):
        with pytest.raises(ConfigError) as refused:
            look()
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
    return messages[0]


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, symlinks=True)
    return to


def seal(folder: Path) -> None:
    """Write a manifest of a checkpoint that knows its files as they are."""
    files = {
        file.name: sum_path(file)
        for file in folder.iterdir()
        if file.name != MANIFEST_FILE
    }
    (folder / MANIFEST_FILE).write_bytes(Manifest(folder.name, files).to_bytes())
