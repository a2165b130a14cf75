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
from dataclasses import dataclass, field
from typing import Any

from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.text import one_line, short_text

from .document_reader import Records

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

    optional_fields = ("tools", "functions", "system", "chat_template_kwargs")

    def read(self, owner: str, name: str, record: Mapping[str, Any], where: str) -> ChatRow:
        """The conversation in field ``name``; ``owner`` and ``where`` are file and line for
        messages."""
        try:
            if name not in record:
                found = one_line(", ".join(map(str, record))[:200])
                raise BadRowError(f"has no field {name!r} (it has {found or 'none'})")
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
            variables = _variables(used.get("chat_template_kwargs"))
            return ChatRow(f"{owner}{where}", messages, learned, _tools(used), variables)
        except BadRowError as error:
            return ChatRow(f"{owner}{where}", problem=str(error))


def _without_nulls(value: Any) -> Any:
    """Leave out the keys of objects whose value is null."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRowError(f"has {short_text(value)} as {name}, which is no list of messages")
    return [_message(message, number) for number, message in enumerate(value, 1)]


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Put the text of a row's field ``system`` before its messages."""
    if system in (None, ""):
        return messages
    if not isinstance(system, str):
        raise BadRowError(f"has {short_text(system)} as system, which is no text")
    if messages[0]["role"] == "system":
        if messages[0].get("content") == system:
            return messages
        raise BadRowError("has a field 'system' and another system message")
    return [{"role": "system", "content": system}, *messages]


def _message(value: Any, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRowError(f"has {short_text(value)} as message {number}, which is no object")
    message = (
        _from_sharegpt(value, number)
        if "role" not in value and isinstance(value.get("from"), str)
        else value
    )
    if not isinstance(message.get("role"), str):
        raise BadRowError(f"has no role in message {number}")
    message = _with_tool_calls(message, number)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    if content is None and not message.get("tool_calls"):
        raise BadRowError(f"has no content in message {number}")
    if not isinstance(content, str | None):
        raise BadRowError(
            f"has {short_text(content)} as the content of message {number}, which is no text"
        )
    return message if content is None else {**message, "content": content}


def _from_sharegpt(value: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message of ``from`` and ``value``."""
    speaker, text = value["from"], value.get("value")
    if speaker not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise BadRowError(
            f"has {short_text(speaker)} as 'from' of message {number}, which is none of {known}"
        )
    rest = {key: each for key, each in value.items() if key not in ("from", "value")}
    message = {"role": SHAREGPT_ROLES[speaker], "content": text} | rest
    if speaker != "function_call":
        return message
    call = _parsed(text, f"a function_call in message {number}")
    calls = call if isinstance(call, list) else [call]
    del message["content"]
    return message | {"tool_calls": [_call(each, number) for each in calls]}


def _with_tool_calls(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message whose ``function_call`` and role ``function`` are today's ``tool_calls`` and
    ``tool``."""
    message = dict(message)
    if "function_call" in message:
        if message.get("tool_calls"):
            raise BadRowError(f"has tool_calls and a function_call in message {number}")
        message["tool_calls"] = [_call(message.pop("function_call"), number)]
    if message["role"] == "function":
        message["role"] = "tool"
    calls = message.get("tool_calls")
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    ):
        raise BadRowError(
            f"has {short_text(calls)} as tool_calls of message {number}, which is no list of "
            "objects"
        )
    return message


def _call(function: Any, number: int) -> dict[str, Any]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRowError(
            f"has {short_text(function)} as a call of message {number}, which names no function"
        )
    return {"type": "function", "function": function}


def _part(part: Any, number: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BadRowError(f"has a part that is no text in message {number}")


def _tools(used: Mapping[str, Any]) -> list[Any] | None:
    name = "tools" if used.get("tools") not in (None, "", []) else "functions"
    value = used.get(name)
    if isinstance(value, str) and value:  # tables often hold them as text
        value = _parsed(value, name)
    if value in (None, "", []):
        return None
    if not isinstance(value, list):
        raise BadRowError(f"has {short_text(value)} as {name}, which is no list")
    return value if name == "tools" else [{"type": "function", "function": each} for each in value]


def _variables(value: Any) -> dict[str, Any]:
    if isinstance(value, str) and value:
        value = _parsed(value, "chat_template_kwargs")
    if value in (None, ""):
        return {}
    if not isinstance(value, dict):
        raise BadRowError(f"has {short_text(value)} as chat_template_kwargs, which is no object")
    for name in OWN_NAMES:
        if name in value:
            raise BadRowError(f"sets {name} in chat_template_kwargs, which has a field of its own")
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
    found = []
    for message in messages:
        calls = message.get("tool_calls")
        found.append(
            {**message, "tool_calls": list(map(_with_arguments, calls))} if calls else message
        )
    return found


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    try:
        parsed = _parsed(arguments, "arguments")
    except BadRowError:
        return call
    if not isinstance(parsed, dict):
        return call
    changed = {**function, "arguments": parsed}
    return {**call, "function": changed} if "function" in call else changed


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
    waiting = [(-1, value)]
    while waiting:
        level, value = waiting.pop()
        yield level, value
        if isinstance(value, (list, dict)):
            waiting += [
                (level + 1, each) for each in (value.values() if isinstance(value, dict) else value)
            ]
