"""FSDP from scratch: ``fully_shard`` with the names and meaning of PyTorch's FSDP2.

Every rank trains on its own data, as in DDP, but keeps only 1/W of parameters, gradients and
optimizer states. A module passed to ``fully_shard`` becomes a unit: its parameters are gathered
from all ranks before its forward and freed after it, and again around its backward, after which its
gradients are reduced and sharded. A rank thus holds one or two whole units at a time. The next unit
is gathered while one computes, and the last one's gradients are reduced meanwhile:

    forward    gather 1 │ gather 2      │ gather 3      │
    computes            │ unit 1, free  │ unit 2, free  │ unit 3 ...
    backward   gather 2 │ gather 1      │               │
    computes   unit 3   │ unit 2        │ unit 1        │ step, on 1/W of everything
    gradients           │ reduce unit 3 │ reduce unit 2 │ reduce unit 1

docs/toys/fsdp.md counts the bytes that a rank sends and holds.

The core, to be read in this order, has 500 lines and imports no other file of the package:

    layout    position of each parameter in a flat tensor
    core      units, hooks and ``fully_shard``

Extensions subclass it:

    unit      mixed precision, accumulation, replicas (HSDP), sums; ``to``, ``to_empty``
    hooks     forward prefetching, recomputation, several modules a unit
    wrap      ``fully_shard`` with PyTorch's arguments, and the methods of a sharded module

Left out: CPU offload, DTensors as parameters (tensor parallelism), several dtypes in one unit,
ignored parameters, resharding to fewer ranks, custom collectives, ``torch.compile`` around it
(compiled modules inside it work), PyTorch's pipelines.
"""

from .unit import MixedPrecisionPolicy as MixedPrecisionPolicy
from .wrap import FSDPModule as FSDPModule
from .wrap import fully_shard as fully_shard
