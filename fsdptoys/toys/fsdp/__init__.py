"""Fully sharded data parallelism from scratch: ``fully_shard`` with the names and meaning of PyTorch's FSDP2.

Every rank trains on its own data, as in DDP, but keeps only 1/W of parameters, gradients and optimizer states. A module
passed to ``fully_shard`` becomes a unit: its parameters are gathered from all ranks before its forward and freed after
it, and again around its backward, after which its gradients are reduced and sharded. A rank thus holds one or two whole
units at a time. The next unit is gathered while one computes, and the last one's gradients are reduced meanwhile:

    forward    gather 1 │ gather 2      │ gather 3      │
    computes            │ unit 1, free  │ unit 2, free  │ unit 3 ...
    backward   gather 2 │ gather 1      │               │
    computes   unit 3   │ unit 2        │ unit 1        │ step, on 1/W of everything
    gradients           │ reduce unit 3 │ reduce unit 2 │ reduce unit 1

docs/toys/fsdp.md counts the bytes that a rank sends and holds.

The core, to be read in this order, is below 500 lines and imports no other file of the package:

    layout           position of each parameter in a flat tensor
    core             units, hooks and ``fully_shard``

Extensions subclass it:

    policies         dtypes of mixed precision; offload policies
    gradients        accumulation, replicas (HSDP), averaging and divide factors
    tensor_parallel  parameters that tensor parallelism has sharded
    unit             the unit with all of these; ``to``, ``to_empty`` and loading with ``assign=True``; resharding to
                     fewer ranks after the forward
    hooks            forward prefetching, recomputation, several modules a unit
    module           methods of a sharded module
    wrap             ``fully_shard`` with all arguments and checks
    initialize       values for a model on the meta device
    internals        PyTorch's private functions

Left out:

    ==============================================  =========================================================
    ``offload_policy=CPUOffloadPolicy``             refused, except for CPU ranks without pinning: shards stay
                                                    on the device of the mesh
    ``dp_mesh_dims``, ``ShardPlacementResult``      refused: a unit has one mesh, DTensors over others
    ``reshard_after_forward`` as a number, of       refused, by PyTorch too
    DTensors
    several dtypes or devices in one unit           refused: there is one flat shard
    ``fsdp_pre_all_gather`` of a parameter          refused: the flat shard is sent as it is
    ``set_custom_all_gather``, ``…reduce_scatter``  refused: the collectives are those of ``core``
    ``set_separate_reduce_scatter_group``           refused
    ``set_allocate_memory_from_process_group_…``    refused
    ``set_symm_mem_for_comm``                       refused
    ``set_all_reduce_hook(stream=…)``,              refused: there are no streams, and gathering is asynchronous
    ``_set_unshard_async_op(False)``                always
    ``FSDPState``, ``FSDPParamGroup`` and their     absent: the state of a module is a ``FullHooks`` with other
    attributes                                      attributes; PyTorch's pipelines, for one, know only theirs
    ``torch.compile`` around it, ``torch.func``     not covered; compiled modules inside it are
    ==============================================  =========================================================

Different from PyTorch's: a divide factor is always applied after a sum, and units under reentrant checkpointing are not
prefetched.
"""

from .initialize import initialize as initialize
from .module import FSDPModule as FSDPModule
from .module import UnshardHandle as UnshardHandle
from .module import register_fsdp_forward_method as register_fsdp_forward_method
from .module import share_comm_ctx as share_comm_ctx
from .policies import CPUOffloadPolicy as CPUOffloadPolicy
from .policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from .policies import OffloadPolicy as OffloadPolicy
from .wrap import fully_shard as fully_shard
