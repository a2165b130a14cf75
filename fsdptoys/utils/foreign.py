"""Parsers of foreign JSON and YAML, bounded in depth and size, with one error class.

With Python's json and PyYAML's safe loader, a file of 1 KB can exhaust the memory (nested aliases),
a number of 600 KB takes minutes (``1:59:59:…``, base 60), and deep nesting ends in a
``RecursionError``, maybe in later code.
"""

import itertools
import json
import math
import re
from typing import Any

import yaml

from .text import one_line

MAX_DEPTH = 50
"""Maximum nesting of mappings and lists; a configuration of this project has five levels."""

MAX_YAML_BYTES = 2**20
"""Maximum size; PyYAML parses about 0.3 MB/s in Python and 3 MB/s with libyaml. A run's config.yaml
has 10 KB."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_HUGE_NUMBER = re.compile(r"[0-9]{300}|[0-9][eE]\+?[0-9]{3}")
"""Start of a number that may exceed a float's range; json returns infinity for ``1e400``."""

_LibYaml: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ForeignError(ValueError):
    """Invalid foreign input; the message is one line without control characters."""


def parse_json(
    text: "str | bytes",
    *,
    max_depth: int = MAX_DEPTH,
    non_finite: bool = False,
    unique_keys: bool = False,
    surrogates: bool = False,
) -> Any:
    """Parse JSON.

    Args:
        text: UTF-8 if bytes; the caller bounds its size.
        max_depth: maximum nesting of objects and arrays.
        non_finite: accept ``NaN``, ``Infinity`` and ``-Infinity``, which are not standard.
        unique_keys: reject repeated keys instead of keeping the last; takes twice the time.
        surrogates: accept halves of surrogate pairs, as in Python's names of non-UTF-8 files.

    Raises:
        ForeignError: for invalid JSON or UTF-8, deep nesting, or a number beyond a float's range.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        tree = json.loads(
            text,
            parse_constant=None if non_finite else _refuse_constant,
            object_pairs_hook=_unique if unique_keys else None,
        )
        if text.count("[") + text.count("{") > max_depth:
            check_depth(tree, max_depth)
        if not surrogates and _SURROGATE.search(text) is not None:
            json.dumps(tree, ensure_ascii=False).encode("utf-8")
        if _HUGE_NUMBER.search(text) is not None:
            _check_numbers(tree, non_finite)
    except RecursionError:
        raise ForeignError(f"it is nested more than {max_depth} deep") from None
    except ForeignError:
        raise
    except ValueError as error:
        # from json, the decoder, or int() for thousands of digits
        raise ForeignError(one_line(error)) from None
    return tree


def parse_yaml(text: "str | bytes") -> Any:
    """Parse YAML without tags and aliases; dates and numbers in base 60 are returned as text.

    Args:
        text: UTF-8 if bytes; at most ``MAX_YAML_BYTES``.

    Raises:
        ForeignError: for invalid YAML, tags, aliases, repeated keys, or more than ``MAX_DEPTH``
            levels or ``MAX_YAML_BYTES``.
    """
    if len(text) > MAX_YAML_BYTES:
        raise ForeignError(f"it is longer than {MAX_YAML_BYTES} bytes")
    depth = 0
    try:
        # Events are checked first, since libyaml's composer recurses and expands aliases without
        # limit.
        for event in yaml.parse(text, Loader=_LibYaml):
            if isinstance(event, yaml.AliasEvent):
                raise ForeignError(
                    f"it has an alias (*{event.anchor}) in line {_line_of(event)}"
                )
            tag = getattr(event, "tag", None)
            if tag not in (None, "!"):
                raise ForeignError(
                    one_line(f"it has a tag ({tag}) in line {_line_of(event)}")
                )
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    raise ForeignError(f"it is nested more than {MAX_DEPTH} deep")
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
        tree = yaml.load(text, _Loader)
        _check_numbers(tree, non_finite=True)
        return tree
    except ForeignError:
        raise
    # ValueError: invalid numbers and dates; TypeError: unhashable keys; OverflowError: years
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
        AttributeError,
        LookupError,
    ) as error:
        raise ForeignError(one_line(error)) from None


def yaml_lines(text: "str | bytes") -> dict[tuple[str, ...], int]:
    """Map the path of each key of nested mappings to its line; 1 is the first.

    Args:
        text: what ``parse_yaml`` has accepted.
    """
    lines: dict[tuple[str, ...], int] = {}
    queue: list[tuple[tuple[str, ...], Any]] = [((), yaml.compose(text, _LibYaml))]
    while queue:
        path, node = queue.pop()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                key_path = (*path, key.value)
                lines[key_path] = key.start_mark.line + 1
                queue.append((key_path, value))
    return lines


def check_depth(tree: Any, max_depth: int = MAX_DEPTH) -> None:
    """Check that a tree of dicts and lists has at most ``max_depth`` levels, so that recursion is
    safe."""
    level = [tree]
    for _ in range(max_depth + 1):
        level = [node for node in level if isinstance(node, (dict, list))]
        if not level:
            return
        level = list(
            itertools.chain.from_iterable(
                node.values() if isinstance(node, dict) else node for node in level
            )
        )
    raise ForeignError(f"it is nested more than {max_depth} deep")


def _check_numbers(tree: Any, non_finite: bool) -> None:
    """Reject integers beyond a float's range, which fail in divisions, and optionally non-finite
    floats."""
    level = [tree]
    while level:
        children: list[Any] = []
        for node in level:
            if isinstance(node, int) and abs(node) >= 10**300:
                raise ForeignError("it holds an integer of more than 300 digits")
            if isinstance(node, float) and not non_finite and not math.isfinite(node):
                raise ForeignError("it holds a number that is too large")
            if isinstance(node, (dict, list)):
                children += node.values() if isinstance(node, dict) else node
        level = children


def _refuse_constant(name: str) -> Any:
    raise ForeignError(f"it holds {name}, which JSON does not have")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ForeignError(f"the key {one_line(twice)} occurs twice in one object")
    return tree


def _line_of(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 0


class _Loader(_LibYaml):
    """The safe loader without repeated keys, dates, and numbers in base 60: ``1:30`` is text."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise ForeignError(
                        f"{one_line(key.value)} occurs twice in one mapping"
                    )
                keys.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def _without_base_60(construct: Any) -> Any:
    """Keep numbers in base 60 as text: 600 KB of ``1:59:59…`` take minutes."""
    return lambda loader, node: (
        node.value if ":" in node.value else construct(loader, node)
    )


_Loader.add_constructor(
    "tag:yaml.org,2002:int", _without_base_60(yaml.SafeLoader.construct_yaml_int)
)
_Loader.add_constructor(
    "tag:yaml.org,2002:float", _without_base_60(yaml.SafeLoader.construct_yaml_float)
)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
