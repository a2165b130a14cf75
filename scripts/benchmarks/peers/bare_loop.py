"""transformers' Llama in a loop of PyTorch alone on one device: no launcher, nothing sharded, the
fused AdamW."""

import contextlib

import torch
from torch.optim import AdamW
from transformers_llama import build_llama
from work import (
    BETAS,
    EPS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    decay_groups,
    read_work,
    tell_peak,
    tell_step,
)

work = read_work()
assert work.ranks == 1
model = build_llama(work).to(work.device)
if work.low_bits:
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(
        decay_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS
    )
else:
    optimizer = AdamW(
        decay_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True
    )
model.train()
mixed = work.bfloat16 and not work.half

for step, (tokens, labels) in enumerate(work.batches_of(0), 1):
    with (
        torch.autocast(work.device, torch.bfloat16)
        if mixed
        else contextlib.nullcontext()
    ):
        loss = model(input_ids=tokens, labels=labels, shift_labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    tell_step(step, loss.item())
tell_peak(work.device)
