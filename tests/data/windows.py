"""Files of tokens, and the windows that a data set should cut them into."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from fsdptoys.data import Samples


def write_tokens(path: Path, count: int, dtype: str = "uint16", seed: int = 0) -> np.ndarray:
    limit = min(70_000, np.iinfo(dtype).max + 1)
    tokens = np.random.default_rng(seed).integers(0, limit, count).astype(dtype)
    tokens.tofile(path)
    return tokens


def assert_windows(samples: Samples, stream: np.ndarray, seq_len: int, stride: int = 1) -> None:
    """Compare every ``stride``-th sample, also after pickling, with its slice of the stream; check where they end."""
    assert len(samples) == (len(stream) - 1) // seq_len > 0
    for reader in (samples, pickle.loads(pickle.dumps(samples))):
        for index in range(0, len(samples), stride):
            tokens_T, labels_T = reader[index]
            window = stream[index * seq_len : (index + 1) * seq_len + 1].astype(np.int64)
            np.testing.assert_array_equal(tokens_T, window[:-1])
            np.testing.assert_array_equal(labels_T, window[1:])
            assert tokens_T.dtype == labels_T.dtype == np.int64
        for outside in (-1, len(samples)):
            with pytest.raises(IndexError):
                reader[outside]
