"""Sizes of a trainer's parameters, units and states, read from its tensors before the first step.

Optimizer states that do not exist yet are counted with the formula of the optimizer's
configuration, which the planner uses too; AdamW's step counters, four bytes a parameter tensor, are
left out.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.memory import BucketedOptimizer
from fsdptoys.metrics.layout import Layout, RankBytes, Unit
from fsdptoys.models.nf4 import is_packed, unpacked_elements
from fsdptoys.utils.dtensor import local_tensor
from fsdptoys.utils.storages import storage_bytes

if TYPE_CHECKING:
    from .trainer import Trainer


def measure_layout(trainer: "Trainer") -> Layout:
    """Measure this rank and take the largest number over all ranks. A collective."""
    config = trainer.config
    strategy = trainer.strategy
    sizes = trainer.parallel_model.parameter_sizes
    params = dict(strategy.held_parameters())
    own = {name: local_tensor(param) for name, param in params.items()}
    trained = {name: own[name] for name, param in params.items() if param.requires_grad}
    parameter_bytes = storage_bytes(own.values())
    elements = count_elements(own)
    frozen = [own[name] for name in own.keys() - trained.keys()]
    in_backward = config.memory.optimizer_in_backward
    gradients = (
        0 if in_backward else strategy.gradient_bytes(list(trained.values()), frozen)
    )
    if isinstance(trainer.optimizer, BucketedOptimizer):
        buckets = trainer.optimizer.buckets
        states = sum(bucket.slab.nbytes for bucket in buckets if not bucket.on_host)
        on_host = sum(bucket.slab.nbytes for bucket in buckets if bucket.on_host)
    else:
        states = 0
        on_host = 0
        for name, local in trained.items():
            states += sum(
                config.optim.state_bytes(
                    params[name].shape,
                    local.numel(),
                    name in trainer.parallel_model.block_names,
                )
            )
    numbers = torch.tensor(
        [elements, parameter_bytes, gradients, states, on_host],
        device=trainer.world.device.torch_device,
    )
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    elements, *sizes_of_kinds, on_host = map(int, numbers.tolist())
    kinds = "parameters", "gradients", "optimizer states"
    offloads = config.memory.cpu_offload
    held_bytes = {
        kind: RankBytes(*((0, size) if offloads else (size, 0)))
        for kind, size in zip(kinds, sizes_of_kinds, strict=True)
    }
    if on_host:
        held_bytes[kinds[-1]] = RankBytes(
            0 if offloads else sizes_of_kinds[-1], on_host
        )
    # A unit gathers only its rank's part of experts and features.
    gathered = {
        name: size // strategy.gathered_parts(name) for name, size in sizes.items()
    }
    units = unit_sizes(strategy.unit_names(), gathered)
    width = config.parallel.param_dtype.torch.itemsize
    by_size = [
        Unit(name, size, size * width)
        for name, size in sorted(units.items(), key=lambda unit: unit[1])
    ]
    largest = max(by_size, key=lambda unit: unit.parameters, default=None)
    return Layout(
        parameters=sum(sizes.values()),
        parameters_per_rank=elements,
        units=len(units),
        largest_unit=largest,
        smallest_unit=by_size[0] if by_size else None,
        mesh={axis: ranks for axis, ranks in strategy.axes().items() if ranks > 1},
        sharded=strategy.sharded,
        bytes_per_rank=held_bytes,
        trained=sum(sizes[name] for name in trained)
        if config.tune.freezes
        else sum(sizes.values()),
    )


def count_elements(own: Mapping[str, Tensor]) -> int:
    """Elements of one rank's tensors, by name, with the padding of shards."""
    packed = storage_bytes(tensor for name, tensor in own.items() if is_packed(name))
    kinds = {tensor.dtype for tensor in own.values()}
    plain = {
        kind: [
            tensor
            for name, tensor in own.items()
            if tensor.dtype is kind and not is_packed(name)
        ]
        for kind in kinds
    }
    return unpacked_elements(packed) + sum(
        storage_bytes(tensors) // kind.itemsize for kind, tensors in plain.items()
    )


def unit_sizes(units: Iterable[list[str]], sizes: Mapping[str, int]) -> dict[str, int]:
    """Parameters of each unit by name, of units that have any; a parameter belongs to the innermost
    module named.

    ``units`` has the names of the modules of each unit, ``sizes`` the number of elements of each
    parameter.
    """
    unit_of = {
        name: ", ".join(filter(None, names)) or "root"
        for names in units
        for name in names
    }
    unit_elements = dict.fromkeys(unit_of.values(), 0)
    for name, size in sizes.items() if unit_of else ():
        module = name.rpartition(".")[0]
        while module and module not in unit_of:
            module = module.rpartition(".")[0]
        unit_elements[unit_of[module]] += size
    return {name: size for name, size in unit_elements.items() if size}
