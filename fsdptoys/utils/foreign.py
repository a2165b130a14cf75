"""Parsers for JSON and YAML that someone else may have written: bounded in depth and size, with one kind of error.

Python's and PyYAML's own parsers run no code either (``yaml.safe_load``), and still let a file of 1 KB take all memory
(nested aliases, "billion laughs"), a number of 600 KB take minutes (``1:59:59:…``, base 60), and nesting end in a
``RecursionError``, here or in the caller's next loop over the tree.
"""

import itertools
import json
import math
import re
from typing import Any

import yaml

from .text import one_line

MAX_DEPTH = 50
"""Mappings and lists within each other; a configuration of this project has five."""

MAX_YAML_BYTES = 2**20
"""PyYAML reads about 0.3 MB/s in Python and 3 MB/s with libyaml; a run's config.yaml holds 10 KB."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_HUGE_NUMBER = re.compile(r"[0-9]{300}|[0-9][eE]\+?[0-9]{3}")
"""As a number may begin that a float cannot hold; json makes ``1e400`` infinite."""

_LibYaml: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ForeignError(ValueError):
    """A text that is not what it should be; the message is one line without control characters."""


def parse_json(
    text: "str | bytes",
    *,
    max_depth: int = MAX_DEPTH,
    non_finite: bool = False,
    unique_keys: bool = False,
    surrogates: bool = False,
) -> Any:
    """A JSON value.

    Args:
        text: UTF-8 if bytes. Its size is the caller's to bound, where the file is read.
        max_depth: objects and arrays within each other.
        non_finite: accept ``NaN``, ``Infinity`` and ``-Infinity``, which the standard does not have.
        unique_keys: refuse an object with the same key twice instead of keeping the last; takes twice the time.
        surrogates: accept halves of surrogate pairs, by which Python writes names of files that are not UTF-8.

    Raises:
        ForeignError: if it is not valid JSON, is nested too deeply, holds a number that a float cannot, or text that
            UTF-8 cannot.
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
    except ValueError as error:  # of json, of the decoder, of int() for thousands of digits
        raise ForeignError(one_line(error)) from None
    return tree


def parse_yaml(text: "str | bytes", *, unique_keys: bool = False) -> Any:
    """A YAML document of plain values: no tags, no aliases; dates and numbers in base 60 stay text.

    Args:
        text: UTF-8 if bytes; at most ``MAX_YAML_BYTES``.
        unique_keys: refuse a mapping with the same key twice instead of keeping the last.

    Raises:
        ForeignError: if it is anything else, or nested more than ``MAX_DEPTH`` deep.
    """
    if len(text) > MAX_YAML_BYTES:
        raise ForeignError(f"it is longer than {MAX_YAML_BYTES} bytes")
    depth = 0
    try:
        # The events are read first: libyaml's own composer recurses, and expands aliases, where Python cannot look.
        for event in yaml.parse(text, Loader=_LibYaml):
            if isinstance(event, yaml.AliasEvent):
                raise ForeignError(f"it has an alias (*{event.anchor}) in line {_line_of(event)}")
            tag = getattr(event, "tag", None)
            if tag not in (None, "!"):
                raise ForeignError(one_line(f"it has a tag ({tag}) in line {_line_of(event)}"))
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    raise ForeignError(f"it is nested more than {MAX_DEPTH} deep")
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
        tree = yaml.load(text, _UniqueLoader if unique_keys else _Loader)
        _check_numbers(tree, non_finite=True)
        return tree
    except ForeignError:
        raise
    # ValueError: numbers and dates that are none; TypeError: keys that cannot be hashed; OverflowError: years
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError, AttributeError, LookupError) as error:
        raise ForeignError(one_line(error)) from None


def check_depth(tree: Any, max_depth: int = MAX_DEPTH) -> None:
    """Check a tree of dicts and lists, so that a caller may recurse through it.

    Raises:
        ForeignError: if it is nested more deeply.
    """
    level = [tree]
    for _ in range(max_depth + 1):
        level = [node for node in level if isinstance(node, (dict, list))]
        if not level:
            return
        level = list(itertools.chain.from_iterable(node.values() if isinstance(node, dict) else node for node in level))
    raise ForeignError(f"it is nested more than {max_depth} deep")


def _check_numbers(tree: Any, non_finite: bool) -> None:
    """Refuse integers that a float cannot hold, on which the next division would fail, and maybe infinite floats."""
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
        raise ForeignError(f"the key {one_line(twice)} stands twice in one object")
    return tree


def _line_of(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 0


class _Loader(_LibYaml):
    """The safe loader without dates and numbers in base 60: ``1:30`` is text."""


class _UniqueLoader(_Loader):
    """The same, which refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise ForeignError(one_line(f"{key.value} stands twice in one mapping, which keeps one of them"))
                keys.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return made


def _read_number(loader: Any, node: yaml.ScalarNode, construct: Any) -> Any:
    """Leave numbers in base 60 as text: 600 KB of ``1:59:59…`` take minutes."""
    return node.value if ":" in node.value else construct(loader, node)


_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: _read_number(loader, node, yaml.SafeLoader.construct_yaml_int)
)
_Loader.add_constructor(
    "tag:yaml.org,2002:float", lambda loader, node: _read_number(loader, node, yaml.SafeLoader.construct_yaml_float)
)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
