"""Read groups of documents, and encode them in several processes.

Groups keep the order in which they were read, for any number of processes.

A document is held out if a hash of its text falls below ``eval_fraction``: equal texts are always
on the same side.
"""

import functools
import hashlib
import math
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError

from .dataset import Tokens
from .dataset_index import DTYPES
from .document_reader import LongText, read_documents
from .loader import end_with_parent
from .request import Request
from .text_encoder import Encoder

GROUP_CHARACTERS = 2**18  # text of a group
GROUPS_AHEAD = 4  # groups in flight for each process


@dataclass(frozen=True)
class Group:
    """Documents encoded together, or one long text, which this process writes itself."""

    documents: list[Any]
    done_bytes: float  # of the sources, at its end

    @property
    def long_text(self) -> LongText | None:
        """The long text, if it is one."""
        document = self.documents[0]
        return document if isinstance(document, LongText) else None


@dataclass
class EncodedGroup:
    """Ids of a group's documents."""

    splits: dict[str, tuple[NDArray[Any], Tokens, NDArray[Any] | None]] = field(
        default_factory=dict
    )
    """By split, the ids of all documents, the length of each, and which ids are learned."""
    empty: int = 0  # documents without ids
    bad: list[str] = field(default_factory=list)  # sentences on documents of no use
    # sentences on texts that lack something
    losses: list[str] = field(default_factory=list)
    ends: int = 0  # documents with an end that the model learns to write


def read_groups(request: Request, skip: int) -> Iterator[Group]:
    """Group all documents except the first ``skip``."""
    documents: list[Any] = []
    characters = 0
    bytes_before = 0
    done_bytes = 0.0
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
                yield Group(documents, done_bytes)
                documents = []
                characters = 0
            done_bytes = bytes_before + share * source.size_bytes
            if is_long:
                yield Group([document], done_bytes)
            else:
                documents.append(document or "")
                characters += len(documents[-1])
        bytes_before += source.size_bytes
    if documents:
        yield Group(documents, bytes_before)


def encode_groups(
    groups: Iterable[Group], request: Request
) -> Iterator[tuple[Group, EncodedGroup | LongText]]:
    """Each group with its ids, in order; a long text as it is."""
    encode = functools.partial(_encode, request.encoder, request.eval_fraction)
    if request.processes == 1:
        for group in groups:
            yield group, group.long_text or encode(group.documents)
        return
    # A fork has the tokenizer and all modules at once; this process has no threads and no
    # accelerator context.
    context = multiprocessing.get_context(
        "fork" if sys.platform == "linux" else "spawn"
    )
    executor = ProcessPoolExecutor(
        request.processes, context, _begin_process, (encode,)
    )
    pending: deque[tuple[Group, Future[EncodedGroup]]] = deque()
    try:
        for group in groups:
            long = group.long_text
            if long is None:
                future = executor.submit(_encode_group, group.documents)
                pending.append((group, future))
            # Two long texts at once could exceed the memory.
            most = GROUPS_AHEAD * request.processes - 1 if long is None else 0
            while len(pending) > most:
                first, future = pending.popleft()
                yield first, future.result()
            if long is not None:
                yield group, long
        for first, future in pending:
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


_encode_in_process: Callable[[list[Any]], EncodedGroup]


def _begin_process(encode: Callable[[list[Any]], EncodedGroup]) -> None:
    global _encode_in_process
    _encode_in_process = encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    end_with_parent()


def _encode_group(documents: list[Any]) -> EncodedGroup:
    return _encode_in_process(documents)


def _encode(encoder: Encoder, fraction: float, documents: list[Any]) -> EncodedGroup:
    """Ids of documents by split, each document with its end, which is learned only where everything
    is."""
    dtype = DTYPES[encoder.dtype]
    end = np.array([encoder.document_end], dtype)
    no_label = np.zeros(1, bool)
    encoded = EncodedGroup()
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
    return is_drawn([text.encode().replace(b"\0", b"")], fraction)


def is_drawn(blocks: Iterable[bytes], fraction: float) -> bool:
    """Whether a document of these bytes is held out."""
    if not fraction:
        return False
    digest = hashlib.blake2b(digest_size=8, person=b"held out")
    for block in blocks:
        digest.update(block)
    return int.from_bytes(digest.digest(), "little") < math.ldexp(fraction, 64)
