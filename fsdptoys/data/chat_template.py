"""Chat templates: the text of a conversation, and which parts of it are the model's own answers.

The text is that of ``apply_chat_template`` in transformers 5
(https://huggingface.co/docs/transformers/chat_templating_writing). An answer is what a model
generates: the text after the generation prompt (``add_generation_prompt``), up to and including the
token that ends the turn. A template's own ``{% generation %}`` blocks take precedence.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptoys.errors import ConfigError

from .chat_jinja import JinjaTemplate, MarkedText
from .chat_losses import lost_parts
from .chat_rows import ANSWERS, BadRowError, ChatRow, with_parsed_arguments
from .tokenizer_settings import (
    TemplateSource,
    read_template_file,
    read_templates,
    read_tokens,
    tokenizer_path,
)

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STAND_IN = "\ufdd4answer\ufdd4"  # in place of an answer, to find what closes it
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that hold its reasoning; templates read the first, those of gpt-oss the
second."""
_WHOLE_WORDS = re.compile(r".*[\s>\]|]", re.DOTALL)


@dataclass(frozen=True)
class Rendered:
    """A conversation's text."""

    text: str
    answers: list[tuple[int, int]]
    """Start and stop (excluded), in characters, of each answer that is learned."""
    lost: list[str] = field(default_factory=list)
    """What the template leaves out, such as "the call in message 2"."""


class ChatTemplate:
    """A template with the tokens that it may name (``bos_token``, …).

    Args:
        sources: a tokenizer's templates by name; ``default`` alone, or with others;
            ``tool_use`` is for conversations with tools.
        tokens: name → text.
    """

    def __init__(
        self, sources: Mapping[str, TemplateSource], tokens: Mapping[str, str]
    ) -> None:
        self.sources = dict(sources)
        self.tokens = dict(tokens)
        self._compiled = {
            name: JinjaTemplate(source.text, source.owner)
            for name, source in self.sources.items()
            if name in ("default", "tool_use")
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.sources, self.tokens)

    def may_write(self, token: str) -> bool:
        """Whether a source spells a token, or names it (``eos_token``)."""
        spellings = [
            token,
            *(name for name, text in self.tokens.items() if text == token),
        ]
        return any(
            spelling in source.text
            for source in self.sources.values()
            for spelling in spellings
        )

    def render(self, row: ChatRow, special: Sequence[str] = ()) -> Rendered:
        """The text of a conversation; BadRowError if the template or the search for answers fails.

        ``special`` are the tokenizer's special tokens; one of them ends an answer.
        """
        parsed = with_parsed_arguments(row.messages)
        retries = parsed != row.messages
        try:
            messages, marked, lost = self._run(row.messages, row)
            retries = retries and bool(lost)
        except BadRowError:
            if not retries:
                raise
        if retries:  # the template wants objects, or writes the text as a string
            messages, marked, lost = self._run(parsed, row)
        if self._template(row).has_blocks:
            learned = frozenset(row.learned)
            owners = [
                number
                for number, message in enumerate(messages)
                if message["role"] == ANSWERS
            ]
            answers = [
                (start, stop)
                for start, stop, number in marked.generated
                # A block in another message, such as the header that ends a turn, is of the answer
                # before it.
                if number is None or owners[bisect_right(owners, number) - 1] in learned
            ]
            return Rendered(marked.text, answers, lost)
        search = _AnswerSearch(self, row, messages, marked, special)
        return Rendered(
            marked.text, [search.span(number) for number in row.learned], lost
        )

    def turn(self, message: str, system: str | None = None) -> tuple[str, str]:
        """The text with which a model answers one message, and the text that closes its answer;
        BadRowError if none.

        ``system`` is the content of a system message before it.
        """
        question = [] if system is None else [{"role": "system", "content": system}]
        question.append({"role": "user", "content": message})
        row = ChatRow("--prompt", question)
        text = self.text([*question, {"role": ANSWERS, "content": STAND_IN}], row)
        return self.text(question, row, prompt=True), text.partition(STAND_IN)[
            2
        ].rstrip()

    def text(
        self, messages: Sequence[Mapping[str, Any]], row: ChatRow, prompt: bool = False
    ) -> str:
        """The text of some messages with the tools and variables of ``row``."""
        return self._template(row).text(
            self._variables(_with_reasoning(messages), row, prompt)
        )

    def marked(self, messages: Sequence[Mapping[str, Any]], row: ChatRow) -> MarkedText:
        """The text of some messages, divided by message, with tools and variables of ``row``."""
        return self._template(row).marked(
            self._variables(_with_reasoning(messages), row, False)
        )

    def prompt(self, messages: Sequence[Mapping[str, Any]], row: ChatRow) -> str:
        """The text behind messages after which the model answers."""
        messages = _with_reasoning(messages)
        if not messages:  # many templates look at the first message
            messages = [{"role": "user", "content": STAND_IN}]
        prompted = self._template(row).marked(self._variables(messages, row, True))
        without = self._template(row).text(self._variables(messages, row, False))
        same = _common_length(prompted.text, without)
        # Where the text without the prompt is no beginning of it, or has the prompt too.
        unlike = same < len(without) or len(prompted.text) == len(without)
        return (
            prompted.tail
            if unlike and len(messages) - 1 in prompted.turns
            else prompted.text[same:]
        )

    def _template(self, row: ChatRow) -> JinjaTemplate:
        use_tools = row.tools is not None and "tool_use" in self._compiled
        return self._compiled["tool_use" if use_tools else "default"]

    def _run(
        self, messages: Sequence[Mapping[str, Any]], row: ChatRow
    ) -> tuple[list[dict[str, Any]], MarkedText, list[str]]:
        """The messages as the template gets them, their text, and what it lacks."""
        messages = _with_reasoning(messages)
        template = self._template(row)
        variables = self._variables(messages, row, False)
        text = template.text(variables)
        marked = template.marked(variables)
        if marked.text != text:
            raise BadRowError(
                "is written by the chat template in a way in which its messages cannot be found"
            )
        return messages, marked, lost_parts(messages, marked)

    def _variables(
        self, messages: Sequence[Mapping[str, Any]], row: ChatRow, prompt: bool
    ) -> dict[str, Any]:
        own = {
            "messages": messages,
            "tools": row.tools,
            "documents": None,
            "add_generation_prompt": prompt,
        }
        return {**self.tokens, **row.variables, **own}


def _with_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of messages with their reasoning under the names that templates read, as in
    transformers."""
    copies = []
    for message in messages:
        reasoning = next((message[key] for key in REASONING if key in message), None)
        extra = {} if reasoning is None else {"reasoning_content": reasoning}
        copies.append(
            ({"thinking": reasoning} if extra else {}) | dict(message) | extra
        )
    return copies


def _common_length(one: str, other: str) -> int:
    """Length of the common beginning of two texts."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


class _AnswerSearch:
    """Finds the answers of one conversation in its text."""

    def __init__(
        self,
        template: ChatTemplate,
        row: ChatRow,
        messages: Sequence[Mapping[str, Any]],
        marked: MarkedText,
        special: Sequence[str],
    ) -> None:
        self._template = template
        self._row = row
        self._messages = messages
        self._marked = marked
        self._turns = marked.turns
        self._prompts: dict[str | None, str] = {}
        self._special = tuple(special)
        begin = template.tokens.get("bos_token")  # ends no turn
        tokens = "|".join(re.escape(token) for token in special if token != begin)
        self._follows = re.compile(rf"\s*(?:{tokens})") if tokens else None

    def span(self, number: int) -> tuple[int, int]:
        """Start and stop of the answer in message ``number``."""
        first, last = self._turn(number)
        start = first + self._header_length(number, self._marked.text[first:last])
        return start, self._stop(number, start, last)

    def _turn(self, number: int) -> tuple[int, int]:
        """Start and stop of the text of a message, without results of tools in it."""
        turns = self._turns
        text = self._marked.text
        # Perhaps written outside of a loop, behind the last message with a text
        if number not in turns:
            first = max((stop for _, stop in turns.values()), default=0)
            if (
                number + 1 < len(self._messages)
                or not turns
                or not text[first:].strip()
            ):
                raise BadRowError(
                    f"has an answer in message {number + 1} that the chat template does not write"
                )
            return first, len(text)
        first, last = turns[number]
        if any(
            result in text[first:last] for result in self._results_elsewhere(number)
        ):
            # As it is before there are results, in the same turn of the conversation.
            question = max(
                (at for at in range(number) if self._messages[at]["role"] == "user"),
                default=0,
            )
            alone = self._template.marked(
                self._messages[question : number + 1], self._row
            )
            begin, end = alone.turns.get(number - question, (0, 0))
            last = first + _common_length(text[first:last], alone.text[begin:end])
        return first, last

    def _results_elsewhere(self, number: int) -> Iterator[str]:
        """Contents of the results behind a message that have no text of their own."""
        for index in range(number + 1, len(self._messages)):
            if self._messages[index]["role"] != "tool":
                return
            content = self._messages[index].get("content", "").strip()
            begin, end = self._turns.get(index, (0, 0))
            if content and content not in self._marked.text[begin:end]:
                yield content

    def _header_length(self, number: int, turn: str) -> int:
        """Characters of a turn up to where it and the generation prompt part."""
        prompt = self._prompt(number)
        # a template may write another header behind a result than behind a question
        if not prompt:
            prompt = next(
                (
                    other
                    for other in self._prompts.values()
                    if other and turn.startswith(other)
                ),
                "",
            )
        skipped = 0
        if not turn.startswith(prompt):  # a line's end may belong to the message before
            skipped, prompt = len(turn) - len(turn.lstrip()), prompt.lstrip()
        common = prompt[: _common_length(prompt, turn[skipped:])]
        if common != prompt:
            offset = turn.find(prompt)
            if offset >= 0:  # behind a system message that the template adds
                return offset + len(prompt)
            # Not in the middle of a word or a token.
            whole = _WHOLE_WORDS.match(common)
            if not whole:
                return self._own_start(number, turn)
            common = whole[0]
        return skipped + len(common)

    def _own_start(self, number: int, turn: str) -> int:
        """Where the message itself begins."""
        message = self._messages[number]
        own = [
            str(message.get(key, "")).strip()
            for key in ("reasoning_content", "content")
        ]
        offsets = [offset for text in own if text and (offset := turn.find(text)) >= 0]
        if not offsets:
            raise BadRowError(
                f"has an answer in message {number + 1} whose start is not in the full text"
            )
        return min(offsets)

    def _prompt(self, number: int) -> str:
        """The generation prompt of a message, by the role of the message before it."""
        role = self._messages[number - 1]["role"] if number else None
        if role not in self._prompts:
            self._prompts[role] = self._template.prompt(
                self._messages[:number], self._row
            )
        return self._prompts[role]

    def _stop(self, number: int, start: int, last: int) -> int:
        """The end of the token that ends a turn; the turn's text ends at ``last``."""
        text = self._marked.text
        end = start + len(text[start:last].rstrip())
        if text.endswith(self._special, start, end):
            return end
        following = (
            self._follows.match(text, end) if self._follows is not None else None
        )
        if following:
            return following.end()
        # A line's end after the text that ends the turn is never generated; without such a text, it
        # ends the turn.
        content = self._messages[number].get("content", "").rstrip()
        return last if content and text.endswith(content, start, end) else end


def open_template(
    choice: str | None, tokenizer: str, key: str, missing: str
) -> ChatTemplate:
    """The template ``chatml``, of a file, or the tokenizer's own.

    ``key`` is the option for the choice, and ``missing`` the ConfigError where there is none.
    """
    folder = tokenizer_path(tokenizer).parent
    tokens = {} if tokenizer == "bytes" else read_tokens(folder)
    if choice == "chatml":
        sources = {"default": TemplateSource(CHATML, f"{key}=chatml")}
    elif choice is not None:
        path = Path(choice).expanduser()
        sources = {"default": read_template_file(path, f"{key}={choice}")}
    else:
        sources = {} if tokenizer == "bytes" else read_templates(folder)
    if "default" not in sources:
        raise ConfigError(missing)
    return ChatTemplate(sources, tokens)
