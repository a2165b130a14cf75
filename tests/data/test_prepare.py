"""Preparing data: compared with the source documents and with other runs of the same request."""

import errno
import gzip
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fsdptoys.data import Request, open_encoder, prepare_folder, read_index
from fsdptoys.data.encoded_groups import is_held_out
from fsdptoys.data.prepare import Advance
from fsdptoys.errors import ConfigError
from tests.harness.clean_process import ROOT
from tests.harness.prepared_data import (
    contents,
    documents,
    living_in_group,
    read_split,
    request,
    save_tokenizer,
    write_lines,
)
from tests.harness.processes import wait_until

OUT = Path("out")
LINES = Path("a.jsonl")

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def small_groups(monkeypatch):
    """Encode 500 characters at a time, and save the progress every 1,500 tokens."""
    monkeypatch.setattr("fsdptoys.data.encoded_groups.GROUP_CHARACTERS", 500)
    monkeypatch.setattr("fsdptoys.data.shard_writer.SAVE_TOKENS", 1500)


def test_documents_are_stored_once_in_order_with_their_end_tokens():
    """Oracle: the texts; a shard ends with the first document that brings it to 2,000 ids, and none
    is empty."""
    texts = documents(200)
    write_lines(LINES, [*texts[:120], None, "", *texts[120:]])
    index = prepare_folder(request(OUT, LINES, shard_tokens=2000))
    assert read_split(OUT, "train") == [text.encode() for text in texts]
    assert index == read_index(str(OUT), "out")
    assert (index.documents("train"), index.left_out, index.of("eval")) == (200, 2, [])
    assert index.tokens("train") == sum(len(text.encode()) + 1 for text in texts)
    longest = max(len(text.encode()) for text in texts)
    assert (
        all(2000 <= shard.tokens <= 2000 + longest for shard in index.shards[:-1])
        and len(index.shards) > 5
    )
    assert sorted(path.name for path in Path().iterdir()) == ["a.jsonl", "out"]


@pytest.mark.usefixtures("small_groups")
def test_result_does_not_depend_on_the_number_of_processes():
    """Oracle: every byte that one process makes."""
    files = [write_lines(LINES, documents(300)), Path("b.txt")]
    files[1].write_text("a text file is one document")
    settings = {"shard_tokens": 3000, "eval_fraction": 0.2}
    for processes in (1, 2, 3):
        prepare_folder(
            request(Path(f"out{processes}"), *files, **settings, processes=processes)
        )
    assert contents(Path("out1")) == contents(Path("out2")) == contents(Path("out3"))
    assert len(contents(Path("out1"))) > 10


def test_splits_are_disjoint_and_equal_texts_share_a_split():
    """Oracle: sets of texts; about a fifth is held out, and a text that comes again is on the same
    side again."""
    texts = documents(500)
    write_lines(LINES, texts)
    more = write_lines(Path("b.jsonl"), texts[::-1])
    prepare_folder(request(OUT, LINES, more, eval_fraction=0.2))
    train, held_out = (read_split(OUT, split) for split in ("train", "eval"))
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(2 * [text.encode() for text in texts])
    assert held_out[: len(held_out) // 2] == [
        text.encode() for text in texts if is_held_out(text, 0.2)
    ]
    assert 70 < len(set(held_out)) < 130


class StoppedError(Exception):
    """Stands for a kill of the process: no cleanup runs."""


def prepare_and_stop(stopped_request: Request, after: int) -> list[int]:
    """Stop after some groups; return the number of documents after each."""
    counts: list[int] = []

    def stop(advance: Advance) -> None:
        counts.append(advance.documents)
        if len(counts) > after:
            raise StoppedError

    with pytest.raises(StoppedError):
        prepare_folder(stopped_request, stop)
    return counts


@pytest.mark.parametrize(
    ("after", "changes", "leave"),
    [
        *((after, {}, None) for after in (0, 7, 20)),
        (20, {"eval_fraction": 0.5}, None),
        (20, {}, lambda part: (part / "thumbnails").mkdir()),
    ],
    ids=["group 0", "group 7", "group 20", "other request", "unremovable"],
)
@pytest.mark.usefixtures("small_groups")
def test_interrupted_preparation_ends_with_identical_bytes(after, changes, leave):
    """Oracle: an uninterrupted run; the interrupted one leaves no folder under the final name.

    Parts of another request are discarded, and so are parts beside which a folder lies that is no
    shard.
    """
    lines = write_lines(LINES, documents(300))
    settings = {"shard_tokens": 3000, "eval_fraction": 0.2}
    part = Path("out.part")
    resumed = []
    prepare_folder(request(Path("whole"), lines, **settings))
    counts = prepare_and_stop(request(OUT, lines, **settings | changes), after)
    assert not OUT.exists() and not (part / "index.json").exists()
    assert after < 7 or (part / "progress.json").exists()
    if leave is not None:
        leave(part)
    prepare_folder(
        request(OUT, lines, **settings),
        lambda advance: resumed.append(advance.documents),
    )
    assert contents(OUT) == contents(Path("whole"))
    assert after < 7 or changes or leave or resumed[0] > counts[-5], (
        "what was saved is not done again"
    )


@pytest.mark.usefixtures("small_groups")
def test_failed_index_leaves_the_progress(monkeypatch):
    """Oracle: the documents done, from which the same command continues."""
    lines = write_lines(LINES, documents(300))
    stopped_request = request(OUT, lines, shard_tokens=3000)

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match="No space left"),
    ):
        patch.setattr("fsdptoys.utils.sealed_folder.write_atomically", fail)
        prepare_folder(stopped_request)
    resumed = []
    prepare_folder(stopped_request, lambda advance: resumed.append(advance.documents))
    assert (
        all(documents_read > 200 for documents_read in resumed)
        and (OUT / "index.json").exists()
    )


def test_pickled_tokenizer_encodes_special_tokens_as_text():
    """Oracle: the ids of the tokenizer before pickling, which spawned processes need."""
    encoder = open_encoder(save_tokenizer(Path("tokenizer"), None), None, "", "")
    sent = pickle.loads(pickle.dumps(encoder))
    (ids,), (others,) = (
        one.encode(["one <|endoftext|> two"]) for one in (encoder, sent)
    )
    assert ids.tolist() == others.tolist() and encoder.document_end not in ids


PAUSING = """
import sys
from pathlib import Path
from fsdptoys.data import encoded_groups, prepare_folder, shard_writer
from tests.harness.prepared_data import request

def pause(advance):
    print(advance.documents, flush=True)
    sys.stdin.readline()

encoded_groups.GROUP_CHARACTERS = 500
shard_writer.SAVE_TOKENS = 1000
prepare_folder(request(Path(sys.argv[1]), sys.argv[2], processes=2), pause)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_preparation_leaves_no_process_and_no_lock(tmp_path):
    """Oracle: the kernel's list of the group's processes; a second run is refused meanwhile and
    resumes afterwards."""
    write_lines(LINES, documents(300))
    command = [sys.executable, "-c", PAUSING, tmp_path / OUT, tmp_path / LINES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, **pipes, cwd=ROOT, start_new_session=True)
    try:
        assert int(run.stdout.readline()) > 0
        with pytest.raises(
            ConfigError,
            match=rf"out is being written by another process \(pid {run.pid}\); wait",
        ):
            prepare_folder(request(OUT, LINES))
        run.stdin.write("\n")
        run.stdin.flush()
        assert int(run.stdout.readline()) > 0
    finally:
        run.kill()
    run.wait()
    wait_until(
        lambda: not living_in_group(run.pid),
        "the end of the killed run's processes",
        living_in_group(run.pid),
    )
    prepare_folder(request(OUT, LINES))
    assert read_split(OUT, "train") == [text.encode() for text in documents(300)]


def kill_itself(texts):
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_process_is_reported_without_a_hang(monkeypatch):
    """Oracle: the expected message."""
    write_lines(LINES, documents(5))
    monkeypatch.setattr("fsdptoys.data.encoded_groups._encode_group", kill_itself)
    with pytest.raises(
        ConfigError,
        match=r"^a process that turns text into ids has ended: .* with 1 processes$",
    ):
        prepare_folder(request(OUT, LINES, processes=2))


def test_every_kind_of_file_gives_the_same_documents():
    """Oracle: the texts, written by json, gzip, pyarrow and datasets themselves."""
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = documents(50)
    lines = write_lines(LINES, texts, "body").read_bytes()
    Path("a.jsonl.gz").write_bytes(
        gzip.compress(lines[:1000]) + gzip.compress(lines[1000:])
    )
    codec = pyarrow.Codec("zstd")
    parts = [codec.compress(part).to_pybytes() for part in (lines[:1001], lines[1001:])]
    Path("a.json.zst").write_bytes(b"".join(parts))
    table = pyarrow.table({"id": list(range(50)), "body": texts})
    parquet.write_table(table, "a.parquet", row_group_size=7)
    whole = datasets.Dataset(table)
    whole.save_to_disk("saved", num_shards=2)
    Path("stream.arrow").write_bytes(
        next(Path("saved").glob("data-00000*.arrow")).read_bytes()
    )
    datasets.DatasetDict(
        {"first": whole, "second": whole.select(range(3))}
    ).save_to_disk("parts")
    expected = [text.encode() for text in texts]
    counts = {f"a.{kind}": 50 for kind in ("jsonl", "jsonl.gz", "json.zst", "parquet")}
    counts |= {"saved": 50, "stream.arrow": 25, "parts/second": 3}
    for number, (name, count) in enumerate(counts.items()):
        advances = []
        prepare_folder(
            request(Path(f"out{number}"), name, field="body"),
            advances.append,
        )
        assert read_split(Path(f"out{number}"), "train") == expected[:count], name
        assert advances[-1].done_bytes == advances[-1].total_bytes
    with pytest.raises(
        ConfigError, match=r"holds several data sets; name one of its folders"
    ):
        request(OUT, "parts")


@pytest.mark.parametrize("own", [None, "three"])
def test_end_tokens_are_never_encoded_from_text(own):
    """Oracle: the vocabulary; text that spells the end token, and the tokenizer's own truncation,
    have no effect."""
    pytest.importorskip("tokenizers")
    choice = save_tokenizer(Path("tokenizer"), own)
    write_lines(LINES, ["one two one two", "two <|endoftext|> one", "\ud800 one"])
    index = prepare_folder(request(OUT, LINES, tokenizer=choice))
    end = 4 if own else 1
    ids = np.fromfile(OUT / "shard-00000.bin", "<u2").tolist()
    assert ids == [2, 3, 2, 3, end, 3, 5, 7, 6, 2, end, 0, 2, end]
    assert (index.document_end, index.vocab_size, index.tokenizer) == (
        end,
        8,
        "tokenizer.json",
    )
    with pytest.raises(
        ConfigError,
        match=r"^--tokenizer has no token 'four'; set --document-end to one of its t",
    ):
        request(Path("other"), LINES, tokenizer=choice, end="four")
    with pytest.raises(
        ConfigError,
        match=r"^a document holds id 2, which is to end documents; name a special token",
    ):
        prepare_folder(request(Path("other"), LINES, tokenizer=choice, end="one"))


def test_vocabulary_over_16_bits_is_stored_in_32():
    """Oracle: ids written and read back."""
    wide = open_encoder("bytes", None, "", "")
    wide.vocab_size = 2**16 + 1
    Path("a.txt").write_text("ab")
    wide_request = replace(request(OUT, "a.txt"), encoder=wide)
    assert prepare_folder(wide_request).dtype == "uint32"
    assert np.fromfile(OUT / "shard-00000.bin", "<u4").tolist() == [
        97,
        98,
        0,
    ]


NO_OBJECTS = (
    b'{"te',
    b"\xff",
    b"[" * 200_000,
    b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        *(
            (
                "a.jsonl",
                b'{"text": "a"}\n' + row + b"\n",
                "has no JSON object in line 2 (",
            )
            for row in NO_OBJECTS
        ),
        (
            "a.jsonl",
            b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}",
            "has [[[[[[[…as text in line 1, which is no text",
        ),
        (
            "a.jsonl",
            b'{"a\\u001b[31m": 1}',
            "has no field 'text' in line 1: it has a\\x1b[31m;",
        ),
        (
            "a.jsonl",
            b'{"text": 5}\n',
            "has 5 as text in line 1, which is no text; name a field of text",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9],
            "cannot be read (",
        ),
        ("a.txt.gz", b"no gzip", "cannot be read (Not a gzipped file"),
        ("a.parquet", b"PAR1 nonsense PAR1", "cannot be read as Parquet ("),
    ],
)
def test_unreadable_file_is_named(name, content, sentence):
    """Oracle: the expected message."""
    if name.endswith("parquet"):
        pytest.importorskip("datasets")
    Path(name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        prepare_folder(request(OUT, name))
    message = str(caught.value)
    start, _, end = sentence.partition("…")
    assert (
        message.startswith(f"FILE=[{name}] {start}")
        and end in message
        and message.isprintable()
    )
    assert not OUT.exists()
