"""Base classes of all data: the ``data`` section of the configuration, and numbered samples of one
length.

A sample is a window of ``seq_len`` tokens; the label of each is the next token. Samples are looked
up by number, so any rank can start at any step; ``sampler`` decides the order.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import between
from fsdptoys.utils.options import Effect, check_options, option

from .content_sample import SampledFiles

# label of ignored positions, as in ``torch.nn.functional.cross_entropy``
IGNORE_INDEX = -100
MOST_WORKERS = 64  # background processes of a rank, each a Python interpreter

Tokens = NDArray[np.int64]


class Samples(ABC):
    """Numbered samples of one length."""

    @property
    def endless(self) -> bool:
        """Whether samples are interchangeable and inexhaustible: no epochs, no shuffling."""
        return False

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> tuple[Tokens, Tokens]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.read(index)

    @abstractmethod
    def read(self, index: int) -> tuple[Tokens, Tokens]:
        """Tokens and labels of one sample, each of shape (T,)."""


@dataclass(frozen=True)
class TextSample:
    """Text that the trained model continues."""

    prompt_T: Tokens
    tokens: int  # number to generate
    temperature: float  # divides the logits; 0 is greedy
    decode: Callable[[Tokens], str]


class TokenDataset(ABC):
    """Training and held-out samples."""

    train: Samples
    eval: Samples | None  # the held-out samples, if any
    fingerprint: str
    """Hash of everything that decides the training samples and their order; a run must not resume
    if it differs."""
    document_end: int | None = None  # the last id of every document; None if unknown
    # ``document_end`` where only answers have labels, else None
    answers_end: int | None = None
    # lowest loss that a model can reach, if known
    conditional_entropy_nats: float | None = None
    text_sample: TextSample | None = None  # sample to generate after training, if any

    def __init__(self, train: Samples, eval: Samples | None, fingerprint: str) -> None:
        self.train = train
        self.eval = eval
        self.fingerprint = fingerprint

    def sample_files(self) -> SampledFiles | None:
        """Read sampled blocks of the training files, if any; ConfigError if one cannot be read."""
        return None

    def end_labels_with_documents(self) -> int:
        """Ignore the label after each document's end, which is of another document; return the id
        of the end."""
        assert self.document_end is not None
        self.train = LabelsWithinDocuments(self.train, self.document_end)
        self.eval = (
            None
            if self.eval is None
            else LabelsWithinDocuments(self.eval, self.document_end)
        )
        self.fingerprint = hash_of(self.fingerprint, self.document_end)
        return self.document_end

    @property
    @abstractmethod
    def unigram_entropy_nats(self) -> float | None:
        """Loss of a model that knows only the token frequencies of the training part, of files the
        first 256 MiB."""


@dataclass
class LabelsWithinDocuments(Samples):
    """Samples with ``IGNORE_INDEX`` as the label after the end of a document."""

    samples: Samples
    document_end: int

    @property
    def endless(self) -> bool:
        """See ``Samples``."""
        return self.samples.endless

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Tokens, Tokens]:
        """See ``Samples``."""
        tokens_T, labels_T = self.samples[index]
        return tokens_T, np.where(tokens_T == self.document_end, IGNORE_INDEX, labels_T)


@dataclass(kw_only=True)
class DataConfig(ABC):
    """Settings of all data."""

    name: ClassVar[str]
    """The name after ``data=``."""
    reads_files: ClassVar[bool] = True
    """Whether samples are read from files, which takes time."""

    eval_fix: ClassVar[str] = "data.eval_fraction=0.05"
    """Override that holds a part out."""
    documents_fix: ClassVar[str] = ""
    """Override that names the id that ends a document, where it is unknown."""
    plain_texts: ClassVar[bool] = False
    """Whether texts were encoded by ``text_encoder``: without special ids around or within them."""

    workers: int = option(
        0,
        between(0, MOST_WORKERS),
        effect=Effect.none,
        alias="num_workers dataloader_num_workers",
    )
    """Processes on each rank that make batches ahead of the loop; 0 to make each batch in the
    loop."""
    mask_documents: bool = option(False, effect=Effect.training)
    """Restrict attention to the own document, and ignore the label after its end."""

    def __post_init__(self) -> None:
        check_options("data", self)

    @property
    @abstractmethod
    def has_eval(self) -> bool:
        """Whether a part is held out."""

    @property
    def knows_document_end(self) -> bool:
        """Whether the dataset will know the id that ends a document."""
        return True

    def find_tokenizer(self) -> str | None:
        """The tokenizer: ``bytes``, or the path of a ``tokenizer.json``; None if unknown,
        ConfigError if damaged."""
        return None

    def check_documents(self) -> None:
        """Refuse ``mask_documents`` for data without known ends of documents."""
        if self.mask_documents and not self.knows_document_end:
            fixes = filter(None, (self.documents_fix, "data.mask_documents=false"))
            raise ConfigError(
                "data.mask_documents=true needs the id that ends a document, which "
                f"data={self.name} does not know as set; set {' or '.join(fixes)}"
            )

    @abstractmethod
    def validate(self, seq_len: int, vocab_size: int) -> None:
        """Run the cheap checks, before any rank starts; a ConfigError names key, value and fix."""

    def prepare(self, seq_len: int, vocab_size: int) -> None:  # noqa: B027  # most data needs no preparation
        """Make the files that ``build`` reads: once on each node, before the process group, since
        it may take long."""

    @abstractmethod
    def build(self, seq_len: int, vocab_size: int, seed: int) -> TokenDataset:
        """Open the data; ``seed`` decides synthetic data, and is part of every fingerprint."""


def hash_of(*parts: object, contents: bytes = b"") -> str:
    """SHA-256, in hexadecimal, of plain values and bytes."""
    digest = hashlib.sha256(json.dumps(parts).encode())
    digest.update(contents)
    return digest.hexdigest()
