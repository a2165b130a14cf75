"""``data=hf``: train from text, JSON lines, Parquet or Arrow, which are tokenized at the first use.

The result of ``fsdptoys data prepare`` goes into a cache folder named by a hash of the tokenizer,
the options and the files' paths, sizes and times; from then on it is ``data=prepared``. The
launcher prepares before it starts any rank; under torchrun the first rank of each node does, and
the others wait for its lock.
"""

import dataclasses
from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdptoys.device import available_cores
from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import at_least, between
from fsdptoys.utils.options import Effect, option
from fsdptoys.utils.text import print_status

from .dataset import DataConfig, TokenDataset
from .dataset_index import (
    INDEX_FILE,
    UnusableFolderError,
    kept_tokenizer,
    read_index,
)
from .document_reader import find_sources
from .packing import Packing
from .prepare import MOST_PROCESSES, cache_folder, prepare_folder
from .prepared import PreparedConfig
from .progress import Display
from .request import Request
from .text_encoder import ByteEncoder, Encoder, open_encoder
from .tokenizer_settings import tokenizer_path

KEY_LENGTH = 24


@dataclass(kw_only=True)
class TokenizedConfig(DataConfig):
    """Files that are tokenized at the first use; subclasses define the records."""

    files: list[str] = option([], effect=Effect.training)
    """Paths or globs of .txt, .jsonl, .parquet, .arrow (also .gz, .zst), or folders of datasets."""
    tokenizer: str = option("bytes", effect=Effect.training)
    """bytes, or a tokenizer.json or the folder that holds it."""
    document_end: str | None = option(None, effect=Effect.training)
    """Token that ends a document; null for the tokenizer's own."""
    eval_fraction: float = option(
        0.0, between(0, 1, below=True), effect=Effect.training
    )
    """Share of the documents held out, by a hash of their text; 0 for none."""
    packing: Packing = option(Packing.none, effect=Effect.training)
    """How documents become samples."""
    processes: int = option(
        -1, at_least(1, MOST_PROCESSES, other=-1), effect=Effect.none
    )
    """Processes that tokenize; -1 for one a core."""
    cache: str | None = option(None, effect=Effect.none)
    """Folder of prepared data; null for fsdptoys/data in $XDG_CACHE_HOME or ~/.cache."""

    @property
    def has_eval(self) -> bool:
        """Whether a share of the documents is held out; once prepared, whether it has any
        document."""
        if not self.eval_fraction:
            return False
        with suppress(ConfigError):  # files or tokenizer are missing
            return self._prepared(self._request()).has_eval
        return True

    @property
    def eval_fix(self) -> str:  # type: ignore[override]
        """A higher share."""
        return (
            f"data.eval_fraction above {self.eval_fraction}"
            if self.eval_fraction
            else "data.eval_fraction=0.01"
        )

    def find_tokenizer(self) -> str:
        """The configured file, or else its copy in the cache."""
        if self.tokenizer == "bytes" or tokenizer_path(self.tokenizer).is_file():
            return self.tokenizer
        # A folder's name is a hash of the tokenizer among others, and its index names that
        # tokenizer.
        with suppress(ConfigError):
            request = self._request_of(ByteEncoder())
            for path in sorted(cache_folder(self.cache).glob(f"*/{INDEX_FILE}")):
                folder = str(path.parent)
                with suppress(ConfigError):  # a damaged folder, maybe of other data
                    index = read_index(folder, folder)
                    fingerprint = request.fingerprint_with(
                        index.tokenizer_sha256, index.document_end
                    )
                    if path.parent.name == fingerprint[:KEY_LENGTH]:
                        copy = kept_tokenizer(folder, index)
                        if copy is not None:
                            return str(copy)
        raise ConfigError(
            f"data.tokenizer={self.tokenizer} does not exist, and the cache has no copy; restore it"
        )

    def validate(self, seq_len: int, vocab_size: int) -> None:
        """Check files, tokenizer, vocabulary and, unless missing or damaged, the prepared
        folder."""
        request = self._request()
        if request.encoder.vocab_size > vocab_size:
            raise ConfigError(
                f"data.tokenizer={self.tokenizer} has ids up to "
                f"{request.encoder.vocab_size - 1}, over model.vocab_size={vocab_size}; set "
                f"model.vocab_size={request.encoder.vocab_size} or the model's tokenizer"
            )
        if _is_prepared(request):
            self._prepared(request).validate(seq_len, vocab_size)

    def prepare(self, seq_len: int, vocab_size: int) -> None:
        """Prepare the folder, unless the cache has it undamaged."""
        request = self._request()
        if not _is_prepared(request):
            display = Display("preparing the data")
            index = prepare_folder(request, display.show, print_status, reuse=True)
            print_status(
                f"{index.documents('train'):,} documents to train on, prepared in {request.folder}"
            )
        prepared = self._prepared(request)
        prepared.validate(seq_len, vocab_size)
        prepared.prepare(seq_len, vocab_size)

    def build(self, seq_len: int, vocab_size: int, seed: int) -> TokenDataset:
        """Open the prepared folder."""
        return self._prepared(self._request()).build(seq_len, vocab_size, seed)

    def _request(self) -> Request:
        if not self.files:
            raise ConfigError(
                "data.files=[] names no file; set data.files=[corpus/*.jsonl]"
            )
        request = self._request_of(self._open_encoder())
        return dataclasses.replace(
            request, folder=cache_folder(self.cache) / request.fingerprint[:KEY_LENGTH]
        )

    def _request_of(self, encoder: Encoder) -> Request:
        """The request without its folder."""
        sources = find_sources("data.files", self.files)
        processes = available_cores() if self.processes == -1 else self.processes
        return Request(
            "data.files",
            sources,
            encoder,
            Path(),
            self._field,
            self.eval_fraction,
            processes=processes,
        )

    @property
    @abstractmethod
    def _field(self) -> str:
        """Field of a record that holds the document."""

    @abstractmethod
    def _open_encoder(self) -> Encoder:
        """The encoder of the documents; ConfigError if tokenizer or template are missing."""

    def _prepared(self, request: Request) -> PreparedConfig:
        prepared = PreparedConfig(
            folder=str(request.folder), packing=self.packing, cache=self.cache
        )
        prepared.known_as = "data.files"
        return prepared


@dataclass
class HFConfig(TokenizedConfig):
    """Text files, JSON lines, Parquet, Arrow, or a folder of datasets, tokenized at the first
    use."""

    name = "hf"
    plain_texts = True

    text_field: str = option("text", effect=Effect.training)
    """Field of a record that holds the text."""

    @property
    def _field(self) -> str:
        return self.text_field

    def _open_encoder(self) -> Encoder:
        owner = f"data.tokenizer={self.tokenizer}"
        return open_encoder(
            self.tokenizer, self.document_end, owner, "data.document_end"
        )


def _is_prepared(request: Request) -> bool:
    """Whether the cache has the folder, with a valid index and files of the right sizes;
    ConfigError if unreadable."""
    try:
        read_index(str(request.folder), str(request.folder))
    except UnusableFolderError:
        return False
    return True
