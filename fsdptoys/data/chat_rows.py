"""Conversations as records of files: messages with roles and contents, and perhaps tools.

Two forms are read: ``{"messages": [{"role": "user", "content": "…"}, …]}`` as of OpenAI's API, and
ShareGPT's ``{"conversations": [{"from": "human", "value": "…"}, …]}``. Older forms become today's:
``function_call`` and ``functions`` of OpenAI's API, ``function_call`` and ``observation`` of
ShareGPT, and a field ``system`` beside the messages. A content is text, or a list of parts
``{"type": "text", "text": "…"}``. A message with ``"weight": 0`` is context only. A null is the
same as a missing key, at every level, because tables write all keys of all rows. Not covered:
images, sound, files.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.text import one_line, short_text

from .documents import Records

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
MOST_LEVELS = 64  # of nested tools and arguments; templates and processes recurse
ANSWERS = "assistant"
"""Role of the messages that are learned."""
OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that ``chat_template_kwargs`` cannot set."""


class BadRowError(ValueError):
    """A row that is no conversation to learn from; the text completes "line 5 …"."""


@dataclass(frozen=True)
class ChatRow:
    """One conversation, or the reason why it is none; its length is that of the contents in
    characters."""

    where: str  # file and line
    messages: list[dict[str, Any]] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    """Numbers of the messages that are learned."""
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    """Of the template, from the row's ``chat_template_kwargs``."""
    problem: str | None = None

    def __len__(self) -> int:
        return 1 + sum(len(message.get("content", "")) for message in self.messages)


class ChatRecords(Records):
    """Reads records as ``ChatRow``."""

    plain_files = False
    optional_fields = ("tools", "functions", "system", "chat_template_kwargs")

    def read(
        self, owner: str, name: str, record: Mapping[str, Any], where: str
    ) -> ChatRow:
        """The conversation in field ``name``; ``owner`` and ``where`` are file and line for
        messages."""
        try:
            if name not in record:
                has = one_line(", ".join(map(str, record))[:200])
                raise BadRowError(f"has no field {name!r} (it has {has})")
            used = {key: record.get(key) for key in (name, *self.optional_fields)}
            if any(level > MOST_LEVELS for level, _ in _walk(used)):
                raise BadRowError(f"nests more than {MOST_LEVELS} lists and objects")
            used = _without_nulls(used)
            messages = _with_system(_messages(used.get(name), name), used.get("system"))
            learned = [
                number
                for number, message in enumerate(messages)
                if message["role"] == ANSWERS and message.pop("weight", 1) != 0
            ]
            if not learned:
                raise BadRowError(f"has no message of role {ANSWERS!r} to learn from")
            return ChatRow(
                f"{owner}{where}", messages, learned, _tools(used), _variables(used)
            )
        except BadRowError as error:
            return ChatRow(f"{owner}{where}", problem=str(error))


def _without_nulls(value: Any) -> Any:
    """Leave out keys of objects with a null."""
    if isinstance(value, dict):
        return {
            key: _without_nulls(child)
            for key, child in value.items()
            if child is not None
        }
    return (
        [_without_nulls(child) for child in value] if isinstance(value, list) else value
    )


def _require(value: Any, kind: type, name: str, noun: str) -> None:
    """Refuse a value of another type, which is no ``noun``."""
    if not isinstance(value, kind):
        raise BadRowError(f"has {short_text(value)} as {name}, which is no {noun}")


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRowError(
            f"has {short_text(value)} as {name}, which is no list of messages"
        )
    return [_message(message, number) for number, message in enumerate(value, 1)]


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Put the text of a row's field ``system`` before its messages."""
    if system in (None, ""):
        return messages
    _require(system, str, "system", "text")
    if messages[0]["role"] == "system":
        if messages[0].get("content") == system:
            return messages
        raise BadRowError("has a field 'system' and another system message")
    return [{"role": "system", "content": system}, *messages]


def _message(value: Any, number: int) -> dict[str, Any]:
    _require(value, dict, f"message {number}", "object")
    message = dict(value)
    if "role" not in message and isinstance(message.get("from"), str):
        message = _from_sharegpt(message, number)
    if not isinstance(message.get("role"), str):
        raise BadRowError(f"has no role in message {number}")
    _rename_calls(message, number)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
        message["content"] = content
    if content is None and message.get("tool_calls"):
        return message
    if content is None:
        raise BadRowError(f"has no content in message {number}")
    _require(content, str, f"the content of message {number}", "text")
    return message


def _from_sharegpt(message: dict[str, Any], number: int) -> dict[str, Any]:
    """A message of ``from`` and ``value``."""
    speaker = message.pop("from")
    text = message.pop("value", None)
    if speaker not in SHAREGPT_ROLES:
        roles = ", ".join(SHAREGPT_ROLES)
        raise BadRowError(
            f"has {short_text(speaker)} as 'from' of message {number}, which is none of {roles}"
        )
    role = {"role": SHAREGPT_ROLES[speaker]}
    if speaker != "function_call":
        return role | {"content": text} | message
    call = _parsed(text, f"a function_call in message {number}")
    calls = call if isinstance(call, list) else [call]
    return (
        role | message | {"tool_calls": [_call(function, number) for function in calls]}
    )


def _rename_calls(message: dict[str, Any], number: int) -> None:
    """Turn ``function_call`` and role ``function`` into today's ``tool_calls`` and ``tool``."""
    if "function_call" in message:
        if message.get("tool_calls"):
            raise BadRowError(f"has tool_calls and a function_call in message {number}")
        message["tool_calls"] = [_call(message.pop("function_call"), number)]
    if message["role"] == "function":
        message["role"] = "tool"
    name = f"tool_calls of message {number}"
    calls = message.get("tool_calls", [])
    _require(calls, list, name, "list of objects")
    for call in calls:
        _require(call, dict, name, "list of objects")


def _call(function: Any, number: int) -> dict[str, Any]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRowError(
            f"has {short_text(function)} as a call of message {number}, which names no function"
        )
    return {"type": "function", "function": function}


def _part(part: Any, number: int) -> str:
    if (
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ):
        return str(part["text"])
    raise BadRowError(f"has a part that is no text in message {number}")


def _tools(used: Mapping[str, Any]) -> list[Any] | None:
    tools: list[Any] | None = _parsed_field(used, "tools", list, "list")
    if tools is not None:
        return tools
    functions = _parsed_field(used, "functions", list, "list")
    if functions is None:
        return None
    return [{"type": "function", "function": function} for function in functions]


def _variables(used: Mapping[str, Any]) -> dict[str, Any]:
    variables: dict[str, Any] = (
        _parsed_field(used, "chat_template_kwargs", dict, "object") or {}
    )
    for name in OWN_NAMES:
        if name in variables:
            raise BadRowError(
                f"sets {name} in chat_template_kwargs, which has a field of its own"
            )
    return variables


def _parsed_field(used: Mapping[str, Any], name: str, kind: type, noun: str) -> Any:
    """A field's value, which tables often hold as text; None if it is empty."""
    value = used.get(name)
    if isinstance(value, str) and value:
        value = _parsed(value, name)
    if value in (None, "", [], {}):
        return None
    _require(value, kind, name, noun)
    return value


def _parsed(text: Any, what: str) -> Any:
    """The value of a text in JSON."""
    try:
        return _without_nulls(parse_json(text, surrogates=True))
    except (TypeError, ValueError) as error:
        raise BadRowError(f"has {what} that are no JSON ({one_line(error)})") from error


def with_parsed_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace arguments of calls that are objects written as text, as in OpenAI's API, by the
    objects.

    Equal to ``messages`` if there are none.
    """
    parsed = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            message = {
                **message,
                "tool_calls": [_with_arguments(call) for call in calls],
            }
        parsed.append(message)
    return parsed


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    with suppress(BadRowError):
        parsed = _parsed(arguments, "arguments")
        if isinstance(parsed, dict):
            changed = {**function, "arguments": parsed}
            return {**call, "function": changed} if "function" in call else changed
    return call


def texts_of(row: ChatRow) -> Iterator[str]:
    """All texts of a conversation, its tools and variables, keys included."""
    for _, value in _walk([row.messages, row.tools, row.variables]):
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from (key for key in value if isinstance(key, str))


def _walk(value: Any) -> Iterator[tuple[int, Any]]:
    """Every value within a value of JSON, with its level; without recursion, since rows may nest
    deeply."""
    pending = [(-1, value)]
    while pending:
        level, value = pending.pop()
        yield level, value
        if isinstance(value, (list, dict)):
            pending += [
                (level + 1, child)
                for child in (value.values() if isinstance(value, dict) else value)
            ]
