"""Encoder of conversations: their template's text as ids. Only those of answers are learned.

The text is tokenized in one piece, special tokens included, as ``apply_chat_template`` of
transformers does. A message that spells a special token would end a turn or begin another, so such
a row is refused. The id behind each conversation separates documents and is no label: the model
learns to stop at the end of its turn.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import one_line

from .chat_jinja import MARKS
from .chat_rows import BadRowError, ChatRecords, ChatRow, texts_of
from .chat_template import ChatTemplate, Rendered, open_template
from .text_encoder import Encoded, Encoder, TextEncoder, open_encoder


@dataclass(frozen=True)
class ShownRow:
    """A conversation as it is learned."""

    where: str
    pieces: list[tuple[str, bool]]
    """Text, and whether its tokens are learned."""
    tokens: int
    learned: int
    lost: list[str]
    """What the text lacks of the row."""


READING = 2
"""Version of how rows become texts and answers; a new one prepares cached data again."""


class ChatEncoder(Encoder):
    """Encodes ``ChatRow`` with a tokenizer and a template.

    The meaning of ids is the tokenizer's, so conversations can be mixed with texts of the same
    tokenizer and end.
    """

    records = ChatRecords()
    marks_learned = True

    def __init__(
        self, encoder: TextEncoder, template: ChatTemplate, end_owner: str
    ) -> None:
        self._encoder = encoder
        self._template = template
        self._end_owner = end_owner
        self.name = encoder.name
        self.sha256 = encoder.sha256
        self.file = encoder.file
        self.vocab_size = encoder.vocab_size
        self.document_end = encoder.document_end
        texts = sorted((name, source.text) for name, source in template.sources.items())
        decides = (READING, texts, sorted(template.tokens.items()))
        self.template_sha256 = hashlib.sha256(repr(decides).encode()).hexdigest()
        self.special_tokens = sorted(encoder.special_tokens, key=len, reverse=True)
        self._refused = re.compile(
            "|".join(map(re.escape, [*self.special_tokens, *MARKS]))
        )

    def encode_documents(self, documents: Sequence[ChatRow]) -> list[Encoded | str]:
        """See ``Encoder``."""
        rendered = [self._render(row) for row in documents]
        texts = [
            conversation.text
            for conversation in rendered
            if isinstance(conversation, Rendered)
        ]
        located = self._encoder.encode_with_offsets(texts)
        encoded: list[Encoded | str] = []
        for row, conversation in zip(documents, rendered, strict=True):
            if isinstance(conversation, str):
                encoded.append(f"{row.where} {conversation}")
                continue
            ids, offsets = next(located)
            if (ids == self.document_end).any():
                raise ConfigError(
                    f"{row.where} holds id {self.document_end} by its chat template, which must "
                    f"separate conversations; set {self._end_owner} to a special token that the "
                    "template does not write"
                )
            learned = _within(offsets, conversation.answers)
            if not learned.any():
                encoded.append(f"{row.where} has answers without a token")
                continue
            text = conversation.text
            lost = conversation.lost
            loss = f"{row.where} {losing(lost)}" if lost else None
            special = tuple(self.special_tokens)
            ends = any(
                text.endswith(special, *answer) for answer in conversation.answers
            )
            encoded.append(Encoded(text, ids, learned, loss, ends))
        return encoded

    def show_row(self, row: ChatRow) -> "ShownRow":
        """The row's text in pieces; ConfigError if it is of no use."""
        rendered = self._render(row)
        if isinstance(rendered, str):
            raise ConfigError(f"{row.where} {rendered}; repair it, or show another row")
        ((ids, offsets),) = self._encoder.encode_with_offsets([rendered.text])
        learned = _within(offsets, rendered.answers)
        marks = np.zeros(len(rendered.text), bool)
        for start, stop in offsets[learned].tolist():
            marks[start:stop] = True
        borders = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(marks)]
        pieces = [
            (rendered.text[a:b], bool(marks[a]))
            for a, b in itertools.pairwise(borders)
            if a < b
        ]
        return ShownRow(row.where, pieces, len(ids), int(learned.sum()), rendered.lost)

    def _render(self, row: ChatRow) -> Rendered | str:
        """The row's text, or why it is of no use."""
        if row.problem is not None:
            return row.problem
        try:
            for text in texts_of(row):
                spelling = self._refused.search(text)
                if spelling:
                    raise BadRowError(
                        f"spells the special token {spelling.group()} within a message"
                    )
            rendered = self._template.render(row, self.special_tokens)
            # JSON can hold half of a surrogate pair, which UTF-8 cannot; its replacement is one
            # character too.
            return dataclasses.replace(
                rendered, text=rendered.text.encode("utf-8", "replace").decode()
            )
        except BadRowError as error:
            return one_line(error)


def losing(lost: Sequence[str]) -> str:
    """A sentence on what a row loses, without its place."""
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    return f"loses {lost[0]}{more}, which the chat template does not write"


def _within(offsets: NDArray[Any], spans: Sequence[tuple[int, int]]) -> NDArray[Any]:
    """Whether each token has a character of a span."""
    inside = np.zeros(len(offsets), bool)
    for first, last in spans:
        inside |= (offsets[:, 0] < last) & (offsets[:, 1] > first)
    return inside


def open_chat_encoder(
    tokenizer: str,
    template: str | None,
    end: str | None,
    owner: str,
    template_key: str,
    end_owner: str,
) -> ChatEncoder:
    """Open tokenizer and template; ConfigError if one is missing or they do not fit each other.

    ``owner`` is the tokenizer as the user named it; ``template_key`` and ``end_owner`` are the
    options for the template and for the token behind each conversation.
    """
    missing = (
        f"{owner} has no chat template; set {template_key}=chatml, {template_key} to the path of "
        "a Jinja template, or the tokenizer to that of a chat model"
    )
    if tokenizer != "bytes" and not Path(tokenizer).expanduser().exists():
        raise ConfigError(
            f"{owner} does not exist; name a tokenizer.json, its folder, or bytes"
        )
    opened = open_template(template, tokenizer, template_key, missing)
    encoder = open_encoder(tokenizer, end, owner, end_owner, writes=opened.may_write)
    return ChatEncoder(encoder, opened, end_owner)
