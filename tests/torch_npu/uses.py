"""Every name of torch_npu that our sources use, found by parsing them.

A source may reach torch_npu's modules in these ways: it imports ``torch_npu`` or a part of it, it
names ``torch.npu``, it calls ``torch.get_device_module``, or it binds one of those to a name or an
attribute, or returns it. Chains of attributes from there are uses, and their calls give the
parameters. Operators are named as text (``"npu_rms_norm"``, ``"npu.npu_rms_norm"``) or as
attributes (``torch.ops.npu.npu_rms_norm``); a call with such a text alone, as
``operator("npu_rms_norm")``, is a call of the operator.

Modules passed from one source to another are not found by parsing: ``test_interface.py`` names
those attributes. Streams and events are passed everywhere; of their methods only those with names
unique to them are found.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MODULE = "torch_npu.npu"
MODULES = ("torch_npu", "torch_npu.npu", "torch_npu.npu.memory", "torch_npu.profiler")
STREAM_METHODS = ("wait_event", "wait_stream", "record_event", "elapsed_time")
"""Names unique to streams and events."""
OPERATOR = re.compile(r"(?:npu\.)?(npu_[a-z0-9_]+)")
VARIABLE = re.compile(
    r"(PYTORCH_NPU|TORCH_NPU|TORCH_HCCL|TASK_QUEUE|MULTI_STREAM|ASCEND|HCCL|INF_NAN)_[A-Z0-9_]+"
)


@dataclass
class Use:
    """The largest argument list of the calls of one name; empty if it is only named."""

    positional: int = 0
    keywords: set[str] = field(default_factory=set)
    called: bool = False

    def add(self, call: ast.Call | None) -> None:
        """Include one more use."""
        if call is not None:
            self.called = True
            self.positional = max(self.positional, len(call.args))
            self.keywords |= {
                keyword.arg for keyword in call.keywords if keyword.arg is not None
            }


@dataclass
class Uses:
    """The uses in all parsed sources."""

    names: dict[str, Use] = field(default_factory=dict)
    operators: dict[str, Use] = field(default_factory=dict)
    variables: set[str] = field(default_factory=set)
    stream_methods: set[str] = field(default_factory=set)


def uses_of(sources: Mapping[str, Path], handed: Mapping[tuple[str, str], str]) -> Uses:
    """Read sources.

    Args:
        sources: name → file.
        handed: (source, attribute or name) → its torch_npu name.
    """
    uses = Uses()
    for source, path in sources.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            name: module for (where, name), module in handed.items() if where == source
        }
        _Reader(tree, names).read_into(uses)
    return uses


class _Reader:
    def __init__(self, tree: ast.Module, names: Mapping[str, str]) -> None:
        self._tree = tree
        self._bound = {**names}
        self._operators: dict[str, str] = {}
        self._calls = {
            id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)
        }
        self._inner = {
            id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)
        }
        self._docstrings = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for _ in range(2):  # once more for names bound to bound names
            self._bind()

    def read_into(self, uses: Uses) -> None:
        for node in ast.walk(self._tree):
            if id(node) in self._inner:
                continue  # a part of a longer chain
            name = self._dotted(node)
            if isinstance(node, ast.expr) and name is not None and name not in MODULES:
                uses.names.setdefault(name, Use()).add(self._calls.get(id(node)))
            if isinstance(node, ast.Attribute) and node.attr in STREAM_METHODS:
                uses.stream_methods.add(node.attr)
            operator = self._operator(node)
            if operator is not None:
                uses.operators.setdefault(operator, Use()).add(
                    self._calls.get(id(node))
                )
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in self._docstrings
            ):
                if VARIABLE.fullmatch(node.value):
                    uses.variables.add(node.value)
                match = OPERATOR.fullmatch(node.value)
                if match:
                    uses.operators.setdefault(match[1], Use())

    def _bind(self) -> None:
        for node in ast.walk(self._tree):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "torch_npu"
            ):
                for alias in node.names:
                    self._bound[alias.asname or alias.name] = (
                        f"{node.module}.{alias.name}"
                    )
            if isinstance(node, ast.Import) and any(
                alias.name == "torch_npu" for alias in node.names
            ):
                self._bound["torch_npu"] = "torch_npu"
            for target, value in _bindings(node):
                name = None if value is None else self._dotted(value)
                if name is not None:
                    self._bound[target] = name
                operator = None if value is None else self._operator(value)
                if operator is not None:
                    self._operators[target] = operator

    def _dotted(self, node: ast.AST) -> str | None:
        """The torch_npu name of an expression, given the names bound in the source."""
        if isinstance(node, ast.Call):
            if (
                _tail(node.func) == "getattr"
                and len(node.args) > 1
                and isinstance(node.args[1], ast.Constant)
            ):
                owner = self._dotted(node.args[0])
                return None if owner is None else f"{owner}.{node.args[1].value}"
            return MODULE if _tail(node.func) == "get_device_module" else None
        if isinstance(node, ast.Name):
            return self._bound.get(node.id)
        if isinstance(node, ast.Attribute):
            if (
                node.attr == "npu"
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            ):
                return MODULE
            owner = self._dotted(node.value)
            if owner is not None:
                return f"{owner}.{node.attr}"
            return self._bound.get(node.attr)
        return None

    def _operator(self, node: ast.AST) -> str | None:
        """The operator named by an expression."""
        if (
            isinstance(node, ast.Call)
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Constant)
        ):
            match = OPERATOR.fullmatch(str(node.args[0].value))
            return match[1] if match else None
        if isinstance(node, ast.Attribute):
            if OPERATOR.fullmatch(node.attr) and _tail(node.value) in (
                "npu",
                "torch_npu",
            ):
                return node.attr
            return self._operators.get(node.attr)
        return self._operators.get(node.id) if isinstance(node, ast.Name) else None


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names and attributes that a statement binds, functions by their return values."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name | ast.Attribute):
                yield _tail(target), node.value
    if isinstance(node, ast.AnnAssign):
        yield _tail(node.target), node.value
    if isinstance(node, ast.FunctionDef):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Return):
                yield node.name, inner.value


def _tail(node: ast.AST) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )
