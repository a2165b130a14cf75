"""All ranks have as many rows as the first; the last ones are padded."""

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def own_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Chunks of ⌈rows / ranks⌉ until there are no more."""
    most = -(-rows // ranks)
    return min(rank * most, rows), min((rank + 1) * most, rows)


def gather_rows(shard: Tensor, rows: int) -> Tensor:
    """Padding comes last, since only the last ranks have fewer rows."""
    ranks = dist.get_world_size()
    most = -(-rows // ranks)
    whole = shard.new_empty(most * ranks, shard.shape[1])
    dist.all_gather_into_tensor(whole, pad(shard, (0, 0, 0, most - len(shard))))
    return whole[:rows]
