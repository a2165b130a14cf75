"""transformers' Llama under PyTorch's ``fully_shard``, in a plain script for torchrun."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from transformers_llama import build_llama
from work import (
    BETAS,
    EPS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    Work,
    decay_groups,
    read_work,
    tell_step,
)


def train(work: Work) -> list[float]:
    """Take the steps; returns the mean loss of each over all ranks."""
    model = build_llama(work)
    model.to(work.device)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if work.bfloat16 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = AdamW(decay_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS)
    model.train()
    losses = []
    for step, (tokens_BT, labels_BT) in enumerate(work.batches_of(dist.get_rank()), 1):
        loss = model(input_ids=tokens_BT, labels=labels_BT, shift_labels=labels_BT).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        assert isinstance(norm, DTensor)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
        if dist.get_rank() == 0:
            tell_step(step, losses[-1])
    return losses


if __name__ == "__main__":
    work = read_work()
    dist.init_process_group("gloo")
    assert dist.get_world_size() == work.ranks and not work.low_bits
    train(work)
    dist.barrier()
    dist.destroy_process_group()
