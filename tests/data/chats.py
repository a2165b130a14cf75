"""A configuration of a file of conversations, and the rows that it gives."""

import json
from typing import Any

import numpy as np

from fsdptoys.data import IGNORE_INDEX
from fsdptoys.data.chat import ChatConfig
from tests.harness.chat_files import CONVERSATIONS

GOOD = json.dumps({"messages": CONVERSATIONS[0]})


WIDE = 512
"""Tokens of a row that holds any conversation whole."""


def config(**changes: Any) -> ChatConfig:
    settings = {
        "files": ["a.jsonl"],
        "tokenizer": "tokenizer",
        "cache": "cache",
        "processes": 1,
    }
    return ChatConfig(**(settings | changes))


def rows_of(
    config: ChatConfig, seq_len: int = WIDE
) -> list[tuple[list[int], list[int]]]:
    """Each conversation's ids without the separator, and its labels, in the order of the file."""
    config.prepare(seq_len, 512)
    dataset = config.build(seq_len, 512, 0)
    end = dataset.document_end
    rows = []
    for number in range(len(dataset.train)):
        tokens_T, labels_T = dataset.train[number]
        learned = [-1, *labels_T.tolist()]
        start = 0
        for stop in np.flatnonzero(tokens_T == end).tolist():
            if stop > start:
                rows.append(
                    (
                        tokens_T[start:stop].tolist(),
                        [
                            x
                            for x in learned[start:stop]
                            if x != IGNORE_INDEX and x != -1
                        ],
                    )
                )
            start = stop + 1
    return rows
