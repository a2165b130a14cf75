"""``data=prepared``: folders made by ``fsdptoys data prepare``, one or several mixed by weight
(``mixture``).

A split's shards are one stream, cut into windows of ``seq_len`` that may cross from one document
into the next, or packed into rows of whole documents (``packing``). Shards are mapped, not read.
Truncating a mapped file kills the run (SIGBUS): make a new folder instead.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fsdptoys.errors import ConfigError
from fsdptoys.utils.options import Effect, option
from fsdptoys.utils.text import print_status

from .dataset import DataConfig, Samples, hash_of
from .dataset_index import SPLITS, Index, kept_tokenizer, read_index
from .mixture import MixedHeldOut, MixedSamples, spread
from .packing import PackedSamples, Packing, pack_rows
from .permutation import ORDER
from .prepare import cache_folder
from .source_files import SourceFile
from .text_encoder import ByteEncoder
from .token_files import BinaryFile
from .token_stream import TokenStream
from .token_windows import FileDataset, LearnedWindows, WindowSamples

LEARNED_VALUES = 256
"""Values of a byte; those over 1 are reported as damage."""

PART_NAMES = {"train": "training", "eval": "held-out"}
FIXES = {
    "train": "prepare more text",
    "eval": "hold out a larger share (data.eval_fraction, or prepare it with --eval-fraction)",
}
"""How a split gets longer."""


@dataclass
class PreparedConfig(DataConfig):
    """Folders of tokens made by fsdptoys data prepare, one or several mixed."""

    name = "prepared"
    eval_fix = "data.folder to one that was prepared with --eval-fraction 0.01"
    plain_texts = True
    known_as = ""
    """The folder's name in messages, if not its path; not a setting."""

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
        paths = [
            os.path.realpath(os.path.expanduser(source)) for source in self.sources
        ]
        for number, path in enumerate(paths):
            if path in paths[:number]:
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
            copy = kept_tokenizer(folder, index)
            if copy is not None:
                return str(copy)
        return None

    def validate(self, seq_len: int, vocab_size: int) -> None:
        """Check that the folders are complete, compatible, long enough and fit the vocabulary; and
        the weights."""
        spread(self._shares(self._open(seq_len, vocab_size)))

    def prepare(self, seq_len: int, vocab_size: int) -> None:
        """Pack documents into rows, unless the cache has them, and say how many sequences have
        nothing to learn."""
        for part in self._open_samples(seq_len, vocab_size):
            if part.left_out:
                share = f"{part.left_out:,} of {len(part.windows['train']):,}"
                print_status(
                    f"left out {share} sequences of {part.owner}, which have no answer"
                )

    def build(self, seq_len: int, vocab_size: int, seed: int) -> FileDataset:
        """Map the folders."""
        parts = self._open_samples(seq_len, vocab_size)
        weights = self._shares(parts)
        contents = [
            self.packing.value,
            *(part.index.fingerprint("train") for part in parts),
        ]
        contents += [f"{part.left_out} left out" for part in parts if part.left_out]
        train = parts[0].samples["train"]
        held_out = parts[0].samples.get("eval")
        if len(parts) > 1:
            mixed = MixedSamples(
                [part.samples["train"] for part in parts], weights, seed
            )
            contents += [ORDER, *map(str, mixed.counts)]
            train = mixed
            evals = [part.samples["eval"] for part in parts if "eval" in part.samples]
            held_out = (
                MixedHeldOut(evals, weights) if len(evals) == len(parts) else None
            )
        fingerprint = hash_of(self.name, seq_len, seed, contents)
        windows = [part.windows["train"] for part in parts]
        dataset = FileDataset(train, held_out, fingerprint, windows, weights)
        dataset.document_end = parts[0].index.document_end
        if any(part.index.has_learned for part in parts):
            dataset.answers_end = dataset.document_end
        return dataset

    def _shares(self, parts: Sequence["Part"]) -> list[float]:
        return self.weights or [
            float(len(part.samples["train"])) or 1.0 for part in parts
        ]

    def _open_samples(self, seq_len: int, vocab_size: int) -> list["Part"]:
        parts = self._open(seq_len, vocab_size)
        for part in parts:
            if self.packing is Packing.best_fit:
                part.pack(cache_folder(self.cache))
            elif part.index.has_learned:
                part.keep_learned()
        return parts

    def _read(self) -> list[tuple[str, str, Index]]:
        """Name in messages, path and index of each folder."""
        if self.folder is not None:
            folders = [(self.known_as or f"data.folder={self.folder}", self.folder)]
        else:
            folders = [(f"data.sources=[{source}]", source) for source in self.sources]
        if not folders:
            raise ConfigError(
                "data=prepared needs a folder that fsdptoys data prepare has made; set "
                "data.folder=FOLDER, or data.sources=[FOLDER,FOLDER]"
            )
        # The configuration does not name a folder of the cache, so its errors must.
        return [
            (owner, folder, read_index(folder, folder if self.known_as else owner))
            for owner, folder in folders
        ]

    def _open(self, seq_len: int, vocab_size: int) -> list["Part"]:
        windows = self.packing is Packing.none
        parts = [Part(*folder, seq_len, vocab_size, windows) for folder in self._read()]
        first = parts[0]
        own = first.index
        for part in parts[1:]:
            index = part.index
            if (index.tokenizer_sha256, index.document_end) != (
                own.tokenizer_sha256,
                own.document_end,
            ):
                raise ConfigError(
                    f"{part.owner} was prepared with another tokenizer or end of documents "
                    f"({index.tokenizer}, id {index.document_end}) than {first.owner} "
                    f"({own.tokenizer}, id {own.document_end}), so their ids do not mean the "
                    "same; prepare one of them again (--tokenizer, --document-end)"
                )
        return parts


class Part:
    """One folder's samples: windows, which ``pack`` replaces by rows.

    ConfigError if its ids do not fit the vocabulary, or, with ``windows``, a split is shorter than
    a window.
    """

    def __init__(
        self,
        owner: str,
        folder: str,
        index: Index,
        seq_len: int,
        vocab_size: int,
        windows: bool,
    ) -> None:
        self.owner = owner
        self.folder = folder
        self.index = index
        if index.vocab_size > vocab_size:
            raise ConfigError(
                f"{owner} has ids up to {index.vocab_size - 1} (of {index.tokenizer}), over "
                f"model.vocab_size={vocab_size}; set model.vocab_size={index.vocab_size} or "
                "prepare it with the model's tokenizer"
            )
        self.windows = {
            split: self._windows(split, seq_len, vocab_size)
            for split in SPLITS
            if index.of(split)
        }
        self.samples: dict[str, Samples] = dict(self.windows)
        self.left_out = 0
        """Training windows without a learned token."""
        if "train" not in self.windows:
            raise ConfigError(
                f"{owner} holds no document to train on; hold out a smaller share "
                "(data.eval_fraction, or prepare it with --eval-fraction)"
            )
        if windows:
            for split, samples in self.windows.items():
                samples.require_one(
                    f"the {PART_NAMES[split]} part of {owner}", FIXES[split]
                )

    def keep_learned(self) -> None:
        """Leave out windows in which nothing is learned."""
        for split, windows in self.windows.items():
            samples = LearnedWindows(windows)
            if not len(samples):
                raise ConfigError(
                    f"{self.owner} has no answer in the {len(windows)} sequences of its "
                    f"{PART_NAMES[split]} part; {FIXES[split]}"
                )
            self.samples[split] = samples
        self.left_out = len(self.windows["train"]) - len(self.samples["train"])

    def pack(self, cache: Path) -> None:
        """Replace windows by rows of whole documents."""
        for split, windows in self.windows.items():
            seq_len = windows.seq_len
            learned = windows.learned
            rows = pack_rows(
                cache, self.folder, self.index, split, seq_len, print_status, learned
            )
            end = self.index.document_end
            self.samples[split] = PackedSamples(
                windows.stream, rows, seq_len, end, learned
            )

    def _windows(self, split: str, seq_len: int, vocab_size: int) -> WindowSamples:
        stream = self._stream(BinaryFile, split, 0, vocab_size)
        learned = None
        if self.index.has_learned:
            learned = self._stream(LearnedFile, split, 2, LEARNED_VALUES)
        return WindowSamples(stream, 0, len(stream), seq_len, learned)

    def _stream(
        self, kind: type[BinaryFile], split: str, number: int, values: int
    ) -> TokenStream:
        """The file of that number of every shard; its items are below ``values``."""
        root = Path(self.folder).expanduser()
        shards = [self.index.files(shard)[number] for shard in self.index.of(split)]
        key = self.owner.partition("=")[0]
        sources = [
            SourceFile(str(root / file.name), file.name, file.size_bytes)
            for file in shards
        ]
        dtype = shards[0].dtype
        files = [kind(key, source, dtype, mapped=True) for source in sources]
        return TokenStream(files, values)


class LearnedFile(BinaryFile):
    """For each token, 1 if it counts as a label, else 0."""

    def read(self, offset: int, count: int) -> NDArray[Any]:
        """See ``TokenFile``; ConfigError if a value is neither."""
        learned = super().read(offset, count)
        if len(learned) and int(learned.max()) > 1:
            raise ConfigError(
                f"{self.owner} has {int(learned.max())}, where 0 and 1 "
                "say which tokens are learned; restore it, or prepare the folder again"
            )
        return learned
