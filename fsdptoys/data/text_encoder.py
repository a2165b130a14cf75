"""Encoders of text while data is prepared: bytes of UTF-8, or a file of the package ``tokenizers``.

No special ids are added, and text that looks like one ("<|endoftext|>" in an article on tokenizers)
becomes ordinary ids, so that the end-of-document id occurs nowhere else. For bytes it is 0, as in
``data=text``; zero bytes of a text are dropped.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line

from .byte_text import BYTES, SEPARATOR
from .dataset_index import DTYPES, MOST_TOKENIZER_BYTES
from .documents import TEXTS, Records
from .tokenizer_settings import SETTINGS_FILE, read_settings, token_text, tokenizer_path

USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Candidates for the end of a document, if neither the user nor the folder names one."""
SEPARATORS = (*USUAL_ENDS, "<pad>", "<|pad|>", "[PAD]", "<unk>")
"""Candidates for the id between conversations, after the folder's own end."""


Located = tuple[NDArray[Any], NDArray[Any]]


class Encoded(NamedTuple):
    """A document's ids, without its end."""

    text: str  # decides whether the document is held out
    ids: NDArray[Any]
    # for each id whether it counts as a label; None if all do
    learned: NDArray[Any] | None = None
    loss: str | None = None  # a sentence on what the text lacks of the document
    ends: bool = False  # whether an answer ends with a special token


class Encoder(ABC):
    """Turns documents into ids; pickled once for each process."""

    name: str
    sha256: str  # of everything that decides the ids
    file: bytes | None = None  # content of the tokenizer's file, if it has one
    vocab_size: int
    document_end: int
    ids_are_bytes = False
    """Whether ids are the bytes of UTF-8 without zeros, so that a long text can be encoded in
    parts."""
    records: Records = TEXTS
    """Reads documents."""
    marks_learned = False
    """Whether only some ids are learned."""
    special_tokens: Sequence[str] = ()
    """Texts of the special tokens, the lowest id first."""
    # Of how conversations become texts, if documents are conversations
    template_sha256: str | None = None

    @property
    def dtype(self) -> str:
        """Smallest dtype for the ids, as the index names it."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    @abstractmethod
    def encode_documents(self, documents: Sequence[Any]) -> list[Encoded | str]:
        """Documents as ``records`` reads them, or a sentence on each that is of no use."""


class TextEncoder(Encoder):
    """Turns texts into ids."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Ids of each text in the smallest dtype, without the end of the document."""

    @abstractmethod
    def encode_with_offsets(self, texts: Sequence[str]) -> Iterator["Located"]:
        """Ids of each text, and their first and last (excluded) character, shape (ids, 2)."""

    def encode_documents(self, documents: Sequence[str]) -> list[Encoded | str]:
        """See ``Encoder``."""
        # JSON can hold half of a surrogate pair, which UTF-8 cannot.
        texts = [
            text if text.isascii() else text.encode("utf-8", "replace").decode()
            for text in documents
        ]
        all_ids = self.encode(texts)
        for ids in all_ids:
            if (ids == self.document_end).any():
                raise ConfigError(
                    f"a document holds id {self.document_end}, which is to end documents; name a "
                    "special token of the tokenizer for the end"
                )
        return [Encoded(text, ids) for text, ids in zip(texts, all_ids, strict=True)]


class ByteEncoder(TextEncoder):
    """Ids 1 to 255 are bytes of UTF-8, and 0 ends a document."""

    name = "bytes"
    sha256 = hashlib.sha256(b"bytes of UTF-8 without zero").hexdigest()
    vocab_size = BYTES
    document_end = SEPARATOR
    ids_are_bytes = True

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """See ``TextEncoder``."""
        raw = (text.encode() for text in texts)
        return [np.frombuffer(content.replace(b"\0", b""), np.uint8) for content in raw]

    def encode_with_offsets(self, texts: Sequence[str]) -> Iterator[Located]:
        """See ``Encoder``."""
        for text, ids in zip(texts, self.encode(texts), strict=True):
            widths = [len(character.encode().replace(b"\0", b"")) for character in text]
            starts = np.repeat(np.arange(len(text)), widths)
            yield ids, np.stack([starts, starts + 1], axis=1)


class FileEncoder(TextEncoder):
    """A ``tokenizer.json``: the file or its folder.

    ``end`` is the token that ends a document; None for the folder's own, or one of ``USUAL_ENDS``.
    ``owner`` is the tokenizer as the user named it, and ``end_owner`` the option for ``end``, for
    messages. ``writes`` is for conversations: whether their template may write a token. Special
    tokens in a text are then themselves, and the end is one that the template does not write: the
    folder's own, a usual one, or another special token.
    """

    def __init__(
        self,
        choice: str,
        end: str | None,
        owner: str,
        end_owner: str,
        *,
        writes: Callable[[str], bool] | None = None,
    ) -> None:
        file = tokenizer_path(choice)
        missing = (
            f"{owner} names no existing tokenizer.json ({file}); name one, its "
            "folder, or bytes"
        )
        instead = "take bytes for the tokenizer"
        self._reader, self.file = read_tokenizer(
            file, owner, "data", instead, missing, plain=True
        )
        self._owner = owner
        self.name = file.name
        ids = self._reader.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise ConfigError(
                f"{owner} has an empty vocabulary ({file}); download it again or name another "
                "tokenizer"
            )
        self.vocab_size = 1 + max(ids)
        self._texts = writes is None
        self._set_reader()
        # processes share the work, and may fork
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        added = sorted(self._reader.get_added_tokens_decoder().items())
        special = [
            token.content for _, token in added if token.special and token.content
        ]
        self.special_tokens = special
        if not end:
            own = (
                token_text(read_settings(file.parent / SETTINGS_FILE).get("eos_token"))
                or ""
            )
            usual = (
                [own] if own else [token for token in USUAL_ENDS if self._knows(token)]
            )
            if writes is not None:
                candidates = (own, *SEPARATORS, *special)
                usual = [
                    token
                    for token in candidates
                    if token in special and not writes(token)
                ]
            end = next(iter(usual), None)
        if end is None or not self._knows(end):
            mistake = (
                f"has no token {end!r}"
                if end
                else "names no token that ends a document"
            )
            raise ConfigError(
                f"{owner} {mistake}; set {end_owner} to one of its tokens"
            )
        self.document_end = int(self._reader.token_to_id(end))
        self.sha256 = hashlib.sha256(self.file + end.encode()).hexdigest()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._set_reader()

    def _set_reader(self) -> None:
        self._reader.encode_special_tokens = self._texts  # not part of the pickle

    def _knows(self, token: str) -> bool:
        return self._reader.token_to_id(token) is not None

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """See ``Encoder``."""
        with explain_package_errors(f"{self._owner} cannot turn a document into ids"):
            encodings = self._reader.encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        return [np.array(encoding.ids, DTYPES[self.dtype]) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> Iterator[Located]:
        """See ``Encoder``."""
        with explain_package_errors(f"{self._owner} cannot turn a document into ids"):
            encodings = self._reader.encode_batch(list(texts), add_special_tokens=False)
        for encoding in encodings:
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            yield np.array(encoding.ids, DTYPES[self.dtype]), offsets


@contextmanager
def explain_package_errors(
    failure: str, fix: str = "name another tokenizer, or repair this one"
) -> Iterator[None]:
    """Report errors of the package ``tokenizers``, and its panics, as ConfigError "FAILURE
    (REASON); FIX"."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except BaseException as error:
        # PanicException is not an Exception, and its module cannot be imported.
        if (
            not isinstance(error, Exception)
            and type(error).__module__ != "pyo3_runtime"
        ):
            raise
        raise ConfigError(
            f"{failure} ({one_line(error) or type(error).__name__}); {fix}"
        ) from None


def read_tokenizer(
    file: Path, owner: str, extra: str, instead: str, missing: str, *, plain: bool
) -> tuple[Any, bytes]:
    """Read a ``tokenizers.Tokenizer``, and its file, for ``owner``, the tokenizer as the user named
    it.

    ``extra`` of this project installs the package, and ``instead`` is the alternative, an
    imperative; ``missing`` is the sentence for a missing file. ``plain`` ignores special tokens in
    the text, and the file's truncation and padding.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"{owner} needs the package tokenizers, which is not installed; pip install -e "
            f"'.[{extra}]', or {instead}"
        ) from error
    if not file.is_file():
        raise ConfigError(missing)
    try:
        content = read_regular(file, MOST_TOKENIZER_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"{file} cannot be read ({reason}); restore it") from error
    with explain_package_errors(
        f"{file} cannot be read as a tokenizer", "download it again"
    ):
        reader = Tokenizer.from_buffer(content)
    if plain:
        reader.no_truncation()
        reader.no_padding()
        reader.encode_special_tokens = True
    return reader, content


def open_encoder(
    choice: str,
    end: str | None,
    owner: str,
    end_owner: str,
    *,
    writes: Callable[[str], bool] | None = None,
) -> TextEncoder:
    """Open the encoder ``bytes`` or a ``FileEncoder``; ConfigError if it does not exist."""
    if choice == "bytes":
        if end is not None:
            raise ConfigError(
                f"{end_owner} names a token, and bytes have none but 0 for the end; leave it out"
            )
        return ByteEncoder()
    return FileEncoder(choice, end, owner, end_owner, writes=writes)
