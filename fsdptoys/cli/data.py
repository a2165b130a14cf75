"""``fsdptoys data``: tokenize text or conversations into a folder, and check or describe such
folders.

fsdptoys data prepare corpus/*.jsonl.gz --out tokens --tokenizer tokenizer.json --eval-fraction 0.01
fsdptoys data prepare rows.jsonl --chat --out conversations --tokenizer MODEL
fsdptoys data check tokens
fsdptoys data show tokens --json
fsdptoys data show rows.jsonl --chat --tokenizer MODEL --row 3
"""

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from fsdptoys.data import (
    MOST_PROCESSES,
    SHARD_TOKENS,
    Display,
    Request,
    find_sources,
    open_chat_encoder,
    open_encoder,
    prepare_folder,
)
from fsdptoys.data.chat_encoder import ChatEncoder, ShownRow, losing
from fsdptoys.data.chat_rows import ChatRow
from fsdptoys.data.dataset_index import (
    SPLITS,
    TOKENIZER_FILE,
    Index,
    check_folder,
    files_of,
    read_index,
)
from fsdptoys.data.document_reader import read_documents
from fsdptoys.data.text_encoder import Encoder
from fsdptoys.device import available_cores
from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import counted, print_status, printable

from .commands import parse, run_part


def data_command(argv: Sequence[str]) -> int:
    """Run the command; return the exit status: 1 if a folder is damaged."""
    return run_part("data", argv, {"prepare": _prepare, "check": _check, "show": _show})


def _prepare(argv: Sequence[str]) -> int:
    options = parse("data prepare", argv)
    if not options.arguments:
        raise ConfigError(
            "fsdptoys data prepare has nothing to read; write fsdptoys data prepare FILE ... "
            "--out DIR"
        )
    for name, example in (("out", "DIR"), ("tokenizer", "bytes, or a tokenizer.json")):
        if getattr(options, name) is None:
            raise ConfigError(
                f"fsdptoys data prepare needs --{name}; write --{name} {example}"
            )
    processes = options.processes or min(available_cores(), MOST_PROCESSES)
    if processes > MOST_PROCESSES:
        raise ConfigError(
            f"--processes {processes} is over {MOST_PROCESSES}; write --processes "
            f"{available_cores()}"
        )
    chat = _open_chat(options) if options.chat else None
    if chat is None and (options.template is not None or options.skip_bad_rows):
        option = (
            "--skip-bad-rows"
            if options.template is None
            else f"--template {options.template}"
        )
        raise ConfigError(f"{option} is for conversations; add --chat, or leave it out")
    encoder: Encoder = chat or open_encoder(
        options.tokenizer,
        options.document_end,
        f"--tokenizer {options.tokenizer}",
        "--document-end",
    )
    out = Path(options.out).expanduser()
    if os.path.lexists(out):
        raise ConfigError(
            f"--out {options.out} exists already; name another folder, or remove it"
        )
    request = Request(
        key="FILE",
        sources=find_sources("FILE", options.arguments),
        encoder=encoder,
        folder=out,
        field=options.field or ("messages" if options.chat else "text"),
        eval_fraction=options.eval_fraction,
        shard_tokens=options.shard_tokens or SHARD_TOKENS,
        processes=processes,
        skip_bad_rows=options.skip_bad_rows,
        skip_fix="add --skip-bad-rows",
    )
    index = prepare_folder(request, Display("preparing").show, report=print_status)
    print(_describe(str(out), index))
    if chat is not None:
        print()
        for row in _conversations(request):
            with suppress(ConfigError):  # the first that is not left out
                _print_row(chat.show_row(row))
                break
    return 0


def _open_chat(options: Any) -> ChatEncoder:
    return open_chat_encoder(
        options.tokenizer,
        options.template,
        options.document_end,
        f"--tokenizer {options.tokenizer}",
        "--template",
        "--document-end",
    )


def _conversations(request: Request) -> Iterator[ChatRow]:
    for source in request.sources:
        for row, _ in read_documents(
            request.key, source, request.field, records=request.encoder.records
        ):
            yield row


def _print_row(row: ShownRow) -> None:
    """Print a conversation, with what is learned in color, or else in brackets."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    for piece, learned in row.pieces:
        text = printable(piece, sys.stdout)
        if learned and console.color_system is None:
            text = f"[[{text}]]"
        console.print(text, style="bold green" if learned else "", end="")
    how = "in [[brackets]]" if console.color_system is None else "in green"
    console.print(
        f"\n{row.where}: {row.tokens:,} tokens, of which {row.learned:,} are learned, {how}"
    )
    if row.lost:
        console.print(f"the row {losing(row.lost)}")


def _check(argv: Sequence[str]) -> int:
    folders = _folders("check", parse("data check", argv).arguments)
    total = sum(
        size for folder in folders for _, size in files_of(read_index(folder, folder))
    )
    damaged = False
    display = Display("checking", total)
    for folder in folders:
        index, damages = check_folder(folder, display.advance)
        damaged |= bool(damages)
        for sentence in damages:
            print(f"{folder}: {sentence}", file=sys.stderr)
        if not damages:
            tokenizer = f" and {TOKENIZER_FILE}" if index.tokenizer_file_sha256 else ""
            print(
                f"{folder}: {counted(len(index.shards), 'shard')}{tokenizer}, every byte as it "
                "was written"
            )
    return int(damaged)


def _show(argv: Sequence[str]) -> int:
    options = parse("data show", argv)
    if options.chat:
        return _show_row(options)
    chat_options = [
        name
        for name in ("tokenizer", "template", "document_end", "field", "row")
        if getattr(options, name)
    ]
    if chat_options:
        raise ConfigError(
            f"--{chat_options[0].replace('_', '-')} is for conversations; add --chat, or leave "
            "it out"
        )
    indexes = {
        folder: read_index(folder, folder)
        for folder in _folders("show", options.arguments)
    }
    if options.json:
        trees = []
        for folder, index in indexes.items():
            splits = {
                name: {"documents": index.documents(name), "tokens": index.tokens(name)}
                for name in SPLITS
            }
            trees.append(
                {"folder": folder} | dataclasses.asdict(index) | {"splits": splits}
            )
        print(json.dumps(trees, indent=2))
    else:
        print(
            "\n\n".join(_describe(folder, index) for folder, index in indexes.items())
        )
    return 0


def _show_row(options: Any) -> int:
    if options.tokenizer is None:
        raise ConfigError(
            "fsdptoys data show --chat needs --tokenizer; write --tokenizer bytes, or a chat "
            "model's folder"
        )
    if options.json:
        raise ConfigError(
            "--json is for the index of a folder; leave it out with --chat"
        )
    encoder = _open_chat(options)
    number = options.row or 1
    request = Request(
        "ROWS",
        find_sources("ROWS", options.arguments),
        encoder,
        Path(),
        options.field or "messages",
    )
    row = next(itertools.islice(_conversations(request), number - 1, None), None)
    if row is None:
        raise ConfigError(
            f"--row {number} is not among the conversations; write --row 1"
        )
    _print_row(encoder.show_row(row))
    return 0


def _folders(command: str, folders: list[str]) -> list[str]:
    if not folders:
        raise ConfigError(
            f"fsdptoys data {command} needs a folder; write fsdptoys data {command} DIR"
        )
    return folders


def _describe(folder: str, index: Index) -> str:
    facts = {"folder": folder}
    for split in SPLITS:
        shards = len(index.of(split))
        content = (
            f"{index.documents(split):,} documents, {index.tokens(split):,} tokens in "
            f"{counted(shards, 'shard')} of {index.dtype}"
        )
        facts[split] = content if shards else "nothing"
    source_bytes = sum(source.bytes for source in index.sources)
    tokens = sum(map(index.tokens, SPLITS))
    facts["sources"] = (
        f"{counted(len(index.sources), 'file')}, {source_bytes:,} bytes as they lie there, "
        f"{source_bytes / tokens:.2f} a token"
    )
    facts["tokenizer"] = (
        f"{index.tokenizer}, {index.vocab_size:,} ids, {index.document_end} ends a document; "
        f"SHA-256 {index.tokenizer_sha256[:12]}…"
    ) + ("; kept in the folder" if index.tokenizer_file_sha256 else "")
    if index.left_out:
        facts["left out"] = f"{index.left_out:,} documents without text"
    return "\n".join(f"{label:<11}{value}" for label, value in facts.items())
