"""Chat templates: the text of a conversation, and which parts of it are the model's own answers.

A template is a Jinja program from a tokenizer's folder. It comes from others, so it runs in Jinja's sandbox, which has
no access to Python's attributes, files or modules; it can still take long. Tokenizers call it as transformers does
(https://huggingface.co/docs/transformers/chat_templating_writing), with one exception: ``strftime_now`` formats a fixed
date, so that the same files give the same tokens on every day.

An answer is the text after the generation prompt (``add_generation_prompt``), up to and including the end-of-turn
token. A template's own ``{% generation %}`` blocks take precedence.
"""

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line

from .chat_rows import ANSWERS, BadRowError, ChatRow
from .text_encoder import MOST_SETTINGS_BYTES, SETTINGS_FILE

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BUILT_IN = {"chatml": CHATML}
TEMPLATE_FILE = "chat_template.jinja"
MOST_TEMPLATE_BYTES = 2**20
TODAY = datetime.date(2024, 7, 26)
"""The date in the templates of Llama 3.1 to 3.3, which they take where there is no ``strftime_now``."""
BEGIN, END = "\ufdd0", "\ufdd1"
"""Around generated text while a template runs: code points that Unicode keeps out of texts."""
STAND_IN = "\ufdd2answer\ufdd2"  # in place of an answer, to find where the template puts it
MARKS = (BEGIN, END, "\ufdd2")
"""Characters that a conversation must not have."""


@dataclass(frozen=True)
class Rendered:
    """A conversation's text."""

    text: str
    answers: list[tuple[int, int]]
    """Start and stop (excluded), in characters, of each answer that is learned."""


class ChatTemplate:
    """A template with the tokens that it may name (``bos_token``, …); ``owner`` is its name in messages."""

    def __init__(self, source: str, tokens: Mapping[str, str], owner: str) -> None:
        self.source, self.tokens, self._owner = source, dict(tokens), owner
        self._template = _compile(source, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self.tokens, self._owner)

    def render(self, row: ChatRow) -> Rendered:
        """The text of a conversation; BadRowError if the template or the search for answers fails."""
        marked = self._text(row.messages, row)
        if BEGIN in marked:
            return _unmark(marked, row)
        return Rendered(marked, [self._answer(marked, row, number) for number in row.learned])

    def turn(self, message: str, system: str | None = None) -> tuple[str, str]:
        """The text with which a model answers one message, and the text that closes its answer; BadRowError if none.

        ``system`` is the content of a system message before it.
        """
        asked = [] if system is None else [{"role": "system", "content": system}]
        asked.append({"role": "user", "content": message})
        row = ChatRow("--prompt", asked)
        answered = self._text([*asked, {"role": ANSWERS, "content": STAND_IN}], row).replace(BEGIN, "").replace(END, "")
        return self._text(asked, row, prompt=True), answered.partition(STAND_IN)[2].rstrip()

    def _text(self, messages: Sequence[Mapping[str, Any]], row: ChatRow, prompt: bool = False) -> str:
        from jinja2.exceptions import TemplateError

        context = {"messages": messages, "tools": row.tools, "add_generation_prompt": prompt, **self.tokens}
        try:
            return str(self._template.render(context))
        except TemplateError as error:
            raise BadRowError(f"is refused by the chat template ({one_line(error)})") from error
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError, ZeroDivisionError) as error:
            raise BadRowError(f"does not fit the chat template ({one_line(error)})") from error

    def _answer(self, text: str, row: ChatRow, number: int) -> tuple[int, int]:
        """Start and stop of the answer in message ``number``."""
        before, message = row.messages[:number], row.messages[number]
        prompt = self._prompt(before, row)
        until = self._text(row.messages[: number + 1], row) if number + 1 < len(row.messages) else text
        content = message["content"]
        starts = prompt is not None and text.startswith(prompt)
        start, stop = len(prompt or ""), len(until)
        if not (starts and text.startswith(until)):
            # The template writes earlier turns otherwise than the last one, so look where it puts the content.
            if content is None:
                raise BadRowError(f"has a call of tools in message {number + 1} that the chat template changes later")
            stand_in = {**message, "content": STAND_IN}
            head, found, tail = self._text([*before, stand_in, *row.messages[number + 1 :]], row).partition(STAND_IN)
            closing = self._text([*before, stand_in], row).partition(STAND_IN)[2]
            if not (found and text.endswith(tail) and tail.startswith(closing)):
                raise BadRowError(f"has an answer in message {number + 1} that the chat template changes")
            stop = len(text) - len(tail) + len(closing)
            if not starts:
                start = len(head)
                if not text.startswith(head):
                    raise BadRowError(f"has an answer in message {number + 1} whose start is not in the full text")
        answer = text[start:stop]
        closed = answer.rstrip()
        # A line's end after the token that ends the turn is never generated; without such a token, it ends the turn.
        ends_with_content = bool(content and content.strip()) and closed.endswith(content.rstrip())
        return start, stop if ends_with_content else start + len(closed)

    def _prompt(self, before: Sequence[Mapping[str, Any]], row: ChatRow) -> str | None:
        """The generation prompt; None where the template cannot write it."""
        try:
            return self._text(before, row, prompt=True)
        except BadRowError:
            if before:
                raise
            return None  # many templates look at the first message


def _unmark(marked: str, row: ChatRow) -> Rendered:
    """Remove ``BEGIN`` and ``END``; a template with ``generation`` blocks has one for every answer."""
    parts, answers, length, blocks = [], [], 0, 0
    roles = [number for number, message in enumerate(row.messages) if message["role"] == ANSWERS]
    for position, piece in enumerate(marked.split(BEGIN)):
        inside, found, outside = piece.partition(END)
        if bool(found) != bool(position):
            raise BadRowError("has an answer within an answer, by the chat template")
        if position:
            if blocks < len(roles) and roles[blocks] in row.learned:
                answers.append((length, length + len(inside)))
            blocks += 1
        parts += [inside, outside]
        length += len(inside) + len(outside)
    if blocks != len(roles):
        raise BadRowError(f"has {len(roles)} answers, of which the chat template writes {blocks}")
    return Rendered("".join(parts), answers)


def _compile(source: str, owner: str) -> Any:
    try:
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError(
            f"{owner} needs the package jinja2, which is not installed; pip install 'fsdptoys[data]'"
        ) from error

    class Generation(Extension):
        """``{% generation %}…{% endgeneration %}`` around generated text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json  # Jinja's own escapes for HTML
    environment.globals |= {"raise_exception": refuse, "strftime_now": TODAY.strftime}
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        raise ConfigError(f"{owner} is no Jinja template ({one_line(error)}); name another") from error


def open_template(choice: str | None, tokenizer: str, key: str, missing: str) -> ChatTemplate:
    """The template ``chatml``, of a file, or the tokenizer's own.

    ``key`` is the option for the choice, and ``missing`` the ConfigError where there is none.
    """
    place = Path(tokenizer).expanduser()
    folder = place if place.is_dir() else place.parent
    settings = {} if tokenizer == "bytes" else _settings(folder / SETTINGS_FILE)
    tokens = dict(_special_tokens(settings))
    if choice in BUILT_IN:
        return ChatTemplate(BUILT_IN[choice], tokens, f"{key}={choice}")
    if choice is not None:
        return ChatTemplate(_read(Path(choice).expanduser(), f"{key}={choice}"), tokens, f"{key}={choice}")
    if tokenizer != "bytes":
        if (folder / TEMPLATE_FILE).is_file():
            path = folder / TEMPLATE_FILE
            return ChatTemplate(_read(path, str(path)), tokens, str(path))
        own = settings.get("chat_template")
        if isinstance(own, list):  # several, by name
            own = {each.get("name"): each.get("template") for each in own if isinstance(each, dict)}.get("default")
        if isinstance(own, str):
            return ChatTemplate(own, tokens, f"the chat_template of {folder / SETTINGS_FILE}")
    raise ConfigError(missing)


def _read(path: Path, owner: str) -> str:
    try:
        return read_regular(path, MOST_TEMPLATE_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(f"{owner} cannot be read ({reason}); name a Jinja template or chatml") from error


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = parse_json(read_regular(path, MOST_SETTINGS_BYTES), non_finite=True)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(f"{path} cannot be read ({reason}); download it again") from error
    return settings if isinstance(settings, dict) else {}


def _special_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            yield name, text
