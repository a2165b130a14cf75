"""``fsdptoys data``: tokenize text into a folder, and check or describe such folders.

fsdptoys data prepare corpus/*.jsonl.gz --out tokens --tokenizer tokenizer.json --eval-fraction 0.01
fsdptoys data check tokens
fsdptoys data show tokens --json
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fsdptoys.data import (
    MOST_PROCESSES,
    SHARD_TOKENS,
    TOKENIZER_FILE,
    Display,
    Index,
    Request,
    check_folder,
    files_of,
    find_sources,
    open_encoder,
    prepare_folder,
    read_index,
)
from fsdptoys.device import available_cores
from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import (
    near_miss,
)

from .help import (
    read_integer,
    read_number,
    refuse_unknown,
    take_options,
)

VALUES = {
    "--out": "DIR",
    "--tokenizer": "bytes",
    "--document-end": "TOKEN",
    "--field": "NAME",
    "--eval-fraction": "0.01",
    "--processes": "2",
    "--shard-tokens": str(SHARD_TOKENS),
}


def run_data(words: Sequence[str]) -> int:
    """Run the command.

    Args:
        words: as typed after the command.

    Returns:
        Exit status: 1 if a folder is damaged.

    Raises:
        ConfigError: for the first mistake, before anything is written.
    """
    parts: dict[str, Callable[[Sequence[str]], int]] = {"prepare": _prepare, "check": _check, "show": _show}
    if words[0] not in parts:
        near = near_miss(words[0], list(parts))
        raise ConfigError(
            f"fsdptoys data {words[0]} is not a command; "
            + (f"did you mean fsdptoys data {near}?" if near else "see fsdptoys data --help")
        )
    return parts[words[0]](words[1:])


def _prepare(words: Sequence[str]) -> int:
    patterns, options = take_options(words, [], VALUES)
    refuse_unknown("data", patterns, list(VALUES))
    if not patterns:
        raise ConfigError("fsdptoys data prepare has nothing to read; write fsdptoys data prepare FILE ... --out DIR")
    for option in ("--out", "--tokenizer"):
        if option not in options:
            raise ConfigError(
                f"fsdptoys data prepare needs {option}; write {option} {VALUES[option]}"
                + (", or a tokenizer.json" if option == "--tokenizer" else "")
            )
    eval_fraction = read_number(options, "--eval-fraction", 0.0, least=0.0, most=1.0)
    if eval_fraction == 1:
        raise ConfigError("--eval-fraction 1 leaves nothing to train on; write --eval-fraction 0.01")
    processes = read_integer(options, "--processes", min(available_cores(), MOST_PROCESSES), least=1)
    if processes > MOST_PROCESSES:
        raise ConfigError(f"--processes {processes} is over {MOST_PROCESSES}; write --processes {available_cores()}")
    shard_tokens = read_integer(options, "--shard-tokens", SHARD_TOKENS, least=1)
    choice = options["--tokenizer"]
    encoder = open_encoder(choice, options.get("--document-end"), f"--tokenizer {choice}", "--document-end")
    out = Path(options["--out"]).expanduser()
    if os.path.lexists(out):
        raise ConfigError(f"--out {options['--out']} exists already; name another folder, or remove it")
    request = Request(
        key="FILE",
        sources=find_sources("FILE", patterns),
        encoder=encoder,
        folder=out,
        field=options.get("--field", "text"),
        eval_fraction=eval_fraction,
        shard_tokens=shard_tokens,
        processes=processes,
    )
    with Display("preparing") as display:
        index = prepare_folder(request, display.show)
    print(_told(str(out), index))
    return 0


def _check(words: Sequence[str]) -> int:
    folders = _folders("check", words)
    total = sum(size for folder in folders for _, size in files_of(read_index(folder, folder)))
    damaged, done = False, 0.0
    with Display("checking") as display:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            display.show_bytes(done, total)

        for folder in folders:
            index, damages = check_folder(folder, advance)
            damaged |= bool(damages)
            for sentence in damages:
                print(f"{folder}: {sentence}", file=sys.stderr)
            if not damages:
                several = "s" * (len(index.shards) != 1)
                tokenizer = f" and {TOKENIZER_FILE}" if index.tokenizer_file_sha256 else ""
                print(f"{folder}: {len(index.shards):,} shard{several}{tokenizer}, every byte as it was written")
    return int(damaged)


def _show(words: Sequence[str]) -> int:
    rest, options = take_options(words, ["--json"])
    folders = _folders("show", rest, ["--json"])
    indexes = {folder: read_index(folder, folder) for folder in folders}
    if "--json" in options:
        print(json.dumps([_as_tree(folder, index) for folder, index in indexes.items()], indent=2))
    else:
        print("\n\n".join(_told(folder, index) for folder, index in indexes.items()))
    return 0


def _folders(command: str, words: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    refuse_unknown("data", words, options)
    if not words:
        raise ConfigError(f"fsdptoys data {command} needs a folder; write fsdptoys data {command} DIR")
    return list(words)


def _as_tree(folder: str, index: Index) -> Mapping[str, object]:
    tree: dict[str, object] = {"folder": folder} | dataclasses.asdict(index)
    splits = {split: (index.documents(split), index.tokens(split)) for split in ("train", "eval")}
    tree["splits"] = {
        split: {"documents": documents, "tokens": tokens} for split, (documents, tokens) in splits.items()
    }
    return tree


def _told(folder: str, index: Index) -> str:
    facts = {"folder": folder}
    for split in ("train", "eval"):
        documents, tokens, shards = index.documents(split), index.tokens(split), len(index.of(split))
        if shards:
            several = "s" * (shards != 1)
            facts[split] = f"{documents:,} documents, {tokens:,} tokens in {shards:,} shard{several} of {index.dtype}"
        else:
            facts[split] = "nothing"
    source_bytes = sum(source.bytes for source in index.sources)
    tokens = index.tokens("train") + index.tokens("eval")
    facts["sources"] = (
        f"{len(index.sources):,} file{'s' * (len(index.sources) != 1)}, {source_bytes:,} bytes as they lie there, "
        f"{source_bytes / tokens:.2f} a token"
    )
    facts["tokenizer"] = (
        f"{index.tokenizer}, {index.vocab_size:,} ids, {index.document_end} ends a document; "
        f"SHA-256 {index.tokenizer_sha256[:12]}…" + ("; kept in the folder" if index.tokenizer_file_sha256 else "")
    )
    if index.left_out:
        facts["left out"] = f"{index.left_out:,} documents without text"
    return "\n".join(f"{label:<11}{value}" for label, value in facts.items())
