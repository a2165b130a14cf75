"""Find what a chat template leaves out of a conversation.

A template may ignore a role, the calls of tools or the reasoning of an answer, without a word:
Qwen's ignore the role ``developer``, old ones ``tool_calls``. The model then learns from less than
the row says, or to answer a call with nothing. So the content, the reasoning, the calls and the
result of every message are looked for in the text.

A part is found if its characters other than white space are in the text of its own message, or, for
a message without a text of its own, in what belongs to no message or is left of others beside their
own parts. A template may write it as JSON. One loss is right: templates of reasoning models leave
out the reasoning of answers before the last question, as it is when these models are used.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .chat_jinja import MarkedText

THINK = "<think>"
THOUGHT = "</think>"
"""Around reasoning within a content."""


def lost_parts(messages: Sequence[Mapping[str, Any]], marked: MarkedText) -> list[str]:
    """What is not in the text, such as "the call in message 2" (counted from 1)."""
    turns = {number: _squeezed(text) for number, text in marked.texts().items()}
    left = dict(turns)  # without the parts of their own messages
    last_question = max(
        (
            number
            for number, message in enumerate(messages)
            if message["role"] == "user"
        ),
        default=-1,
    )
    missing = []
    for number, message in enumerate(messages):
        for part in _parts(message):
            if part.kind == "reasoning" and number < last_question:
                continue
            if part.is_in(turns.get(number, "")):
                for text in part.texts:
                    left[number] = left[number].replace(_squeezed(text), "", 1)
            else:
                missing.append((number, part))
    if not missing:
        return []
    rest = "".join(left.values())
    return [
        f"the {part.kind} of message {number + 1} ({messages[number]['role']})"
        for number, part in missing
        if not part.is_in(rest)
    ]


class _Part(NamedTuple):
    """What must be written of a message."""

    kind: str
    texts: list[str]
    as_json: bool = True  # whether texts may be written as strings of JSON

    def is_in(self, text: str) -> bool:
        """Whether a text without white space holds all of it."""
        return all(
            _squeezed(piece) in text
            or (
                self.as_json
                and any(
                    _squeezed(json.dumps(piece, ensure_ascii=a)[1:-1]) in text
                    for a in (False, True)
                )
            )
            for piece in self.texts
        )


def _parts(message: Mapping[str, Any]) -> Iterator[_Part]:
    """Each part of a message."""
    content = message.get("content", "")
    reasoning = message.get("reasoning_content")
    if THOUGHT in content:
        inside, _, content = content.rpartition(THOUGHT)
        reasoning = reasoning or inside.replace(THINK, "")
    if isinstance(reasoning, str) and reasoning.strip():
        yield _Part("reasoning", [reasoning])
    if content.strip():
        yield _Part("content", [content])
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function, dict):
            arguments = function.get("arguments")
            # Arguments as text are JSON already.
            yield _Part(
                "call",
                [str(function.get("name", "")), *_leaves(arguments)],
                not isinstance(arguments, str),
            )


def _leaves(value: Any) -> Iterator[str]:
    """Texts of all keys and values within arguments."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield str(key)
            yield from _leaves(child)
    elif isinstance(value, list):
        for child in value:
            yield from _leaves(child)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield json.dumps(value)


def _squeezed(text: str) -> str:
    return "".join(text.split())
