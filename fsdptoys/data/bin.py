"""``data=bin``: files of token ids without a header, as nanoGPT's ``train.bin``.

Ids are little-endian, 16 or 32 bits, of any tokenizer. Several files are one stream, in the given
order (a glob's files by path), and a sample may cross from one into the next.
"""

import os
from dataclasses import dataclass
from enum import Enum

import numpy as np

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import between
from fsdptoys.utils.options import Effect, option

from .dataset import DataConfig
from .source_files import match_files, require_content, without_repeats
from .token_files import BinaryFile
from .token_stream import TokenStream
from .token_windows import FileDataset, WindowSamples, split_windows, window_dataset


class TokenDType(Enum):
    """dtype of a token in a file."""

    uint16 = "uint16"
    """Vocabularies up to 65,536."""
    uint32 = "uint32"


@dataclass
class BinConfig(DataConfig):
    """Token ids from binary files."""

    name = "bin"
    documents_fix = "data.document_end=ID"

    files: list[str] = option([], effect=Effect.training)
    """Paths or globs (``**`` for any depth)."""
    dtype: TokenDType = option(TokenDType.uint16, effect=Effect.training)
    """dtype of a token, in all files."""
    document_end: int | None = option(None, effect=Effect.training)
    """The last id of every document; null if there is none."""
    eval_files: list[str] = option([], effect=Effect.training)
    """Paths or globs of held-out files."""
    eval_fraction: float = option(
        0.0, between(0, 1, below=True), effect=Effect.training
    )
    """Share of ``files`` held out, at their end; 0 for none. Excludes ``eval_files``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_files and self.eval_fraction:
            raise ConfigError(
                f"data.eval_fraction={self.eval_fraction} and data.eval_files exclude each other; "
                "set data.eval_fraction=0 or data.eval_files=[]"
            )

    @property
    def has_eval(self) -> bool:
        """Whether files or a share of them are held out."""
        return bool(self.eval_files) or self.eval_fraction > 0

    @property
    def knows_document_end(self) -> bool:
        """Whether the id that ends a document is configured."""
        return self.document_end is not None

    def validate(self, seq_len: int, vocab_size: int) -> None:
        """Check that the files exist and are long enough, and that the first MiB of each fits the
        vocabulary."""
        if self.document_end is not None and not 0 <= self.document_end < vocab_size:
            raise ConfigError(
                f"data.document_end={self.document_end} is no id below "
                f"model.vocab_size={vocab_size}; set data.document_end to the id that ends "
                "documents in the files, or to null"
            )
        for part in self._open(seq_len, vocab_size):
            if part is not None:
                part.stream.check_heads()

    def build(self, seq_len: int, vocab_size: int, seed: int) -> FileDataset:
        """Open the files."""
        train, held_out = self._open(seq_len, vocab_size)
        dataset = window_dataset(self.name, train, held_out, seed)
        dataset.document_end = self.document_end
        return dataset

    def _open(
        self, seq_len: int, vocab_size: int
    ) -> tuple[WindowSamples, WindowSamples | None]:
        if not self.files:
            raise ConfigError(
                "data.files=[] names no file; set data.files=[path/to/train.bin]"
            )
        stream = self._open_stream("data.files", self.files, vocab_size)
        train, held_out = split_windows(stream, seq_len, self.eval_fraction)
        if self.eval_files:
            eval_stream = self._open_stream(
                "data.eval_files", self.eval_files, vocab_size
            )
            train_paths = {os.path.realpath(file.source.path) for file in stream.files}
            for file in eval_stream.files:
                if os.path.realpath(file.source.path) in train_paths:
                    raise ConfigError(
                        f"{file.owner} is also in data.files, so that it would "
                        "not be held out; take it out of one of them"
                    )
            held_out = WindowSamples(eval_stream, 0, len(eval_stream), seq_len)
            held_out.require_one("data.eval_files", "add files to data.eval_files")
        return train, held_out

    def _open_stream(
        self, key: str, patterns: list[str], vocab_size: int
    ) -> TokenStream:
        files = [file for pattern in patterns for file in match_files(key, pattern)]
        dtype = np.dtype(self.dtype.value).newbyteorder("<")
        for file in files:
            require_content(key, file)
            if file.size_bytes % dtype.itemsize:
                raise ConfigError(
                    f"{key}=[{file.path}] has {file.size_bytes} bytes, which is not a multiple "
                    f"of the {dtype.itemsize} bytes of data.dtype={self.dtype.value}; write it "
                    "again or set data.dtype to that of the file"
                )
        return TokenStream(
            [BinaryFile(key, file, dtype) for file in without_repeats(files)],
            vocab_size,
        )
