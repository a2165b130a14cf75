"""What a wheel of torch_npu offers, read and never run: the names and parameters of its Python, its operators' schemas,
and the strings in its libraries.

A name is followed through ``from … import`` and star imports to the ``def`` or ``class`` behind it. Not seen: what is put
on a module at run time. Operators' schemas are registered by libtorch_npu.so, which holds them as text.
"""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

SCHEMA = re.compile(rb"(?<![\w.:])(?:npu::)?(npu_\w+(?:\.\w+)?)\(([^()\0]*(?:\([^()\0]*\)[^()\0]*)*)\) -> [^\0\n]+")
ENDS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Found = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Parameters:
    """What a callable takes."""

    positional: tuple[str, ...]
    keywords: frozenset[str]
    takes_all: bool = False
    """Whether it takes any keyword."""

    def accepts(self, positional: int, keywords: frozenset[str]) -> bool:
        """Whether a call with so many positional arguments and these keywords fits."""
        return self.takes_all or (positional <= len(self.positional) and keywords <= self.keywords)


class Wheel:
    """An unpacked wheel.

    Args:
        folder: that holds ``torch_npu``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cached_property
    def _binaries(self) -> bytes:
        package = self._folder / "torch_npu"
        return b"".join(path.read_bytes() for path in [package / "lib/libtorch_npu.so", *package.glob("_C.*.so")])

    @functools.cached_property
    def operators(self) -> dict[str, list[str]]:
        """Operator → its parameters in order, as the schema names them."""
        found: dict[str, list[str]] = {}
        for name, text in SCHEMA.findall(self._binaries):
            parts = [part for part in re.split(r",\s*(?![^\[(]*[\])])", text.decode()) if part != "*"]
            names = [part.split("=")[0].split()[-1] for part in parts if part.strip()]
            found.setdefault(name.decode(), names)
        return found

    def has_text(self, text: str) -> bool:
        """Whether the libraries or the Python hold a text."""
        if text.encode() in self._binaries:
            return True
        return any(text in path.read_text(encoding="utf-8") for path in (self._folder / "torch_npu").rglob("*.py"))

    def find(self, name: str) -> Found | None:
        """Where a dotted name is defined: in ``torch_npu.npu.Stream.wait_event``, the method's ``def``; or None."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            module = self._module(".".join(parts[:length]))
            if module is not None:
                return self._within(module, parts[length:])
        return None

    def parameters(self, name: str) -> Parameters | None:
        """What a function, method or class takes; None where there is no such thing."""
        found = self.find(name)
        if isinstance(found, ast.ClassDef):
            for constructor in ("__new__", "__init__"):
                made = self.find(f"{name}.{constructor}")
                if made is not None:
                    return _parameters(made, bound=True)
            return Parameters((), frozenset(), takes_all=False)
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            *_, owner = name.rsplit(".", 2)[:2]
            return _parameters(found, bound=owner[:1].isupper())
        return None

    def _module(self, name: str) -> Path | None:
        path = self._folder.joinpath(*name.split("."))
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        return path / "__init__.py" if (path / "__init__.py").is_file() else None

    def _within(self, path: Path, parts: list[str]) -> Found | None:
        found = self._named(path, parts[0])
        for part in parts[1:]:
            if not isinstance(found, ast.ClassDef):
                return None
            found = next((node for node in found.body if part in _bound(node)), None)  # type: ignore[assignment]
        return found

    @functools.cache  # noqa: B019  (a wheel lives as long as the tests)
    def _named(self, path: Path, name: str) -> Found | None:
        """The definition of a name in a module, looked for in what the module imports too; the last one counts."""
        found: Found | None = None
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom):
                source = self._source(path, node)
                for alias in node.names:
                    if source is not None and (alias.name == "*" or (alias.asname or alias.name) == name):
                        found = self._named(source, name if alias.name == "*" else alias.name) or found
        for node in _tree(path).body:
            if name in _bound(node):
                found = node  # type: ignore[assignment]
        return found

    def _source(self, path: Path, node: ast.ImportFrom) -> Path | None:
        parts = [] if node.module is None else node.module.split(".")
        if node.level:
            package = path.parent
            for _ in range(node.level - 1):
                package = package.parent
            parts = [*package.relative_to(self._folder).parts, *parts]
        source = self._module(".".join(parts))
        return None if source == path else source


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _bound(node: ast.AST) -> set[str]:
    """Names that a statement defines."""
    if isinstance(node, ENDS):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def _parameters(node: Found, bound: bool) -> Parameters:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = node.args
    positional = [each.arg for each in [*arguments.posonlyargs, *arguments.args]][bound:]
    by_keyword = [each.arg for each in [*arguments.args, *arguments.kwonlyargs]]
    return Parameters(tuple(positional), frozenset(by_keyword), takes_all=arguments.kwarg is not None and bool(arguments.vararg))
