"""The import graph of the package has no cycle, between modules or between packages.

Every ``import`` statement counts: in functions, under ``TYPE_CHECKING`` and in ``try`` blocks too.
A re-export in ``a/__init__.py`` is an edge to the submodule, so a submodule that imports a name
from its own package closes a cycle. Parent packages that Python initializes on the way to ``a.b``
are no edges. The links ``models``, ``patches`` and ``configs`` are packages like any other.
"""

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]


def import_graph(package: str) -> dict[str, set[str]]:
    """The modules that each module imports."""
    graph = grimp.build_graph(package, cache_dir=None)
    return {
        module: graph.find_modules_directly_imported_by(module)
        for module in graph.modules
    }


def between_packages(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same graph between packages at the top level; a module at the top level is one of its
    own."""
    packages: dict[str, set[str]] = {}
    for module, imported in graph.items():
        own = ".".join(module.split(".")[:2])
        packages.setdefault(own, set()).update(
            {".".join(name.split(".")[:2]) for name in imported} - {own}
        )
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
    graph = import_graph("fsdptoys")
    assert (
        len(graph) > 200
        and "fsdptoys.models.decoder" in graph
        and "fsdptoys.patches" in graph
    )
    for level in (graph, between_packages(graph)):
        cycle = find_cycle(level)
        assert not cycle, "import cycle, each importing the next: " + " → ".join(cycle)


def imported_modules(path: Path) -> set[str]:
    """Modules of scripts and tests that a file imports, packages in place of names in them
    included."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module for module in modules if module.startswith(("scripts.", "tests."))}


def test_the_harness_imports_itself_only_and_nothing_imports_a_test() -> None:
    """Oracle: the rule of CONTRIBUTING.md, read off the imports of every file."""
    wrong = []
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("scripts/**/*.py")]:
        folder = path.relative_to(ROOT).parts[:2]
        for module in imported_modules(path):
            outside = folder == ("tests", "harness") and not module.startswith(
                "tests.harness."
            )
            from_script = folder[0] == "scripts" and module.startswith("tests.")
            outside |= from_script and not module.startswith("tests.harness.")
            if outside or ".test_" in module:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_nested_imports_count_toward_cycles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a package of five files, and the cycles it has by hand."""
    sources = {
        "__init__": "from .a import f",
        "a": "def f():\n    from . import b",
        "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cyclic.a",
        "c": "from . import f, d",
        "d": "import os.path",
    }
    (tmp_path / "cyclic").mkdir()
    for name, source in sources.items():
        (tmp_path / "cyclic" / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    graph = import_graph("cyclic")
    edges = {"": "a", ".a": "b", ".b": "a"}
    expected = {
        f"cyclic{module}": {f"cyclic.{imported}"} for module, imported in edges.items()
    }
    assert graph == {**expected, "cyclic.c": {"cyclic", "cyclic.d"}, "cyclic.d": set()}
    assert find_cycle(graph) in (
        ["cyclic.a", "cyclic.b", "cyclic.a"],
        ["cyclic.b", "cyclic.a", "cyclic.b"],
    )
    assert find_cycle({"p.a": {"p.b"}, "p.b": set()}) == []


def test_no_file_has_more_than_400_lines() -> None:
    """Oracle: the limit in CONTRIBUTING.md."""
    folders = ("fsdptoys", "models", "patches", "scripts", "tests", "docs")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    lengths = {
        str(file): len(file.read_text(encoding="utf-8").splitlines()) for file in files
    }
    assert len(lengths) > 600
    assert not {file: length for file, length in lengths.items() if length > 400}
