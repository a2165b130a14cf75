"""``data=chat``: ids, learned tokens and bad rows, compared with transformers' chat templates."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdptoys.cli.data import data_command
from fsdptoys.config.schema import Config
from fsdptoys.data import IGNORE_INDEX, ChatConfig, HFConfig, PreparedConfig
from fsdptoys.data.chat_encoder import open_chat_encoder
from fsdptoys.data.dataset_index import read_index
from fsdptoys.data.packing import Packing
from fsdptoys.data.permutation import EndlessShuffle
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import StepMetrics
from fsdptoys.parallel import FSDP2Config
from fsdptoys.train.trainer import Trainer
from tests.data.mistakes import mistakes
from tests.harness.chat_files import (
    CONVERSATIONS,
    GENERATED,
    save_chat_tokenizer,
    without_blocks,
    write_rows,
)
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config

GOOD = json.dumps({"messages": CONVERSATIONS[0]})
WIDE = 512
"""Tokens of a row that holds any conversation whole."""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer with a template, and a file of one conversation."""
    monkeypatch.chdir(tmp_path)
    save_chat_tokenizer(Path("tokenizer"), without_blocks(GENERATED["chatml"]))
    write_rows(Path("a.jsonl"), [GOOD])


def config(**changes: Any) -> ChatConfig:
    settings = {"files": ["a.jsonl"], "tokenizer": "tokenizer", "cache": "cache", "processes": 1}
    return ChatConfig(**(settings | changes))


def rows_of(config: ChatConfig, seq_len: int = WIDE) -> list[tuple[list[int], list[int]]]:
    """Each conversation's ids without the separator, and its labels, in the order of the file."""
    config.prepare(seq_len, 512)
    dataset = config.build(seq_len, 512, 0)
    end = dataset.document_end
    found = []
    for number in range(len(dataset.train)):
        tokens_T, labels_T = dataset.train[number]
        learned = [-1, *labels_T.tolist()]
        start = 0
        for stop in np.flatnonzero(tokens_T == end).tolist():
            if stop > start:
                found.append(
                    (
                        tokens_T[start:stop].tolist(),
                        [x for x in learned[start:stop] if x != IGNORE_INDEX and x != -1],
                    )
                )
            start = stop + 1
    return found


def rows_of_transformers(
    template: str, conversations: list[list[dict[str, Any]]], **options: Any
) -> Any:
    """Ids, and those that the assistant's mask marks, of each conversation."""
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(save_chat_tokenizer(Path("oracle"), template))
    rows = []
    for messages in conversations:
        encoded = oracle.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        marked = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        rows.append((encoded["input_ids"], [token for token, learned in marked if learned]))
    return rows


@pytest.mark.oracle
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("name", sorted(GENERATED))
def test_ids_and_learned_tokens_are_those_of_transformers(name: str, blocks: bool) -> None:
    """Oracle: ``apply_chat_template`` with the assistant's mask, which needs ``generation`` blocks;
    without such blocks in the template, the answers found are the same."""
    template = GENERATED[name] if blocks else without_blocks(GENERATED[name])
    save_chat_tokenizer(Path("tokenizer"), template)
    write_rows(Path("a.jsonl"), [{"messages": messages} for messages in CONVERSATIONS])
    assert sorted(rows_of(config())) == sorted(rows_of_transformers(GENERATED[name], CONVERSATIONS))


def test_bytes_with_a_built_in_template_learn_the_answers() -> None:
    """Oracle: the texts, written by hand."""
    write_rows(
        Path("a.jsonl"), [{"messages": CONVERSATIONS[1]}, {"messages": CONVERSATIONS[0][:3]}]
    )
    found = rows_of(config(tokenizer="bytes", template="chatml"))
    texts = [(bytes(ids).decode(), bytes(learned).decode()) for ids, learned in found]
    arithmetic = (
        "<|im_start|>system\nYou are terse. <|im_end|>\n<|im_start|>user\nWhat is 2 + "
        "2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    )
    greeting = (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n hello yourself \n<|im_end|>\n"
    )
    assert sorted(texts) == [
        (arithmetic, "4<|im_end|>"),
        (greeting, " hello yourself \n<|im_end|>"),
    ]


FORMS = {
    "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "yes"}],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
        },
        {"role": "assistant", "content": "yes"},
    ],
    "weights": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes", "weight": 1},
    ],
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_other_forms_of_messages_give_the_same_tokens(form: str) -> None:
    """Oracle: plain messages of roles and texts."""
    plain = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    write_rows(Path("a.jsonl"), [{"messages": plain}])
    write_rows(Path("b.jsonl"), [{"messages": FORMS[form]}])
    assert rows_of(config(files=["b.jsonl"])) == rows_of(config())


@pytest.mark.parametrize("tokenizer", ["bytes", "tokenizer"])
def test_half_of_a_surrogate_pair_becomes_a_question_mark(tokenizer: str) -> None:
    """Oracle: the row with question marks."""
    save_chat_tokenizer(Path("tokenizer"), None)
    for name, text in (("a", "\ud800"), ("b", "?")):
        messages = [
            {"role": "user", "content": f"é{text}"},
            {"role": "assistant", "content": f"yes{text}"},
        ]
        write_rows(Path(f"{name}.jsonl"), [{"messages": messages}])
    found, expected = (
        rows_of(config(files=[f"{name}.jsonl"], tokenizer=tokenizer, template="chatml"))
        for name in ("a", "b")
    )
    assert found == expected


def test_messages_of_weight_0_are_context_only() -> None:
    """Oracle: the learned text."""
    messages = [dict(message) for message in CONVERSATIONS[0]]
    messages[2]["weight"] = 0
    write_rows(Path("a.jsonl"), [{"messages": messages}])
    ((_, learned),) = rows_of(config(tokenizer="bytes", template="chatml"))
    assert bytes(learned).decode() == "That is 7, naïvely.\n\nDone<|im_end|>"


@pytest.mark.oracle
def test_tools_and_calls_are_written_by_the_template() -> None:
    """Oracle: transformers, with tools in JSON lines and, as text, in a table."""
    import pyarrow
    import pyarrow.parquet

    template = (
        "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}"
        "{{ m.content }}{% endif %}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>{{ '\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds é"}}]
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    expected = rows_of_transformers(template, [messages], tools=tools)
    save_chat_tokenizer(Path("tokenizer"), without_blocks(template))
    write_rows(Path("a.jsonl"), [{"messages": messages, "tools": tools}])
    assert rows_of(config()) == expected
    simple = [message | {"tool_calls": message.get("tool_calls")} for message in messages]
    table = pyarrow.Table.from_pylist([{"messages": simple, "tools": json.dumps(tools)}])
    pyarrow.parquet.write_table(table, "b.parquet")
    assert rows_of(config(files=["b.parquet"])) == expected


DEEP = "[" * 200 + "]" * 200


@pytest.mark.parametrize(("typed", "says"), mistakes("chat rows"))
def test_bad_row_is_named_by_file_and_line_or_left_out(
    typed: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the whole message, and the good rows alone."""
    refusing = "{% if messages and messages[0].role == 'poet' %}{{ raise_exception('no poets') }}{% endif %}"
    mute = "{% if messages and messages[0].role == 'mute' %}nothing{% else %}"
    template = refusing + mute + without_blocks(GENERATED["chatml"]) + "{% endif %}"
    save_chat_tokenizer(Path("tokenizer"), template)
    write_rows(Path("a.jsonl"), [GOOD, "", typed.replace("{deep}", DEEP), GOOD])
    sentence = f"data.files=[a.jsonl] in line 3 {says}"
    with pytest.raises(ConfigError) as caught:
        config().prepare(WIDE, 512)
    assert str(caught.value) == f"{sentence}; repair it, or set data.skip_bad_rows=true"
    found = rows_of(config(skip_bad_rows=True))
    assert f"left out: {sentence}\n" in capsys.readouterr().err
    write_rows(Path("b.jsonl"), [GOOD, GOOD])
    assert found == rows_of(config(files=["b.jsonl"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer": "bytes"},
            "data.tokenizer=bytes has no chat template; set data.template=chatml, ",
        ),
        (
            {"tokenizer": "bare"},
            "data.tokenizer=bare has no chat template; set data.template=chatml, ",
        ),
        (
            {"tokenizer": "gone"},
            "data.tokenizer=gone does not exist; name a tokenizer.json, its folder, or bytes",
        ),
        (
            {"template": "none.jinja"},
            "data.template=none.jinja cannot be read (No such file or directory); name a ",
        ),
        ({"template": "bad.jinja"}, "data.template=bad.jinja is no Jinja template ("),
        (
            {"document_end": "<none>"},
            "data.tokenizer=tokenizer has no token '<none>'; set data.document_end to ",
        ),
        (
            {"files": ["a.txt"]},
            "data.files=[a.txt] is neither JSON lines nor a table; name files that end in .jsonl, ",
        ),
        (
            {"files": ["a.json"]},
            "data.files=[a.json] holds a JSON array in line 1, not an object; write one object a ",
        ),
        ({"document_end": "<|im_end|>"}, "data.files=[a.jsonl] in line 1 holds id "),
    ],
)
def test_mistakes_are_named_with_a_fix(changes: dict[str, Any], message: str) -> None:
    """Oracle: the beginning of the message."""
    save_chat_tokenizer(Path("bare"), None)
    Path("bad.jinja").write_text("{% for %}")
    Path("a.txt").write_text("x")
    Path("a.json").write_text(f"[{GOOD}]")
    with pytest.raises(ConfigError) as caught:
        config(**changes).validate(WIDE, 512)
        config(**changes).prepare(WIDE, 512)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
    ],
)
def test_template_cannot_reach_python(template: str) -> None:
    """Oracle: Jinja's sandbox, which refuses the row."""
    save_chat_tokenizer(Path("tokenizer"), template)
    with pytest.raises(ConfigError, match=r"line 1 is refused by the chat template"):
        config().prepare(WIDE, 512)


def test_template_and_skipping_decide_the_cache_and_the_day_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the number of folders; a template that writes the date writes the same one always."""
    dated = "{{ strftime_now('%d %b %Y') }}" + without_blocks(GENERATED["chatml"])
    save_chat_tokenizer(Path("tokenizer"), dated)
    for changes in ({}, {}, {"template": "chatml"}, {"skip_bad_rows": True}):
        config(**changes).prepare(WIDE, 512)
    folders = [path for path in Path("cache").iterdir() if (path / "index.json").exists()]
    assert len(folders) == 3
    ((ids, _),) = rows_of(config())
    from tokenizers import Tokenizer

    assert Tokenizer.from_file("tokenizer/tokenizer.json").decode(ids).startswith("26 Jul 2024")


@pytest.mark.parametrize(
    ("own", "special", "template", "chosen"),
    [
        ("<|im_end|>", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>", "<|endoftext|>"),
        ("<end>", ["<end>", "<|im_end|>"], "<|im_end|>", "<end>"),
        ("<end>", ["<end>", "<gap>"], "{{ eos_token }}", "<gap>"),
        ("<end>", ["<end>"], "<|im_end|>", "<end>"),
        ("<end>", ["<end>"], "<end>", None),
    ],
)
def test_conversations_are_separated_by_a_special_token_that_the_template_does_not_write(
    own: str, special: list[str], template: str, chosen: str | None
) -> None:
    """Oracle: the table; ``</s>`` is an ordinary token of each tokenizer, and no template writes
    it."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: place for place, word in enumerate(["?", "</s>", "hello"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.add_special_tokens(special)
    folder = Path("own")
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    source = f"{{% for m in messages %}}{{{{ m.content }}}}{template}{{% endfor %}}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": own, "chat_template": source})
    )

    def opened() -> int:
        return open_chat_encoder("own", None, None, "own", "template", "end").document_end

    if chosen is None:
        with pytest.raises(
            ConfigError, match="names no token that ends a document; set end to one of its tokens"
        ):
            opened()
    else:
        assert opened() == tokenizer.token_to_id(chosen)


def test_prepared_folder_keeps_what_is_learned_and_mixes_with_texts() -> None:
    """Oracle: the conversations' own rows; every token of a text is a label."""
    with gzip.open("a.jsonl.gz", "wt") as file:
        file.write(f"{GOOD}\n" * 5)
    Path("b.txt").write_text("hello " * 400)
    chat = config(files=["a.jsonl.gz"])
    chat.prepare(64, 512)
    (chat_folder,) = (path for path in Path("cache").iterdir() if (path / "index.json").exists())
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
        PreparedConfig(folder=str(chat_folder)).build(64, 512, 0).fingerprint != dataset.fingerprint
    )


def test_other_ends_of_documents_are_named() -> None:
    """Oracle: the message; the tokenizer is the same, and text ends with its own end."""
    write_rows(Path("rows.jsonl"), [GOOD])
    Path("b.txt").write_text("hello " * 400)
    words = ["--tokenizer", "tokenizer", "--processes", "1", "--out"]
    assert data_command(["prepare", "rows.jsonl", "--chat", *words, "chat"]) == 0
    assert data_command(["prepare", "b.txt", *words, "text"]) == 0
    with pytest.raises(ConfigError) as caught:
        PreparedConfig(sources=["chat", "text"]).validate(16, 512)
    assert str(caught.value) == (
        "data.sources=[text] ends documents with id 302, and data.sources=[chat] with id 300; "
        "prepare one of them again with the token of the other (--document-end)"
    )


def test_data_prepare_writes_the_folder_of_data_chat(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the bytes that data=chat puts into its cache, without the bad row; --chat's options
    need it."""
    write_rows(Path("rows.jsonl"), [GOOD, GOOD, '{"messages": []}'])
    chat = config(files=["rows.jsonl"], skip_bad_rows=True)
    chat.prepare(WIDE, 320)
    words = [
        "prepare",
        "rows.jsonl",
        "--tokenizer",
        "tokenizer",
        "--out",
        "out",
        "--processes",
        "1",
    ]
    assert data_command([*words, "--chat", "--skip-bad-rows"]) == 0
    assert "left out: " in capsys.readouterr().err
    (cached,) = (path.parent for path in Path("cache").glob("*/index.json"))
    names = sorted(path.name for path in Path("out").iterdir())
    assert "shard-00000.learned" in names and names == sorted(
        path.name for path in cached.iterdir()
    )
    assert all(Path("out", name).read_bytes() == (cached / name).read_bytes() for name in names)
    words[words.index("out")] = "other"
    with pytest.raises(ConfigError, match=r"in line 3 .*; repair it, or add --skip-bad-rows"):
        data_command([*words, "--chat"])
    for option in (["--template", "chatml"], ["--skip-bad-rows"]):
        with pytest.raises(
            ConfigError, match=rf"{' '.join(option)} is for conversations; add --chat"
        ):
            data_command([*words, *option])


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
    words = ["show", "a.jsonl", "--chat", "--tokenizer", "tokenizer", "--row"]
    assert data_command([*words, "2"]) == 0
    assert capsys.readouterr().out == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[[I look<|im_end|>]]\n"
        "<|im_start|>tool\n:smile: [b]<|im_end|>\n<|im_start|>assistant\n[[7<|im_end|>]]\n\n"
        "ROWS=[a.jsonl] in line 2: 57 tokens, of which 8 are learned, in [[brackets]]\n"
        "the row loses the call of message 2 (assistant), which the chat template does not write\n"
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert data_command([*words, "2"]) == 0
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
            data_command([*words, row])
        assert str(caught.value) == message


def test_preparing_reports_what_rows_lose_and_prints_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: ten sentences and the number of all; the first good row; the sentence on a template
    without an end."""
    template = "{% for m in messages if m.role != 'developer' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    save_chat_tokenizer(Path("tokenizer"), template)
    row = {"messages": [{"role": "developer", "content": "terse"}, *CONVERSATIONS[1]]}
    write_rows(Path("rows.jsonl"), ['{"messages": []}', *[row] * 12])
    words = [
        "prepare",
        "rows.jsonl",
        "--tokenizer",
        "tokenizer",
        "--out",
        "out",
        "--chat",
        "--skip-bad-rows",
    ]
    assert data_command([*words, "--processes", "1"]) == 0
    out, err = capsys.readouterr()
    loses = "loses the content of message 1 (developer), which the chat template does not write"
    assert f"FILE=[rows.jsonl] in line 11 {loses}\n" in err and f"in line 12 {loses}" not in err
    assert "12 rows in all lose parts\n" in err
    assert (
        "no answer ends with a special token, so the model does not learn to end its turn\n" in err
    )
    assert "user: hello\n[[assistant:  hello yourself \n\n]]\n" in out and f"the row {loses}" in out


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
    long = [{"role": "user", "content": "word " * 150}, {"role": "assistant", "content": "yes"}]
    write_rows(Path("a.jsonl"), [{"messages": messages} for messages in (*CONVERSATIONS, long)])
    wanted = config(packing=Packing.none, mask_documents=False)
    wanted.prepare(16, 512)
    dataset = wanted.build(16, 512, 0)
    windows = dataset.train.windows
    expected = [
        windows[number]
        for number in range(len(windows))
        if (windows[number][1] != IGNORE_INDEX).any()
    ]
    found = [dataset.train[number] for number in range(len(dataset.train))]
    assert 0 < len(expected) < len(windows)
    for (tokens, labels), (expected_tokens, expected_labels) in zip(found, expected, strict=True):
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
            r"data\.files has no answer in its \d+ training sequences; prepare rows with answers",
        ),
        (
            "eval",
            r"data\.files has no answer in its held-out part; set data\.eval_fraction higher, or to 0 for none",
        ),
    ],
)
def test_parts_without_any_answer_are_refused(part: str, sentence: str) -> None:
    """Oracle: the expected message, of labels that are all 0 in one part."""
    write_rows(Path("a.jsonl"), [{"messages": messages} for messages in CONVERSATIONS * 10])
    wanted = config(packing=Packing.none, mask_documents=False, eval_fraction=0.5)
    wanted.prepare(16, 512)
    for shard in read_index(str(next(Path("cache").glob("*/index.json")).parent), "data.files").of(
        part
    ):
        (path,) = Path("cache").glob(f"*/{shard.files()[2][0]}")
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ConfigError, match=sentence):
        wanted.build(16, 512, 0)


def steps_of(config: Config) -> list[StepMetrics]:
    trainer = Trainer(config)
    trainer.train()
    return trainer.history


def test_training_counts_answers_for_the_loss_and_all_tokens_for_the_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: labels and ids of the dataset's rows; one process for the losses of two. Every row
    has a label."""
    long = [{"role": "user", "content": "word " * 150}, {"role": "assistant", "content": "yes"}]
    write_rows(Path("a.jsonl"), [{"messages": messages} for messages in (*CONVERSATIONS, long)])
    histories: list[list[StepMetrics]] = []
    for ranks, batch_size in ((1, 4), (2, 2)):
        wanted = make_config(
            FSDP2Config(), ranks, steps=3, seq_len=64, grad_accum=1, batch_size=batch_size
        )
        wanted.model.vocab_size, wanted.data = 512, config()
        wanted.data.prepare(64, 512)
        wanted.validate(ranks, "cpu")
        histories += run_ranks(ranks, steps_of, wanted)
    dataset = config().build(64, 512, 0)
    learned = [token for _, tokens in rows_of(config()) for token in tokens]
    rows = [dataset.train[number] for number in range(len(dataset.train))]
    labels = [int((labels_T != IGNORE_INDEX).sum()) for _, labels_T in rows]
    padding = [
        64 - len(np.trim_zeros(tokens_T - dataset.document_end, "b")) for tokens_T, _ in rows
    ]
    tokens = [64 - max(0, count - 1) for count in padding]
    assert min(labels) > 0 and sum(labels) == len(learned) and len(rows) > 4 and min(tokens) < 64
    assert "parts without an answer, of documents longer than 64 tokens" in capsys.readouterr().err
    stream = EndlessShuffle(len(rows), 0)
    for number, (step, *others) in enumerate(zip(*histories, strict=True)):
        chosen = [stream[4 * number + sample] for sample in range(4)]
        assert step.valid_tokens == sum(labels[row] for row in chosen)
        assert step.tokens_per_second * step.step_time_seconds == pytest.approx(
            sum(tokens[row] for row in chosen)
        )
        for other in others:
            assert other.valid_tokens == step.valid_tokens and other.loss == pytest.approx(
                step.loss, rel=1e-5
            )
