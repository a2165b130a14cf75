"""``data=text``: text files as bytes, token ids 0 to 255, without a tokenizer.

Documents are ordered by a hash of their names, so that the held-out end of the stream is a random
sample, with one zero byte between them. ``stdlib`` is the source of the running Python's standard
library: about 12 MB of text without a download, though it depends on Python's version.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import at_least, between
from fsdptoys.utils.options import Effect, option

from .dataset import DataConfig, TextSample, Tokens
from .source_files import (
    STDLIB,
    SourceFile,
    match_files,
    stdlib_files,
    without_repeats,
)
from .token_files import BinaryFile
from .token_stream import TokenStream
from .token_windows import FileDataset, split_windows, window_dataset

BYTES = 256  # ids of a byte-level vocabulary
SEPARATOR = 0  # byte between two documents, rare in text


@dataclass
class TextConfig(DataConfig):
    """Bytes of text files."""

    name = "text"

    files: list[str] = option([STDLIB], effect=Effect.training)
    """Paths or globs (``**`` for any depth); ``stdlib`` is the source of Python's standard
    library."""
    eval_fraction: float = option(
        0.05, between(0, 1, below=True), effect=Effect.training
    )
    """Share of the bytes held out: whole files, and part of the one at the cut; 0 for none."""
    sample_tokens: int = option(300, between(0, 2**20), effect=Effect.none)
    """Tokens that the trained model generates after the prompt; 0 for no sample."""
    sample_prompt: str = option("def read(self, size=-1):", effect=Effect.none)
    """Start of the sample."""
    sample_temperature: float = option(0.85, at_least(0), effect=Effect.none)
    """Divides the logits before sampling; 0 is greedy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample_tokens and not self.sample_prompt:
            raise ConfigError(
                "data.sample_prompt='' gives the model nothing to continue; "
                "set data.sample_prompt='def read(self, size=-1):'"
            )

    @property
    def has_eval(self) -> bool:
        """Whether a share of the bytes is held out."""
        return self.eval_fraction > 0

    def find_tokenizer(self) -> str:
        """``bytes``."""
        return "bytes"

    def validate(self, seq_len: int, vocab_size: int) -> None:
        """Check that the files exist and are long enough, and that a byte fits the vocabulary."""
        split_windows(self._open(vocab_size), seq_len, self.eval_fraction)

    def build(self, seq_len: int, vocab_size: int, seed: int) -> FileDataset:
        """Open the files."""
        train, held_out = split_windows(
            self._open(vocab_size), seq_len, self.eval_fraction
        )
        dataset = window_dataset(self.name, train, held_out, seed)
        dataset.document_end = SEPARATOR
        if self.sample_tokens:
            prompt_T = encode_bytes(self.sample_prompt)
            dataset.text_sample = TextSample(
                prompt_T, self.sample_tokens, self.sample_temperature, decode_bytes
            )
        return dataset

    def _open(self, vocab_size: int) -> TokenStream:
        if vocab_size < BYTES:
            raise ConfigError(
                f"model.vocab_size={vocab_size} must be at least {BYTES} for data=text, one id a "
                f"byte; set model.vocab_size={BYTES}"
            )
        if not self.files:
            raise ConfigError(
                f"data.files=[] names no file; set data.files=[{STDLIB}] or "
                "data.files=[path/to/*.txt]"
            )
        files: list[SourceFile] = []
        for pattern in self.files:
            files += (
                stdlib_files()
                if pattern == STDLIB
                else match_files("data.files", pattern)
            )
        # Empty files, such as many an __init__.py, are no documents.
        documents = [file for file in without_repeats(files) if file.size_bytes]
        documents.sort(key=lambda file: hashlib.sha256(os.fsencode(file.name)).digest())
        byte = np.dtype(np.uint8)
        return TokenStream(
            [BinaryFile("data.files", document, byte) for document in documents],
            BYTES,
            SEPARATOR,
        )


def encode_bytes(text: str) -> Tokens:
    """Bytes of a text in UTF-8, shape (T,)."""
    return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(
        np.int64
    )


def decode_bytes(tokens: Sequence[int] | Tokens) -> str:
    """Text of UTF-8 bytes; invalid ids and bytes become U+FFFD."""
    tokens_T = np.asarray(tokens, dtype=np.int64)
    never_in_utf8 = 0xFF
    in_range = (tokens_T >= 0) & (tokens_T < BYTES)
    return (
        np.where(in_range, tokens_T, never_in_utf8)
        .astype(np.uint8)
        .tobytes()
        .decode("utf-8", errors="replace")
    )
