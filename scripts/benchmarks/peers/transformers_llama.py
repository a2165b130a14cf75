"""transformers' Llama as the work asks for it: weights from a folder or drawn, blocks compiled or
computed again."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from values import draw
from work import Work


def build_llama(work: Work) -> LlamaForCausalLM:
    """On a CPU where the folder has weights, else on the work's device."""
    options = {
        "dtype": torch.bfloat16 if work.half else torch.float32,
        "attn_implementation": "sdpa",
    }
    if any(Path(work.weights).glob("*.safetensors")):
        model = LlamaForCausalLM.from_pretrained(
            work.weights, **options, use_cache=False
        )
    else:
        with torch.device(work.device):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(work.weights, use_cache=False), **options
            )
        for name, param in model.named_parameters():
            draw(param, name)
    if work.checkpoints:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    if work.compiles:
        for layer in model.model.layers:
            layer.compile()
    return model
