"""DistributedDataParallel from scratch: the whole model on every rank, gradients averaged during the backward.

``core`` is the algorithm, and stands alone. The other files subclass it for the rest of PyTorch's class:

    unused_parameters   outputs or losses that do not depend on every parameter; static graphs
    comm_hooks          user functions in place of the all-reduce; gradients of sparse embeddings
    checks              PyTorch's errors, in its words
    logging_data        settings, buckets and times, as PyTorch logs them
    module              ``DistributedDataParallel``, with PyTorch's arguments; ranks that run out of data before others

Refused by name: DDP's own mixed precision, delayed all-reduce of named parameters, batched copies, skipping unused
parameters. Absent: hooks on buffers, built-in hooks in C++, fused optimizers, replacing the process group, remote
references, ``torch.compile`` across buckets.
Sources: arXiv:2006.15704, https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from .core import BUCKET_CAP_MB as BUCKET_CAP_MB
from .core import MIB as MIB
from .module import DistributedDataParallel as DistributedDataParallel
