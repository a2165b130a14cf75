"""Turn files of text into a folder of tokens, for ``fsdptoys data prepare`` and ``data=hf``.

One process reads documents and writes shards; the others encode groups of documents. Groups are
written in the order in which they were read, so the folder has the same bytes for any number of
processes, and memory does not grow with the corpus. The single reader and writer is the bottleneck
beyond some tens of processes.

A document is held out if a hash of its text falls below ``eval_fraction``: equal texts are always
on the same side.
"""

import hashlib
import itertools
import math
import multiprocessing
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError
from fsdptoys.utils.file_lock import hold_lock

from .dataset import Tokens, hash_of
from .dataset_index import (
    DTYPES,
    VERSION,
    Index,
    Source,
    UnusableFolderError,
    read_index,
)
from .document_reader import LongText, no_memory, read_documents
from .loader import end_with_parent
from .shard_writer import ShardsWriter
from .text_encoder import Encoder
from .token_files import SourceFile

SHARD_TOKENS = 2**27  # default size of a shard: 256 MiB in 16 bits
GROUP_CHARACTERS = 2**18  # text of a group
GROUPS_AHEAD = 4  # groups in flight for each process
MOST_PROCESSES = 1024
MOST_SENTENCES = 10  # on rows that are left out, and on those that lose parts


@dataclass(frozen=True)
class Request:
    """Input, output and options of a preparation."""

    key: str  # the files as the user named them, for messages
    sources: list[SourceFile]
    encoder: Encoder
    folder: Path  # the result
    field: str = "text"
    eval_fraction: float = 0.0
    shard_tokens: int = SHARD_TOKENS
    processes: int = 1
    skip_bad_rows: bool = False
    skip_fix: str = (
        "set data.skip_bad_rows=true"  # how the user would have them skipped
    )

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the bytes, with sizes and times of the files instead of
        their contents."""
        return self.fingerprint_with(self.encoder.sha256, self.encoder.document_end)

    def fingerprint_with(self, tokenizer_sha256: str, document_end: int) -> str:
        """The fingerprint with another tokenizer."""
        files = []
        for source in self.sources:
            paths = (
                sorted(Path(source.path).glob("*"))
                if source.is_folder
                else [Path(source.path)]
            )
            for path in paths:
                facts = path.stat()
                files.append(
                    [
                        os.path.realpath(path),
                        source.name,
                        facts.st_size,
                        facts.st_mtime_ns,
                    ]
                )
        encoder = [tokenizer_sha256, document_end]
        chat = (
            [self.encoder.template_sha256, self.skip_bad_rows]
            if self.encoder.template_sha256
            else []
        )
        return hash_of(
            VERSION,
            encoder,
            self.field,
            self.eval_fraction,
            self.shard_tokens,
            files,
            *chat,
        )


@dataclass(frozen=True)
class Advance:
    """Progress so far."""

    done_bytes: float  # of the sources, compressed if they are
    total_bytes: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class _Group:
    """Documents encoded together, or one long text, which this process writes itself."""

    documents: list[Any]
    done_bytes: float


@dataclass
class _Encoded:
    """Ids of a group's documents."""

    splits: dict[str, tuple[NDArray[Any], Tokens, NDArray[Any] | None]] = field(
        default_factory=dict
    )
    """By split, the ids of all documents, the length of each, and which ids are learned."""
    empty: int = 0  # documents without ids
    bad: list[str] = field(default_factory=list)  # a sentence on each that is of no use
    losses: list[str] = field(
        default_factory=list
    )  # a sentence on each whose text lacks something
    ends: int = 0  # documents with an end that the model learns to write


def prepare_folder(
    request: Request,
    advance: Callable[[Advance], None] = lambda advance: None,
    report: Callable[[str], object] = lambda sentence: None,
    reuse: bool = False,
) -> Index:
    """Prepare a folder, or continue an interrupted preparation.

    ``advance`` receives the progress, and ``report`` a sentence on each of the first rows that are
    left out, with ``request.skip_bad_rows``, or whose text lacks something. An existing folder, and
    one that another process prepares, are refused. With ``reuse`` they are used, and a damaged one
    is replaced. ConfigError if a document cannot be read or the folder cannot be written.
    """
    folder = request.folder
    owner = str(folder)

    def wait(holder: str) -> None:
        report(f"process {holder} prepares the data; waiting")

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(
            folder.with_name(f"{folder.name}.lock"), owner, wait if reuse else None
        ):
            if os.path.lexists(folder):
                if not reuse:
                    raise ConfigError(
                        f"{owner} exists already; name another folder, or remove it"
                    )
                try:
                    return read_index(owner, owner)
                except UnusableFolderError:
                    report(f"{owner} is damaged; the data is prepared again")
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder)
                else:
                    folder.unlink()
            return _write(request, advance, report)
    except OSError as error:
        raise ConfigError(
            f"{owner} cannot be written ({error.strerror or error}); make room or name another "
            "folder, and give the same command again, which continues there"
        ) from error


def _write(
    request: Request,
    advance: Callable[[Advance], None],
    report: Callable[[str], object],
) -> Index:
    encoder = request.encoder
    total = sum(source.size_bytes for source in request.sources)
    writer = ShardsWriter(
        request.folder,
        request.fingerprint,
        encoder.dtype,
        request.shard_tokens,
        encoder.marks_learned,
    )
    left_out = losing = ends = documents = 0
    try:
        groups = _groups(request, skip=writer.progress.documents)
        for group, encoded in _encode_all(groups, request):
            if isinstance(encoded, LongText):
                written = _write_long(encoded, writer, request)
                writer.read(1, int(not written))
            else:
                if encoded.bad and not request.skip_bad_rows:
                    raise ConfigError(
                        f"{encoded.bad[0]}; repair it, or {request.skip_fix}"
                    )
                for sentence in encoded.bad[: max(0, MOST_SENTENCES - left_out)]:
                    report(f"left out: {sentence}")
                for sentence in encoded.losses[: max(0, MOST_SENTENCES - losing)]:
                    report(sentence)
                left_out += len(encoded.bad)
                losing += len(encoded.losses)
                ends += encoded.ends
                for split, columns in encoded.splits.items():
                    documents += len(columns[1])
                    writer.add(split, *columns)
                writer.read(len(group.documents), encoded.empty + len(encoded.bad))
            advance(
                Advance(
                    group.done_bytes, total, writer.progress.documents, writer.tokens
                )
            )
        if left_out > MOST_SENTENCES:
            report(f"{left_out:,} rows in all left out")
        if losing > MOST_SENTENCES:
            report(f"{losing:,} rows in all lose parts")
        if encoder.special_tokens and encoder.marks_learned and documents and not ends:
            report(
                "no answer ends with a special token, so the model does not learn to end its turn"
            )
        if not writer.tokens:
            raise ConfigError(
                f"{request.key} finds no document with text; name files that hold some"
            )
        index = Index(
            dtype=encoder.dtype,
            vocab_size=encoder.vocab_size,
            document_end=encoder.document_end,
            tokenizer=encoder.name,
            tokenizer_sha256=encoder.sha256,
            field=request.field,
            eval_fraction=request.eval_fraction,
            left_out=0,
            sources=tuple(
                Source(source.name, source.size_bytes) for source in request.sources
            ),
            shards=(),
        )
        return writer.finish(index, encoder.file)
    except MemoryError as error:
        raise no_memory(request.key) from error
    except ConfigError:
        writer.save()
        raise
    finally:
        writer.close()


def _write_long(long: LongText, writer: ShardsWriter, request: Request) -> bool:
    """Write a long text in parts, unless it has no ids; return whether it has."""
    has_ids = any(long.blocks())
    if has_ids:
        split = "eval" if _is_drawn(long.blocks(), request.eval_fraction) else "train"
        blocks = itertools.chain(long.blocks(), [bytes([request.encoder.document_end])])
        writer.add_long(split, (np.frombuffer(block, np.uint8) for block in blocks))
    long.release()
    return has_ids


def _groups(request: Request, skip: int) -> Iterator[_Group]:
    """Group all documents except the first ``skip``."""
    documents: list[Any] = []
    characters = 0
    before = done = 0.0
    for source in request.sources:
        for document, share in read_documents(
            request.key,
            source,
            request.field,
            long_texts=request.encoder.ids_are_bytes,
            records=request.encoder.records,
        ):
            is_long = isinstance(document, LongText)
            if skip:
                skip -= 1
                if is_long:
                    document.release()
                continue
            if documents and (is_long or characters >= GROUP_CHARACTERS):
                yield _Group(documents, done)
                documents = []
                characters = 0
            done = before + share * source.size_bytes
            if is_long:
                yield _Group([document], done)
            else:
                documents.append(document or "")
                characters += len(documents[-1])
        before += source.size_bytes
    if documents:
        yield _Group(documents, before)


def _encode_all(
    groups: Iterable[_Group], request: Request
) -> Iterator[tuple[_Group, _Encoded | LongText]]:
    """Each group with its ids, in order; a long text as it is."""
    encoder, fraction = request.encoder, request.eval_fraction
    if request.processes == 1:
        for group in groups:
            long = _long_text(group)
            yield group, long or _encode(encoder, fraction, group.documents)
        return
    # A fork has the tokenizer and all modules at once; this process has no threads and no
    # accelerator context.
    context = multiprocessing.get_context(
        "fork" if sys.platform == "linux" else "spawn"
    )
    executor = ProcessPoolExecutor(
        request.processes, context, _begin_process, (encoder, fraction)
    )
    under_way: deque[tuple[_Group, Future[_Encoded]]] = deque()
    try:
        for group in groups:
            long = _long_text(group)
            if long is None:
                future = executor.submit(_encode_here, group.documents)
                under_way.append((group, future))
            # Two long texts at once could exceed the memory.
            most = GROUPS_AHEAD * request.processes - 1 if long is None else 0
            while len(under_way) > most:
                first, future = under_way.popleft()
                yield first, future.result()
            if long is not None:
                yield group, long
        for first, future in under_way:
            yield first, future.result()
    except BrokenProcessPool as error:
        fewer = max(1, request.processes // 2)
        raise ConfigError(
            "a process that turns text into ids has ended: it was killed, or there was too "
            f"little memory; give the same command again, which continues there, with {fewer} "
            "processes"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _long_text(group: _Group) -> LongText | None:
    document = group.documents[0]
    return document if isinstance(document, LongText) else None


_encoder_here: Encoder
_fraction_here: float


def _begin_process(encoder: Encoder, fraction: float) -> None:
    global _encoder_here, _fraction_here
    _encoder_here, _fraction_here = encoder, fraction
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    end_with_parent()


def _encode_here(documents: list[Any]) -> _Encoded:
    return _encode(_encoder_here, _fraction_here, documents)


def _encode(encoder: Encoder, fraction: float, documents: list[Any]) -> _Encoded:
    """Ids of documents by split, each document with its end, which is learned only where everything
    is."""
    dtype = DTYPES[encoder.dtype]
    end = np.array([encoder.document_end], dtype)
    no_label = np.zeros(1, bool)
    encoded = _Encoded()
    columns: dict[str, tuple[list[NDArray[Any]], list[int], list[NDArray[Any]]]] = {}
    for document in encoder.encode_documents(documents):
        if isinstance(document, str):
            encoded.bad.append(document)
        elif not len(document.ids):
            encoded.empty += 1
        else:
            split = "eval" if is_held_out(document.text, fraction) else "train"
            ids, lengths, learned = columns.setdefault(split, ([], [], []))
            ids += [document.ids.astype(dtype, copy=False), end]
            lengths.append(len(document.ids) + 1)
            if document.learned is not None:
                learned += [document.learned, no_label]
            if document.loss is not None:
                encoded.losses.append(document.loss)
            encoded.ends += document.ends
    for split, (ids, lengths, learned) in columns.items():
        marks = np.concatenate(learned) if learned else None
        encoded.splits[split] = np.concatenate(ids), np.array(lengths, np.int64), marks
    return encoded


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document is held out."""
    # As in byte ids, without zeros
    return _is_drawn([text.encode().replace(b"\0", b"")], fraction)


def _is_drawn(blocks: Iterable[bytes], fraction: float) -> bool:
    if not fraction:
        return False
    digest = hashlib.blake2b(digest_size=8, person=b"held out")
    for block in blocks:
        digest.update(block)
    return int.from_bytes(digest.digest(), "little") < math.ldexp(fraction, 64)


def cache_folder(chosen: str | None) -> Path:
    """The chosen cache folder, or ``fsdptoys/data`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or f"{home}/fsdptoys/data").expanduser()
