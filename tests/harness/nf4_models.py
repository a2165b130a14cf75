"""Models with rows of whole blocks of NF4."""

import dataclasses

from fsdptoys.models import GPT2Config
from tests.harness.tiny import tiny_model

LLAMA = dataclasses.replace(
    tiny_model(), dim=64, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=128
)
GPT2 = GPT2Config(
    name="tiny", dim=64, n_layers=2, n_heads=4, vocab_size=67, max_seq_len=64
)
