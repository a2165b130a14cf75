"""Counts of a step's collectives."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.config.schema import Config
from fsdptoys.train.trainer import Trainer

LAYERS = 3
GATHER = "all_gather"
SCATTER = "reduce_scatter"
REDUCE = "all_reduce"
# FSDP1 gathers into a list of tensors on a CPU.
KINDS = {
    "_allgather_base_": GATHER,
    "allgather_": GATHER,
    "_reduce_scatter_base_": SCATTER,
    "allreduce_": REDUCE,
}


class Recorder(TorchDispatchMode):
    """Records every collective, and the calls of a model's hooks, in the order of issue."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.events.append(KINDS.get(name, name))
        return func(*args, **(kwargs or {}))


@contextmanager
def block_hooks(blocks: list[nn.Module], events: list[str]) -> Iterator[None]:
    """Record the start of each block's forward and the end of its backward."""
    handles = []
    for index, block in enumerate(blocks):
        handles.append(
            block.register_forward_pre_hook(
                lambda *_, i=index: events.append(f"forward {i}")
            )
        )
        handles.append(
            block.register_full_backward_hook(
                lambda *_, i=index: events.append(f"backward {i}")
            )
        )
    yield
    for handle in handles:
        handle.remove()


def second_step(configs: list[Config]) -> list[list[str]]:
    """Collectives and block events of the second step's forward and backward, for each
    configuration."""
    recorded = []
    for config in configs:
        trainer = Trainer(config)
        blocks = [
            module
            for module in trainer.strategy.model.modules()
            if type(module).__name__.endswith("Block")
        ]
        assert len(blocks) == LAYERS
        trainer.train()
        trainer.config.train.steps += 1
        recorder = Recorder()
        with recorder, block_hooks(blocks, recorder.events):
            trainer.train()
        recorded.append(recorder.events)
    return recorded
