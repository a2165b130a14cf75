"""Lines that a new user types, and the settings that they compose to.

Lines with a mistake are in ``tests/messages``. Composed and validated in this process for two ranks on a CPU.
"""

import shlex

import pytest

from fsdptoys.cli.commands import parse
from fsdptoys.config.compose import compose_config

LINES = {
    "memory=lean": "memory.chunk_loss=true memory.gradient_checkpointing=full memory.cpu_offload=false",
    "memory=lean memory.chunk_loss=false": "memory.chunk_loss=false memory.gradient_checkpointing=full",
    "memory.chunk_loss=false memory=lean": "memory.chunk_loss=false memory.gradient_checkpointing=full",
    "memory=cpu_offload memory=lean": "memory.chunk_loss=true memory.cpu_offload=false",
    "memory=cpu_offload": "memory.cpu_offload=true",
    "memory=optimizer_offload": "memory.optimizer_offload=true",
    "model=llama_bytes memory=smallest": "memory.cpu_offload=true memory.activation_offload=true",
    "experiment=llama3_1b": "memory.gradient_checkpointing=full",
    "experiment=llama3_1b memory=none": "memory.gradient_checkpointing=none",
    "mesh=hsdp": "mesh.fsdp_size=1",
    "mesh=node": "mesh.fsdp_size=2",
    "mesh=hsdp mesh.fsdp_size=2": "mesh.fsdp_size=2",
    "model=llama3_8b model=gpt2_debug": "model.name=gpt2_debug",
    "parallel=ddp parallel=fsdp1": "parallel.name=fsdp1",
    "memory.gradient_checkpointing=true": "memory.gradient_checkpointing=full",
    "memory.gradient_checkpointing=on": "memory.gradient_checkpointing=full",
    "memory.gradient_checkpointing=off": "memory.gradient_checkpointing=none",
    "parallel=fsdp1 parallel.min_params=1e6": "parallel.min_params=1000000.0",
    "parallel=fsdp2 parallel.min_params=20000": "parallel.min_params=20000.0",
    "model=gpt2_debug train.steps=3": "train.steps=3",
    "parallel=fsdp2 memory.cpu_offload=true": "memory.cpu_offload=true",
    "parallel=ddp memory.chunk_loss=true": "memory.chunk_loss=true",
}
"""Typed line → settings, as they would be typed."""


@pytest.mark.parametrize("line", LINES)
def test_typed_line_composes_to_its_settings(line: str) -> None:
    """Oracle: the table above."""
    config = compose_config(parse("train", shlex.split(line)).words)
    config.validate(world_size=2, device_type="cpu")
    tree = config.to_dict()
    for word in LINES[line].split():
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        assert str(tree[section][name]).lower() == value
