"""Strategies, optimizers and data are known by facts of their config classes, not by their names or classes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import fsdptoys
from fsdptoys.config.schema import SCHEMAS

NAMES = {name for group in ("parallel", "optim", "data") for name in SCHEMAS[group]}
OWNERS = ("parallel", "optim", "data", "toys")
"""Packages that may compare names: their own packages, and ``plan``, which predicts a subset of the strategies."""


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each comparison with a literal name, or with a literal collection of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                constants = side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]
                for constant in constants:
                    if isinstance(constant, ast.Constant) and constant.value in NAMES:
                        yield node.lineno, constant.value


def test_names_are_compared_in_their_own_packages_only() -> None:
    """Oracle: the syntax tree of every file."""
    root = Path(fsdptoys.__file__).parent
    files = [path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in OWNERS]
    found = [(str(path.relative_to(root)), *hit) for path in files for hit in compared(ast.parse(path.read_text()))]
    assert len(files) > 100
    assert found == []


def test_trainer_checks_no_classes() -> None:
    """Oracle: the syntax tree of the training loop."""
    tree = ast.parse((Path(fsdptoys.__file__).parent / "train" / "trainer.py").read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert "build_optimizer" in called and not called & {"isinstance", "issubclass", "type"}
