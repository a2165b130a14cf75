"""Contents of a torch_npu wheel, read and never run: names and parameters of its Python, its
operators' schemas, and the strings in its libraries.

A name is followed through ``from … import`` and star imports to the ``def`` or ``class`` behind it,
or into the extension module, which must have its text. A function that forwards all of its
arguments is followed to the one that it calls. Not seen: attributes set on a module at run time.
Operators' schemas are registered by libtorch_npu.so, which holds them as text.
"""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

SCHEMA = re.compile(
    rb"(?<![\w.:])(?:npu::)?(npu_\w+(?:\.\w+)?)\(([^()\0]*(?:\([^()\0]*\)[^()\0]*)*)\) -> [^\0\n]+"
)
ENDS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Found = (
    ast.FunctionDef
    | ast.AsyncFunctionDef
    | ast.ClassDef
    | ast.Assign
    | ast.AnnAssign
    | ast.ImportFrom
)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a callable."""

    positional: tuple[str, ...]
    keywords: frozenset[str]

    def accepts(self, positional: int, keywords: frozenset[str]) -> bool:
        """Whether a call with N positional arguments and these keywords fits."""
        return positional <= len(self.positional) and keywords <= self.keywords - {
            *self.positional[:positional]
        }


class Wheel:
    """An unpacked wheel.

    Args:
        folder: the parent of ``torch_npu``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cached_property
    def _binaries(self) -> bytes:
        package = self._folder / "torch_npu"
        return b"".join(
            path.read_bytes()
            for path in [package / "lib/libtorch_npu.so", *package.glob("_C.*.so")]
        )

    @functools.cached_property
    def operators(self) -> dict[str, list[str]]:
        """Operator → its parameters in order, as the schema names them."""
        schemas: dict[str, list[str]] = {}
        for name, text in SCHEMA.findall(self._binaries):
            parts = [
                part
                for part in re.split(r",\s*(?![^\[(]*[\])])", text.decode())
                if part != "*"
            ]
            names = [part.split("=")[0].split()[-1] for part in parts if part.strip()]
            schemas.setdefault(name.decode(), names)
        return schemas

    def has_text(self, text: str) -> bool:
        """Whether the libraries or the Python hold a text."""
        if text.encode() in self._binaries:
            return True
        return any(
            text in path.read_text(encoding="utf-8")
            for path in (self._folder / "torch_npu").rglob("*.py")
        )

    def find(self, name: str) -> Found | None:
        """The definition of a dotted name: for ``torch_npu.npu.Stream.wait_event``, the method's
        ``def``; or None."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            path = self._module(".".join(parts[:length]))
            if path is not None:
                node = self._find_name(path, parts[length], frozenset())
                for part in parts[length + 1 :]:
                    node = self._member(node, part)
                return node
        return None

    def parameters(self, name: str) -> Parameters | None:
        """The parameters of a function, method or class; None if it does not exist."""
        node = self.find(name)
        if isinstance(node, ast.ClassDef):
            makers = (self._member(node, maker) for maker in ("__init__", "__new__"))
            return next(
                (
                    _parameters(maker, bound=True)
                    for maker in makers
                    if isinstance(maker, ENDS)
                ),
                None,
            )
        if not isinstance(node, ast.FunctionDef):
            return None
        handed_on = _hands_on_to(node)
        if handed_on is not None:
            return self.parameters(f"{name.rpartition('.')[0]}.{handed_on}")
        return _parameters(node, bound=name.split(".")[-2][:1].isupper())

    def _member(self, parent: Found | None, name: str) -> Found | None:
        """An attribute of a class; for a class defined in C++, the class itself, if the extension
        module has the text.
        """
        if isinstance(parent, ast.ImportFrom):
            return parent if name.encode() in self._binaries else None
        if isinstance(parent, ast.ClassDef):
            return next((node for node in parent.body if name in _bound(node)), None)  # type: ignore[misc]
        return None

    def _module(self, name: str) -> Path | None:
        path = self._folder.joinpath(*name.split("."))
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
        return path / "__init__.py" if (path / "__init__.py").is_file() else None

    def _find_name(
        self, path: Path, name: str, visited: frozenset[tuple[Path, str]]
    ) -> Found | None:
        """The definition of a name in a module, or in the modules that it imports; its own comes
        first."""
        if (path, name) in visited:
            return None
        visited |= {(path, name)}
        own = [node for node in _tree(path).body if name in _bound(node)]
        if own:
            return own[-1]  # type: ignore[return-value]
        for node in _imports(path):
            for alias in node.names:
                if alias.name != "*" and (alias.asname or alias.name) != name:
                    continue
                if (node.module or "").startswith(
                    "torch_npu._C"
                ) and alias.name.encode() in self._binaries:
                    return node
                source = self._source(path, node)
                if source is None:
                    continue
                definition = self._find_name(
                    source, name if alias.name == "*" else alias.name, visited
                )
                if definition is not None:
                    return definition
        return None

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
def _imports(path: Path) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom)]


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


def _hands_on_to(node: ast.FunctionDef) -> str | None:
    """The function that receives all of ``*args`` and ``**kwargs``, if any."""
    if node.args.vararg is None or node.args.kwarg is None:
        return None
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            starred = any(isinstance(argument, ast.Starred) for argument in call.args)
            if starred and any(keyword.arg is None for keyword in call.keywords):
                return call.func.id
    return None


def _parameters(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, bound: bool
) -> Parameters:
    assert not isinstance(node, ast.ClassDef)
    arguments = node.args
    positional = [
        argument.arg for argument in [*arguments.posonlyargs, *arguments.args]
    ][bound:]
    by_keyword = [argument.arg for argument in [*arguments.args, *arguments.kwonlyargs]]
    return Parameters(tuple(positional), frozenset(by_keyword))
