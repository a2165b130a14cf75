"""Evaluation between training steps: loss on the held-out split, and text samples.

Shapes: B sequences of a micro-batch, T tokens of each.
"""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.data import TextConfig, TextDataset
from fsdptoys.loss.objective import IGNORE_INDEX
from fsdptoys.models.generate import Draw, generate
from fsdptoys.models.layers import LossFn


@torch.no_grad()
def held_out_loss(model: nn.Module, loss_fn: LossFn, batches: Iterable[tuple[Tensor, Tensor]], zero: Tensor) -> float:
    """Mean loss over all ranks' batches, in nats per token. A collective.

    Args:
        model: as prepared by the strategy.
        loss_fn: sums the loss over valid labels.
        batches: (tokens_BT, labels_BT) of this rank; every rank needs the same number.
        zero: scalar zero on the model's device; its dtype is that of the sums.
    """
    model.eval()
    loss_sum, valid = zero.clone(), zero.clone()
    for tokens_BT, labels_BT in batches:
        loss_sum += model(tokens_BT.to(zero.device), labels_BT.to(zero.device), loss_fn)
        valid += int((labels_BT != IGNORE_INDEX).sum())
    dist.all_reduce(loss_sum)
    dist.all_reduce(valid)
    model.train()
    return loss_sum.item() / max(1.0, valid.item())


def sample_text(
    model: nn.Module,
    data: TextConfig,
    dataset: TextDataset,
    seq_len: int,
    seed: int,
    device: torch.device,
    *,
    compiled: bool,
) -> str:
    """Return the prompt and the model's continuation. A collective if the model is sharded.

    Args:
        model: as prepared by the strategy.
        data: prompt, length and temperature.
        dataset: encodes and decodes token ids.
        seq_len: maximum context length.
        seed: of the sampling.
        device: of the model.
        compiled: whether parts of the model are compiled; they run eagerly here, since each length would recompile.
    """
    prompt = torch.from_numpy(dataset.encode(data.sample_prompt)).to(device)
    model.eval()
    draw = Draw(data.sample_temperature, seed=seed)
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        tokens = generate(model, prompt, data.sample_tokens, seq_len, draw)
    model.train()
    return dataset.decode(tokens.cpu().numpy())
