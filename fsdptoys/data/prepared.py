"""``data=prepared``: folders made by ``fsdptoys data prepare``, one or several mixed by weight
(``mixture``).

A split's shards are one stream, cut into windows of ``seq_len`` that may cross from one document
into the next, or packed into rows of whole documents (``packing``). Shards are mapped, not read;
each rank or worker keeps up to ``MOST_MAPS`` maps open. Truncating a mapped file kills the run
(SIGBUS): make a new folder instead.
"""

import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError
from fsdptoys.utils.options import Effect, option
from fsdptoys.utils.text import print_status

from .content_sample import SampledFiles
from .dataset import DataConfig, Samples, TokenDataset, hash_of
from .dataset_index import DTYPES, LEARNED_DTYPE, Index, kept_tokenizer, read_index
from .mixture import MixedHeldOut, MixedSamples, Pattern
from .packing import PackedSamples, Packing, pack_rows
from .permutation import ORDER
from .prepare import cache_folder
from .text_encoder import ByteEncoder
from .token_files import FileStream, SourceFile
from .token_windows import LearnedWindows, WindowSamples, entropy_nats, token_shares

MOST_MAPS = 256
"""Shards of all sources mapped at a time; each map takes a file descriptor, of which a process may
have 1024."""


@dataclass(frozen=True)
class Fixes:
    """Ends of error messages; ``data=hf`` has others."""

    more_text: str = "prepare more text"
    hold_out_less: str = "prepare it with a lower --eval-fraction"
    hold_out_more: str = "prepare it with a higher --eval-fraction"
    restore: str = "restore it, or prepare the folder again from the same text"


@dataclass
class PreparedConfig(DataConfig):
    """Folders of tokens made by fsdptoys data prepare, one or several mixed."""

    name = "prepared"
    eval_fix = "data.folder to one that was prepared with --eval-fraction 0.01"
    plain_texts = True
    known_as = ""
    """The folder's name in messages, if not its path; not a setting, as ``fixes``."""
    fixes = Fixes()

    folder: str | None = option(None, effect=Effect.training)
    """The folder; null if several are mixed."""
    sources: list[str] = option([], effect=Effect.training)
    """Folders to mix, prepared with the same tokenizer."""
    weights: list[float] = option([], effect=Effect.training)
    """Shares of the samples of each source; [] for shares by size."""
    packing: Packing = option(Packing.none, effect=Effect.training)
    """How documents become samples."""
    cache: str | None = option(None, effect=Effect.none)
    """Folder for packed rows; null for fsdptoys/data in $XDG_CACHE_HOME or ~/.cache."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder is not None and self.sources:
            raise ConfigError(
                f"data.folder={self.folder} and data.sources=[{','.join(self.sources)}] exclude "
                "each other; set data.folder=null or data.sources=[]"
            )
        if self.weights and len(self.weights) != len(self.sources):
            raise ConfigError(
                f"data.weights has {len(self.weights)} numbers for the {len(self.sources)} "
                "folders of data.sources; give one for each, or data.weights=[] for shares by "
                "size"
            )
        for weight in self.weights:
            if not (math.isfinite(weight) and weight > 0):
                raise ConfigError(
                    f"data.weights has {weight}, which must be above 0; leave the source out "
                    "that is to give nothing"
                )
        places = [os.path.realpath(os.path.expanduser(source)) for source in self.sources]
        for number, place in enumerate(places):
            if place in places[:number]:
                raise ConfigError(
                    f"data.sources has {self.sources[number]} twice; give it a higher weight "
                    "instead"
                )

    @property
    def has_eval(self) -> bool:
        """Whether every folder has a held-out part."""
        return all(index.of("eval") for _, _, index in self._read())

    def find_tokenizer(self) -> str | None:
        """The copy in the first folder that has one."""
        for _, folder, index in self._read():
            if index.tokenizer_sha256 == ByteEncoder.sha256:
                return "bytes"
            kept = kept_tokenizer(folder, index)
            if kept is not None:
                return str(kept)
        return None

    def validate(self, seq_len: int, vocab_size: int) -> None:
        """Check that the folders are complete, compatible, long enough and fit the vocabulary; and
        the weights."""
        parts = self._open(seq_len, vocab_size)
        Pattern(self._shares(parts))

    def prepare(self, seq_len: int, vocab_size: int) -> None:
        """Pack documents into rows, unless the cache has them, and say how many sequences have
        nothing to learn."""
        for part in self._open_packed(seq_len, vocab_size):
            if part.left_out:
                share = f"{part.left_out:,} of {len(part.windows):,}"
                print_status(f"left out {share} sequences of {part.owner}, which have no answer")

    def build(self, seq_len: int, vocab_size: int, seed: int) -> "PreparedDataset":
        """Map the folders."""
        parts = self._open_packed(seq_len, vocab_size)
        return PreparedDataset(parts, self._shares(parts), seq_len, seed, self.packing, self.fixes)

    def _shares(self, parts: Sequence["Part"]) -> list[float]:
        return self.weights or [float(len(part.train)) or 1.0 for part in parts]

    def _open_packed(self, seq_len: int, vocab_size: int) -> list["Part"]:
        parts = self._open(seq_len, vocab_size)
        for part in parts:
            if self.packing is Packing.best_fit:
                part.pack(cache_folder(self.cache), seq_len)
            else:
                part.keep_learned()
        return parts

    def _read(self) -> list[tuple[str, str, Index]]:
        """Name in messages, path and index of each folder."""
        if self.folder is not None:
            named = [(self.known_as or f"data.folder={self.folder}", self.folder)]
        else:
            named = [(f"data.sources=[{source}]", source) for source in self.sources]
        if not named:
            raise ConfigError(
                "data=prepared needs a folder that fsdptoys data prepare has made; set "
                "data.folder=FOLDER, or data.sources=[FOLDER,FOLDER]"
            )
        # The configuration does not name a folder of the cache, so its errors must.
        return [
            (owner, folder, read_index(folder, folder if self.known_as else owner))
            for owner, folder in named
        ]

    def _open(self, seq_len: int, vocab_size: int) -> list["Part"]:
        found = self._read()
        parts = [
            Part(self, *each, seq_len, vocab_size, max(1, MOST_MAPS // len(found)))
            for each in found
        ]
        first, *others = parts
        own = first.index
        for part in others:
            index = part.index
            same_file = (
                index.tokenizer_file_sha256 is not None
                and index.tokenizer_file_sha256 == own.tokenizer_file_sha256
            )
            if same_file and index.document_end != own.document_end:
                raise ConfigError(
                    f"{part.owner} ends documents with id {index.document_end}, and "
                    f"{first.owner} with id {own.document_end}; prepare one of them again with "
                    "the token of the other (--document-end)"
                )
            if (index.tokenizer_sha256, index.document_end) != (
                own.tokenizer_sha256,
                own.document_end,
            ):
                raise ConfigError(
                    f"{part.owner} was prepared with another tokenizer ({index.tokenizer}) than "
                    f"{first.owner} ({own.tokenizer}), so their ids do not mean the same; "
                    "prepare one of them again"
                )
        return parts


class Part:
    """One folder's samples: windows, which ``pack`` replaces by rows.

    ConfigError if its ids do not fit the vocabulary, or a split is shorter than a window.
    """

    def __init__(
        self,
        config: PreparedConfig,
        owner: str,
        folder: str,
        index: Index,
        seq_len: int,
        vocab_size: int,
        maps: int,
    ) -> None:
        self.owner = owner
        self.fixes = config.fixes
        self.folder = folder
        self.index = index
        if index.vocab_size > vocab_size:
            raise ConfigError(
                f"{owner} has ids up to {index.vocab_size - 1} (of {index.tokenizer}), over "
                f"model.vocab_size={vocab_size}; set model.vocab_size={index.vocab_size} or "
                "prepare it with the model's tokenizer"
            )
        train = self._windows("train", seq_len, vocab_size, maps)
        held_out = self._windows("eval", seq_len, vocab_size, maps)
        if train is None:
            raise ConfigError(
                f"{owner} holds no document to train on; {config.fixes.hold_out_less}"
            )
        if config.packing is Packing.none:
            train.require_one(f"the training part of {owner}", config.fixes.more_text)
            if held_out is not None:
                held_out.require_one(f"the held-out part of {owner}", config.fixes.hold_out_more)
        self.windows = train
        self.left_out = 0
        """Training windows without a learned token."""
        self.train: Samples = train
        self.eval: Samples | None = held_out

    def keep_learned(self) -> None:
        """Leave out windows in which nothing is learned."""
        if not self.index.has_learned:
            return
        train = LearnedWindows(self.windows)
        if not len(train):
            raise ConfigError(
                f"{self.owner} has no answer in its {len(self.windows)} training sequences; "
                "prepare rows with answers"
            )
        self.train, self.left_out = train, train.left_out
        if isinstance(self.eval, WindowSamples):
            self.eval = LearnedWindows(self.eval)
            if not len(self.eval):
                raise ConfigError(
                    f"{self.owner} has no answer in its held-out part; {self.fixes.hold_out_more}"
                )

    def pack(self, cache: Path, seq_len: int) -> None:
        """Replace windows by rows of whole documents."""
        self.train = self._rows(cache, "train", self.windows, seq_len)
        if isinstance(self.eval, WindowSamples):
            self.eval = self._rows(cache, "eval", self.eval, seq_len)

    def _rows(self, cache: Path, split: str, windows: WindowSamples, seq_len: int) -> PackedSamples:
        rows = pack_rows(
            cache, self.folder, self.index, split, seq_len, print_status, windows.learned
        )
        return PackedSamples(
            windows.stream, rows, seq_len, self.index.document_end, windows.learned
        )

    def _windows(
        self, split: str, seq_len: int, vocab_size: int, maps: int
    ) -> WindowSamples | None:
        if not self.index.of(split):
            return None
        stream = self._stream(MappedStream, split, 0, DTYPES[self.index.dtype], vocab_size, maps)
        learned = None
        if self.index.has_learned:
            learned = self._stream(LearnedStream, split, 2, LEARNED_DTYPE, 2, maps)
        return WindowSamples(stream, 0, len(stream), seq_len, learned)

    def _stream(
        self,
        kind: "type[MappedStream]",
        split: str,
        file: int,
        dtype: "np.dtype[Any]",
        values: int,
        maps: int,
    ) -> "MappedStream":
        """One of the files of every shard; its items are below ``values``."""
        root, files = Path(self.folder).expanduser(), []
        for shard in self.index.of(split):
            name, count, _ = shard.files()[file]
            files.append(SourceFile(str(root / name), name, count * dtype.itemsize))
        stream = kind(self.owner.partition("=")[0], files, dtype, values)
        stream.most_maps = maps
        return stream


class MappedStream(FileStream):
    """Tokens of mapped files; each is mapped at its first read."""

    most_maps = MOST_MAPS
    _maps: "OrderedDict[int, NDArray[Any]] | None" = None

    def _read_file(self, index: int, offset: int, count: int) -> NDArray[Any]:
        tokens = self._map(index)[offset : offset + count]
        self.check_tokens(index, offset, tokens)
        return tokens

    def _map(self, index: int) -> NDArray[Any]:
        if self._maps is None:
            self._maps = OrderedDict()
        found = self._maps.get(index)
        if found is not None:
            self._maps.move_to_end(index)
            return found
        file = self.files[index]
        try:
            found = np.memmap(file.path, self.dtype, "r", shape=(self.file_tokens[index],)).view(
                np.ndarray
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.key}=[{file.path}] can no longer be read ({error}); restore it or change "
                f"{self.key}"
            ) from error
        self._maps[index] = found
        if len(self._maps) > self.most_maps:
            self._maps.popitem(last=False)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_maps"}


class LearnedStream(MappedStream):
    """For each token, 1 if it counts as a label, else 0."""

    def check_tokens(self, index: int, offset: int, tokens: NDArray[Any]) -> None:
        """Check that there are only zeros and ones."""
        if len(tokens) and int(tokens.max()) > 1:
            raise ConfigError(
                f"{self.key}=[{self.files[index].path}] has {int(tokens.max())}, where 0 and 1 "
                "say which tokens are learned; restore it, or prepare the folder again"
            )


class PreparedDataset(TokenDataset):
    """Samples of one or several mixed folders."""

    def __init__(
        self,
        parts: Sequence[Part],
        weights: Sequence[float],
        seq_len: int,
        seed: int,
        packing: Packing,
        fixes: Fixes,
    ) -> None:
        contents = [packing.value, *(part.index.fingerprint("train") for part in parts)]
        contents += [f"{part.left_out} left out" for part in parts if part.left_out]
        train: Samples = parts[0].train
        held_out: Samples | None = parts[0].eval
        if len(parts) > 1:
            mixed = MixedSamples([part.train for part in parts], weights, seed)
            contents += [ORDER, *map(str, mixed.pattern.counts)]
            train = mixed
            evals = [part.eval for part in parts if part.eval is not None]
            held_out = MixedHeldOut(evals, weights) if len(evals) == len(parts) else None
        super().__init__(train, held_out, hash_of(PreparedConfig.name, seq_len, seed, contents))
        self.document_end = parts[0].index.document_end
        if any(part.index.has_learned for part in parts):
            self.answers_end = self.document_end
        self._parts = parts
        self._weights = weights
        self._fixes = fixes

    def sample_files(self) -> SampledFiles:
        """See ``TokenDataset``."""
        streams = [part.windows.stream for part in self._parts]
        return SampledFiles(
            streams[0].key,
            [file for stream in streams for file in stream.files],
            self._fixes.restore,
        )

    def _unigram_entropy_nats(self) -> float:
        shares_V = np.zeros(self._parts[0].windows.stream.vocab_size)
        for weight, part in zip(self._weights, self._parts, strict=True):
            shares_V += (
                weight / math.fsum(self._weights) * token_shares(part.windows, len(self._parts))
            )
        return entropy_nats(shares_V)
