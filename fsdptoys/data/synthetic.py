"""A Markov source of known entropy, so that the lowest loss of a model is a formula.

Each token is one of the ``branching`` ids after the previous one (modulo the vocabulary), all
equally likely. So the lowest loss is log(branching) nats per token, and that of a model without
context log(vocab_size). A sample is a function of the seed and its number, made from NumPy's raw
Philox bits, which are stable across versions.
"""

import math
from dataclasses import dataclass

import numpy as np

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import at_least, between
from fsdptoys.utils.options import Effect, option

from .dataset import (
    IGNORE_INDEX,
    DataConfig,
    Samples,
    TokenDataset,
    Tokens,
    hash_of,
)

TRAIN_SAMPLES = 2**40  # more than any run takes
# part of the seed of a sample, so that no held-out sample is a training sample
TRAIN = 0
EVAL = 1
DOCUMENT_END = 0  # taken as the end of a document: about one token in vocab_size


@dataclass
class SyntheticConfig(DataConfig):
    """Tokens from a Markov source with known entropy."""

    name = "synthetic"
    reads_files = False
    eval_fix = "data.eval_samples=256"

    branching: int = option(8, at_least(1), effect=Effect.training)
    """Equally likely successors of each id; the lowest loss is log(branching) nats."""
    ragged: bool = option(False, effect=Effect.training)
    """Draw each sequence's valid labels from 1 to seq_len, uniformly; token 0 pads the rest."""
    eval_samples: int = option(256, between(0, TRAIN_SAMPLES), effect=Effect.none)
    """Sequences held out; 0 for none."""

    @property
    def has_eval(self) -> bool:
        """Whether any samples are held out."""
        return self.eval_samples > 0

    def validate(self, seq_len: int, vocab_size: int) -> None:
        """Check that the vocabulary has enough successors."""
        if self.branching > vocab_size:
            raise ConfigError(
                f"data.branching={self.branching} must be at most model.vocab_size={vocab_size}; "
                f"set data.branching={min(8, vocab_size)}"
            )

    def build(self, seq_len: int, vocab_size: int, seed: int) -> "SyntheticDataset":
        """Build the source."""
        self.validate(seq_len, vocab_size)
        return SyntheticDataset(self, seq_len, vocab_size, seed)


class SyntheticDataset(TokenDataset):
    """The source's samples and its entropies."""

    def __init__(
        self, config: SyntheticConfig, seq_len: int, vocab_size: int, seed: int
    ) -> None:
        train = MarkovSamples(config, seq_len, vocab_size, seed, TRAIN)
        held_out = MarkovSamples(config, seq_len, vocab_size, seed, EVAL)
        fingerprint = hash_of(
            config.name, config.branching, config.ragged, seq_len, vocab_size, seed
        )
        super().__init__(train, held_out if config.has_eval else None, fingerprint)
        self.conditional_entropy_nats = math.log(config.branching)
        self.vocab_size = vocab_size
        self.document_end = DOCUMENT_END

    @property
    def unigram_entropy_nats(self) -> float:
        """That of equally likely tokens."""
        return math.log(self.vocab_size)


@dataclass
class MarkovSamples(Samples):
    """Samples of the source, each from its own random numbers."""

    config: SyntheticConfig
    seq_len: int
    vocab_size: int
    seed: int
    split: int

    @property
    def endless(self) -> bool:
        """Whether these are the training samples."""
        return self.split == TRAIN

    def __len__(self) -> int:
        return TRAIN_SAMPLES if self.endless else self.config.eval_samples

    def read(self, index: int) -> tuple[Tokens, Tokens]:
        """See ``Samples``."""
        seed = np.random.SeedSequence(self.seed, spawn_key=(self.split, index))
        # The remainder of 64 random bits is uniform to within vocab_size / 2**64.
        bits = np.random.Philox(seed).random_raw(self.seq_len + 2)
        steps = (bits[:-1] % self.config.branching).astype(np.int64) + 1
        steps[0] = int(bits[0]) % self.vocab_size
        chain = np.cumsum(steps) % self.vocab_size
        tokens_T = chain[:-1]
        labels_T = chain[1:].copy()
        if self.config.ragged:
            valid = 1 + int(bits[-1]) % self.seq_len
            tokens_T[valid + 1 :] = 0
            labels_T[valid:] = IGNORE_INDEX
        return tokens_T, labels_T
