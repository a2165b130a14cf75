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

from .content_sample import SampledFiles

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
    document_end: int | None = None
    """The id that is the last of every document; None where there is none, or nobody said which."""
    conditional_entropy_nats: float | None = None
    """Lowest loss that any model can reach, where it is known."""

    def sample_files(self) -> SampledFiles | None:
        """Read sampled blocks of the files that decide the training samples; None where there are no files.

        Raises:
            ConfigError: if a file cannot be read.
        """
        return None

    def __init__(self, train: Samples, eval: Samples | None, fingerprint: str) -> None:
        self.train = train
        self.eval = eval
        self.fingerprint = fingerprint

    def end_labels_with_documents(self) -> int:
        """Have no label for the first token of a document, which nothing before it in its document foretells.

        Returns:
            The id that ends a document.
        """
        assert self.document_end is not None
        self.train = LabelsWithinDocuments(self.train, self.document_end)
        self.eval = None if self.eval is None else LabelsWithinDocuments(self.eval, self.document_end)
        self.fingerprint = hash_of(self.fingerprint, self.document_end)
        return self.document_end

    @cached_property
    def unigram_entropy_nats(self) -> float | None:
        """Loss of a model that knows only how frequent each token of the training part is; computed at first use.

        Of files no more than the first 256 MiB of the training part are counted.
        """
        return self._unigram_entropy_nats()

    @abstractmethod
    def _unigram_entropy_nats(self) -> float | None:
        """Compute ``unigram_entropy_nats``."""


class LabelsWithinDocuments:
    """Samples without the labels that follow the end of a document."""

    def __init__(self, samples: Samples, document_end: int) -> None:
        self.samples = samples
        self.endless = samples.endless
        self.document_end = document_end

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tokens, Tokens]:
        tokens_T, labels_T = self.samples[index]
        return tokens_T, np.where(tokens_T == self.document_end, IGNORE_INDEX, labels_T)


@dataclass(kw_only=True)
class DataConfig(ABC):
    """What every kind of data has."""

    name: ClassVar[str]
    """The word after ``data=``."""
    reads_files: ClassVar[bool] = True
    """Whether samples are read from files, which takes time."""

    eval_fix: ClassVar[str] = "data.eval_fraction=0.05"
    """The override that holds a part out."""
    documents_fix: ClassVar[str] = ""
    """The override that tells which id ends a document, where that is not known."""
    plain_texts: ClassVar[bool] = False
    """Whether texts became ids as ``encoding`` has it: nothing put around them, nothing in them special."""

    workers: int = 0
    """Processes on each rank that make batches ahead of the loop; 0 to make each when it is its turn."""
    mask_documents: bool = False
    """Let each document of a sequence see nothing but itself, and leave out the label after its end."""

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

    @property
    def tells_documents(self) -> bool:
        """Whether the dataset will know which id ends a document."""
        return True

    def find_tokenizer(self) -> str | None:
        """What the ids mean: ``bytes``, or the path of a ``tokenizer.json``; None where nothing that is left says it.

        Raises:
            ConfigError: if what says it cannot be read, or is not what it was.
        """
        return None

    def check_documents(self) -> None:
        """Refuse to keep documents apart where nobody knows them.

        Raises:
            ConfigError: naming key, value and fix.
        """
        if self.mask_documents and not self.tells_documents:
            raise ConfigError(
                f"data.mask_documents=true must know which id ends a document, which data={self.name} does not tell as "
                f"set; set {self.documents_fix} or data.mask_documents=false"
            )

    @abstractmethod
    def validate(self, seq_len: int, vocab_size: int) -> None:
        """Check all that can be checked cheaply, before any worker starts.

        Args:
            seq_len: tokens a sample.
            vocab_size: the model's number of token ids.

        Raises:
            ConfigError: naming key, value and fix.
        """

    def prepare(self, seq_len: int, vocab_size: int) -> None:  # noqa: B027  # most kinds have nothing to make
        """Make what ``build`` reads, where that takes long: once on each machine, before any rank joins the others.

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
