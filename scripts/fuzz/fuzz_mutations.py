"""Damages for files that a reader must refuse in a sentence: values, structures, bytes, and other
things than files.

A mutation is drawn from a random generator alone, so that its seed brings it back.
"""

import copy
import gzip
import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

GIANT_BYTES = 2**30
LONG = "9" * 5000
ALIAS_BOMB = (
    "{z0: &z0 [x, x, x], "
    + ", ".join(f"z{n}: &z{n} [{f'*z{n - 1}, ' * 9}]" for n in range(1, 12))
    + "}"
)
MERGE_BOMB = (
    "{a0: &a0 {x: 1}, "
    + ", ".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1}, ' * 9}]}}" for n in range(1, 9))
    + "}"
)

TEXTS = (
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "line\nline\r\x00\x08",
    "\u202eright-to-left",
    "\u2028",
    "\ud800",
    "../../../etc/passwd",
    "/dev/zero",
    "",
    " ",
    "x" * 10_000,
    "<script>alert(1)</script>",
    "=1+1",
    "[bold]markup[/bold]",
    "nan",
    "1e5",
    "éü中😀",
)

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**62,
    2**63,
    -(2**64),
    10**30,
    10**299,
    10**400,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    {"": None},
    [None] * 1000,
    *TEXTS,
)

RAW_JSON = (
    "1e400",
    "-1e99999",
    LONG,
    "[" * 100_000,
    "[" * 60 + "]" * 60,
    '{"a":' * 60 + "1" + "}" * 60,
    "nul",
    "1 2",
)
"""Texts in the place of a value, which a value cannot be written as."""

RAW_YAML = (
    ALIAS_BOMB,
    MERGE_BOMB,
    "&a {b: *a}",
    "&a [*a]",
    "1" + ":59" * 200_000,
    "0x" + "f" * 400,
    "!!python/object/apply:os.system [true]",
    "!!binary aGk=",
    "!!set {a, b}",
    "[" * 100_000,
    "[" * 60 + "]" * 60,
    "{? [a] : b}",
    "{1: 2, null: 3, true: 4, 1.5: 5}",
    "2001-99-99",
    "0b_",
    ".nan",
    LONG,
    "1e400",
    "{<<: {a: 1}}",
    "{<<: 1}",
)

MARK = "@@raw@@"

Tree = Any


def mutate_tree(tree: Tree, draw: random.Random) -> tuple[Tree, str]:
    """Change, remove or add one part of a tree; say how."""
    root = {"": copy.deepcopy(tree)}
    holder, key = _draw_part(root, draw)
    kind = draw.choice(
        ("value", "value", "value", "value", "raw", "delete", "rename", "swap")
    )
    if kind == "value":
        holder[key] = copy.deepcopy(draw.choice(VALUES))
    elif kind == "raw":
        holder[key] = MARK
    elif kind == "delete" and holder is not root:
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict) and holder is not root:
        holder[draw.choice(TEXTS)] = holder.pop(key)
    else:
        other, other_key = _draw_part(root, draw)
        holder[key] = copy.deepcopy(other[other_key])
    return root[""], f"{kind} of {key!a:.60}"


def _draw_part(root: dict[str, Tree], draw: random.Random) -> tuple[Any, Any]:
    """A container of a tree and the key of one of its values; the deeper, the less likely."""
    holder: Any = root
    key: Any = ""
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.9:
        holder = holder[key]
        key = draw.choice(
            list(holder) if isinstance(holder, dict) else range(len(holder))
        )
    return holder, key


def mutate_json(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Change one part of JSON."""
    tree, how = mutate_tree(json.loads(content), draw)
    text = json.dumps(tree).replace(f'"{MARK}"', draw.choice(RAW_JSON))
    return text.encode("utf-8", "surrogatepass"), how


def mutate_yaml(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Change one part of YAML."""
    tree, how = mutate_tree(yaml.safe_load(content), draw)
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=draw.random() < 0.5)
    return text.replace(f"'{MARK}'", draw.choice(RAW_YAML)).encode(
        "utf-8", "surrogatepass"
    ), how


def mutate_lines(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Change, remove or move one of some JSON lines."""
    lines = content.splitlines()
    index = draw.randrange(len(lines))
    how = draw.choice(("line", "line", "line", "line", "delete", "twice", "reverse"))
    if how == "line":
        lines[index], how = mutate_json(lines[index], draw)
    elif how == "delete":
        del lines[index]
    elif how == "reverse":
        lines.reverse()
    else:
        lines.insert(0, lines[index])
    return b"".join(line + b"\n" for line in lines), f"line {index + 1}: {how}"


def mutate_header(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """A safetensors file with another header of the length that it says."""
    length = int.from_bytes(content[:8], "little")
    if draw.random() < 0.2:
        header_length = draw.choice(
            (0, 1, length - 1, length + 1, 2**32, 2**63, 2**64 - 1)
        )
        return header_length.to_bytes(8, "little") + content[
            8:
        ], f"says a header of {header_length} bytes"
    header, how = mutate_json(content[8 : 8 + length], draw)
    return len(header).to_bytes(8, "little") + header + content[8 + length :], how


def mutate_packed(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Change one part of gzipped JSON."""
    text, how = mutate_json(gzip.decompress(content), draw)
    return gzip.compress(text, 1), how


def mutate_bytes(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Change some bytes."""
    offset = draw.randrange(len(content) + 1)
    before = content[:offset]
    after = content[offset:]
    kind = draw.choice(
        ("truncate", "flip", "flip", "insert", "overwrite", "empty", "noise", "utf-8")
    )
    if kind == "truncate":
        changed = before
    elif kind == "flip" and after:
        changed = before + bytes([after[0] ^ 1 << draw.randrange(8)]) + after[1:]
    elif kind == "insert":
        changed = before + draw.choice((b"\n", bytes(200), draw.randbytes(30))) + after
    elif kind == "overwrite":
        size = draw.randrange(64)
        changed = (
            before + draw.choice((bytes(size), draw.randbytes(size))) + after[size:]
        )
    elif kind == "noise":
        changed = draw.randbytes(draw.randint(1, 2000))
    elif kind == "utf-8":
        wrong = draw.choice((b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xef\xbb\xbf"))
        changed = before + wrong + after
    else:
        changed = b""
    return changed, f"{kind} at byte {offset}"


def replace_file(path: Path, draw: random.Random) -> str:
    """Something other than a file in a file's place, or a file of another size."""
    kind = draw.choice(
        (
            "pipe",
            "loop",
            "folder",
            "device",
            "dangling",
            "socket",
            "giant",
            "missing",
            "itself",
        )
    )
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(path))  # names of sockets are short
    elif kind == "giant":
        path.touch()
        os.truncate(path, GIANT_BYTES)
    elif kind == "itself":
        path.symlink_to(path.parent)
    return f"replaced: {kind}"


KINDS: dict[str, Callable[[bytes, random.Random], tuple[bytes, str]]] = {
    ".json": mutate_json,
    ".jsonl": mutate_lines,
    ".yaml": mutate_yaml,
    ".safetensors": mutate_header,
    ".gz": mutate_packed,
}


def mutate_file(path: Path, draw: random.Random) -> str:
    """Mutate a file in place, by the kind in its name; returns a description."""
    if draw.random() < 0.12:
        return replace_file(path, draw)
    mutate = (
        mutate_bytes if draw.random() < 0.25 else KINDS.get(path.suffix, mutate_bytes)
    )
    content, how = mutate(path.read_bytes(), draw)
    path.write_bytes(content)
    return how
