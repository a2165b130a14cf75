"""LitGPT's model under Lightning Fabric: FSDP where Fabric runs it, DDP where it refuses, as it
does CPUs."""

import json
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from litgpt.config import Config
from litgpt.model import GPT, Block
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import chunked_cross_entropy
from safetensors.torch import load_file
from torch.optim import AdamW
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


def open_fabric(work: Work) -> tuple[Fabric, str]:
    """Fabric with FSDP, or with DDP and the error of FSDP."""
    precision = "bf16-mixed" if work.bfloat16 else "32-true"
    settings = {"accelerator": "cpu", "devices": work.ranks, "precision": precision}
    try:
        strategy = FSDPStrategy(
            auto_wrap_policy={Block}, sharding_strategy="FULL_SHARD"
        )
        return Fabric(strategy=strategy, **settings), "FSDPStrategy"
    except (ValueError, RuntimeError) as error:
        return Fabric(
            strategy="ddp", **settings
        ), f"ddp; of FSDP Fabric says: {str(error).splitlines()[0]}"


def build_model(work: Work) -> GPT:
    """The model with the weights of the folder, converted as ``litgpt convert_to_litgpt`` does."""
    tree = json.loads((Path(work.weights) / "config.json").read_text())
    config = Config(
        name="llama",
        block_size=work.seq_len,
        vocab_size=tree["vocab_size"],
        padded_vocab_size=tree["vocab_size"],
        n_layer=tree["num_hidden_layers"],
        n_head=tree["num_attention_heads"],
        n_query_groups=tree["num_key_value_heads"],
        n_embd=tree["hidden_size"],
        intermediate_size=tree["intermediate_size"],
        norm_eps=tree["rms_norm_eps"],
        rope_base=int(tree["rope_theta"]),
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    model = GPT(config)
    state: dict[str, torch.Tensor] = {}
    for path in sorted(Path(work.weights).glob("*.safetensors")):
        copy_weights_hf_llama(config, {}, state, load_file(path))
    model.load_state_dict(state)
    return model


work = read_work()
fabric, note = open_fabric(work)
assert fabric.world_size == work.ranks
fabric.print(f"note {note}", flush=True)
model = fabric.setup_module(build_model(work))
optimizer = fabric.setup_optimizers(
    AdamW(decay_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS)
)
model.train()

for step, (tokens, labels) in enumerate(work.batches_of(fabric.global_rank), 1):
    # In chunks of 128 rows, as LitGPT's own pretraining
    loss = chunked_cross_entropy(model(tokens), labels)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean").item()
    if fabric.is_global_zero:
        tell_step(step, mean)
