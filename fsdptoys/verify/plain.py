"""The reference: a training loop in plain PyTorch, in one process.

The model's own forward, ``F.cross_entropy``, autograd, a clipped norm and ``torch.optim.AdamW``
(other optimizers are the run's own). It takes the micro-batches of the ranks one after another, and
adds up what each rank would, so that a layout whose reductions add two numbers has its bits. Norms
are taken in float64 and rounded to float32, as runs do.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdptoys.config.schema import Config
from fsdptoys.data import BatchStream
from fsdptoys.optim import build_optimizer
from fsdptoys.optim.adamw import AdamWConfig, OptimStateDType
from fsdptoys.optim.config import WeightDecayOn, learning_rate_ratio
from fsdptoys.train.distributed import deterministic_kernels

from .measure import Array, Key
from .plain_model import PlainModel

IGNORED = -100
"""Label of positions without one."""


class Split(NamedTuple):
    """How a global batch is taken in pieces."""

    ranks: int
    """Data-parallel ranks, whose micro-batches are at the same time."""
    microbatches: int
    """Of each rank, one after another."""
    batch_size: int
    """Sequences of a micro-batch."""


@dataclass
class Trajectory:
    """Numbers of a training run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[Key, Array] = field(default_factory=dict)
    """By step and name: initial values and buffers of step 0, then gradients and parameters."""

    def add(self, step: int, kind: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors of a step; float64 ones are not rounded."""
        for name, tensor in tensors:
            values = tensor.detach().to("cpu", copy=True)
            wide = values.dtype is torch.float64
            values = values if wide else values.float()
            self.tensors[step, f"{kind} {name}"] = values.numpy()


def train_plain(
    config: Config, split: Split, device: torch.device, dtype: torch.dtype
) -> Trajectory:
    """Train in this process.

    Args:
        config: of a run of one process, validated.
        split: of the global batch.
        device: where it computes.
        dtype: float32, bfloat16 with parameters in float32, or float64 throughout.
    """
    train = config.train
    assert train.data_seed is not None, "the config must have been validated"
    model = PlainModel(config, device, dtype)
    optimizer = _build_optimizer(config, model.masters)
    rates = [group["lr"] for group in optimizer.param_groups]
    dataset = config.data.build(train.seq_len, config.model.vocab_size, train.data_seed)
    if config.data.mask_documents:
        model.keep_documents_apart(dataset.end_labels_with_documents())
    stream = BatchStream(
        dataset.train,
        split.batch_size,
        split.microbatches,
        ranks=range(split.ranks),
        data_ranks=split.ranks,
        seed=train.data_seed,
    )
    result = Trajectory()
    result.add(0, "initial value of", model.masters.items())
    result.add(0, "buffer", model.buffers())
    with deterministic_kernels(train.deterministic, device.type):
        for step in range(1, train.steps + 1):
            ratio = learning_rate_ratio(config.optim, step - 1, train.steps)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * ratio
            batches = [
                (tokens_BT.to(device), labels_BT.to(device))
                for tokens_BT, labels_BT in stream.next_step()
            ]
            loss, grads = _backward(config, model, batches, split)
            result.add(step, "gradient of", grads.items())
            norm = _clip(grads, train.max_grad_norm)
            for name, master in model.masters.items():
                master.grad = grads[name]
            optimizer.step()
            result.losses.append(loss)
            result.norms.append(norm)
            result.add(step, "parameter", model.masters.items())
    result.add(train.steps, "buffer", model.buffers())
    return result


def _backward(
    config: Config,
    model: PlainModel,
    batches: list[tuple[Tensor, Tensor]],
    split: Split,
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss over valid labels, and its gradients."""
    valid = sum(int((labels_BT != IGNORED).sum()) for _, labels_BT in batches)
    loss_sum = 0.0
    of_ranks: list[dict[str, Tensor]] = [{} for _ in range(split.ranks)]
    if model.balance is not None:
        model.balance.begin_step(sum(tokens.numel() for tokens, _ in batches))
    model.load()
    exact = config.train.deterministic.reduces_each_microbatch
    sums: dict[str, Tensor] = {}
    for first in range(0, len(batches), split.ranks):
        at_once = batches[first : first + split.ranks]
        if model.balance is not None:
            model.balance.count(model, [tokens_BT for tokens_BT, _ in at_once])
        for (tokens_BT, labels_BT), of_rank in zip(at_once, of_ranks, strict=True):
            loss = _loss(config, model.logits(tokens_BT), labels_BT)
            mean = loss * torch.tensor(1 / valid, dtype=loss.dtype)
            if model.balance is None:
                mean.backward()
            else:
                with model.balance.gradients(loss.dtype):
                    mean.backward()
            loss_sum += loss.item()
            _add(of_rank, model.take_gradients())
        if exact:
            _add(sums, _sum_exactly(of_ranks))
            of_ranks = [{} for _ in of_ranks]
    for of_rank in of_ranks:
        _add(sums, of_rank)
    return loss_sum / valid, sums


def _loss(config: Config, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The loss summed over valid labels, in float32 or wider."""
    train = config.train
    logits_NV = logits_BTV.flatten(0, 1)
    if logits_NV.dtype is not torch.float64:
        logits_NV = logits_NV.float()
    labels_N = labels_BT.flatten()
    loss = F.cross_entropy(
        logits_NV,
        labels_N,
        ignore_index=IGNORED,
        label_smoothing=train.label_smoothing,
        reduction="sum",
    )
    if train.z_loss_coef:
        squares_N = logits_NV.logsumexp(-1).square()
        loss = loss + train.z_loss_coef * squares_N[labels_N != IGNORED].sum()
    return loss


def _add(sums: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    for name, grad in grads.items():
        if name in sums:
            sums[name] += grad
        else:
            sums[name] = grad.clone()


def _sum_exactly(of_ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sum over ranks in float64, rounded to the gradients' dtype."""
    return {
        name: sum(
            (of_rank[name].double() for of_rank in of_ranks),
            torch.zeros((), dtype=torch.float64, device=grad.device),
        ).to(grad.dtype)
        for name, grad in of_ranks[0].items()
    }


def _clip(grads: dict[str, Tensor], max_norm: float | None) -> float:
    """Scale gradients so that their norm is at most ``max_norm``; return the norm before."""
    norms = [
        torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads.values()
    ]
    norm = torch.stack(norms).square().sum().sqrt()
    dtype = next(iter(grads.values())).dtype
    norm = norm.to(dtype)
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads.values():
            grad.mul_(scale)
    return norm.item()


def _build_optimizer(
    config: Config, masters: dict[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """PyTorch's AdamW, or the run's own optimizer."""
    optim = config.optim
    if isinstance(optim, AdamWConfig) and optim.state_dtype is OptimStateDType.float32:
        groups = [
            {"params": [param], "weight_decay": optim.weight_decay * decays}
            for param in masters.values()
            for decays in [optim.weight_decay_on is WeightDecayOn.all or param.ndim > 1]
        ]
        return torch.optim.AdamW(
            groups,
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            **optim.implementation.arguments,
        )
    matrices = {name for name, param in masters.items() if param.ndim > 1}
    blocks = {name for name in masters if name.startswith("layers.")}
    return build_optimizer(optim, masters.items(), matrices, blocks)
