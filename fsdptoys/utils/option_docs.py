"""Docstrings of classes and of their fields, from the source: Python keeps none of fields."""

import ast
import contextlib
import dataclasses
import inspect
import textwrap
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class ClassDocs:
    """Docstring of a class, and those of its fields or of its members."""

    doc: str
    fields: dict[str, str]


def read_docs(kind: type) -> ClassDocs:
    """Read the docstrings of a dataclass or an enum; fields have those of their base classes."""
    fields: dict[str, str] = {}
    for base in kind.__mro__[-2::-1]:
        if dataclasses.is_dataclass(base) or issubclass(base, Enum):
            with contextlib.suppress(OSError, TypeError):  # a class without source
                fields |= _read_fields(base)
    return ClassDocs(_plain(inspect.getdoc(kind) or ""), fields)


def _read_fields(kind: type) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    fields: dict[str, str] = {}
    name = ""
    for statement in node.body:
        if (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and name
        ):
            fields[name] = _plain(str(statement.value.value))
        name = ""
        if isinstance(statement, ast.AnnAssign):
            name = ast.unparse(statement.target)
        elif isinstance(statement, ast.Assign):
            (target,) = statement.targets
            # locals()["NAME"] = …, where the name is no identifier
            if isinstance(target, ast.Name):
                name = target.id
            elif isinstance(target, ast.Subscript):
                name = ast.literal_eval(target.slice)
    return fields


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").split())
