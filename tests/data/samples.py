"""Samples that are numbers, and windows of tokens."""

import pickle

import numpy as np
import pytest

from fsdptoys.data import Samples

SEQ_LEN = 4


class NumberedSamples:
    """Every token of a sample is its number, counted from ``first``, so that batches show their
    samples."""

    def __init__(self, count: int, endless: bool = False, first: int = 0) -> None:
        self.count = count
        self.endless = endless
        self.first = first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return np.full(SEQ_LEN, self.first + index), np.full(
            SEQ_LEN, self.first + index + 1
        )


def assert_windows(
    samples: Samples, stream: np.ndarray, seq_len: int, stride: int = 1
) -> None:
    """Compare every ``stride``-th sample, also after pickling, with its slice of the stream; check
    where they end."""
    assert len(samples) == (len(stream) - 1) // seq_len > 0
    for reader in (samples, pickle.loads(pickle.dumps(samples))):
        for index in range(0, len(samples), stride):
            tokens_T, labels_T = reader[index]
            window = stream[index * seq_len : (index + 1) * seq_len + 1].astype(
                np.int64
            )
            np.testing.assert_array_equal(tokens_T, window[:-1])
            np.testing.assert_array_equal(labels_T, window[1:])
            assert tokens_T.dtype == labels_T.dtype == np.int64
        for outside in (-1, len(samples)):
            with pytest.raises(IndexError):
                reader[outside]
