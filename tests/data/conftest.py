"""Current folders of tests."""

from pathlib import Path

import pytest

from tests.data.chats import GOOD
from tests.harness.chat_files import (
    GENERATED,
    save_chat_tokenizer,
    without_blocks,
    write_rows,
)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def chat_folder(empty_folder: None) -> None:
    """A tokenizer with a template, and a file of one conversation."""
    save_chat_tokenizer(Path("tokenizer"), without_blocks(GENERATED["chatml"]))
    write_rows(Path("a.jsonl"), [GOOD])
