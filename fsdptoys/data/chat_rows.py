"""Conversations as records of files: messages with roles and contents, and perhaps tools.

Two forms are read: ``{"messages": [{"role": "user", "content": "…"}, …]}`` as of OpenAI's API, and ShareGPT's
``{"conversations": [{"from": "human", "value": "…"}, …]}``. A content is text, or a list of parts ``{"type": "text",
"text": "…"}``. A message with ``"weight": 0`` is context only. Not covered: images, sound, files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.text import one_line, short_text

from .document_reader import Records

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
MOST_LEVELS = 64  # of nested tools and arguments; templates and processes recurse
ANSWERS = "assistant"
"""Role of the messages that are learned."""


class BadRowError(ValueError):
    """A row that is no conversation to learn from; the text completes "line 5 …"."""


@dataclass(frozen=True)
class ChatRow:
    """One conversation, or the reason why it is none; its length is that of the contents in characters."""

    where: str  # file and line
    messages: list[dict[str, Any]] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    """Numbers of the messages that are learned."""
    tools: list[Any] | None = None
    problem: str | None = None

    def __len__(self) -> int:
        return 1 + sum(len(message.get("content") or "") for message in self.messages)


class ChatRecords(Records):
    """Reads records as ``ChatRow``."""

    optional_fields = ("tools",)

    def read(self, owner: str, name: str, record: Mapping[str, Any], where: str) -> ChatRow:
        """The conversation in field ``name``; ``owner`` and ``where`` are file and line for messages."""
        try:
            if name not in record:
                found = one_line(", ".join(map(str, record))[:200])
                raise BadRowError(f"has no field {name!r} (it has {found or 'none'})")
            messages = _messages(record[name], name)
            learned = [
                number
                for number, message in enumerate(messages)
                if message["role"] == ANSWERS and message.pop("weight", 1) != 0
            ]
            if not learned:
                raise BadRowError(f"has no message of role {ANSWERS!r} to learn from")
            tools = _tools(record.get("tools"))
            if any(level > MOST_LEVELS for level, _ in _walk([messages, tools])):
                raise BadRowError(f"nests more than {MOST_LEVELS} lists and objects")
            return ChatRow(f"{owner}{where}", messages, learned, tools)
        except BadRowError as error:
            return ChatRow(f"{owner}{where}", problem=str(error))


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRowError(f"has {short_text(value)} as {name}, which is no list of messages")
    return [_message(message, number) for number, message in enumerate(value, 1)]


def _message(value: Any, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRowError(f"has {short_text(value)} as message {number}, which is no object")
    message = {key: each for key, each in value.items() if each is not None or key == "content"}
    if "role" not in message and isinstance(message.get("from"), str):
        role = message.pop("from")
        message = {"role": SHAREGPT_ROLES.get(role, role), "content": message.pop("value", None)} | message
    if not isinstance(message.get("role"), str):
        raise BadRowError(f"has no role in message {number}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    if content is None and not message.get("tool_calls"):
        raise BadRowError(f"has no content in message {number}")
    if not isinstance(content, str | None):
        raise BadRowError(f"has {short_text(content)} as the content of message {number}, which is no text")
    message["content"] = content
    return message


def _part(part: Any, number: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BadRowError(f"has a part that is no text in message {number}")


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str) and value:  # tables often hold them as text
        try:
            value = parse_json(value, surrogates=True)
        except ValueError as error:
            raise BadRowError(f"has tools that are no JSON ({one_line(error)})") from error
    if value in (None, "", []):
        return None
    if not isinstance(value, list):
        raise BadRowError(f"has {short_text(value)} as tools, which is no list")
    return value


def texts_of(row: ChatRow) -> Iterator[str]:
    """All texts of a conversation and its tools, keys excluded."""
    return (value for _, value in _walk([row.messages, row.tools]) if isinstance(value, str))


def _walk(value: Any) -> Iterator[tuple[int, Any]]:
    """Every value within a value of JSON, with its level; without recursion, since rows may nest deeply."""
    waiting = [(0, value)]
    while waiting:
        level, value = waiting.pop()
        yield level, value
        if isinstance(value, (list, dict)):
            waiting += [(level + 1, each) for each in (value.values() if isinstance(value, dict) else value)]
