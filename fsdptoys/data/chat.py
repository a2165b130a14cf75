"""``data=chat``: supervised fine-tuning on conversations. Answers alone are learned.

Prepared as ``data=hf``: once, into the cache. Conversations are packed into rows and see only
themselves.
"""

import dataclasses
from dataclasses import dataclass

from fsdptoys.utils.options import Effect, option

from .chat_encoder import open_chat_encoder
from .hf import TokenizedConfig
from .packing import Packing
from .request import Request
from .text_encoder import Encoder


@dataclass
class ChatConfig(TokenizedConfig):
    """Conversations in JSON lines, Parquet or Arrow, tokenized by a chat template; answers alone
    are learned."""

    name = "chat"

    document_end: str | None = option(None, effect=Effect.training)
    """Token between conversations, which the template does not write; null for the first usual
    one."""
    messages_field: str = option("messages", effect=Effect.training)
    """Field of a record that holds the messages."""
    template: str | None = option(None, effect=Effect.training)
    """chatml, or the path of a Jinja template; null for the tokenizer's own."""
    skip_bad_rows: bool = option(False, effect=Effect.training)
    """Leave out rows that are no conversation to learn from, instead of stopping at the first."""
    packing: Packing = option(Packing.best_fit, effect=Effect.training)
    """How documents become samples."""
    mask_documents: bool = option(True, effect=Effect.training)
    """Restrict attention to the own document, and ignore the label after its end."""

    @property
    def _field(self) -> str:
        return self.messages_field

    def _open_encoder(self) -> Encoder:
        owner = f"data.tokenizer={self.tokenizer}"
        return open_chat_encoder(
            self.tokenizer,
            self.template,
            self.document_end,
            owner,
            "data.template",
            "data.document_end",
        )

    def _request_of(self, encoder: Encoder) -> Request:
        return dataclasses.replace(
            super()._request_of(encoder), skip_bad_rows=self.skip_bad_rows
        )
