"""Conversations, a small tokenizer, and templates of the shapes that published chat models have."""

import json
from pathlib import Path
from typing import Any

import yaml

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [
        {"role": "system", "content": "You are terse. "},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And three more? é"},
        {"role": "assistant", "content": "That is 7, naïvely.\n\nDone"},
    ],
    [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": " hello yourself \n"},
    ],
    [
        {"role": "user", "content": "think"},
        {"role": "assistant", "content": "<think>\nhard\n</think>\n\nyes"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "<think>\nharder\n</think>\n\nno"},
    ],
    [
        {"role": "user", "content": "think apart"},
        {"role": "assistant", "content": "so", "reasoning": "hardest"},
    ],
]

_PIECES = yaml.safe_load(
    Path(__file__).with_name("chat_templates.yaml").read_text(encoding="utf-8")
)
GENERATED: dict[str, str] = {name: "".join(pieces) for name, pieces in _PIECES.items()}
"""Templates whose ``generation`` blocks say which text is an answer."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<s>"]


def without_blocks(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def save_chat_tokenizer(folder: Path, template: str | None) -> str:
    """A byte-level BPE tokenizer as of a Hugging Face folder."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [
        message["content"] for messages in CONVERSATIONS for message in messages
    ] * 3
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join(
            (row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows
        )
    )
    return path
