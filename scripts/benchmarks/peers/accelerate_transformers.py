"""transformers' Llama under Hugging Face accelerate: DDP on CPUs, one process on a GPU."""

from accelerate import Accelerator
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
accelerator = Accelerator(
    cpu=work.device == "cpu",
    mixed_precision="bf16" if work.bfloat16 and not work.half else "no",
)
assert accelerator.num_processes == work.ranks and not work.low_bits
model = build_llama(work)
optimizer = AdamW(decay_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS)
model, optimizer = accelerator.prepare(model, optimizer)
model.train()
if accelerator.is_main_process:
    print(f"note {type(model).__name__}, {accelerator.distributed_type}", flush=True)

for step, (tokens, labels) in enumerate(work.batches_of(accelerator.process_index), 1):
    loss = model(input_ids=tokens, labels=labels, shift_labels=labels).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    if accelerator.is_main_process:
        tell_step(step, mean)
tell_peak(work.device)
accelerator.end_training()
