"""The import graph of the package has no cycle, between modules or between packages.

Every ``import`` statement counts: in functions, under ``TYPE_CHECKING`` and in ``try`` blocks too. ``from a import b``
is an edge to the module ``a.b`` if there is one, and to ``a`` otherwise. ``a/__init__.py`` is the module ``a``: its
re-exports are edges to its submodules, so a submodule that imports a name from its own package closes a cycle. Parent
packages that Python initializes on the way to ``a.b`` are no edges. The links ``models``, ``patches`` and ``configs``
are packages like any other.
"""

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import fsdptoys

ROOT = Path(fsdptoys.__file__).parent


def read_modules(root: Path) -> dict[str, ast.Module]:
    """Syntax tree of every module below ``root``, links included, by dotted name."""
    trees = {}
    for folder, _, names in os.walk(root, followlinks=True):
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py":
                parts = path.relative_to(root.parent).with_suffix("").parts
                trees[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_bytes(), str(path))
    return trees


def imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Dotted name of everything that a module imports, relative imports resolved against its package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def import_graph(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """The modules that each module imports."""
    packages = {name.rpartition(".")[0] for name in trees}
    graph = {}
    for module, tree in trees.items():
        package = module if module in packages else module.rpartition(".")[0]
        names = imported_names(tree, package)
        graph[module] = {found for name in names if (found := _holder(name, trees)) is not None} - {module}
    return graph


def _holder(name: str, modules: Iterable[str]) -> str | None:
    """The module that an imported name is or belongs to; None outside the package."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def between_packages(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same graph between packages at the top level; a module at the top level is one of its own."""
    packages: dict[str, set[str]] = {}
    for module, imported in graph.items():
        own = ".".join(module.split(".")[:2])
        packages.setdefault(own, set()).update({".".join(name.split(".")[:2]) for name in imported} - {own})
    return packages


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """One cycle, each module importing the next; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle[::-1]  # graphlib lists the imported module first
    return []


def test_package_has_no_import_cycle() -> None:
    """Oracle: a topological order of the modules, and of the packages at the top level."""
    graph = import_graph(read_modules(ROOT))
    assert len(graph) > 200 and "fsdptoys.models.decoder" in graph and "fsdptoys.patches" in graph
    for level in (graph, between_packages(graph)):
        cycle = find_cycle(level)
        assert not cycle, "import cycle, each importing the next: " + " → ".join(cycle)


def test_nested_imports_count_toward_cycles() -> None:
    """Oracle: a package of four files, and the cycles it has by hand."""
    sources = {
        "p": "from .a import f",
        "p.a": "def f():\n    from . import b",
        "p.b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a",
        "p.c": "from . import f, d",
        "p.d": "import os.path, p.e as e",
        "p.e": "",
    }
    graph = import_graph({name: ast.parse(source) for name, source in sources.items()})
    assert graph == {"p": {"p.a"}, "p.a": {"p.b"}, "p.b": {"p.a"}, "p.c": {"p", "p.d"}, "p.d": {"p.e"}, "p.e": set()}
    assert find_cycle(graph) in (["p.a", "p.b", "p.a"], ["p.b", "p.a", "p.b"])
    assert find_cycle({"p.a": {"p.b"}, "p.b": set()}) == []
