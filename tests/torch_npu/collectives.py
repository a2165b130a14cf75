"""Collectives of the real ProcessGroupHCCL, on one of several ranks, started by torchrun; prints
the results as JSON.
"""

import json
import os

import torch
import torch.distributed as dist


def main() -> None:
    """Run them."""
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl")
    tensor = torch.arange(3.0, device="npu") + 10 * rank
    gathered = [torch.zeros(3, device="npu") for _ in range(ranks)]
    dist.all_gather(gathered, tensor)
    objects: list[object] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    mean = tensor.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    part = torch.zeros(1, device="npu")
    dist.reduce_scatter_tensor(part, tensor[:ranks].contiguous())
    uneven = torch.zeros(ranks, device="npu")
    dist.all_to_all_single(uneven, tensor[:ranks].contiguous())
    # more than the stub's slot
    large = torch.full((10_000_000,), float(rank + 1), device="npu")
    dist.all_reduce(large)
    try:
        dist.all_reduce(torch.ones(2, dtype=torch.float64, device="npu"))
        refused = ""
    except RuntimeError as error:
        refused = str(error).splitlines()[0]
    results = {
        "all_gather": [part.tolist() for part in gathered],
        "objects": objects,
        "mean": mean.tolist(),
        "part": part.tolist(),
        "all_to_all": uneven.tolist(),
        "large": sorted(set(large.tolist())),
        "refused": refused,
    }
    print(f"rank {rank}: {json.dumps(results)}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
