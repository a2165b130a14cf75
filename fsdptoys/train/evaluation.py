"""What a trainer asks of its model between steps: the loss on the held-out part, and a sample of text.

Shapes: B rows of a micro-batch, T tokens of one.
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
    """Mean loss over all ranks' batches, in nats a token. A collective.

    Args:
        model: as the strategy made it.
        loss_fn: summed over valid labels.
        batches: this rank's, as (tokens_BT, labels_BT), the same number on each.
        zero: a sum to begin from, on the model's device.
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
    """The prompt and what the model goes on with. A collective where the model is sharded.

    Args:
        model: as the strategy made it.
        data: prompt, length and temperature.
        dataset: knows what ids mean.
        seq_len: tokens that the model sees at most.
        seed: of what is drawn.
        device: of the model.
        compiled: whether the compiler is at work, which would compile for every length anew.
    """
    prompt = torch.from_numpy(dataset.encode(data.sample_prompt)).to(device)
    model.eval()
    draw = Draw(data.sample_temperature, seed=seed)
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        tokens = generate(model, prompt, data.sample_tokens, seq_len, draw)
    model.train()
    return dataset.decode(tokens.cpu().numpy())
