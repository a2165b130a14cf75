"""A step's batches and counts on the device, in one copy.

All micro-batches are copied before the first forward, from pinned memory, so that the host does not
wait: it goes on to launch the forward. They take 16 bytes a token of the rank's share of the global
batch until the step ends, half a mebibyte for 32,768 tokens. The host copies them into pinned
memory itself, while the device computes the step before; workers (``data.workers``) cannot, since
they have no device.

Under document masking a token attends to its own document only, which takes fewer FLOPs than causal
attention over the full sequence; an MFU computed from the latter would be too high. So each rank
counts the attended keys.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.data import BatchStream, check_dataset, eval_batches
from fsdptoys.device import Device
from fsdptoys.loss.objective import IGNORE_INDEX
from fsdptoys.models import DecoderModel, attended_keys
from fsdptoys.register import registered

from .parallelize import ParallelModel


class StepInputs(NamedTuple):
    """Inputs of this process for one step, on the device."""

    microbatches: Sequence[tuple[Tensor, Tensor]]
    """(tokens_BT, labels_BT) of each."""
    counts: Tensor
    """Valid labels, tokens of the documents, then the counts of ``DocumentCounter``, if any:
    int64."""
    samples: Sequence[Tensor]
    """Numbers of each micro-batch's samples, where layers draw by them: int64 (B,)."""
    wait_seconds: float = 0.0
    """Time that the device has waited for the batches."""


class StepData:
    """This process's share of every global batch.

    Args:
        config: of the run.
        parallel_model: the model; it gets the id that ends documents, if documents are kept apart.
    """

    def __init__(self, config: Config, parallel_model: ParallelModel) -> None:
        strategy = parallel_model.strategy
        train = config.train
        assert train.data_seed is not None, "the config must have been validated"
        axes = strategy.mesh_axes
        local = strategy.local_data_ranks
        stage, rank_in_stage = divmod(strategy.world.rank, axes.stage_ranks)
        self.data_rank, sharing_rank = divmod(rank_in_stage, axes.sharing)
        self.owns_token_count = sharing_rank == stage == 0
        """Whether this rank counts the tokens of its sequences, which it may share with others."""
        self.dataset = config.data.build(
            train.seq_len, config.model.vocab_size, train.data_seed
        )
        if config.data.name in registered("data"):
            check_dataset(
                self.dataset, config.data, train.seq_len, config.model.vocab_size
            )
        self.documents: DocumentCounter | None = None
        """Counts what tokens attend to; None where documents are not kept apart."""
        if config.data.mask_documents:
            end = self.dataset.end_labels_with_documents()
            self.documents = DocumentCounter(parallel_model.model, end, train.seq_len)
        self.batches = BatchStream(
            self.dataset.train,
            train.batch_size,
            train.grad_accum,
            ranks=range(self.data_rank * local, (self.data_rank + 1) * local),
            data_ranks=strategy.data_ranks,
            seed=train.data_seed,
            fingerprint=self.dataset.fingerprint,
            workers=config.data.workers,
            files=self.dataset.sample_files(),
        )
        self.global_tokens = self.batches.global_batch * train.seq_len
        """Tokens of a global batch, with or without labels."""
        self._train = train
        self._device = strategy.world.device
        self._eval_ranks = strategy.world.world_size // (axes.pp * axes.sharing)
        self._numbers_samples = parallel_model.samples is not None

    def eval_batches(self) -> Iterable[tuple[Tensor, Tensor]]:
        """This process's share of the first batches of the held-out split."""
        assert self.dataset.eval is not None
        train = self._train
        return eval_batches(
            self.dataset.eval,
            train.batch_size,
            train.eval_batches,
            self.data_rank,
            self._eval_ranks,
        )

    def next_step(self, wait_of: Callable[[float], float]) -> StepInputs:
        """Copy the micro-batches of the next step to the device, with what this rank counts in
        them."""
        started = time.perf_counter()
        numbers = self.batches.sample_numbers() if self._numbers_samples else []
        batches = self.batches.next_step()
        wait_seconds = wait_of(time.perf_counter() - started)
        inputs = upload_inputs(
            batches, self.documents, self._device, self.dataset.answers_end, numbers
        )
        if not self.owns_token_count:
            inputs.counts.zero_()
        return inputs._replace(wait_seconds=wait_seconds)


def upload_inputs(
    microbatches: Sequence[tuple[Tensor, Tensor]],
    documents: "DocumentCounter | None",
    device: Device,
    answers_end: int | None = None,
    samples: Sequence[Tensor] = (),
) -> StepInputs:
    """Copy a step's micro-batches, their counts and ``samples`` to the device; on a CPU they stay
    where they are.

    ``answers_end`` is the id that ends documents and fills rows, of data where only answers have
    labels. Otherwise labels stand for tokens.
    """
    valid = sum(int((labels_BT != IGNORE_INDEX).sum()) for _, labels_BT in microbatches)
    tokens = valid
    if answers_end is not None:
        tokens = sum(
            tokens_without_padding(tokens_BT, answers_end)
            for tokens_BT, _ in microbatches
        )
    counts = [valid, tokens]
    counts += documents.count(microbatches) if documents else []
    counted = torch.tensor(counts)
    if not device.is_accelerator:
        return StepInputs(microbatches, counted, samples)
    parts = [tensor for pair in microbatches for tensor in pair]
    # Counts come last: kernels may be specialized on the alignment of the tokens.
    placed = device.upload(
        torch.cat([*(part.flatten() for part in parts), *samples, counted])
    )
    sizes = [part.numel() for part in (*parts, *samples)]
    *placed_parts, on_device = placed.split([*sizes, len(counts)])
    views = iter(
        flat.view(part.shape) for flat, part in zip(placed_parts, parts, strict=False)
    )
    return StepInputs(
        list(zip(views, views, strict=True)), on_device, placed_parts[len(parts) :]
    )


def tokens_without_padding(tokens_BT: Tensor, document_end: int) -> int:
    """Number of tokens up to the first of the ids ``document_end`` that fill the end of each row,
    and including it."""
    padding_BT = (tokens_BT == document_end).flip(1).cumprod(1)
    return tokens_BT.numel() - int((padding_BT.sum(1) - 1).clamp(min=0).sum())


class DocumentCounter:
    """Counts attended keys per step and turns them into FLOPs per token; turns the model's document
    masking on."""

    def __init__(self, model: DecoderModel, document_end: int, seq_len: int) -> None:
        model.document_end = document_end
        with torch.device("meta"):
            # Ranks may have a part of the given one
            self._model: DecoderModel = model.config.build()
        self._document_end = document_end
        self._seq_len = seq_len

    def count(self, microbatches: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
        """Return the number of tokens in a rank's micro-batches, then per chunk length twice their
        attended keys."""
        keys = [
            sum(
                attended_keys(tokens_BT, self._document_end, chunk_len)
                for tokens_BT, _ in microbatches
            )
            for chunk_len in self._model.chunk_lens
        ]
        return [sum(tokens_BT.numel() for tokens_BT, _ in microbatches), *keys]

    def flops_per_token(self, counts: Sequence[int]) -> float:
        """FLOPs of forward and backward per token, from the results of ``count`` summed over
        ranks."""
        tokens, *keys = counts
        means = {
            length: twice / 2 / max(1, tokens)
            for length, twice in zip(self._model.chunk_lens, keys, strict=True)
        }
        return self._model.flops_per_token_of_documents(self._seq_len, means)
