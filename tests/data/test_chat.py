"""``data=chat``: ids, learned tokens and bad rows, compared with transformers' chat templates."""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.data.chat_encoder import open_chat_encoder
from fsdptoys.errors import ConfigError
from tests.data.chats import GOOD, WIDE, config, rows_of
from tests.data.mistakes import mistakes
from tests.harness.chat_files import (
    CONVERSATIONS,
    GENERATED,
    save_chat_tokenizer,
    without_blocks,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("chat_folder")


def rows_of_transformers(
    template: str, conversations: list[list[dict[str, Any]]], **options: Any
) -> Any:
    """Ids, and those that the assistant's mask marks, of each conversation."""
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(
        save_chat_tokenizer(Path("oracle"), template)
    )
    rows = []
    for messages in conversations:
        encoded = oracle.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **options,
        )
        marked = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        rows.append(
            (encoded["input_ids"], [token for token, learned in marked if learned])
        )
    return rows


@pytest.mark.oracle
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("name", sorted(GENERATED))
def test_ids_and_learned_tokens_are_those_of_transformers(
    name: str, blocks: bool
) -> None:
    """Oracle: ``apply_chat_template`` with the assistant's mask, which needs ``generation`` blocks;
    without such blocks in the template, the answers found are the same."""
    template = GENERATED[name] if blocks else without_blocks(GENERATED[name])
    save_chat_tokenizer(Path("tokenizer"), template)
    write_rows(Path("a.jsonl"), [{"messages": messages} for messages in CONVERSATIONS])
    assert sorted(rows_of(config())) == sorted(
        rows_of_transformers(GENERATED[name], CONVERSATIONS)
    )


def test_bytes_with_a_built_in_template_learn_the_answers() -> None:
    """Oracle: the texts, written by hand; a message of weight 0 is context only."""
    context = [
        *CONVERSATIONS[0][:2],
        {**CONVERSATIONS[0][2], "weight": 0},
        *CONVERSATIONS[1],
    ]
    write_rows(Path("a.jsonl"), [{"messages": CONVERSATIONS[1]}, {"messages": context}])
    rows = rows_of(config(tokenizer="bytes", template="chatml"))
    texts = [(bytes(ids).decode(), bytes(learned).decode()) for ids, learned in rows]
    arithmetic = (
        "<|im_start|>system\nYou are terse. <|im_end|>\n<|im_start|>user\nWhat is 2 + "
        "2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    )
    greeting = (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n hello "
        "yourself \n<|im_end|>\n"
    )
    assert sorted(texts) == [
        (arithmetic + greeting, " hello yourself \n<|im_end|>"),
        (greeting, " hello yourself \n<|im_end|>"),
    ]


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
    rows, expected = (
        rows_of(config(files=[f"{name}.jsonl"], tokenizer=tokenizer, template="chatml"))
        for name in ("a", "b")
    )
    assert rows == expected


@pytest.mark.oracle
def test_tools_and_calls_are_written_by_the_template() -> None:
    """Oracle: transformers."""
    template = (
        "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}"
        "{{ m.content }}{% endif %}<|im_end|>{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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


DEEP = "[" * 200 + "]" * 200


@pytest.mark.parametrize(("row", "says"), mistakes("chat rows"))
def test_bad_row_is_named_by_file_and_line_or_left_out(
    row: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the whole message, and the good rows alone."""
    refusing = (
        "{% if messages and messages[0].role == 'poet' %}"
        "{{ raise_exception('no poets') }}{% endif %}"
    )
    mute = "{% if messages and messages[0].role == 'mute' %}nothing{% else %}"
    template = refusing + mute + without_blocks(GENERATED["chatml"]) + "{% endif %}"
    save_chat_tokenizer(Path("tokenizer"), template)
    write_rows(Path("a.jsonl"), [GOOD, "", row.replace("{deep}", DEEP), GOOD])
    sentence = f"data.files=[a.jsonl] in line 3 {says}"
    with pytest.raises(ConfigError) as caught:
        config().prepare(WIDE, 512)
    assert str(caught.value) == f"{sentence}; repair it, or set data.skip_bad_rows=true"
    rows = rows_of(config(skip_bad_rows=True))
    assert f"left out: {sentence}\n" in capsys.readouterr().err
    write_rows(Path("b.jsonl"), [GOOD, GOOD])
    assert rows == rows_of(config(files=["b.jsonl"]))


@pytest.mark.parametrize(("changes", "says"), mistakes("chat settings"))
def test_mistakes_are_named_with_a_fix(changes: dict[str, Any], says: str) -> None:
    """Oracle: the beginning of the message."""
    save_chat_tokenizer(Path("bare"), None)
    Path("bad.jinja").write_text("{% for %}")
    Path("a.txt").write_text("x")
    Path("a.json").write_text(f"[{GOOD}]")
    with pytest.raises(ConfigError) as caught:
        config(**changes).validate(WIDE, 512)
        config(**changes).prepare(WIDE, 512)
    assert str(caught.value).startswith(says)


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
    vocabulary = {
        word: token_id for token_id, word in enumerate(["?", "</s>", "hello"])
    }
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token="?")
    )
    tokenizer.add_special_tokens(special)
    folder = Path("own")
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    source = f"{{% for m in messages %}}{{{{ m.content }}}}{template}{{% endfor %}}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": own, "chat_template": source})
    )

    def opened() -> int:
        return open_chat_encoder(
            "own", None, None, "own", "template", "end"
        ).document_end

    if chosen is None:
        with pytest.raises(
            ConfigError,
            match="names no token that ends a document; set end to one of its tokens",
        ):
            opened()
    else:
        assert opened() == tokenizer.token_to_id(chosen)
