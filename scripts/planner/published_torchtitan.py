"""torchtitan's benchmark of December 2024, rewritten for tracing: Llama 3.1 8B on 8 and 128 H100s,
eager.

Its page (github.com/pytorch/torchtitan, ``benchmarks/llama3_h100_202412_torchtitan.md``) gives
tokens per second and GPU and the highest reserved memory at the 90th step. The run: FSDP2 on one
axis, batch 2 of 8192 tokens per GPU, selective checkpointing by operator, torch of 2024-12-23,
torchtitan of 2024-12-26, on H100s with 96 GB of HBM2e at 2.4 TB/s, limited to 500 W, and 400 Gb/s
of network per GPU. Facts come from sources of the half years around it (``train.py`` and
``llama3_8b.toml`` 0011fb9, ``parallelize_llama.py`` 004b314, ``optimizer.py`` 04a22a0, ``model.py``
0199cbc); a comment marks each source of another day.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from fsdptoys.device.profile import AttentionKind, Hardware, Quantity, load_hardware
from scripts.planner.published_llama2 import Block, FeedForward
from scripts.planner.published_programs import Fill, Marks

GIB = 2**30
aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    # Later than the benchmark, whose H100s did not use it.
    aten._scaled_dot_product_cudnn_attention.default,
}
"""Operators whose results selective checkpointing keeps; of matmuls every other one."""


@dataclass(frozen=True)
class Sizes:
    """Model and batch; the published ones by default."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 8
    ffn_dim: int = 14336
    vocab_size: int = 128256
    seq_len: int = 8192
    batch_size: int = 2


@dataclass(frozen=True)
class Published:
    """Published numbers for a number of GPUs."""

    tokens_per_second: float
    """Per GPU."""
    reserved_gib: float

    @property
    def tokens(self) -> int:
        """Tokens of one GPU's step."""
        return Sizes.batch_size * Sizes.seq_len

    @property
    def step_seconds(self) -> float:
        """From the tokens per second."""
        return self.tokens / self.tokens_per_second


def h100() -> Hardware:
    """Hardware of torchtitan's table: an H100 with other memory than the common one, and
    FlashAttention."""
    source = (
        "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
    )
    return dataclasses.replace(
        load_hardware("h100"),
        attention=AttentionKind.flash,
        memory_bandwidth=Quantity(2.4e12, source),
        memory_bytes=Quantity(96 * GIB, source),
    )


class RMSNorm(nn.Module):
    """``nn.RMSNorm`` as PyTorch ran it before it had a fused kernel (2.9): every step an operator,
    in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(1e-5))
        return (wide * scale * self.weight).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention that repeats keys and values, and rotates by complex numbers in
    float32."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.n_heads
        self.repeats = sizes.n_heads // sizes.n_kv_heads
        kv_dim = sizes.n_kv_heads * self.head_dim
        self.query = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.key = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.value = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.out = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Attend causally; turns are complex numbers of shape (T, K/2)."""
        batch, seq_len, _ = x.shape
        query = self.query(x)
        key = self.key(x)
        value = self.value(x)
        query, key, value = (
            projection.view(batch, seq_len, -1, self.head_dim)
            for projection in (query, key, value)
        )
        query, key = _rotate(query, key, turns)
        key, value = self._repeat(key), self._repeat(value)
        query, key, value = (
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).contiguous().view(batch, seq_len, -1))

    def _repeat(self, x: Tensor) -> Tensor:
        batch, seq_len, heads, dim = x.shape
        repeated = x[:, :, :, None, :].expand(batch, seq_len, heads, self.repeats, dim)
        return repeated.reshape(batch, seq_len, heads * self.repeats, dim)


def _rotate(query: Tensor, key: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    wide_query = torch.view_as_complex(query.float().reshape(*query.shape[:-1], -1, 2))
    wide_key = torch.view_as_complex(key.float().reshape(*key.shape[:-1], -1, 2))
    turns = turns[: query.shape[1]].view(1, query.shape[1], 1, -1)
    turned_query = torch.view_as_real(wide_query * turns).flatten(3)
    turned_key = torch.view_as_real(wide_key * turns).flatten(3)
    return turned_query.type_as(query), turned_key.type_as(key)


class Llama3(nn.Module):
    """The model with its head, without its loss."""

    turns: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.dim)
        turns = torch.empty(
            sizes.seq_len, sizes.dim // sizes.n_heads // 2, dtype=torch.complex64
        )
        self.register_buffer("turns", turns)
        self.layers = nn.ModuleList(
            Block(
                Attention(sizes),
                FeedForward(sizes.dim, sizes.ffn_dim),
                RMSNorm(sizes.dim),
                RMSNorm(sizes.dim),
            )
            for _ in range(sizes.n_layers)
        )
        self.norm = RMSNorm(sizes.dim)
        self.output = nn.Linear(sizes.dim, sizes.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (B, T, V) for tokens of shape (B, T)."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.turns)
        return self.output(self.norm(hidden))


def keep_every_other_product() -> Any:
    """Contexts of one block's forward and recomputation (``selective_ac_option = "op"``)."""
    counts: defaultdict[bool, int] = defaultdict(int)

    def policy(
        context: Any, operator: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        saved = operator in SAVED
        if operator is aten.mm.default:
            counts[context.is_recompute] += 1
            saved = counts[context.is_recompute] % 2 == 1
        return (
            CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)


def torchtitan_program(
    recorder: Marks,
    device: torch.device,
    sizes: Sizes | None = None,
    steps: int = 2,
    fill: Fill | None = None,
) -> list[float]:
    """Build the model and train it for a few steps; return the losses.

    Args:
        recorder: receives the start of each phase.
        device: of the tensors; a process group for it exists.
        sizes: the published ones by default.
        steps: number of steps.
        fill: fills parameters; None on a planned device.
    """
    sizes = sizes or Sizes()
    recorder.mark(0, "construction")
    with torch.device("meta"):
        model = Llama3(sizes)
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(
            layer, context_fn=keep_every_other_product, preserve_rng_state=False
        )
    mesh = DeviceMesh(
        device.type, list(range(dist.get_world_size())), mesh_dim_names=("dp_shard",)
    )
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for index, layer in enumerate(model.layers):
        # The last block is needed again at once.
        last = index == sizes.n_layers - 1
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not last)
    # The root was asked to reshard, which torch did not follow before 2.8.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    _to_empty(model, device)
    if fill is not None:
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            fill(parameter.to_local())
    # ``fused`` was off by default, so that states are updated group by group through whole lists of
    # temporaries.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    losses = []
    for step in range(1, steps + 1):
        recorder.mark(step, "data")
        tokens = torch.zeros(sizes.batch_size, sizes.seq_len, dtype=torch.int64).to(
            device
        )
        labels = torch.zeros(sizes.batch_size, sizes.seq_len, dtype=torch.int64).to(
            device
        )
        # Gradients live until here.
        optimizer.zero_grad()
        recorder.mark(step, "forward")
        logits = model(tokens)
        # Logits go to float32 in the loss (torchtitan #551 of August 2024); 0011fb9 is older.
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        recorder.mark(step, "backward")
        loss.backward()
        recorder.mark(step, "optimizer")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        # The loss is read every tenth step only; the host does not wait for it here.
        losses.append(loss.detach())
        recorder.mark(step, "end")
    return [loss.item() for loss in losses]


def _to_empty(model: nn.Module, device: torch.device) -> None:
    """Give the sharded parameters and the table of rotations memory on a device."""
    model.to_empty(device=device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device=device))
