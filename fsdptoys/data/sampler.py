"""The order of the training samples: a pure function of the seed and the number of samples seen.

The samples of a step, over all ranks and micro-batches, are consecutive positions of a seeded
permutation, a new one each epoch; an epoch that ends within a step continues with the next
permutation. Row r of a micro-batch takes position (micro-batch · ranks + rank) · batch_size + r of
the step: while the product of ranks, micro-batches and batch size stays the same, so does every
step, and a checkpoint needs one number for all ranks.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdptoys.errors import ConfigError

from .content_sample import SampledFiles
from .dataset import IGNORE_INDEX, Samples
from .loader import StepPrefetcher, StepReader
from .permutation import ORDER


class ChangedDataError(ConfigError):
    """The samples or their order are not those of the checkpoint."""


class BatchStream:
    """Batches of this process's ranks, step after step.

    A step has ``microbatches`` of ``batch_size`` sequences on each rank. ``ranks`` are those of
    this process, out of ``range(data_ranks)``, which share a step's samples. ``workers`` background
    processes read ahead, started with the first step. A checkpoint is refused if its data has
    another ``fingerprint``, or if the sampled contents of ``files`` have changed since.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        microbatches: int,
        ranks: range,
        data_ranks: int,
        seed: int,
        fingerprint: str = "",
        workers: int = 0,
        files: SampledFiles | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self._files = files
        self.samples_seen = 0  # samples of all steps so far, over all ranks
        self._reader = StepReader(
            samples, batch_size, microbatches, ranks, data_ranks, seed
        )
        self.global_batch = self._reader.stride  # sequences of a step, over all ranks
        self._order = None if samples.endless else ORDER
        self._workers = workers
        self._ahead: StepPrefetcher | None = None

    def next_step(self) -> list[tuple[Tensor, Tensor]]:
        """Take the next step: ``(tokens_BT, labels_BT)``, int64 on the CPU, for each micro-batch
        and own rank.

        ConfigError if the data can no longer be read, LostWorkerError if a worker has ended.
        """
        if self._workers:
            if self._ahead is None:
                self._ahead = StepPrefetcher(
                    self._reader, self.samples_seen, self._workers
                )
            step = self._ahead.next()
        else:
            step = self._reader.read(self.samples_seen)
        self.samples_seen += self.global_batch
        return [(tokens_BT, labels_BT) for tokens_BT, labels_BT in step]

    def sample_numbers(self) -> list[Tensor]:
        """Numbers of the next step's samples, counted over the run: int64 (B,) for each micro-batch
        and own rank."""
        return self._reader.numbers(self.samples_seen)

    def close(self) -> None:
        """End the workers, if any; the next step would start new ones."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from, the same on every rank."""
        state = {
            "samples": self.samples_seen,
            "fingerprint": self.fingerprint,
            "order": self._order,
        }
        return (
            state
            if self._files is None
            else state | {"files": self._files.state_dict()}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples seen before; ConfigError if the data or its order has
        changed."""
        if state.get("order") != self._order:
            raise ChangedDataError(
                "the checkpoint's data came in the order "
                f"{state.get('order') or 'of an earlier version'}, and this version's is "
                f"{self._order}, so the order cannot continue; finish the run with the version "
                "that began it, or start a new run"
            )
        if self._files is not None:
            self._files.check_unchanged(state.get("files"))
        if state["fingerprint"] != self.fingerprint:
            raise ChangedDataError(
                f"data has changed since the checkpoint (fingerprint {self.fingerprint[:12]} "
                f"instead of {state['fingerprint'][:12]}), so the order cannot continue; restore "
                "data.*, train.seq_len, train.data_seed and the files, or start a new run"
            )
        self.close()  # drop the batches prefetched from the old position
        self.samples_seen = int(state["samples"])


def eval_batches(
    samples: Samples, batch_size: int, batches: int, rank: int, data_ranks: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one rank's share of the first ``batches * data_ranks * batch_size`` samples, in order,
    as ``next_step``.

    Every rank gets the same number of batches, so that collectives stay aligned. If the samples end
    early, there are fewer batches, the last padded with rows whose labels are all ``IGNORE_INDEX``.
    """
    needed = -(-len(samples) // (data_ranks * batch_size))
    for batch in range(min(batches, needed)):
        first = (batch * data_ranks + rank) * batch_size
        rows = [
            samples[index]
            for index in range(first, min(first + batch_size, len(samples)))
        ]
        blank_T = np.zeros_like(rows[0][0] if rows else samples[0][0])
        rows += [(blank_T, np.full_like(blank_T, IGNORE_INDEX))] * (
            batch_size - len(rows)
        )
        tokens_BT, labels_BT = torch.from_numpy(np.stack(rows, axis=1))
        yield tokens_BT, labels_BT
