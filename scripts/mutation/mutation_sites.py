"""Sites at which ``mutations.py`` breaks one line of the product, and probes that record which
tests execute them.

A break replaces one part of a statement, as Python's own unparser writes it: a comparison, an
arithmetic or boolean operator, a constant, a condition, a returned value, a call statement, min or
max, the end of a slice. A test cannot tell most breaks of the following from the original, so they
are left out: messages (f-strings, ``raise``, ``assert``, errors, prints, logs, ``__repr__``),
annotations, blocks under ``TYPE_CHECKING`` or ``__name__``, time limits, sizes of caches,
``strict=``, ``frozen=``.

The draw depends on the seed and the product's files only. Every package has its own generator: a
change in one package does not move the sites of the others.
"""

import ast
import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRODUCT = ("fsdptoys", "models", "patches")

SPARE_FACTOR = 3
# a package draws 3 n + 6 sites for n breaks, since no test may execute some
SPARE_SITES = 6

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
MESSAGES = {
    "print",
    "report",
    "warn",
    "filterwarnings",
    "log",
    "debug",
    "info",
    "warning",
    "error",
    "exception",
}
"""Functions about messages; so is every class named ``...Error``."""
TEXTS = {"__repr__", "__str__", "__rich__"}
EQUIVALENT = ("seconds", "timeout", "maxsize", "strict", "frozen")
"""Parts of the names of constants that no test can see."""

PROBE = '''"""Records which test executes a site."""

import os
import sys

_open, _write, _close = os.open, os.write, os.close  # tests replace these
_seen = set()
_test = ""


def hit(site):
    global _test
    _test = os.environ.get("PYTEST_CURRENT_TEST", _test)
    test = _test or ("(import)" if "pytest" in sys.modules else "")
    if not test or (site, test) in _seen:
        return
    _seen.add((site, test))
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = _open({folder!r} + str(site), flags, 0o666)
        _write(file, (test + "\\n").encode())
        _close(file)
    except OSError:
        pass


# torch.compile calls it while it traces, and compiles nothing of it
hit._dynamo_marked_constant = True
'''
"""A module of the recorded copy. It names its folder itself, since tests replace the
environment."""


@dataclass(frozen=True)
class Site:
    """A line and its break."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    number: int
    """Of the break among those of its file."""
    statement: tuple[int, int]
    """Line and column of the statement in front of which a probe belongs."""

    @property
    def package(self) -> str:
        """The folder of the file."""
        return str(Path(self.path).parent)

    @property
    def name(self) -> str:
        """File, line and broken text; unique."""
        return f"{self.path}:{self.line} {self.after.strip()}"

    def break_text(self, text: str) -> str:
        """Return the text of the file with the break, without comments."""
        tree = ast.parse(text)
        list(find_breaks(tree))[self.number].swap()
        return ast.unparse(tree)


@dataclass
class Break:
    """A replacement in a syntax tree."""

    kind: str
    node: Any
    owner: Any
    """Node or list that has the replaced value."""
    field: Any
    """Its attribute or index."""
    value: Any
    """What it becomes."""
    statement: ast.stmt
    """Executes the node."""

    def swap(self) -> None:
        """Break the tree, or mend it again."""
        if isinstance(self.owner, list):
            old = self.owner[self.field]
            self.owner[self.field] = self.value
        else:
            old = getattr(self.owner, self.field)
            setattr(self.owner, self.field, self.value)
        self.value = old


def find_sites(path: str, text: str) -> list[Site]:
    """Return all breaks of a file."""
    sites = []
    for number, fault in enumerate(list(find_breaks(ast.parse(text)))):
        statement = fault.statement
        whole = ast.unparse(statement).splitlines()
        fault.swap()
        broken = ast.unparse(statement).splitlines()
        fault.swap()
        changed = [
            pair for pair in zip(whole, broken, strict=True) if len({*pair}) == 2
        ]
        if changed:  # a large float plus one is the same
            position = (statement.lineno, statement.col_offset)
            line = fault.node.lineno
            sites.append(Site(path, line, fault.kind, *changed[0], number, position))
    return sites


def find_breaks(tree: ast.Module) -> Iterator[Break]:
    """Yield all breaks of a module, in an order that depends on its text only."""
    for node, statement in _walk(tree, None):
        for kind, owner, field, value in _breaks(node):
            yield Break(kind, node, owner, field, value, statement)


def _walk(
    node: ast.AST, statement: ast.stmt | None
) -> Iterator[tuple[ast.AST, ast.stmt]]:
    """Yield all nodes below ``node`` that may be broken, and the statement that executes them.

    The statement of a class executes its body, without the bodies of its functions.
    """
    in_class = isinstance(statement, ast.ClassDef)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if (
                not isinstance(child, ast.AST)
                or name in ("annotation", "returns")
                or _is_message(child)
            ):
                continue
            in_body = name == "body" and isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef
            )
            runs = (
                child
                if isinstance(child, ast.stmt) and (in_body or not in_class)
                else statement
            )
            if runs is not None:
                yield child, runs
            yield from _walk(child, runs)


def _is_message(node: ast.AST) -> bool:
    """Whether no break belongs here: messages, assertions, and code that no test executes."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
        return True
    if isinstance(node, ast.FunctionDef):
        return node.name in TEXTS
    if isinstance(node, ast.If):
        return any(
            isinstance(part, ast.Name) and part.id in ("TYPE_CHECKING", "__name__")
            for part in ast.walk(node.test)
        )
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.keyword):
        return _is_equivalent(node)
    if isinstance(node, ast.Expr):
        return _is_message(node.value)
    return isinstance(node, ast.Call) and (
        _called(node) in MESSAGES or _called(node).endswith("Error")
    )


def _is_equivalent(node: ast.Assign | ast.AnnAssign | ast.keyword) -> bool:
    """Whether a constant is a time limit, the size of a cache, or ``zip``'s check of our own
    bugs."""
    if isinstance(node, ast.keyword):
        name = node.arg or ""
    else:
        name = ast.unparse(
            node.targets[0] if isinstance(node, ast.Assign) else node.target
        )
    return isinstance(node.value, ast.Constant) and any(
        word in name.lower() for word in EQUIVALENT
    )


def _called(node: ast.Call) -> str:
    return (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else getattr(node.func, "id", "")
    )


def _breaks(node: ast.AST) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield kind, owner, field and replacement of every break of a node."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            yield "comparison", node.ops, index, OPERATORS[type(operator)]()
    elif isinstance(node, ast.BinOp):
        if type(node.op) in OPERATORS and not any(
            map(_is_text, (node.left, node.right))
        ):
            yield "arithmetic", node, "op", OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        yield "and, or", node, "op", OPERATORS[type(node.op)]()
    elif isinstance(node, ast.Slice):
        field = "upper" if node.upper else "lower"
        bound = getattr(node, field)
        if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):
            yield "slice", node, field, ast.BinOp(bound, ast.Add(), ast.Constant(1))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        changed = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "constant", node, "value", changed
    elif isinstance(node, ast.Return) and not isinstance(
        node.value, ast.Constant | None
    ):
        yield "return", node, "value", ast.Constant(None)
    elif isinstance(node, ast.If | ast.IfExp):
        inverted: ast.expr = ast.UnaryOp(ast.Not(), node.test)
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            inverted = node.test.operand
        yield "condition", node, "test", inverted
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", node, "value", ast.Constant(...)
    elif isinstance(node, ast.Name) and node.id in ("min", "max"):
        yield "min, max", node, "id", "max" if node.id == "min" else "min"


def _is_text(node: ast.expr) -> bool:
    """Whether an operand of ``+`` is no number."""
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def product_files(checkout: Path) -> list[str]:
    """Return the product's modules, sorted; links are left out."""
    paths = [path for folder in PRODUCT for path in (checkout / folder).rglob("*.py")]
    return sorted(path.relative_to(checkout).as_posix() for path in paths)


def digest(checkout: Path, paths: Sequence[str]) -> str:
    """Return a hash of files."""
    state = hashlib.sha256()
    for path in paths:
        state.update(path.encode() + b"\0" + (checkout / path).read_bytes() + b"\0")
    return state.hexdigest()[:16]


def draw_sites(
    checkout: Path, count: int, seed: int, packages: Sequence[str] = ()
) -> dict[str, tuple[int, list[Site]]]:
    """Return the number of sites of every package, and its sites in the order of the draw, more
    than that number.

    Every package has at least one site; the others are in proportion to statements. A line has one
    break, of a kind drawn first, since constants would outnumber the others.

    Args:
        checkout: with the product.
        count: of sites in all packages together.
        seed: of the draw.
        packages: all without any.

    Raises:
        ValueError: if there are more packages than sites.
    """
    texts = {
        path: (checkout / path).read_text(encoding="utf-8")
        for path in product_files(checkout)
    }
    files: dict[str, list[str]] = {}
    for path in texts:
        package = str(Path(path).parent)
        # that one re-exports
        if package in packages or (not packages and package != PRODUCT[0]):
            files.setdefault(package, []).append(path)
    if count < len(files):
        raise ValueError(
            f"--sites={count} must be at least the number of packages, {len(files)}"
        )
    sizes = {
        package: sum(_statements(texts[path]) for path in paths)
        for package, paths in files.items()
    }
    numbers = dict.fromkeys(files, 1)
    for _ in range(count - len(numbers)):
        numbers[max(sizes, key=lambda name: (sizes[name] / numbers[name], name))] += 1
    drawn = {}
    for package, number in numbers.items():
        breaks = _draw(
            {path: texts[path] for path in files[package]},
            random.Random(f"{seed} {package}"),
        )
        drawn[package] = (
            number,
            list(itertools.islice(breaks, SPARE_FACTOR * number + SPARE_SITES)),
        )
    return drawn


def _statements(text: str) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


def _draw(texts: Mapping[str, str], generator: random.Random) -> Iterator[Site]:
    """Yield a break of every line, in random order."""
    by_line: dict[tuple[str, int], list[Site]] = {}
    for path, text in texts.items():
        for site in find_sites(path, text):
            by_line.setdefault((path, site.line), []).append(site)
    for line in generator.sample(sorted(by_line), len(by_line)):
        kind = generator.choice(sorted({site.kind for site in by_line[line]}))
        site = generator.choice([site for site in by_line[line] if site.kind == kind])
        yield site


def add_probes(text: str, sites: Mapping[int, Site]) -> str:
    """Return a module's text with a probe in front of the statement of every site; comments get
    lost.

    Args:
        text: of the module.
        sites: of this module, by number.
    """
    tree = ast.parse(text)
    for node in list(ast.walk(tree)):
        for field in ("body", "orelse", "finalbody"):
            block: Any = getattr(node, field, None)
            for statement in list(block) if isinstance(block, list) else []:
                for number, site in sites.items():
                    if (statement.lineno, statement.col_offset) == site.statement:
                        probe = ast.parse(
                            f"import mutation_probe\nmutation_probe.hit({number})"
                        ).body
                        position = block.index(statement)
                        block[position:position] = probe
    return ast.unparse(tree)
