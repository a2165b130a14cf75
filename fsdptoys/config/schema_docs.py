"""Read keys, annotations, defaults, bounds and docstrings of the config dataclasses from their
source.

Parsing with ``ast`` keeps ``--help`` under a second; importing the classes would import torch.
"""

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fsdptoys.utils import bounds as bounds_module
from fsdptoys.utils.text import value_text

ARITHMETIC = (ast.Constant, ast.BinOp, ast.operator)


@dataclass
class Declaration:
    """One class: its bases, docstring and fields."""

    bases: list[str]
    doc: str
    fields: list[tuple[str, str, str]] = field(default_factory=list)  # Name, annotation and default
    # Docstrings of fields, and of an enum's members
    docs: dict[str, str] = field(default_factory=dict)
    bounds: dict[str, bounds_module.Bounds] = field(default_factory=dict)
    family: str | None = None
    """Of a model's configuration: the suffix of the ``base_<family>`` schema that its presets start
    from."""


class Key(NamedTuple):
    """A configuration key, with annotation and default of the most derived class that declares
    it."""

    annotation: str
    default: str
    bounds: str
    doc: str


def collect_keys(classes: dict[str, Declaration], name: str) -> dict[str, Key]:
    """All keys of a class, in the order and with the defaults of its dataclass."""
    collected: dict[str, Key] = {}
    for owner in [*reversed(ancestors(classes, name)), name]:
        for key, annotation, default in classes[owner].fields:
            doc = classes[owner].docs.get(key) or (collected[key].doc if key in collected else "")
            bounds = classes[owner].bounds.get(key) or (
                collected[key].bounds if key in collected else ""
            )
            collected[key] = Key(annotation, default, str(bounds), doc)
    return collected


def ancestors(classes: dict[str, Declaration], name: str) -> list[str]:
    """Known bases of a class, in method resolution order."""
    found: list[str] = []
    for base in classes[name].bases:
        if base in classes:
            found += [base, *ancestors(classes, base)]
    # A shared base comes after all classes that share it.
    return [base for index, base in enumerate(found) if base not in found[index + 1 :]]


def read_classes(root: Path, quote: str = "") -> dict[str, Declaration]:
    """Read all classes of a folder and its direct subfolders, by name; aliases (``A = B``)
    included.

    ``quote`` replaces the double backticks of docstrings.
    """
    aliases: dict[str, str] = {}
    # With the constants of all modules, to evaluate the fields' metadata
    names = dict(vars(bounds_module))
    nodes: list[ast.ClassDef] = []
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                nodes.append(node)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if isinstance(node.value, ast.Name):
                    aliases[node.targets[0].id] = node.value.id
                elif all(isinstance(part, ARITHMETIC) for part in ast.walk(node.value)):
                    names[node.targets[0].id] = _evaluate(node.value, {})
    classes = {node.name: _read_class(node, names, quote) for node in nodes}
    return classes | {alias: classes[name] for alias, name in aliases.items() if name in classes}


def _evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    # Of this package's own source
    return eval(compile(ast.Expression(node), "<config>", "eval"), {}, names)


def _read_class(node: ast.ClassDef, names: dict[str, Any], quote: str) -> Declaration:
    def plain(text: str) -> str:
        return " ".join(text.replace("``", quote).split())

    bases = [ast.unparse(base) for base in node.bases]
    is_enum = "Enum" in bases
    found = Declaration(bases, plain(ast.get_docstring(node) or ""))
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    if not (is_enum or is_dataclass):
        return found
    last = ""
    for statement in node.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and last:
            found.docs[last] = plain(str(statement.value.value))
        last = ""
        if isinstance(statement, ast.Assign) and is_enum:
            target = statement.targets[0]
            # locals()["NAME"] = …, where the name is no identifier.
            last = (
                str(ast.literal_eval(target.slice))
                if isinstance(target, ast.Subscript)
                else ast.unparse(target)
            )
            found.fields.append((last, "", ""))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            last = statement.target.id
            annotation = ast.unparse(statement.annotation)
            if not annotation.startswith("ClassVar"):
                found.fields.append((last, annotation, _default(statement.value)))
                if bounds := _bounds(statement.value):
                    found.bounds[last] = _evaluate(bounds, names).get(
                        "bounds", bounds_module.Bounds()
                    )
            elif last == "family" and isinstance(statement.value, ast.Constant):
                found.family = str(statement.value.value)
    return found


def _bounds(node: ast.expr | None) -> ast.expr | None:
    """The bounds in ``option(default, bounds, …)`` or ``field(metadata=bounds)``."""
    if not isinstance(node, ast.Call):
        return None
    in_order = (*node.args, None, None)[1] if ast.unparse(node.func) == "option" else None
    return next((word.value for word in node.keywords if word.arg == "metadata"), in_order)


def _default(node: ast.expr | None) -> str:
    """A default value in command line syntax."""
    if node is None:
        return ""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "option":
        return _default(node.args[0])
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "list":
        return "[...]"
    if isinstance(node, ast.List):
        items = [item.value for item in node.elts if isinstance(item, ast.Constant)]
        return value_text(items, quote=True) if len(items) == len(node.elts) else "[...]"
    if isinstance(node, ast.Constant):
        return value_text(node.value, quote=True)
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call) and node.keywords:  # field(default=…, metadata=…)
        return _default(next((word.value for word in node.keywords if word.arg == "default"), None))
    return ast.unparse(node)
