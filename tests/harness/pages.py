"""Markdown pages of the repository: their links, headings and code blocks."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "docs/toys/**/*.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
)
STARTS = r"(?:[A-Z_]+=\S* )*(?:fsdptoys |bash run_fsdp\.sh|torchrun |torchx )"
"""Beginnings of the command lines of fsdptoys."""


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    info: str
    text: str


def read(page: Path) -> list[Token]:
    """Tokens of a page."""
    return (
        MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    )


def links(page: Path) -> Iterator[str]:
    """Targets of links and images, those in tables too."""
    for token in read(page):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target is not None:
                yield str(target)


def code_spans(page: Path) -> Iterator[str]:
    """Texts of a page's code spans."""
    for token in read(page):
        yield from (
            child.content
            for child in token.children or ()
            if child.type == "code_inline"
        )


def anchors(page: Path) -> set[str]:
    """Fragments of a page's headings, as repository browsers and the site form them."""
    tokens = read(page)
    titles = [
        after
        for token, after in itertools.pairwise(tokens)
        if token.type == "heading_open"
    ]
    texts = (
        "".join(child.content for child in title.children or ()) for title in titles
    )
    return {
        re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        for text in texts
    }


def blocks(page: Path) -> list[Block]:
    """Fenced code blocks of a page, in order."""
    return [
        Block(token.info.strip(), token.content)
        for token in read(page)
        if token.type == "fence"
    ]


def commands(page: Path) -> list[str]:
    """Command lines of fsdptoys in a page's code blocks: one string each, without comments and
    continuations."""
    lines: list[str] = []
    for token in read(page):
        if token.type == "code_block" or (
            token.type == "fence" and token.info.split(" ")[0] in ("bash", "console")
        ):
            lines += token.content.replace("\\\n", " ").splitlines()
    parts = (
        part.strip()
        for line in lines
        for part in re.split(r"&&|\s#\s", line.strip().removeprefix("$ "))
    )
    return [part for part in parts if re.match(STARTS, part)]
