"""Weights, tokens and batches that all contestants of a benchmark train on."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fsdptoys.checkpoint import write_hugging_face
from fsdptoys.data import BatchStream
from fsdptoys.data.bin import BinConfig, TokenDType
from fsdptoys.models import LlamaConfig
from fsdptoys.models.huggingface import Bounds
from scripts.benchmarks.peers.work import (
    BETAS,
    EPS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    Work,
)

DATA_SEED = 0


def write_inputs(folder: Path, model: LlamaConfig) -> None:
    """Weights in Hugging Face format, and tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(name: str, region: Bounds) -> Tensor:
        shape = [last - first for first, last in region]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        return torch.empty(shape).normal_(0.0, model.init_std, generator=generator)

    write_hugging_face(folder / "weights", model, draw, torch.float32, 2**31)
    write_tokens(folder, model.vocab_size)


def write_tokens(
    folder: Path, vocab_size: int, kind: TokenDType = TokenDType.uint16
) -> None:
    """Tokens of a skewed distribution, so that there is something to learn."""
    tokens = vocab_size * np.random.default_rng(0).random(2**18) ** 3
    tokens.astype(kind.value).tofile(folder / "tokens.bin")


def write_batches(
    folder: Path, work: Work, vocab_size: int, kind: TokenDType = TokenDType.uint16
) -> None:
    """The batches that our data room makes of the tokens, in one file for the peers."""
    dataset = BinConfig(files=[str(folder / "tokens.bin")], dtype=kind).build(
        work.seq_len, vocab_size, DATA_SEED
    )
    streams = [
        BatchStream(
            dataset.train,
            work.batch_size,
            1,
            range(rank, rank + 1),
            work.ranks,
            DATA_SEED,
        )
        for rank in range(work.ranks)
    ]
    steps = [
        [torch.stack(stream.next_step()[0]).numpy() for stream in streams]
        for _ in range(work.steps)
    ]
    np.array(steps, dtype=np.int32).tofile(work.batches)


def recipe_overrides(work: Work, folder: Path) -> list[str]:
    """Overrides of our trainer for the data, the optimizer and the length that all peers have."""
    return [
        "data=bin", f"data.files=[{folder / 'tokens.bin'}]", f"train.data_seed={DATA_SEED}",
        f"train.batch_size={work.batch_size}", f"train.seq_len={work.seq_len}",
        f"train.steps={work.steps}", f"train.max_grad_norm={MAX_GRAD_NORM}", "optim=adamw",
        f"optim.lr={LEARNING_RATE}", f"optim.beta1={BETAS[0]}", f"optim.beta2={BETAS[1]}",
        f"optim.eps={EPS}", f"optim.weight_decay={WEIGHT_DECAY}", "optim.schedule=constant",
        f"launch.device={work.device}", "metrics.log_every=1",
    ]  # fmt: skip
