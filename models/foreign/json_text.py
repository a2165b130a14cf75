"""The content of a ``config.json`` as the text that a run keeps.

Keys that name code, an implementation, or what a run decides by itself are left out at any depth.
"""

import json
from collections.abc import Mapping
from typing import Any

MOST_DEPTH = 20
"""Deepest nesting."""
LARGEST_NUMBER = 2**40
"""Largest integer: tensors of more elements have no memory anywhere."""

DROPPED = frozenset(
    {
        *("auto_map", "custom_pipelines", "kernel_config", "use_kernels"),
        *("attn_implementation", "_attn_implementation"),
        *("_attn_implementation_internal", "_attn_implementation_autoset"),
        *("experts_implementation", "_experts_implementation"),
        *("_experts_implementation_internal", "torch_dtype", "dtype", "torchscript"),
        *("gradient_checkpointing", "return_dict", "use_cache", "output_attentions"),
        *("output_hidden_states", "output_router_logits", "id2label", "label2id"),
        *("task_specific_params", "_commit_hash", "transformers_version"),
        *("_name_or_path", "name_or_path"),
    }
)


def config_text(tree: Mapping[str, Any], source: str) -> str:
    """Return a configuration as one line of JSON.

    Args:
        tree: parsed.
        source: file, for messages.

    Raises:
        ValueError: if it is no configuration.
    """
    problem = _problem(tree)
    if problem is not None:
        raise ValueError(f"{source} {problem}; use the file that came with the model")
    return json.dumps(_without_dropped(tree), sort_keys=True, separators=(",", ":"))


def parse_text(text: str) -> dict[str, Any]:
    """Parse the text that a run kept.

    Raises:
        ValueError: for other text.
    """
    fix = "set model.config=null and model.path=FOLDER"
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as mistake:
        raise ValueError(
            f"model.config is no JSON ({one_line(mistake)}); {fix}"
        ) from None
    problem = _problem(tree) if isinstance(tree, dict) else "is no object"
    if problem is not None:
        raise ValueError(f"model.config {problem}; {fix}")
    settings: dict[str, Any] = _without_dropped(tree)
    return settings


def one_line(text: object) -> str:
    """Return the start of a foreign text in one line without control characters."""
    line = " ".join(str(text).split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:300]


def _problem(tree: object) -> str | None:
    level = [tree]
    for _ in range(MOST_DEPTH):
        if not level:
            return None
        deeper: list[object] = []
        for node in level:
            if isinstance(node, int) and abs(node) > LARGEST_NUMBER:
                return f"holds a number above {LARGEST_NUMBER}"
            if isinstance(node, Mapping):
                deeper += node.values()
            elif isinstance(node, list):
                deeper += node
        level = deeper
    return f"is nested more than {MOST_DEPTH} deep"


def _without_dropped(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {
            key: _without_dropped(value)
            for key, value in node.items()
            if key not in DROPPED
        }
    if isinstance(node, list):
        return [_without_dropped(value) for value in node]
    return node
