"""What a preparation reads and writes, and its fingerprint."""

import os
from dataclasses import dataclass
from pathlib import Path

from .dataset import hash_of
from .dataset_index import VERSION
from .source_files import SourceFile
from .text_encoder import Encoder

SHARD_TOKENS = 2**27  # default size of a shard: 256 MiB in 16 bits


@dataclass(frozen=True)
class Request:
    """Input, output and options of a preparation."""

    key: str  # the files as the user named them, for messages
    sources: list[SourceFile]
    encoder: Encoder
    folder: Path  # the result
    field: str = "text"
    eval_fraction: float = 0.0
    shard_tokens: int = SHARD_TOKENS
    processes: int = 1
    skip_bad_rows: bool = False
    # how the user would have them skipped
    skip_fix: str = "set data.skip_bad_rows=true"

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the bytes, with sizes and times of the files instead of
        their contents."""
        return self.fingerprint_with(self.encoder.sha256, self.encoder.document_end)

    def fingerprint_with(self, tokenizer_sha256: str, document_end: int) -> str:
        """The fingerprint with another tokenizer."""
        files = []
        for source in self.sources:
            paths = (
                sorted(Path(source.path).glob("*"))
                if source.is_folder
                else [Path(source.path)]
            )
            for path in paths:
                facts = path.stat()
                files.append(
                    [
                        os.path.realpath(path),
                        source.name,
                        facts.st_size,
                        facts.st_mtime_ns,
                    ]
                )
        encoder = [tokenizer_sha256, document_end]
        chat = (
            [self.encoder.template_sha256, self.skip_bad_rows]
            if self.encoder.template_sha256
            else []
        )
        return hash_of(
            VERSION,
            encoder,
            self.field,
            self.eval_fraction,
            self.shard_tokens,
            files,
            *chat,
        )
