"""Fully sharded data parallel from scratch: ``fully_shard`` with the names and the meaning of PyTorch's FSDP2.

Every rank trains on its own data, as in DDP, but keeps only 1/W of parameters, gradients and optimizer states. A module
that is given to ``fully_shard`` becomes a unit; just before its forward its parameters are put together from all ranks,
and just after it they are freed; so again in the backward, after which its gradients are summed over the ranks and cut
so that each rank keeps its part. A rank thus holds one or two whole units at a time. The next unit is fetched while
this one computes, and the last one's gradients travel meanwhile:

    forward    gather 1 │ gather 2      │ gather 3      │
    computes            │ unit 1, free  │ unit 2, free  │ unit 3 ...
    backward   gather 2 │ gather 1      │               │
    computes   unit 3   │ unit 2        │ unit 1        │ step, on 1/W of everything
    gradients           │ reduce unit 3 │ reduce unit 2 │ reduce unit 1

What a rank sends in a step, of N parameters in U units over W ranks, with p bytes a parameter and g bytes a gradient
(a unit that is not freed after the forward, as the root, is gathered once):

    all-gather      2 U  of them   2 · (W-1)/W · N · p  bytes      forward and backward
    reduce-scatter    U            (W-1)/W · N · g                 the sum of DDP's 2 · (W-1)/W · N · g and half of that
    all-reduce        U            2 · (R-1)/R · N/W · g           only HSDP: R replicas of W shards each

What it holds: N/W parameters, gradients and optimizer states, all but padding (less than one row a parameter and rank),
and of the largest unit its whole parameters, what they were received in, and its gradients.

To be read in this order:

    layout       where each parameter lies in a flat tensor          arithmetic on shapes
    collectives  all-gather, reduce-scatter, all-reduce, means
    shard        a rank's part, and how the others' parts are fetched
    unit         the forms of a unit's parameters                    sharded, whole, resharded to fewer ranks
    reduction    from whole gradients to sharded ones                beside the backward
    iteration    what units know together
    hooks        when all this happens                               around forward and backward; prefetch
    module       what a sharded module can be told
    wrap         ``fully_shard``
    outer        parameters that tensor parallelism has cut before
    initialise   values for a model that was made without memory
    policies, tensors, internals                                     number formats; small helpers

Left out:

    ==============================================  =========================================================
    ``offload_policy=CPUOffloadPolicy``             refused, but for CPU ranks without pinning: shards stay on
                                                    the device of the mesh
    ``dp_mesh_dims``, ``ShardPlacementResult``      refused: a unit has one mesh, DTensors over others
    ``reshard_after_forward`` as a number, of       refused, by PyTorch too
    DTensors
    several dtypes or devices in one unit           refused: there is one flat shard
    ``fsdp_pre_all_gather`` of tensor subclasses    refused: what travels is the flat shard
    ``set_custom_all_gather``, ``…reduce_scatter``  refused: the collectives are those of ``collectives``
    ``set_separate_reduce_scatter_group``           refused
    ``set_allocate_memory_from_process_group_…``    refused
    ``set_symm_mem_for_comm``                       refused
    ``set_all_reduce_hook(stream=…)``,              refused: there are no streams, ``collectives`` says why, and
    ``_set_unshard_async_op(False)``                gathering is asynchronous always
    ``FSDPState``, ``FSDPParamGroup``, and what     not there: the state of a module is a ``Driver``, which has
    tests and tools take from them                  other attributes; PyTorch's pipelines, for one, know only theirs
    ``torch.compile`` around it, ``torch.func``     not covered; what is compiled within it is
    ==============================================  =========================================================

Different from PyTorch's: a divide factor is always applied after a sum, and reentrant checkpointing around a unit is
not prefetched for.
"""

from .initialise import initialise as initialise
from .module import FSDPModule as FSDPModule
from .module import UnshardHandle as UnshardHandle
from .module import register_fsdp_forward_method as register_fsdp_forward_method
from .module import share_comm_ctx as share_comm_ctx
from .policies import CPUOffloadPolicy as CPUOffloadPolicy
from .policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from .policies import OffloadPolicy as OffloadPolicy
from .wrap import fully_shard as fully_shard
