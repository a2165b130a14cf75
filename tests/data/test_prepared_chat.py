"""Conversations on their way into training: caches, prepared folders and counted answers."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from fsdptoys.cli.data import data_command
from fsdptoys.config.schema import Config
from fsdptoys.data import IGNORE_INDEX
from fsdptoys.data.dataset_index import read_index
from fsdptoys.data.hf import HFConfig
from fsdptoys.data.packing import Packing
from fsdptoys.data.permutation import EndlessShuffle
from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import StepMetrics
from fsdptoys.parallel import FSDP2Config
from fsdptoys.train.trainer import Trainer
from tests.data.chats import GOOD, WIDE, config, rows_of
from tests.harness.chat_files import (
    CONVERSATIONS,
    GENERATED,
    save_chat_tokenizer,
    without_blocks,
    write_rows,
)
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config

pytestmark = pytest.mark.usefixtures("chat_folder")


def test_template_and_skipping_decide_the_cache_and_the_day_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the number of folders; a template that writes the date writes the same one always."""
    dated = "{{ strftime_now('%d %b %Y') }}" + without_blocks(GENERATED["chatml"])
    save_chat_tokenizer(Path("tokenizer"), dated)
    for changes in ({}, {}, {"template": "chatml"}, {"skip_bad_rows": True}):
        config(**changes).prepare(WIDE, 512)
    folders = [
        path for path in Path("cache").iterdir() if (path / "index.json").exists()
    ]
    assert len(folders) == 3
    ((ids, _),) = rows_of(config())
    from tokenizers import Tokenizer

    assert (
        Tokenizer.from_file("tokenizer/tokenizer.json")
        .decode(ids)
        .startswith("26 Jul 2024")
    )


def test_prepared_folder_keeps_what_is_learned_and_mixes_with_texts() -> None:
    """Oracle: the conversations' own rows; every token of a text is a label."""
    with gzip.open("a.jsonl.gz", "wt") as file:
        file.write(f"{GOOD}\n" * 5)
    Path("b.txt").write_text("hello " * 400)
    chat = config(files=["a.jsonl.gz"])
    chat.prepare(64, 512)
    (chat_folder,) = (
        path for path in Path("cache").iterdir() if (path / "index.json").exists()
    )
    texts = HFConfig(
        files=["b.txt"],
        tokenizer="tokenizer",
        document_end="<|endoftext|>",
        cache="texts",
        processes=1,
    )
    texts.prepare(64, 512)
    (text_folder,) = Path("texts").iterdir()
    mixed = PreparedConfig(sources=[str(chat_folder), str(text_folder)])
    mixed.validate(64, 512)
    dataset = mixed.build(64, 512, 0)
    shares = [np.mean(dataset.train[number][1] != IGNORE_INDEX) for number in range(20)]
    assert max(shares) == 1.0 and 0 < min(shares) < 0.6
    assert (
        PreparedConfig(folder=str(chat_folder)).build(64, 512, 0).fingerprint
        != dataset.fingerprint
    )


def test_data_prepare_writes_the_folder_of_data_chat(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the bytes that data=chat puts into its cache, without the bad row."""
    write_rows(Path("rows.jsonl"), [GOOD, GOOD, '{"messages": []}'])
    chat = config(files=["rows.jsonl"], skip_bad_rows=True)
    chat.prepare(WIDE, 320)
    arguments = [
        "prepare",
        "rows.jsonl",
        "--tokenizer",
        "tokenizer",
        "--out",
        "out",
        "--processes",
        "1",
    ]
    assert data_command([*arguments, "--chat", "--skip-bad-rows"]) == 0
    assert "left out: " in capsys.readouterr().err
    (cached,) = (path.parent for path in Path("cache").glob("*/index.json"))
    names = sorted(path.name for path in Path("out").iterdir())
    assert "shard-00000.learned" in names and names == sorted(
        path.name for path in cached.iterdir()
    )
    assert all(
        Path("out", name).read_bytes() == (cached / name).read_bytes() for name in names
    )
    arguments[arguments.index("out")] = "other"
    with pytest.raises(
        ConfigError, match=r"in line 3 .*; repair it, or add --skip-bad-rows"
    ):
        data_command([*arguments, "--chat"])


def test_data_show_prints_a_row_with_what_is_learned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the template's text, written by hand; learned tokens in color, or in brackets without
    it."""
    calling = [
        *CONVERSATIONS[1],
        {"role": "tool", "content": ":smile: [b]"},
        {"role": "assistant", "content": "7"},
    ]
    calling[1] = {
        **calling[1],
        "content": "I look",
        "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
    }
    write_rows(Path("a.jsonl"), ['{"messages": []}', {"messages": calling}])
    arguments = ["show", "a.jsonl", "--chat", "--tokenizer", "tokenizer", "--row"]
    assert data_command([*arguments, "2"]) == 0
    assert capsys.readouterr().out == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[[I look<|im_end|>]]\n"
        "<|im_start|>tool\n:smile: [b]<|im_end|>\n<|im_start|>assistant\n[[7<|im_end|>]]\n\n"
        "ROWS=[a.jsonl] in line 2: 57 tokens, of which 8 are learned, in [[brackets]]\n"
        "the row loses the call of message 2 (assistant), which the chat template does not write\n"
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert data_command([*arguments, "2"]) == 0
    assert "assistant\n\x1b[1;32m7<|im_end|>\x1b[0m\n" in capsys.readouterr().out
    mistakes = {
        "1": (
            "ROWS=[a.jsonl] in line 1 has [] as messages, which is no list of messages; repair "
            "it, or show another row"
        ),
        "3": "--row 3 is not among the conversations; write --row 1",
    }
    for row, message in mistakes.items():
        with pytest.raises(ConfigError) as caught:
            data_command([*arguments, row])
        assert str(caught.value) == message


def test_preparing_reports_what_rows_lose_and_prints_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: ten sentences and the number of all; the first good row; the sentence on a template
    without an end."""
    template = (
        "{% for m in messages if m.role != 'developer' %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    save_chat_tokenizer(Path("tokenizer"), template)
    row = {"messages": [{"role": "developer", "content": "terse"}, *CONVERSATIONS[1]]}
    write_rows(Path("rows.jsonl"), ['{"messages": []}', *[row] * 12])
    arguments = [
        "prepare",
        "rows.jsonl",
        "--tokenizer",
        "tokenizer",
        "--out",
        "out",
        "--chat",
        "--skip-bad-rows",
    ]
    assert data_command([*arguments, "--processes", "1"]) == 0
    out, err = capsys.readouterr()
    loses = "loses the content of message 1 (developer), which the chat template does not write"
    assert (
        f"FILE=[rows.jsonl] in line 11 {loses}\n" in err
        and f"in line 12 {loses}" not in err
    )
    assert "12 rows in all lose parts\n" in err
    assert (
        "no answer ends with a special token, so the model does not learn to end its turn\n"
        in err
    )
    assert (
        "user: hello\n[[assistant:  hello yourself \n\n]]\n" in out
        and f"the row {loses}" in out
    )


def test_damaged_learned_file_is_named() -> None:
    """Oracle: the file with a value that is neither 0 nor 1."""
    config().prepare(WIDE, 512)
    (path,) = Path("cache").glob("*/*.learned")
    path.write_bytes(b"\7" * path.stat().st_size)
    with pytest.raises(
        ConfigError,
        match=r"shard-00000.learned\] has 7, where 0 and 1 say which tokens are learned",
    ):
        config().build(WIDE, 512, 0).train[0]


def test_sequences_without_an_answer_are_left_out_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the windows of the same stream that have a label, found one by one."""
    long = [
        {"role": "user", "content": "word " * 150},
        {"role": "assistant", "content": "yes"},
    ]
    write_rows(
        Path("a.jsonl"), [{"messages": messages} for messages in (*CONVERSATIONS, long)]
    )
    chat = config(packing=Packing.none, mask_documents=False)
    chat.prepare(16, 512)
    dataset = chat.build(16, 512, 0)
    windows = dataset.train.windows
    expected = [
        windows[number]
        for number in range(len(windows))
        if (windows[number][1] != IGNORE_INDEX).any()
    ]
    samples = [dataset.train[number] for number in range(len(dataset.train))]
    assert 0 < len(expected) < len(windows)
    for (tokens, labels), (expected_tokens, expected_labels) in zip(
        samples, expected, strict=True
    ):
        assert (tokens == expected_tokens).all() and (labels == expected_labels).all()
    sentence = (
        f"left out {len(windows) - len(expected)} of {len(windows)} sequences of data.files, "
        "which have no answer"
    )
    assert capsys.readouterr().err.count(sentence) == 1


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (
            "train",
            r"data\.files has no answer in the \d+ sequences of its training part; prepare more",
        ),
        (
            "eval",
            r"data\.files has no answer in the \d+ sequences of its held-out part; hold out",
        ),
    ],
)
def test_parts_without_any_answer_are_refused(part: str, sentence: str) -> None:
    """Oracle: the expected message, of labels that are all 0 in one part."""
    write_rows(
        Path("a.jsonl"), [{"messages": messages} for messages in CONVERSATIONS * 10]
    )
    chat = config(packing=Packing.none, mask_documents=False, eval_fraction=0.5)
    chat.prepare(16, 512)
    for shard in read_index(
        str(next(Path("cache").glob("*/index.json")).parent), "data.files"
    ).of(part):
        (path,) = Path("cache").glob(f"*/{shard.name}.learned")
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ConfigError, match=sentence):
        chat.build(16, 512, 0)


def steps_of(config: Config) -> list[StepMetrics]:
    trainer = Trainer(config)
    trainer.train()
    return trainer.history


def test_training_counts_answers_for_the_loss_and_all_tokens_for_the_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: labels and ids of the dataset's rows; one process for the losses of two. Every row
    has a label."""
    long = [
        {"role": "user", "content": "word " * 150},
        {"role": "assistant", "content": "yes"},
    ]
    write_rows(
        Path("a.jsonl"), [{"messages": messages} for messages in (*CONVERSATIONS, long)]
    )
    histories: list[list[StepMetrics]] = []
    for ranks, batch_size in ((1, 4), (2, 2)):
        run_config = make_config(
            FSDP2Config(),
            ranks,
            steps=3,
            seq_len=64,
            grad_accum=1,
            batch_size=batch_size,
        )
        run_config.model.vocab_size = 512
        run_config.data = config()
        run_config.data.prepare(64, 512)
        run_config.validate(ranks, "cpu")
        histories += run_ranks(ranks, steps_of, run_config)
    dataset = config().build(64, 512, 0)
    learned = [token for _, tokens in rows_of(config()) for token in tokens]
    rows = [dataset.train[number] for number in range(len(dataset.train))]
    labels = [int((labels_T != IGNORE_INDEX).sum()) for _, labels_T in rows]
    padding = [
        64 - len(np.trim_zeros(tokens_T - dataset.document_end, "b"))
        for tokens_T, _ in rows
    ]
    tokens = [64 - max(0, count - 1) for count in padding]
    assert (
        min(labels) > 0
        and sum(labels) == len(learned)
        and len(rows) > 4
        and min(tokens) < 64
    )
    assert (
        "parts without an answer, of documents longer than 64 tokens"
        in capsys.readouterr().err
    )
    stream = EndlessShuffle(len(rows), 0)
    for number, (step, *others) in enumerate(zip(*histories, strict=True)):
        chosen = [stream[4 * number + sample] for sample in range(4)]
        assert step.valid_tokens == sum(labels[row] for row in chosen)
        assert step.tokens_per_second * step.step_time_seconds == pytest.approx(
            sum(tokens[row] for row in chosen)
        )
        for other in others:
            assert (
                other.valid_tokens == step.valid_tokens
                and other.loss == pytest.approx(step.loss, rel=1e-5)
            )
