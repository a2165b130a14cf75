"""Layers compute by what is set on them (``ops``, ``exchange``, ``context``), not by replaced
methods."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for folder in ("fsdptoys", "models", "patches")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
}
METHODS = {
    member.name
    for tree in TREES.values()
    for definition in ast.walk(tree)
    if isinstance(definition, ast.ClassDef)
    for member in definition.body
    if isinstance(member, ast.FunctionDef)
}
WRAPPERS = ("partial", "compile", "disable")


def makes_function(value: ast.expr | None, functions: set[str]) -> bool:
    """Whether an expression is a function, or a wrapper of one."""
    if isinstance(value, ast.IfExp):
        return any(
            makes_function(branch, functions) for branch in (value.body, value.orelse)
        )
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in WRAPPERS
    return isinstance(value, ast.Lambda) or (
        isinstance(value, ast.Name) and value.id in functions
    )


def replaced_methods(tree: ast.Module) -> Iterator[str]:
    """Names of methods that a module assigns to other objects, and ``setattr`` of functions."""
    parents = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.FunctionDef))
    ]
    functions = {
        node.name
        for parent in parents
        for node in parent.body
        if isinstance(node, ast.FunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if not isinstance(target, ast.Attribute) or ast.unparse(
                    target.value
                ) in (
                    "self",
                    "ctx",
                ):
                    continue
                is_method = target.attr in METHODS and makes_function(
                    node.value, functions
                )
                if is_method or target.attr == "forward":
                    yield target.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            yield from ["setattr"] * makes_function(node.args[2], functions)


def test_no_method_of_an_instance_is_replaced() -> None:
    """Oracle: the syntax trees of the product."""
    assert "attend" in METHODS and len(TREES) > 300
    replacements = {
        path: names
        for path, tree in TREES.items()
        if (names := [*replaced_methods(tree)])
    }
    assert not replacements


def test_replaced_methods_are_found() -> None:
    """Oracle: replacements written by hand."""
    source = """
def swap(module, method, call):
    module.forward = call
    module.attend = functools.partial(call, module)
    module.attend = torch.compile(module.attend) if call else module.attend
    module.attend = 1
    self.attend = lambda: None
    setattr(module, method, swap)
    setattr(module, method, 1)
"""
    assert list(replaced_methods(ast.parse(source))) == [
        "forward",
        "attend",
        "attend",
        "setattr",
    ]
