"""Reject names that say nothing, and tuple assignments of unrelated values.

    python scripts/check_names.py [PATH ...]

A participle (``found``, ``kept``) or a word for anything (``place``, ``words``) hides what a value
is; the noun says it. A tuple assignment of unrelated values puts two statements on one line; a swap
stays. Docstrings that hang a second fact on the first (``whose``, ``of which``, ``, where``) are
counted. At most five per 10,000 words are allowed for each phrase, the rate of torchtitan's.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PHRASES = (r"\bwhose\b", r"\bof which\b", r", where\b")
MOST_PER_10000_WORDS = 5
FEWEST_WORDS = 10_000  # below, a rate means nothing
REJECTED = re.compile(
    "_*(asked|built|came|done|each|found|given|got|held|kept|known|made|meant|named|ours|place|put"
    "|said|seen|shown|taken|theirs|told|typed|wanted|words|written)_*"
)


def names(node: ast.AST) -> Iterator[str]:
    """Names that a node binds."""
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.alias) and node.asname:
        yield node.asname


def is_unrelated(node: ast.AST) -> bool:
    """Whether a node assigns a tuple of values that do not read the assigned names."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    if not isinstance(node.targets[0], ast.Tuple):
        return False
    targets = {ast.unparse(target) for target in node.targets[0].elts}
    return targets.isdisjoint(ast.unparse(read) for read in ast.walk(node.value))


def faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and description of each fault in a module."""
    for node in ast.walk(tree):
        for name in names(node):
            if REJECTED.fullmatch(name):
                yield node.lineno, f"{name} is no noun; name the value by what it is"
        if is_unrelated(node):
            yield (
                node.lineno,
                "a tuple of unrelated values; write one assignment a line",
            )


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a module, its classes and its functions, on one line each."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield " ".join((ast.get_docstring(node) or "").split())


def main(paths: list[str]) -> int:
    """Check the files, or all files that git knows; return the exit status."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *(paths or ["."])],
        capture_output=True,
        text=True,
        check=True,
    )
    files = [Path(line) for line in listed.stdout.splitlines() if line.endswith(".py")]
    trees = {
        file: ast.parse(file.read_text()) for file in files if not file.is_symlink()
    }
    messages = [
        f"{file}:{line}: {fault}"
        for file, tree in trees.items()
        for line, fault in faults(tree)
    ]
    texts = [text for tree in trees.values() for text in docstrings(tree)]
    words_read = sum(len(text.split()) for text in texts)
    counts = Counter(
        {
            phrase: sum(len(re.findall(phrase, text)) for text in texts)
            for phrase in PHRASES
        }
    )
    if words_read >= FEWEST_WORDS:
        most = MOST_PER_10000_WORDS * words_read // 10_000
        messages += [
            f"docstrings: {count} times {phrase!r}, at most {most}; write a second sentence"
            for phrase, count in counts.items()
            if count > most
        ]
    print("\n".join(messages) if messages else f"{len(trees)} files")
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
