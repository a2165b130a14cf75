"""Texts to prepare, requests, and the tokens that they become."""

import contextlib
import json
from pathlib import Path

import numpy as np

from fsdptoys.data import Request, find_sources, open_encoder, read_ends, read_index
from fsdptoys.data.prepare import prepare_folder

WORDS = ["[UNK]", "<|endoftext|>", "one", "two", "three", "<|", "|>", "endoftext"]


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts of many lengths, each with its number."""
    lengths = np.random.default_rng(seed).integers(1, 60, count)
    return [
        f"{number}: " + "é one two " * int(length)
        for number, length in enumerate(lengths)
    ]


def write_lines(path: Path, texts: list[str | None], field: str = "text") -> Path:
    path.write_text(
        "".join(
            json.dumps({"id": number, field: text}) + "\n"
            for number, text in enumerate(texts)
        )
    )
    return path


def request(out: Path, *files: Path | str, **changes) -> Request:
    encoder = open_encoder(
        changes.pop("tokenizer", "bytes"),
        changes.pop("end", None),
        "--tokenizer",
        "--document-end",
    )
    return Request(
        "FILE",
        find_sources("FILE", [str(file) for file in files]),
        encoder,
        out,
        **changes,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read_split(folder: Path, split: str) -> list[bytes]:
    """Documents of a split of bytes, without their ends, by the folder's own boundaries."""
    index = read_index(str(folder), "folder")
    texts = []
    for shard in index.of(split):
        ids = np.fromfile(folder / f"{shard.name}.bin", index.dtype)
        starts = 0
        for stop in read_ends(str(folder), shard).tolist():
            assert (
                ids[stop - 1] == index.document_end
                and (ids[starts : stop - 1] != index.document_end).all()
            )
            texts.append(ids[starts : stop - 1].astype(np.uint8).tobytes())
            starts = stop
        assert starts == len(ids) == shard.tokens
    return texts


def save_tokenizer(folder: Path, end: str | None) -> str:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    tokenizer.enable_truncation(3)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if end:
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": {"content": end}})
        )
    return str(folder)


def living_in_group(group: int) -> list[int]:
    """Return the processes of a group that have not ended, as the kernel lists them."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                pids.append(int(path.parent.name))
    return pids


def make(folder: Path, count: int = 150, seed: int = 0, **changes) -> str:
    lines = write_lines(
        folder.with_suffix(".jsonl"),
        [f"{folder.name} {text}" for text in documents(count, seed)],
    )
    prepare_folder(
        request(
            folder, lines, **({"shard_tokens": 1000, "eval_fraction": 0.2} | changes)
        )
    )
    return str(folder)
