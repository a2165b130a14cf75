"""Each part passes the ring twice: once for the sum, once to distribute it."""

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor) -> None:
    """N−1 rounds of adding, after which rank r has the full sum of part r+1; N−1 rounds of forwarding sums."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = list(tensor.tensor_split(ranks))
    for turn in range(2 * (ranks - 1)):
        sent, received = parts[(rank - turn) % ranks], parts[(rank - turn - 1) % ranks]
        arrived = torch.empty_like(received)
        operations = [
            dist.P2POp(dist.isend, sent.clone(), (rank + 1) % ranks),
            dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if turn < ranks - 1:
            received.add_(arrived)
        else:
            received.copy_(arrived)
