"""A step's batches and counts on the device, in one copy.

All micro-batches are copied before the first forward, from pinned memory, so that the host does not wait: it goes on to
launch the forward. They take 16 bytes a token of the rank's share of the global batch until the step ends, half a
mebibyte for 32,768 tokens. The host copies them into pinned memory itself, while the device computes the step before;
workers (``data.workers``) cannot, since they have no device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdptoys.device import Device
from fsdptoys.loss.objective import IGNORE_INDEX

from .document_flops import DocumentCounter


class StepInputs(NamedTuple):
    """Inputs of this process for one step, on the device."""

    microbatches: Sequence[tuple[Tensor, Tensor]]
    """(tokens_BT, labels_BT) of each."""
    counts: Tensor
    """Valid labels, tokens of the documents, then the counts of ``DocumentCounter``, if any: int64."""
    samples: Sequence[Tensor]
    """Numbers of each micro-batch's samples, where layers draw by them: int64 (B,)."""


def upload_inputs(
    microbatches: Sequence[tuple[Tensor, Tensor]],
    documents: DocumentCounter | None,
    device: Device,
    answers_end: int | None = None,
    samples: Sequence[Tensor] = (),
) -> StepInputs:
    """Copy a step's micro-batches, their counts and ``samples`` to the device; on a CPU they stay where they are.

    ``answers_end`` is the id that ends documents and fills rows, of data where only answers have labels. Otherwise
    labels stand for tokens.
    """
    valid = sum(int((labels_BT != IGNORE_INDEX).sum()) for _, labels_BT in microbatches)
    tokens = valid
    if answers_end is not None:
        tokens = sum(tokens_without_padding(tokens_BT, answers_end) for tokens_BT, _ in microbatches)
    counts = [valid, tokens]
    counts += documents.count(microbatches) if documents else []
    counted = torch.tensor(counts)
    if not device.is_accelerator:
        return StepInputs(microbatches, counted, samples)
    parts = [tensor for pair in microbatches for tensor in pair]
    # Counts come last: kernels may be specialized on the alignment of the tokens.
    placed = device.upload(torch.cat([*(part.flatten() for part in parts), *samples, counted]))
    sizes = [part.numel() for part in (*parts, *samples)]
    *placed_parts, on_device = placed.split([*sizes, len(counts)])
    views = iter(flat.view(part.shape) for flat, part in zip(placed_parts, parts, strict=False))
    return StepInputs(list(zip(views, views, strict=True)), on_device, placed_parts[len(parts) :])


def tokens_without_padding(tokens_BT: Tensor, document_end: int) -> int:
    """Number of tokens up to the first of the ids ``document_end`` that fill the end of each row, and including it."""
    padding_BT = (tokens_BT == document_end).flip(1).cumprod(1)
    return tokens_BT.numel() - int((padding_BT.sum(1) - 1).clamp(min=0).sum())
