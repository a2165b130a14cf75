"""Damages for files that a reader must refuse in a sentence: values, structures, bytes, and other
things than files.

A mutation is drawn from a random generator alone, so that its seed brings it back.
"""

import copy
import gzip
import json
import os
import random
import re
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
    0.0,
    -0.5,
    1e-320,
    1e308,
    -1e308,
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


def draw_value(draw: random.Random) -> Any:
    """A value that few readers expect."""
    return copy.deepcopy(draw.choice(VALUES))


def mutate_tree(tree: Tree, draw: random.Random) -> tuple[Tree, str]:
    """A tree of which one part is another, is gone, or is new; and how."""
    tree = copy.deepcopy(tree)
    places = list(_places(tree))
    if not places or draw.random() < 0.05:
        value = draw_value(draw)
        return value, f"all of it is {_short(value)}"
    holder, key, path = draw.choice(places)
    kind = draw.choice(
        ("value", "value", "value", "value", "raw", "delete", "add", "rename", "swap", "twice")
    )
    if kind == "value":
        holder[key] = draw_value(draw)
        return tree, f"{path} is {_short(holder[key])}"
    if kind == "raw":
        holder[key] = MARK
        return tree, f"{path} is raw text"
    if kind == "delete":
        del holder[key]
        return tree, f"{path} is gone"
    if kind == "add" and isinstance(holder, dict):
        name = draw.choice(TEXTS)
        holder[name] = draw_value(draw)
        return tree, f"a key {_short(name)} beside {path}"
    if kind == "rename" and isinstance(holder, dict):
        name = draw.choice(TEXTS)
        holder[name] = holder.pop(key)
        return tree, f"{path} is called {_short(name)}"
    if kind == "twice" and isinstance(holder, list):
        holder.append(holder[key])
        return tree, f"{path} stands twice"
    other_holder, other_key, other = draw.choice(places)
    holder[key] = copy.deepcopy(other_holder[other_key])
    return tree, f"{path} is what {other} is"


def _places(tree: Tree, path: str = "") -> Any:
    """Every value of a tree: its container, its key, and its path."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in list(items):
        yield tree, key, f"{path}/{key}"
        yield from _places(value, f"{path}/{key}")


def _short(value: object) -> str:
    text = (
        ascii(value)
        if not (isinstance(value, int) and abs(value) > 2**200)
        else "an integer of hundreds of digits"
    )
    return text if len(text) < 60 else f"{text[:57]}..."


def mutate_json(text: str, draw: random.Random) -> tuple[str, str]:
    """JSON of which one part is another."""
    tree, how = mutate_tree(json.loads(text), draw)
    made = json.dumps(tree)
    if MARK in made:
        raw = draw.choice(RAW_JSON)
        made, how = made.replace(f'"{MARK}"', raw), f"{how} ({_short(raw)})"
    if draw.random() < 0.03:
        made, how = (
            re.sub(r'("[a-z_]+": )', r"\g<1>1, \g<1>", made, count=1),
            f"{how}, and a key twice",
        )
    return made, how


def mutate_lines(text: str, draw: random.Random) -> tuple[str, str]:
    """JSON lines of which one is another, is gone, or stands elsewhere."""
    lines = text.splitlines()
    index = draw.randrange(len(lines))
    kind = draw.choice(
        ("line", "line", "line", "line", "delete", "twice", "reverse", "first twice")
    )
    how = f"line {index + 1}: {kind}"
    if kind == "line":
        lines[index], what = mutate_json(lines[index], draw)
        how = f"line {index + 1}: {what}"
    elif kind == "delete":
        del lines[index]
    elif kind == "reverse":
        lines.reverse()
    else:
        lines.insert(index if kind == "twice" else 0, lines[index])
    return "".join(f"{line}\n" for line in lines), how


def mutate_yaml(text: str, draw: random.Random) -> tuple[str, str]:
    """YAML of which one part is another."""
    tree, how = mutate_tree(yaml.safe_load(text), draw)
    made = yaml.safe_dump(tree, sort_keys=False, allow_unicode=draw.random() < 0.5)
    if MARK in made:
        raw = draw.choice(RAW_YAML)
        made, how = made.replace(f"'{MARK}'", raw), f"{how} ({_short(raw)})"
    return made, how


def mutate_bytes(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Bytes of which some are others."""
    place = draw.randrange(len(content) + 1)
    kind = draw.choice(
        ("truncate", "flip", "flip", "insert", "zeros", "empty", "noise", "double", "utf-8")
    )
    if kind == "truncate":
        return content[:place], f"cut to {place} bytes"
    if kind == "flip" and content:
        made = bytearray(content)
        for _ in range(draw.randint(1, 8)):
            bit = draw.randrange(len(made) * 8)
            made[bit // 8] ^= 1 << bit % 8
        return bytes(made), "bits flipped"
    if kind == "insert":
        return content[:place] + draw.randbytes(draw.randint(1, 30)) + content[
            place:
        ], f"noise at byte {place}"
    if kind == "zeros":
        return content[:place] + bytes(draw.randint(1, 200)) + content[
            place:
        ], f"NULs at byte {place}"
    if kind == "noise":
        return draw.randbytes(draw.randint(1, 2000)), "all noise"
    if kind == "double":
        return content + content, "twice"
    if kind == "utf-8":
        wrong = draw.choice((b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xef\xbb\xbf"))
        return content[:place] + wrong + content[place:], f"{wrong!r} at byte {place}"
    return b"", "empty"


def replace_file(path: Path, draw: random.Random) -> str:
    """Something other than a file in a file's place, or a file of another size."""
    kind = draw.choice(
        ("pipe", "loop", "folder", "device", "dangling", "socket", "giant", "missing", "itself")
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
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "giant":
        path.touch()
        os.truncate(path, GIANT_BYTES)
    elif kind == "itself":
        path.symlink_to(path.parent)
    return f"replaced: {kind}"


def mutate_header(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """A safetensors file with another header of the length that it says."""
    length = int.from_bytes(content[:8], "little")
    if draw.random() < 0.2:
        said = draw.choice((0, 1, length - 1, length + 1, 2**32, 2**63, 2**64 - 1))
        return said.to_bytes(8, "little") + content[8:], f"says a header of {said} bytes"
    header, how = mutate_json(content[8 : 8 + length].decode(), draw)
    encoded = header.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded + content[8 + length :], how


def mutate_packed(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Gzipped JSON of which one part is another."""
    text, how = mutate_json(gzip.decompress(content).decode(), draw)
    return gzip.compress(text.encode("utf-8", "surrogatepass"), 1), how


TEXT_KINDS: dict[str, Callable[[str, random.Random], tuple[str, str]]] = {
    ".json": mutate_json,
    ".jsonl": mutate_lines,
    ".yaml": mutate_yaml,
}

BYTE_KINDS: dict[str, Callable[[bytes, random.Random], tuple[bytes, str]]] = {
    ".safetensors": mutate_header,
    ".gz": mutate_packed,
}


def mutate_file(path: Path, draw: random.Random) -> str:
    """Mutate a file in place, by the kind in its name; returns a description."""
    if draw.random() < 0.12:
        return replace_file(path, draw)
    content = path.read_bytes()
    if draw.random() < 0.25 or path.suffix not in (*TEXT_KINDS, *BYTE_KINDS):
        content, how = mutate_bytes(content, draw)
    elif path.suffix in BYTE_KINDS:
        content, how = BYTE_KINDS[path.suffix](content, draw)
    else:
        text, how = TEXT_KINDS[path.suffix](content.decode(), draw)
        content = text.encode("utf-8", "surrogatepass")
    path.write_bytes(content)
    return how
