"""What a tokenizer's folder says besides its vocabulary: special tokens by name, and chat
templates.

The files are those that transformers 5 reads (``PreTrainedTokenizerBase.from_pretrained``).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
MOST_TEMPLATE_BYTES = 2**20
MOST_SETTINGS_BYTES = 2**26

_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_GPT2 = {
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
}
_QWEN2 = {
    "eos_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
}
_GEMMA = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
CLASS_TOKENS = {
    "Llama": _LLAMA,
    "CodeLlama": _LLAMA,
    "GPT2": _GPT2,
    "Qwen2": _QWEN2,
    "Gemma": _GEMMA,
}
"""Tokens of a tokenizer's class, the beginning of its name, where the folder names none."""


def tokenizer_path(choice: str) -> Path:
    """The tokenizer's file, which the user names by its path or its folder."""
    path = Path(choice).expanduser()
    return path / TOKENIZER_FILE if path.is_dir() else path


class TemplateSource(NamedTuple):
    """A Jinja template, and its name in messages."""

    text: str
    owner: str


def read_tokens(folder: Path) -> dict[str, str]:
    """Name → text of the special tokens; ConfigError if a file cannot be read."""
    settings = read_settings(folder / SETTINGS_FILE)
    mapped = read_settings(folder / TOKENS_FILE)
    kind = (
        str(settings.get("tokenizer_class") or "")
        .removesuffix("Fast")
        .removesuffix("Tokenizer")
    )
    tokens = dict(CLASS_TOKENS.get(kind, {}))
    for source in (mapped, settings):
        extra = source.get("extra_special_tokens")
        named_tokens = {
            name: token for name, token in source.items() if name.endswith("_token")
        }
        for name, token in (
            named_tokens | (extra if isinstance(extra, dict) else {})
        ).items():
            text = token_text(token)
            if text is not None:
                tokens[name] = text
            elif token is None:
                tokens.pop(name, None)
    return tokens


def read_templates(folder: Path) -> dict[str, TemplateSource]:
    """The folder's templates by name, maybe without ``default``; ConfigError if a file cannot be
    read."""
    templates = _templates_in(folder / SETTINGS_FILE)
    if (folder / TEMPLATE_FILE).is_file():
        templates["default"] = read_template_file(
            folder / TEMPLATE_FILE, str(folder / TEMPLATE_FILE)
        )
    for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        templates[path.stem] = read_template_file(path, str(path))
    return templates


def read_template_file(path: Path, owner: str) -> TemplateSource:
    """A file that is a template; ConfigError if it cannot be read."""
    try:
        return TemplateSource(read_regular(path, MOST_TEMPLATE_BYTES).decode(), owner)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(
            f"{owner} cannot be read ({reason}); name a Jinja template or chatml"
        ) from error


def _templates_in(path: Path) -> dict[str, TemplateSource]:
    """The value ``chat_template`` of a JSON file: a template, or several as a list or an object."""
    own = read_settings(path).get("chat_template")
    if isinstance(own, str):
        own = {"default": own}
    elif isinstance(own, list):
        own = {
            str(template.get("name")): template.get("template")
            for template in own
            if isinstance(template, Mapping)
        }
    sources = own.items() if isinstance(own, dict) else ()
    return {
        name: TemplateSource(text, f"the chat_template of {path}")
        for name, text in sources
        if isinstance(text, str)
    }


def token_text(token: Any) -> str | None:
    """The text of a token, which settings name as a text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty without one; ConfigError if the file cannot be read."""
    try:
        settings = parse_json(read_regular(path, MOST_SETTINGS_BYTES), non_finite=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(
            f"{path} cannot be read ({reason}); download it again"
        ) from error
    return settings if isinstance(settings, dict) else {}
