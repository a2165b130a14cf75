"""Compare the text of conversations with that of transformers, for many chat templates and forms of
rows.

python scripts/benchmarks/chat_templates.py FOLDER [--report docs/data.md] [--details]

FOLDER holds templates (``*.jinja``, at any depth), such as those of trl, llama.cpp and axolotl.
Each is rendered with every row of ``ROWS`` by this project and by ``apply_chat_template`` of
transformers, with its clock stopped on the date that this project takes. Answers are compared where
a template has ``generation`` blocks, or where trl has a second template of the same text that does
(``NAME_training.jinja``).
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from fsdptoys.data.chat_jinja import TODAY
from fsdptoys.data.chat_rows import (
    BadRowError,
    ChatRecords,
    ChatRow,
    with_parsed_arguments,
)
from fsdptoys.data.chat_template import ChatTemplate, Rendered
from fsdptoys.data.tokenizer_settings import TemplateSource
from fsdptoys.errors import ConfigError

TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
SPECIAL = re.compile(
    r"<\|[\w.]+\|>|<｜[^｜<>]+｜>|</?s>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|\[/?INST\]"
)
"""What looks like a special token in a template."""

MARK = "<!-- scripts/benchmarks/chat_templates.py -->"
"""Before and after the table in a page."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city, in °C",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
ASKED = {"role": "user", "content": "What is 12 + 30?"}
ANSWERED = {"role": "assistant", "content": "It is 42."}
MORE = [
    {"role": "user", "content": "And twice that, é?"},
    {"role": "assistant", "content": "That makes 84."},
]
WEATHER = {"role": "user", "content": "How warm is it in Bern?"}
RESULT = {
    "role": "tool",
    "name": "get_weather",
    "tool_call_id": "abcdefghi",
    "content": '{"degrees": 23}',
}
WARM = {"role": "assistant", "content": "In Bern it is 23 °C."}
SYSTEM = {"role": "system", "content": "You are terse."}


def calling(content: str | None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    """A message that calls a tool."""
    function = {
        "name": "get_weather",
        "arguments": {"city": "Bern"} if arguments is None else arguments,
    }
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
        **more,
    }


THOUGHT = "Twelve plus thirty is forty-two."
THINKING = {**ANSWERED, "reasoning_content": THOUGHT}
ROWS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [ASKED, ANSWERED]},
    "system, two turns": {"messages": [SYSTEM, ASKED, ANSWERED, *MORE]},
    "call, content null": {
        "messages": [WEATHER, calling(None), RESULT, WARM],
        "tools": TOOLS,
    },
    "call, content empty": {
        "messages": [WEATHER, calling(""), RESULT, WARM],
        "tools": TOOLS,
    },
    "call, content": {
        "messages": [WEATHER, calling("I look it up."), RESULT, WARM],
        "tools": TOOLS,
    },
    "call last": {"messages": [WEATHER, calling(None)], "tools": TOOLS},
    "reasoning_content": {"messages": [ASKED, THINKING]},
    "thinking": {"messages": [ASKED, {**ANSWERED, "thinking": THOUGHT}]},
    "think tags in content": {
        "messages": [
            ASKED,
            {**ANSWERED, "content": f"<think>\n{THOUGHT}\n</think>\n\nIt is 42."},
        ]
    },
    "reasoning, two turns": {
        "messages": [ASKED, THINKING, MORE[0], {**MORE[1], "reasoning": "42 + 42."}]
    },
    "reasoning and call": {
        "messages": [
            WEATHER,
            calling(None, reasoning_content="I must look it up."),
            RESULT,
            WARM,
        ],
        "tools": TOOLS,
    },
    "answer first": {
        "messages": [ANSWERED, ASKED, {"role": "assistant", "content": "Yes, 42."}]
    },
    "developer": {
        "messages": [
            {"role": "developer", "content": "You are terse."},
            ASKED,
            ANSWERED,
        ]
    },
    "arguments as text": {
        "messages": [
            WEATHER,
            calling(None, json.dumps({"city": "Bern"})),
            RESULT,
            WARM,
        ],
        "tools": TOOLS,
    },
}


KINDS = (
    "equal",
    "equal, loses parts",
    "equal with objects",
    "both refuse",
    "refused here alone",
    "other text",
    "other answers",
)


@dataclass
class Result:
    """What became of one row under one template."""

    kind: str
    detail: str = ""


def read_row(row: dict[str, Any]) -> ChatRow:
    """The row as ``data=chat`` reads it."""
    read = ChatRecords().read("", "messages", row, "row")
    assert read.problem is None, read.problem
    return read


class Oracle:
    """``apply_chat_template`` of transformers on a fixed day."""

    def __init__(self) -> None:
        import transformers.utils.chat_template_utils as utils
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        class Today(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> "Today":
                return cls(TODAY.year, TODAY.month, TODAY.day)

        utils.datetime = Today
        self._render = utils.render_jinja_template
        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()), **TOKENS
        )

    def text(self, template: str, row: ChatRow) -> str | None:
        """The text; None if the template refuses the row."""
        options = {
            "tools": row.tools,
            "chat_template": template,
            "tokenize": False,
            **row.variables,
        }
        try:
            return str(self._tokenizer.apply_chat_template(row.messages, **options))
        except Exception:  # whatever a foreign program can raise
            return None

    def answers(self, template: str, row: ChatRow) -> tuple[str, list[tuple[int, int]]]:
        """The text, and start and stop of each generation block."""
        texts, spans = self._render(
            [row.messages],
            row.tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **TOKENS,
        )
        return texts[0], spans[0]


@functools.cache
def compiled(name: str, source: str) -> ChatTemplate:
    """The template; ConfigError if it is none."""
    return ChatTemplate({"default": TemplateSource(source, name)}, TOKENS)


def compare(
    oracle: Oracle, name: str, source: str, blocks: str | None, row: ChatRow
) -> Result:
    """Render a row with both; ``blocks`` is a template of the same text with generation blocks."""
    expected = oracle.text(source, row)
    try:
        template = compiled(name, source)
        special = sorted({*SPECIAL.findall(source), "</s>"}, key=len, reverse=True)
        rendered = template.render(row, special)
    except (BadRowError, ConfigError) as error:
        return Result(
            "both refuse" if expected is None else "refused here alone", str(error)
        )
    if rendered.text != expected:
        objects = dataclasses.replace(row, messages=with_parsed_arguments(row.messages))
        if objects != row and rendered.text == oracle.text(source, objects):
            return Result("equal with objects")
        return Result("other text", f"{rendered.text!r} for {expected!r}")
    if blocks is not None:
        mistake = compare_answers(oracle, blocks, row, template, rendered)
        if mistake:
            return Result("other answers", mistake)
    return (
        Result("equal, loses parts", "; ".join(rendered.lost))
        if rendered.lost
        else Result("equal")
    )


def compare_answers(
    oracle: Oracle,
    blocks: str,
    row: ChatRow,
    template: ChatTemplate,
    rendered: Rendered,
) -> str | None:
    """How the answers differ from those in generation blocks, if the texts are the same.

    A block may begin with the end of the generation prompt, and end with white space or the token
    that ends texts.
    """
    try:
        text, spans = oracle.answers(blocks, row)
    except Exception:
        return None
    if text != rendered.text:
        return None
    inside = {position for start, stop in spans for position in range(start, stop)}
    answers = {
        position for start, stop in rendered.answers for position in range(start, stop)
    }
    more = _pieces(text, answers - inside)
    less = _pieces(text, inside - answers)
    prompts = [
        template.prompt(row.messages[:number], row) for number in row.learned
    ] + [TOKENS["eos_token"]]
    less = [
        piece
        for piece in less
        if not any(piece.strip() in prompt for prompt in prompts)
    ]
    more = [piece for piece in more if piece.strip()]
    return f"too much {more}, too little {less}" if more or less else None


def _pieces(text: str, positions: set[int]) -> list[str]:
    """The texts of adjacent positions."""
    pieces: dict[int, str] = {}
    for count, position in enumerate(sorted(positions)):
        first = position - count  # the same for adjacent positions
        pieces[first] = pieces.get(first, "") + text[position]
    return list(pieces.values())


def templates_in(folder: Path) -> Iterator[tuple[str, str, str | None]]:
    """Name, source, and a source of the same text with generation blocks, of each template once."""
    sources: set[str] = set()
    for path in sorted(folder.rglob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        if source in sources:
            continue
        sources.add(source)
        training = path.with_name(f"{path.stem}_training.jinja")
        blocks = None
        if re.search(r"\{%-?\s*generation\s*-?%\}", source):
            blocks = source
        elif training.exists():
            blocks = training.read_text(encoding="utf-8")
        yield str(path.relative_to(folder)), source, blocks


def main() -> int:
    """Print or write the table; return 1 if any text or answer differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--details", action="store_true", help="print every difference")
    parser.add_argument(
        "--report", type=Path, help="put the table between this file's marks"
    )
    options = parser.parse_args()
    oracle = Oracle()
    counts = {name: collections.Counter[str]() for name in ROWS}
    rows = {name: read_row(row) for name, row in ROWS.items()}
    templates = list(templates_in(options.folder))
    for name, source, blocks in templates:
        for shape, row in rows.items():
            result = compare(oracle, name, source, blocks, row)
            counts[shape][result.kind] += 1
            if options.details and result.kind not in ("equal", "both refuse"):
                print(f"{result.kind}\t{name}\t{shape}\t{result.detail[:600]}")
    lines = [
        f"| row ({len(templates)} templates) | {' | '.join(KINDS)} |",
        "|---|" + "---:|" * len(KINDS),
    ]
    for shape, results in counts.items():
        lines.append(
            f"| {shape} | {' | '.join(str(results[kind]) for kind in KINDS)} |"
        )
    table = "\n".join(lines)
    print(table)
    if options.report:
        before, _, rest = options.report.read_text(encoding="utf-8").partition(MARK)
        after = rest.partition(MARK)[2]
        options.report.write_text(
            f"{before}{MARK}\n\n{table}\n\n{MARK}{after}", encoding="utf-8"
        )
    return int(
        any(
            results["other text"] + results["other answers"]
            for results in counts.values()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
