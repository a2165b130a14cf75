"""Conversations, a small tokenizer, and templates of the shapes that published chat models have."""

import json
from pathlib import Path
from typing import Any

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [
        {"role": "system", "content": "You are terse. "},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And three more? é"},
        {"role": "assistant", "content": "That is 7, naïvely.\n\nDone"},
    ],
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " hello yourself \n"}],
    [
        {"role": "user", "content": "think"},
        {"role": "assistant", "content": "<think>\nhard\n</think>\n\nyes"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "<think>\nharder\n</think>\n\nno"},
    ],
]

GENERATED = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # As Llama 3: contents are stripped, headers are tokens, and no line ends a turn.
    "headers": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '<|end|>\n\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
    ),
    # As Llama 2: the system's message goes into the first question, and answers follow on the same line.
    "inst": (
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set head = messages[0].content + '\n' %}"
        "{% else %}{% set rest = messages %}{% set head = '' %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ head if loop.first }}{{ m.content }} [/INST]"
        "{% else %}{% generation %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endgeneration %}{% endif %}"
        "{% endfor %}"
    ),
    # As Qwen3: reasoning stays in the last answer only.
    "reasoning": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}"
        "<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # A newline ends an answer.
    "plain": (
        "{% for m in messages %}{% if m.role == 'assistant' %}Answer:{% generation %}"
        "{{ ' ' + m.content | trim + '\n' }}{% endgeneration %}"
        "{% else %}{{ m.role + ': ' + m.content + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Answer:{% endif %}"
    ),
}
"""Templates whose ``generation`` blocks say which text is an answer."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<s>"]


def without_blocks(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def save_chat_tokenizer(folder: Path, template: str | None) -> str:
    """A byte-level BPE tokenizer as of a Hugging Face folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [message["content"] for messages in CONVERSATIONS for message in messages] * 3
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
