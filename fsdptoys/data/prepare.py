"""Turn files of text into a folder of tokens, for ``fsdptoys data prepare`` and ``data=hf``.

One process reads documents and writes shards; the others encode groups of documents. Groups are
written in the order in which they were read, so the folder has the same bytes for any number of
processes, and memory does not grow with the corpus. The single reader and writer is the bottleneck
beyond some tens of processes.
"""

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fsdptoys.errors import ConfigError
from fsdptoys.utils.file_lock import hold_lock

from .dataset_index import Index, Source, UnusableFolderError, read_index
from .document_reader import LongText, no_memory
from .encoded_groups import encode_groups, is_drawn, read_groups
from .request import Request
from .shard_writer import ShardsWriter

MOST_PROCESSES = 1024
MOST_SENTENCES = 10  # on rows that are left out, and on those that lose parts


@dataclass(frozen=True)
class Advance:
    """Progress so far."""

    done_bytes: float  # of the sources, compressed if they are
    total_bytes: int
    documents: int
    tokens: int


def prepare_folder(
    request: Request,
    advance: Callable[[Advance], None] = lambda advance: None,
    report: Callable[[str], object] = lambda sentence: None,
    reuse: bool = False,
) -> Index:
    """Prepare a folder, or continue an interrupted preparation.

    ``advance`` receives the progress. ``report`` receives a sentence on each of the first rows that
    lose parts, or are left out with ``request.skip_bad_rows``. An existing folder, and one that
    another process prepares, are refused. With ``reuse`` they are used, and a damaged one is
    replaced. ConfigError if a document cannot be read or the folder cannot be written.
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
        groups = read_groups(request, skip=writer.progress.documents)
        for group, encoded in encode_groups(groups, request):
            if isinstance(encoded, LongText):
                has_ids = _write_long(encoded, writer, request)
                writer.read(1, int(not has_ids))
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
        split = "eval" if is_drawn(long.blocks(), request.eval_fraction) else "train"
        blocks = itertools.chain(long.blocks(), [bytes([request.encoder.document_end])])
        writer.add_long(split, (np.frombuffer(block, np.uint8) for block in blocks))
    long.release()
    return has_ids


def cache_folder(chosen: str | None) -> Path:
    """The chosen cache folder, or ``fsdptoys/data`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or f"{home}/fsdptoys/data").expanduser()
