"""Find what a chat template leaves out of a conversation.

A template may ignore a role, the calls of tools or the reasoning of an answer, without a word: Qwen's ignore the role
``developer``, old ones ``tool_calls``. The model then learns from less than the row says, or to answer a call with
nothing. So the content, the reasoning, the calls and the result of every message are looked for in the text.

A part is found if its characters other than white space are in the text of its own message, or, for a message without
a text of its own, in what belongs to no message or is left of others beside their own parts. A template may write it as
JSON. One loss is right: templates of reasoning models leave out the reasoning of answers before the last question, as
it is when these models are used.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .chat_jinja import MarkedText

THINK, THOUGHT = "<think>", "</think>"
"""Around reasoning within a content."""


def lost_parts(messages: Sequence[Mapping[str, Any]], marked: MarkedText) -> list[str]:
    """What is not in the text, such as "the call in message 2" (counted from 1)."""
    turns = {number: _squeezed(marked.text_of(number)) for number in marked.turns}
    left = dict(turns)  # without the parts of their own messages
    last_question = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    missing = []
    for number, message in enumerate(messages):
        for kind, pieces in _parts(message):
            if kind == "reasoning" and number < last_question:
                continue
            if number in turns and all(_is_in(piece, turns[number]) for piece in pieces):
                for piece in pieces:
                    left[number] = left[number].replace(_squeezed(piece), "", 1)
            else:
                missing.append((number, kind, pieces))
    if not missing:
        return []
    rest = "".join([_squeezed(marked.text_of(None)), *left.values()])
    return [
        f"the {kind} of message {number + 1} ({messages[number]['role']})"
        for number, kind, pieces in missing
        if not all(_is_in(piece, rest) for piece in pieces)
    ]


def _parts(message: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Each part's kind, and the texts that must be written."""
    content, reasoning = message.get("content", ""), message.get("reasoning_content")
    if THOUGHT in content:
        inside, _, content = content.rpartition(THOUGHT)
        reasoning = reasoning or inside.replace(THINK, "")
    if isinstance(reasoning, str) and reasoning.strip():
        yield "reasoning", [reasoning]
    if content.strip():
        yield "content", [content]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function, dict):
            arguments = function.get("arguments")
            yield "call", [str(function.get("name", "")), *_leaves(arguments)]


def _leaves(value: Any) -> Iterator[str]:
    """Texts of all keys and values within arguments."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield str(key)
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield json.dumps(value)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _is_in(piece: str, text: str) -> bool:
    """Whether a text without white space holds a piece, as it is or as JSON."""
    if _squeezed(piece) in text:
        return True
    return any(_squeezed(json.dumps(piece, ensure_ascii=ascii)[1:-1]) in text for ascii in (False, True))
