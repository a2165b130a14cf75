"""The help pages, made from the YAML folder and from the source text of the dataclasses.

Reading the source with ``ast`` rather than importing it keeps the help under a second: importing torch takes longer.
"""

import ast
from dataclasses import dataclass, field
from pathlib import Path

from .overrides import list_choices, list_defaults, plain_text

HEAD = """\
usage: fsdptoys train [GROUP=CHOICE ...] [KEY=VALUE ...] [--cfg job]
"""

COMMANDS = (
    HEAD
    + """\
       fsdptoys train --help
       fsdptoys --version

Trains a language model, as configured. Without any word it finds the hardware and trains what fits it.

  train            start one rank a device (two on a CPU) and train; under torchrun, be one of its ranks
  train --cfg job  print the configuration that these words compose to, and stop
  train --help     all groups, choices and keys
"""
)


@dataclass
class _Class:
    """What the source says of one class."""

    bases: list[str]
    doc: str
    fields: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, annotation and default."""
    docs: dict[str, str] = field(default_factory=dict)


def command_help() -> str:
    """The page of ``fsdptoys --help``."""
    return COMMANDS


def train_help() -> str:
    """The page of ``fsdptoys train --help``."""
    return "\n".join([HEAD, "Groups (the default is marked with *):", *_groups(), "", "Keys:", *_keys()]) + "\n"


def _groups() -> list[str]:
    choices, defaults = list_choices(), list_defaults()
    lines = []
    for group, default in defaults.items():
        names = [f"{name}*" if name == default else name for name in choices[group]]
        if default is None:
            names.append("null (default: by hardware)")
        lines.append(f"  {group + '=':<12} {', '.join(names)}")
    return lines


def _keys() -> list[str]:
    classes, choices = _read_classes(Path(__file__).parent), list_choices()
    lines = []
    for section, annotation, _ in classes["Config"].fields:
        base = classes[annotation]
        lines += ["", f"{section}: {base.doc}", *_fields(classes, annotation, section)]
        for name, found in classes.items():
            choice = name.removesuffix("Config").lower()  # FSDP1Config is what parallel=fsdp1 chooses
            if choice in choices.get(section, ()) and annotation in _ancestors(classes, name):
                own = _fields(classes, name, section, without=annotation)
                lines += [f" with {section}={choice}: {found.doc}", *own] if own else []
    return lines


def _fields(classes: dict[str, _Class], name: str, prefix: str, without: str | None = None) -> list[str]:
    lines = []
    left_out = [without, *_ancestors(classes, without)] if without else []
    inherited = [base for base in reversed(_ancestors(classes, name)) if base not in left_out]
    for owner in [*inherited, name]:
        for key, annotation, default in classes[owner].fields:
            doc = classes[owner].docs.get(key, "")
            if annotation in classes and classes[annotation].fields and "Enum" not in classes[annotation].bases:
                lines += _fields(classes, annotation, f"{prefix}.{key}")
                continue
            if annotation in classes:
                members = ", ".join(member for member, _, _ in classes[annotation].fields)
                doc = f"{doc} [{members}]"
            lines.append(f"  {f'{prefix}.{key}={default}':<42} {doc}")
    return lines


def _ancestors(classes: dict[str, _Class], name: str) -> list[str]:
    """Known bases of a class, nearest first."""
    found: list[str] = []
    for base in classes[name].bases:
        if base in classes:
            found += [base, *_ancestors(classes, base)]
    return found


def _read_classes(root: Path) -> dict[str, _Class]:
    classes: dict[str, _Class] = {}
    aliases: dict[str, str] = {}
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = _read_class(node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                aliases |= {target.id: node.value.id for target in node.targets if isinstance(target, ast.Name)}
    return classes | {alias: classes[name] for alias, name in aliases.items() if name in classes}


def _read_class(node: ast.ClassDef) -> _Class:
    bases = [ast.unparse(base) for base in node.bases]
    is_enum = "Enum" in bases
    found = _Class(bases, " ".join((ast.get_docstring(node) or "").split()))
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    if not (is_enum or is_dataclass):
        return found
    last = ""
    for statement in node.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and last:
            found.docs[last] = " ".join(str(statement.value.value).replace("``", "").split())
        last = ""
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            if is_enum:
                found.fields.append((statement.targets[0].id, "", ""))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            last = statement.target.id
            annotation = ast.unparse(statement.annotation)
            if not annotation.startswith("ClassVar"):
                found.fields.append((last, annotation, _default(statement.value)))
    return found


def _default(node: ast.expr | None) -> str:
    """A default value as it is typed on the command line."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return plain_text(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):  # field(default_factory=...)
        return "[]" if ast.unparse(node).endswith("=list)") else "[...]"
    return ast.unparse(node)
