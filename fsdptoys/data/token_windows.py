"""Cut a stream of files into windows, with a part held out.

Sample i covers positions i·T to i·T + T, both included: inputs never overlap, and the last label of
one sample is the first input of the next. The held-out part is the end of the stream, or a stream
of its own; no window is in both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError

from .content_sample import SampledFiles
from .dataset import IGNORE_INDEX, Samples, TokenDataset, Tokens, hash_of
from .token_stream import TokenStream

# start of the training part, in which token frequencies are counted
ENTROPY_BYTES = 256 * 2**20
CHUNK_TOKENS = 2**22


@dataclass
class WindowSamples(Samples):
    """Disjoint windows of the positions ``start`` to ``stop`` (excluded) of a stream.

    ``learned`` has 1 for every id that counts as a label, else 0; None if all do.
    """

    stream: TokenStream
    start: int
    stop: int
    seq_len: int
    learned: TokenStream | None = None

    def __len__(self) -> int:
        return max(0, self.stop - self.start - 1) // self.seq_len

    def read(self, index: int) -> tuple[Tokens, Tokens]:
        """See ``Samples``."""
        start = self.start + index * self.seq_len
        window = self.stream.read(start, self.seq_len + 1).astype(np.int64)
        labels_T = window[1:]
        if self.learned is not None:
            labels_T = np.where(
                self.learned.read(start + 1, self.seq_len), labels_T, IGNORE_INDEX
            )
        return window[:-1], labels_T

    def require_one(self, part: str, fix: str) -> None:
        """Check that there is at least one sample; ``part`` and ``fix`` (an imperative) are for the
        message."""
        tokens = self.stop - self.start
        if len(self) == 0:
            shorter = f"set train.seq_len={tokens - 1} or " if tokens > 1 else ""
            raise ConfigError(
                f"train.seq_len={self.seq_len} needs {self.seq_len + 1} tokens for one sequence, "
                f"but {part} has {tokens}; {shorter}{fix}"
            )


class LearnedWindows(Samples):
    """The windows that have a label, in order.

    Args:
        windows: with ``learned``, which is read once here.
    """

    def __init__(self, windows: WindowSamples) -> None:
        assert windows.learned is not None
        self.windows = windows
        step = max(1, CHUNK_TOKENS // windows.seq_len)
        numbers = []
        for first in range(0, len(windows), step):
            count = min(step, len(windows) - first)
            learned = windows.learned.read(
                windows.start + first * windows.seq_len + 1, count * windows.seq_len
            )
            numbers.append(
                first
                + np.flatnonzero(learned.reshape(count, windows.seq_len).any(axis=1))
            )
        self._numbers = np.concatenate(numbers) if numbers else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, index: int) -> tuple[Tokens, Tokens]:
        """See ``Samples``."""
        return self.windows[int(self._numbers[index])]


def split_windows(
    stream: TokenStream, seq_len: int, eval_fraction: float
) -> tuple[WindowSamples, WindowSamples | None]:
    """Cut a stream into training windows and, from its last ``eval_fraction``, held-out ones (None
    if that is 0)."""
    boundary = len(stream) - int(len(stream) * eval_fraction)
    train = WindowSamples(stream, 0, boundary, seq_len)
    train.require_one("the training part of data.files", "add files to data.files")
    if not eval_fraction:
        return train, None
    held_out = WindowSamples(stream, boundary, len(stream), seq_len)
    held_out.require_one(
        f"the part held out by data.eval_fraction={eval_fraction}",
        "set data.eval_fraction higher, or to 0 for none",
    )
    return train, held_out


class FileDataset(TokenDataset):
    """Samples of files.

    ``windows`` are the training windows of each source, and ``weights`` their shares.
    """

    def __init__(
        self,
        train: Samples,
        eval: Samples | None,
        fingerprint: str,
        windows: Sequence[WindowSamples],
        weights: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__(train, eval, fingerprint)
        self.windows = windows
        self.weights = weights

    def sample_files(self) -> SampledFiles:
        """See ``TokenDataset``."""
        files = [file for windows in self.windows for file in windows.stream.files]
        return SampledFiles(files[0].key, [file.source for file in files])

    @property
    def unigram_entropy_nats(self) -> float:
        """See ``TokenDataset``."""
        total = math.fsum(self.weights)
        shares_V = [
            weight / total * token_shares(windows, len(self.windows))
            for weight, windows in zip(self.weights, self.windows, strict=True)
        ]
        return entropy_nats(np.sum(shares_V, axis=0))


def window_dataset(
    kind: str, train: WindowSamples, eval: WindowSamples | None, seed: int
) -> FileDataset:
    """Windows of plain files as a dataset."""
    stream = train.stream
    sources = [file.source for file in stream.files]
    files = [[source.name, source.size_bytes] for source in sources]
    settings = (kind, stream.dtype.str, train.stop, train.seq_len, seed, files)
    fingerprint = hash_of(*settings, contents=stream.content_sample())
    return FileDataset(train, eval, fingerprint, [train])


def token_shares(windows: WindowSamples, parts: int) -> NDArray[np.float64]:
    """Frequencies of labels, shape (V,), in the first ``ENTROPY_BYTES / parts`` of some windows."""
    stream = windows.stream
    counts = np.zeros(stream.vocab_size, dtype=np.int64)
    stop = min(
        windows.stop, windows.start + ENTROPY_BYTES // parts // stream.dtype.itemsize
    )
    for start in range(windows.start, stop, CHUNK_TOKENS):
        chunk = stream.read(start, min(CHUNK_TOKENS, stop - start))
        if windows.learned is not None:
            chunk = chunk[windows.learned.read(start, len(chunk)) == 1]
        counts += np.bincount(chunk, minlength=stream.vocab_size)
    return counts / max(1, counts.sum())


def entropy_nats(shares_V: NDArray[np.float64]) -> float:
    """Entropy of a distribution, shape (V,), in nats."""
    shares_V = shares_V[shares_V > 0]
    return float(-(shares_V * np.log(shares_V)).sum())
