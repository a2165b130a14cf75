"""Tokenizers of trained models, for generation and evaluation: bytes, a tokenizer's file, or plain ids.

A run's data defines the meaning of ids if it is text, and a Hugging Face folder does if it has a ``tokenizer.json``;
otherwise the user names a tokenizer. Not covered: tokenizers in other files (``tokenizer.model``), chat templates.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fsdptoys.errors import ConfigError

from .byte_text import BYTES, decode_bytes, encode_bytes
from .dataset_index import TOKENIZER_FILE
from .text_encoder import explain_package_errors, read_tokenizer

CHOICE = "--tokenizer bytes, --tokenizer ids, or --tokenizer with a folder that holds a tokenizer.json"


class Tokenizer(ABC):
    """Converts between text and ids."""

    has_bytes = True  # whether ids stand for bytes of text

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text; ConfigError if it has none."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""

    def encode_file(self, content: bytes, path: str) -> list[int]:
        """Ids of a file; ConfigError if it is not UTF-8, or its text has no ids."""
        try:
            return self.encode(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} holds no text in UTF-8 (byte {error.start}); write it in UTF-8") from error


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes, as with ``data=text``."""

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return encode_bytes(text).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return decode_bytes(ids)

    def encode_file(self, content: bytes, path: str) -> list[int]:
        """See ``Tokenizer``; accepts any bytes."""
        return np.frombuffer(content, dtype=np.uint8).tolist()


class IdTokenizer(Tokenizer):
    """Text is ids in decimal digits, separated by blanks."""

    has_bytes = False

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        for word in text.split():
            if not (word.isascii() and word.isdigit()):
                raise ConfigError(f"{word!r:.40} is no token id; write ids as in '17 4 1003', or another --tokenizer")
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return " ".join(map(str, ids))


class FileTokenizer(Tokenizer):
    """A ``tokenizer.json``: the file or its folder; ``plain`` encodes text as prepared data is."""

    def __init__(self, path: Path, plain: bool) -> None:
        file = path / TOKENIZER_FILE if path.is_dir() else path
        missing = f"{file} is missing, which maps the ids to text; write {CHOICE}"
        self._reader = read_tokenizer(file, str(file), "generate", "write --tokenizer ids", missing, plain=plain)
        self._plain = plain
        self._file = file

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``; with the file's special ids around the text, unless plain."""
        with explain_package_errors(f"{self._file} cannot turn the text into ids"):
            return list(self._reader.encode(text, add_special_tokens=not self._plain).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``; without special ids."""
        with explain_package_errors(f"{self._file} cannot turn ids into text"):
            return str(self._reader.decode(list(ids)))


def open_tokenizer(choice: str, vocab_size: int, *, plain: bool = False) -> Tokenizer:
    """Open ``bytes``, ``ids``, or a ``tokenizer.json`` or its folder; ConfigError if missing or unfit for the model.

    ``plain`` ignores a file's special ids, truncation and padding, as prepared data does.
    """
    if choice == "ids":
        return IdTokenizer()
    if choice == "bytes":
        if vocab_size < BYTES:
            raise ConfigError(
                f"--tokenizer bytes needs {BYTES} ids, and this model has {vocab_size}; write --tokenizer ids"
            )
        return ByteTokenizer()
    return FileTokenizer(Path(choice).expanduser(), plain)


def check_ids(ids: Sequence[int], vocab_size: int, owner: str) -> None:
    """Check that ids are below the model's vocabulary size; a ConfigError names the first that is not."""
    for position, token in enumerate(ids):
        if token >= vocab_size:
            raise ConfigError(
                f"{owner} has token {token} at position {position}, and the model's ids end at {vocab_size - 1}; give "
                "the --tokenizer that it was trained with"
            )
