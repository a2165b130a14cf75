"""What every kind of data has: its part of the configuration, and numbered samples of one length.

A sample is a window of ``seq_len`` tokens with the token after each as its label. Samples are looked up by number and
never read in sequence, so that any rank can start at any step, and the order is somebody else's business (``stream``).
"""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError

IGNORE_INDEX = -100
"""Label of positions that do not count, as in ``torch.nn.functional.cross_entropy``."""

MOST_WORKERS = 64
"""Background processes of a rank; each holds a Python interpreter."""

Tokens = NDArray[np.int64]


class Samples(Protocol):
    """Numbered samples of one length."""

    endless: bool
    """Every sample is as good as any other and there are more than will be asked for: no epochs, no shuffling."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> tuple[Tokens, Tokens]:
        """Tokens and labels of one sample, each of shape (T,); a label of ``IGNORE_INDEX`` does not count."""


class TokenDataset(ABC):
    """Data that is ready to be read."""

    train: Samples
    """What the model learns from."""
    eval: Samples | None
    """The held-out part, or None."""
    fingerprint: str
    """Hash of what decides the training samples and their order: a checkpoint must not go on where it differs."""
    conditional_entropy_nats: float | None = None
    """Lowest loss that any model can reach, where it is known."""

    def __init__(self, train: Samples, eval: Samples | None, fingerprint: str) -> None:
        self.train = train
        self.eval = eval
        self.fingerprint = fingerprint

    @cached_property
    def unigram_entropy_nats(self) -> float | None:
        """Loss of a model that knows only how frequent each token of the training part is; computed at first use.

        Of files no more than the first 256 MiB of the training part are counted.
        """
        return self._unigram_entropy_nats()

    @abstractmethod
    def _unigram_entropy_nats(self) -> float | None:
        """Compute ``unigram_entropy_nats``."""


@dataclass(kw_only=True)
class DataConfig(ABC):
    """What every kind of data has."""

    name: ClassVar[str]
    """The word after ``data=``."""

    eval_fix: ClassVar[str] = "data.eval_fraction=0.05"
    """The override that holds a part out."""

    workers: int = 0
    """Processes on each rank that make batches ahead of the loop; 0 to make each when it is its turn."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        if not 0 <= self.workers <= MOST_WORKERS:
            raise ConfigError(
                f"data.workers={self.workers} must be at least 0 and at most {MOST_WORKERS}; "
                f"set data.workers={0 if self.workers < 0 else MOST_WORKERS}"
            )

    @property
    @abstractmethod
    def has_eval(self) -> bool:
        """Whether a part is held out."""

    @abstractmethod
    def validate(self, seq_len: int, vocab_size: int) -> None:
        """Check all that can be checked cheaply, before any worker starts.

        Args:
            seq_len: tokens a sample.
            vocab_size: the model's number of token ids.

        Raises:
            ConfigError: naming key, value and fix.
        """

    @abstractmethod
    def build(self, seq_len: int, vocab_size: int, seed: int) -> TokenDataset:
        """Open the data.

        Args:
            seq_len: tokens a sample.
            vocab_size: the model's number of token ids.
            seed: decides synthetic data, and is part of the fingerprint of all.

        Raises:
            ConfigError: naming key, value and fix.
        """


def hash_of(*parts: object, contents: bytes = b"") -> str:
    """SHA-256, in hexadecimal, of plain values and of bytes."""
    digest = hashlib.sha256(json.dumps(parts).encode())
    digest.update(contents)
    return digest.hexdigest()
