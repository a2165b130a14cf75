"""Tokenizers of trained models, for generation and evaluation: bytes, a tokenizer's file, or plain
ids.

A run's data defines the meaning of ids if it is text, and a Hugging Face folder does if it has a
``tokenizer.json``; otherwise the user names a tokenizer. Not covered: tokenizers in other files
(``tokenizer.model``).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line

from .byte_text import BYTES, decode_bytes, encode_bytes
from .chat_rows import MOST_LEVELS, BadRowError
from .chat_template import open_template
from .dataset_index import MOST_TOKENIZER_BYTES, TOKENIZER_FILE
from .text_encoder import explain_package_errors, read_tokenizer
from .tokenizer_settings import (
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOKENS_FILE,
    read_tokens,
    tokenizer_path,
)

TOKENIZER_FILES = (
    TOKENIZER_FILE,
    SETTINGS_FILE,
    TOKENS_FILE,
    "added_tokens.json",
    TEMPLATE_FILE,
    "generation_config.json",
)
CHOICE = (
    "--tokenizer bytes, --tokenizer ids, or --tokenizer with a folder that "
    "holds a tokenizer.json"
)


@dataclass(frozen=True)
class Tokenizer:
    """Converts between text and ids."""

    encode: Callable[[str], list[int]]
    """Ids of a text; ConfigError if it has none."""
    decode: Callable[[Sequence[int]], str]
    """Text of ids."""
    encode_chat: Callable[[str], list[int]] | None = None
    """Ids of a chat template's text, whose special tokens are themselves; None for plain ids."""
    is_bytes: bool = False
    """Whether ids 0 to 255 are bytes, as with ``data=text``."""
    has_bytes: bool = True
    """Whether ids stand for bytes of text."""

    def encode_file(self, content: bytes, path: str) -> list[int]:
        """Ids of a file; ConfigError if it must be UTF-8 and is not, or its text has no ids."""
        if self.is_bytes:
            return np.frombuffer(content, dtype=np.uint8).tolist()
        try:
            return self.encode(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path} holds no text in UTF-8 (byte {error.start}); write it in UTF-8"
            ) from error


def open_tokenizer(choice: str, vocab_size: int, *, plain: bool = False) -> Tokenizer:
    """Open ``bytes``, ``ids``, or a ``tokenizer.json`` or its folder; ConfigError if missing or
    unfit for the model.

    ``plain`` ignores a file's special ids, truncation and padding, as prepared data does.
    """
    if choice == "ids":
        return Tokenizer(
            _read_ids, lambda ids: " ".join(map(str, ids)), has_bytes=False
        )
    if choice == "bytes":
        if vocab_size < BYTES:
            raise ConfigError(
                f"--tokenizer bytes needs {BYTES} ids, and this model has {vocab_size}; write "
                "--tokenizer ids"
            )

        def encode_text(text: str) -> list[int]:
            return encode_bytes(text).tolist()

        return Tokenizer(encode_text, decode_bytes, encode_text, is_bytes=True)
    file = tokenizer_path(choice)
    missing = f"{file} is missing, which maps the ids to text; write {CHOICE}"
    reader, _ = read_tokenizer(
        file, str(file), "generate", "write --tokenizer ids", missing, plain=plain
    )

    def encode(text: str) -> list[int]:
        with explain_package_errors(f"{file} cannot turn the text into ids"):
            return list(reader.encode(text, add_special_tokens=not plain).ids)

    def decode(ids: Sequence[int]) -> str:
        with explain_package_errors(f"{file} cannot turn ids into text"):
            return str(reader.decode(list(ids)))

    def encode_chat(text: str) -> list[int]:
        reader.encode_special_tokens = False
        with explain_package_errors(f"{file} cannot turn the text into ids"):
            return list(reader.encode(text, add_special_tokens=False).ids)

    return Tokenizer(encode, decode, encode_chat)


def read_tokenizer_files(folder: str, key: str) -> dict[str, bytes]:
    """Name and content of the files that make up a Hugging Face folder's tokenizer; ConfigError if
    there is none."""
    root = Path(folder).expanduser()
    contents: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        try:
            contents[name] = read_regular(root / name, MOST_TOKENIZER_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"{root / name} cannot be read ({reason}); download it again"
            ) from error
    if TOKENIZER_FILE not in contents:
        raise ConfigError(
            f"{key}={folder} holds no {TOKENIZER_FILE}; name the folder of the model's tokenizer"
        )
    return contents


def find_token_ids(folder: Path) -> dict[str, int | list[int]]:
    """Ids of a tokenizer's begin, end and padding, under the names of transformers' configurations.

    A chat template's end of a turn is an end too, behind the tokenizer's own. ConfigError if a file
    cannot be read.
    """
    try:
        tree = parse_json(
            read_regular(folder / TOKENIZER_FILE, MOST_TOKENIZER_BYTES),
            max_depth=MOST_LEVELS,
        )
        ids = {
            str(token["content"]): int(token["id"]) for token in tree["added_tokens"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / TOKENIZER_FILE} lists no tokens ({one_line(error)}); download it again"
        ) from error
    tokens = read_tokens(folder)
    token_ids: dict[str, int | list[int]] = {
        f"{name}_id": ids[token]
        for name in ("bos_token", "eos_token", "pad_token")
        if (token := tokens.get(name)) is not None and token in ids
    }
    ends = [tokens.get("eos_token")]
    # no template, or one that needs other messages
    with suppress(ConfigError, BadRowError):
        ends.append(open_template(None, str(folder), "tokenizer", "none").turn("x")[1])
    end_ids = list(dict.fromkeys(ids[end] for end in ends if end in ids))
    return token_ids | (
        {"eos_token_id": end_ids[0] if len(end_ids) == 1 else end_ids}
        if end_ids
        else {}
    )


def _read_ids(text: str) -> list[int]:
    """Ids in decimal digits, separated by blanks."""
    for word in text.split():
        if not (word.isascii() and word.isdigit()):
            raise ConfigError(
                f"{word!r:.40} is no token id; write ids as in '17 4 1003', or another --tokenizer"
            )
    return [int(word) for word in text.split()]


def check_ids(ids: Sequence[int], vocab_size: int, owner: str) -> None:
    """Check that ids are below the model's vocabulary size; a ConfigError names the first that is
    not."""
    for position, token in enumerate(ids):
        if token >= vocab_size:
            raise ConfigError(
                f"{owner} has token {token} at position {position}, and the model's ids end at "
                f"{vocab_size - 1}; give the --tokenizer that it was trained with"
            )
