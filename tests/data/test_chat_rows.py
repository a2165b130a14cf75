"""Forms of conversations, and what becomes of them under templates that know tools, reasoning and
roles, or do not."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.data.chat_rows import BadRowError, ChatRecords, ChatRow
from fsdptoys.data.chat_template import ChatTemplate, open_template
from fsdptoys.data.document_reader import find_sources, read_documents
from fsdptoys.data.tokenizer_settings import TemplateSource
from fsdptoys.errors import ConfigError
from scripts.benchmarks.chat_templates import (
    ROWS,
    TOOLS,
    WARM,
    WEATHER,
    Oracle,
    calling,
    compare,
    read_row,
)
from tests.harness.chat_files import write_rows

CALL = {"name": "get_weather", "arguments": {"city": "Bern"}}
RESULT = {"role": "tool", "content": '{"degrees": 23}'}
PLAIN = {
    "messages": [
        WEATHER,
        {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
        RESULT,
    ]
}
PLAIN = {"messages": [*PLAIN["messages"], WARM], "tools": TOOLS}
SHAREGPT = [
    {"from": "human", "value": WEATHER["content"]},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": RESULT["content"]},
    {"from": "gpt", "value": WARM["content"]},
]
OLD_API = [
    WEATHER,
    {"role": "assistant", "content": None, "function_call": CALL},
    {**RESULT, "role": "function"},
    WARM,
]
FORMS: dict[str, dict[str, Any]] = {
    "ShareGPT": {"messages": SHAREGPT, "tools": TOOLS},
    "tools as text": {"messages": SHAREGPT, "tools": json.dumps(TOOLS)},
    "function_call and functions": {
        "messages": OLD_API,
        "functions": [tool["function"] for tool in TOOLS],
    },
    "nulls": {
        "messages": [
            {
                "role": "user",
                "content": WEATHER["content"],
                "tool_calls": None,
                "name": None,
            },
            calling(
                None, {"city": "Bern", "day": None}, reasoning_content=None, id=None
            )
            | {"id": None},
            RESULT,
            WARM,
        ],
        "tools": TOOLS,
        "functions": None,
        "system": None,
    },
}
PARTS = [
    {"type": "text", "text": "How warm is "},
    {"type": "text", "text": "it in Bern?"},
]
FORMS["parts and weights"] = {
    "messages": [
        {**WEATHER, "content": PARTS},
        PLAIN["messages"][1],
        RESULT,
        {**WARM, "weight": 1},
    ],
    "tools": TOOLS,
}
FORMS["nulls"]["messages"][1]["tool_calls"][0].pop("id")


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_calls_are_read_alike(form: str) -> None:
    """Oracle: today's form, written by hand."""
    assert read_row(FORMS[form]) == read_row(PLAIN)


def test_system_field_and_variables_are_read() -> None:
    """Oracle: a system message, and the row's own object."""
    row = read_row(
        {
            "messages": [WEATHER, WARM],
            "system": "Be terse.",
            "chat_template_kwargs": {"thinks": False},
        }
    )
    assert row.messages[0] == {
        "role": "system",
        "content": "Be terse.",
    } and row.learned == [2]
    assert row.variables == {"thinks": False}


def test_tables_and_lines_are_read_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the rows of JSON lines, whose missing keys are nulls in a table, since all rows have
    the same keys."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    other = copy.deepcopy(PLAIN)
    other["messages"][1]["tool_calls"][0]["function"]["arguments"] = {
        "query": "x",
        "limit": 2,
    }
    other["tools"][0]["function"]["parameters"] = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
    }
    rows = [PLAIN, other, {"messages": [WEATHER, WARM]}]
    write_rows(Path("a.jsonl"), rows)
    table = pyarrow.Table.from_pylist([{"tools": None, **row} for row in rows])
    pyarrow.parquet.write_table(table, "a.parquet")
    datasets.Dataset(table).save_to_disk("folder")

    def read(name: str) -> list[ChatRow]:
        (source,) = find_sources("FILE", [name])
        rows = [
            row
            for row, _ in read_documents(
                "FILE", source, "messages", records=ChatRecords()
            )
        ]
        return [
            ChatRow("", row.messages, row.learned, row.tools, problem=row.problem)
            for row in rows
        ]

    assert read("a.jsonl") == read("a.parquet") == read("folder")


CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}\n<call>\n{{ c.function | tojson(FORMAT) }}\n"
    "</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "plain": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    ),
    "calls": CALLS.replace("FORMAT", ""),
    "ascii": CALLS.replace("FORMAT", "true, indent=2"),
    "by keyword": CALLS.replace("FORMAT", "ensure_ascii=False"),
    "documents": "{% if documents is none %}none{% endif %}"
    + CALLS.replace("FORMAT", ""),
    "objects only": CALLS.replace(
        "{{ c.function | tojson(FORMAT) }}",
        "{% for k, v in c.function.arguments.items() %}"
        "{{ c.function.name }}({{ k }}={{ v }}){% endfor %}",
    ),
    "summed": (
        "{% set ns = namespace(out='') %}{% for m in messages %}"
        "{% set ns.out = ns.out ~ '<|im_start|>' ~ m.role ~ '\n' "
        "~ (m.content or '') ~ '<|im_end|>\n' %}{% endfor %}"
        "{{ ns.out }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "joined": (
        "{% for m in messages %}{% set name = m.role ~ ':' %}"
        "{% if name == 'user:' %}Q{% else %}{{ name }}{% endif %}"
        "{{ (m.content or '') + '' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "last apart": (
        "{% for m in messages[:-1] %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>{{ messages[-1].role }}\n{{ messages[-1].content }}<|im_end|>\n"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "results within answers": (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|start|>"
        "{% for r in messages[loop.index0 + 1:] if r.role == 'tool' %}{{ r.content }}"
        "{% endfor %}{% endif %}"
        "<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>"]


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(
        {"default": TemplateSource(source, "this")},
        {"bos_token": "<s>", "eos_token": "</s>"},
    )


@pytest.mark.oracle
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name: str, shape: str) -> None:
    """Oracle: ``apply_chat_template``; of objects, where arguments as text are refused or quoted
    twice."""
    result = compare(Oracle(), name, TEMPLATES[name], None, read_row(ROWS[shape]))
    as_objects = shape == "arguments as text" and name not in (
        "plain",
        "summed",
        "joined",
        "last apart",
    )
    assert result.kind in (
        ["equal with objects"] if as_objects else ["equal", "equal, loses parts"]
    ), result.detail


SUMS = ["It is 42.<|im_end|>", "That makes 84.<|im_end|>"]
WARMTH = "In Bern it is 23 °C.<|im_end|>"
QWEN_CALL = (
    '<call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</call><|im_end|>'
)


@pytest.mark.parametrize(
    ("name", "shape", "learned"),
    [
        ("summed", "system, two turns", SUMS),
        ("last apart", "system, two turns", SUMS),
        ("joined", "system, two turns", SUMS),
        ("calls", "answer first", ["It is 42.<|im_end|>", "Yes, 42.<|im_end|>"]),
        (
            "objects only",
            "arguments as text",
            ["<call>\nget_weather(city=Bern)</call><|im_end|>", WARMTH],
        ),
        ("calls", "arguments as text", [QWEN_CALL, WARMTH]),
        (
            "results within answers",
            "call, content empty",
            ['get_weather{"city": "Bern"}<|start|>', WARMTH],
        ),
        (
            "calls",
            "thinking",
            [
                "<think>\nTwelve plus thirty is forty-two.\n</think>\n\nIt is 42.<|im_end|>"
            ],
        ),
    ],
)
def test_answers_are_found(name: str, shape: str, learned: list[str]) -> None:
    """Oracle: the answers' texts, written by hand."""
    rendered = template_of(TEMPLATES[name]).render(read_row(ROWS[shape]), SPECIAL)
    assert [
        rendered.text[start:stop] for start, stop in rendered.answers
    ] == learned and not rendered.lost


LOSSES: dict[str, tuple[str, list[str]]] = {
    "call, content": ("plain", ["the call of message 2 (assistant)"]),
    "reasoning and call": (
        "plain",
        ["the reasoning of message 2 (assistant)", "the call of message 2 (assistant)"],
    ),
    "thinking": ("plain", ["the reasoning of message 2 (assistant)"]),
    "reasoning, two turns": ("plain", ["the reasoning of message 4 (assistant)"]),
    "developer": (
        "{% for m in messages if m.role != 'developer' %}[{{ m.content }}]{% endfor %}",
        ["the content of message 1 (developer)"],
    ),
    "think tags in content": (
        "{% for m in messages %}[{{ m.content.split('</think>')[-1] }}]{% endfor %}",
        ["the reasoning of message 2 (assistant)"],
    ),
    "call, content empty": (
        "{% for m in messages if m.role != 'tool' %}"
        "[{{ m.content }}{{ m.tool_calls }}]{% endfor %}",
        ["the content of message 3 (tool)"],
    ),
}


@pytest.mark.parametrize("shape", LOSSES)
def test_parts_that_the_template_leaves_out_are_named(shape: str) -> None:
    """Oracle: what the templates write; the reasoning of answers before the last question may be
    left out."""
    name, lost = LOSSES[shape]
    template = template_of(TEMPLATES.get(name, name))
    assert template.render(read_row(ROWS[shape]), SPECIAL).lost == lost


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' | unknown }}",
        "{{ messages[0].content | from_json }}",
        "{{ undefined_function() }}",
        "{{ messages[9].role }}",
        "{{ {messages: 1} }}",
        "{{ messages | sum }}",
        "{% for m in messages %}{{ 1 // 0 }}{% endfor %}",
        "{{ '%d' | format('x') }}",
        "{{ 'x'.encode('none') }}",
        "{{ range(10**9) }}",
        "{% break %}",
        "{{ messages.x.y.z }}",
        "{% for a in messages %}" * 25 + "{% endfor %}" * 25,
    ],
)
def test_any_error_of_a_template_is_one_sentence(source: str) -> None:
    """Oracle: none but the two errors for templates and rows."""
    with pytest.raises((ConfigError, BadRowError)):
        template_of(source).render(read_row(ROWS["one turn"]), SPECIAL)


def test_tool_use_template_is_for_rows_with_tools(tmp_path: Path) -> None:
    """Oracle: transformers' choice, with the templates in each of the places that it reads."""
    settings = tmp_path / "tokenizer_config.json"
    templates = [
        {"name": name, "template": f"{name}{TEMPLATES['calls']}"}
        for name in ("default", "tool_use")
    ]

    def begins() -> list[str]:
        template = open_template(None, str(tmp_path), "data.template", "missing")
        rows = [read_row(ROWS[shape]) for shape in ("one turn", "call last")]
        return [template.render(row, SPECIAL).text.partition("<")[0] for row in rows]

    settings.write_text(json.dumps({"chat_template": templates}))
    assert begins() == ["default", "tool_use"]
    settings.write_text(json.dumps({"chat_template": f"only{TEMPLATES['calls']}"}))
    assert begins() == ["only", "only"]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
        f"file{TEMPLATES['calls']}"
    )
    assert begins() == ["only", "file"]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("settings", "mapped"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, None),
        (
            {"tokenizer_class": "LlamaTokenizerFast"},
            {"eos_token": {"content": "</s>"}, "bos_token": "<s>"},
        ),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}, None),
        (
            {"tokenizer_class": "PreTrainedTokenizerFast"},
            {"bos_token": "<s>", "pad_token": "</s>"},
        ),
        ({"tokenizer_class": "GPT2Tokenizer", "bos_token": None}, None),
    ],
)
def test_special_tokens_are_those_of_transformers(
    settings: dict[str, Any], mapped: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Oracle: ``special_tokens_map`` of the tokenizer that transformers opens."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer

    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    vocabulary = {
        token: number
        for number, token in enumerate(["<s>", "</s>", "<unk>", "<|endoftext|>"])
    }
    Tokenizer(models.BPE(vocabulary, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if mapped is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    expected = AutoTokenizer.from_pretrained(tmp_path).special_tokens_map
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES["calls"])
    template = open_template(None, str(tmp_path), "data.template", "missing")
    assert {name: text for name, text in template.tokens.items() if name in names} == {
        name: str(text) for name, text in expected.items() if name in names
    }
