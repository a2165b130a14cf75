"""Run a chat template, and find which part of its text belongs to which message.

A template is a Jinja program from a tokenizer's folder. It comes from others, so it runs in Jinja's
sandbox, which has no access to Python's attributes, files or modules; it can still take long. Its
filters and functions are those of transformers 5 (``transformers/utils/chat_template_utils.py``),
with one exception: ``strftime_now`` formats a fixed date, so that the same files give the same
tokens on every day.

A second compilation of the same template writes a mark at the beginning of each round of a loop
over messages. The text between two marks is that of a message, so one run of the template, linear
in its messages, finds them all.
"""

import datetime
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import one_line

from .chat_rows import BadRowError

TODAY = datetime.date(2024, 7, 26)
"""The date in the templates of Llama 3.1 to 3.3, which they take where there is no
``strftime_now``."""
BEGIN = "\ufdd0"
END = "\ufdd1"
"""Around generated text in a marked one: code points that Unicode keeps out of texts."""
MESSAGE = "\ufdd2"
AFTER = "\ufdd3"
"""Around the number of the message whose text follows; without a number, the text of none
follows."""
MARKS = (BEGIN, END, MESSAGE, AFTER)
"""Characters that a conversation must not have."""
_MARK = re.compile(f"{MESSAGE}([0-9]*){AFTER}|({BEGIN})|({END})")


@dataclass
class MarkedText:
    """A text, and what its marks said."""

    text: str
    pieces: list[tuple[int | None, int, int]] = field(default_factory=list)
    """Message, or None for text of none, start and stop (excluded) of each piece, in order, without
    gaps."""
    generated: list[tuple[int, int, int | None]] = field(default_factory=list)
    """Start and stop of each ``generation`` block, and its message if known."""

    @property
    def turns(self) -> dict[int, tuple[int, int]]:
        """Message → start and stop of its text up to another message's, for those with a text."""
        turns: dict[int, tuple[int, int]] = {}
        before: int | None = None
        for number, start, stop in self.pieces:
            if number is None:
                continue
            if number == before or number not in turns:
                turns[number] = (turns[number][0] if number in turns else start, stop)
            before = number
        return turns

    def texts(self) -> dict[int | None, str]:
        """Message, or None → all its pieces."""
        texts: dict[int | None, list[str]] = {}
        for number, start, stop in self.pieces:
            texts.setdefault(number, []).append(self.text[start:stop])
        return {number: "".join(pieces) for number, pieces in texts.items()}

    @property
    def tail(self) -> str:
        """The text after the last message's."""
        return self.text[
            max((stop for of, _, stop in self.pieces if of is not None), default=0) :
        ]


class JinjaTemplate:
    """A compiled template; ``owner`` is its name in messages.

    Raises:
        ConfigError: if it is no Jinja template.
    """

    def __init__(self, source: str, owner: str) -> None:
        self._loops = _Loops()
        marked = _environment(MarkedGeneration)
        marked.globals |= {
            "_begin_round": self._loops.begin_round,
            "_leave": self._loops.leave,
            "_assigned": self._loops.assigned,
            "_appended": self._loops.appended,
        }
        try:
            self._plain = _environment(Generation).from_string(source)
            tree = marked.parse(source)
            self.has_blocks = tree.find(nodes.ExtensionAttribute) is not None
            _LoopMarker().visit(tree)
            tree.set_environment(marked)
            tree.set_lineno(1)  # of the new nodes alone
            self._marked = marked.from_string(tree)
        except MemoryError:
            raise
        except Exception as error:
            # SyntaxError for too many nested blocks, LookupError for an unknown filter, …
            reason = one_line(error) or type(error).__name__
            raise ConfigError(
                f"{owner} is no Jinja template ({reason}); name another"
            ) from error

    def text(self, variables: Mapping[str, Any]) -> str:
        """The text as transformers writes it; BadRowError if the template fails."""
        return _render(self._plain, variables)

    def marked(self, variables: Mapping[str, Any]) -> MarkedText:
        """The text with the places of its messages, the variable ``messages``; BadRowError if the
        template fails."""
        self._loops.numbers = {
            id(message): number for number, message in enumerate(variables["messages"])
        }
        self._loops.over_messages.clear()
        return _read_marks(_render(self._marked, variables))


class Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` around generated text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """See ``Extension``."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("write"), [], [], body).set_lineno(line)

    def write(self, caller: Callable[[], str]) -> str:
        """The block's text."""
        return caller()


class MarkedGeneration(Generation):
    """``Generation`` with marks."""

    def write(self, caller: Callable[[], str]) -> str:
        """The block's text between marks."""
        return f"{BEGIN}{caller()}{END}"


def _environment(generation: type[Generation]) -> ImmutableSandboxedEnvironment:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = to_json  # Jinja's own escapes for HTML
    environment.globals |= {"raise_exception": refuse, "strftime_now": TODAY.strftime}
    return environment


def _render(template: Template, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(variables)
    except TemplateError as error:
        raise BadRowError(
            f"is refused by the chat template ({one_line(error)})"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # whatever a foreign program can raise
        reason = one_line(error) or type(error).__name__
        raise BadRowError(f"does not fit the chat template ({reason})") from error


def _read_marks(marked: str) -> MarkedText:
    marked_text = MarkedText("")
    parts: list[str] = []
    number: int | None = None
    position = length = 0
    begun: list[tuple[int, int | None]] = []
    for mark in [*_MARK.finditer(marked), None]:
        piece = marked[position : mark.start() if mark else len(marked)]
        if piece:
            marked_text.pieces.append((number, length, length + len(piece)))
            parts.append(piece)
            length += len(piece)
        if mark is None:
            break
        position = mark.end()
        if mark[2]:
            begun.append((length, number))
        elif mark[3]:
            if not begun:
                raise BadRowError(
                    "has a generation block that ends before it begins, by the chat template"
                )
            start, of = begun.pop()
            marked_text.generated.append((start, length, of))
        else:
            number = int(mark[1]) if mark[1] else None
    marked_text.text = "".join(parts)
    return marked_text


class _Loops:
    """Writes the marks while a template runs."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # identity of a message → its number
        self.current: dict[int, int | None] = {}  # loop → the message of this round
        self.over_messages: set[int] = set()  # loops that have run over messages

    def begin_round(self, target: object, loop: int) -> str:
        """A mark at the beginning of a round of a loop, if its variable is a message."""
        self.current[loop] = None
        return self.assigned(target, loop)

    def assigned(self, value: object, loop: int) -> str:
        """A mark where a round takes its message by a number; a second message in it is another
        one's."""
        number = self.numbers.get(id(value))
        if number is None or self.current[loop] is not None:
            return ""
        self.current[loop] = number
        self.over_messages.add(loop)
        return self._mark(number)

    def appended(self, text: Any, loop: int) -> Any:
        """A text to which a round adds its own, with a mark."""
        number = self.current[loop]
        return (
            text
            if number is None or not isinstance(text, str)
            else text + self._mark(number)
        )

    def leave(self, loop: int, outer: object) -> str:
        """A mark behind a loop over messages: of the message of the loop around it, if any."""
        if loop not in self.over_messages:
            return ""
        self.over_messages.discard(loop)
        return self._mark(self.numbers.get(id(outer)))

    def _mark(self, number: int | None) -> str:
        return f"{MESSAGE}{'' if number is None else number}{AFTER}"


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson`` of chat templates."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _LoopMarker(NodeTransformer):
    """Insert the calls of ``_Loops`` into every loop with one variable, and behind it."""

    def __init__(self) -> None:
        self._count = 0
        self._around: tuple[nodes.Const, nodes.Name] | None = None
        """Number and variable of the loop around a statement."""

    def visit_For(self, node: nodes.For) -> list[nodes.Node] | nodes.Node:  # noqa: N802
        """Mark the beginning of a round, and the end of the loop."""
        if not isinstance(node.target, nodes.Name):
            return self.generic_visit(node)
        self._count += 1
        outer = self._around
        number = nodes.Const(self._count)
        variable = nodes.Name(node.target.name, "load")
        self._around = number, variable
        self.generic_visit(node)
        self._around = outer
        node.body.insert(0, nodes.Output([_call("_begin_round", variable, number)]))
        behind = _call("_leave", number, outer[1] if outer else nodes.Const(None))
        return [node, nodes.Output([behind])]

    def visit_Macro(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
        """Forget the loop: the body may run elsewhere."""
        outer = self._around
        self._around = None
        self.generic_visit(node)
        self._around = outer
        return node

    visit_CallBlock = visit_Macro

    def visit_Assign(self, node: nodes.Assign) -> list[nodes.Node] | nodes.Node:  # noqa: N802
        """Mark a message that a round takes by its number, and a text to which it adds."""
        if self._around is None:
            return node
        number, _ = self._around
        target = node.target
        if isinstance(target, nodes.NSRef):
            space = nodes.Name(target.name, "load")
            _mark_sum(node, nodes.Getattr(space, target.attr, "load"), number)
        elif isinstance(target, nodes.Name):
            same = nodes.Name(target.name, "load")
            _mark_sum(node, same, number)
            if isinstance(node.node, nodes.Getitem):
                return [node, nodes.Output([_call("_assigned", same, number)])]
        return node


def _call(function: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.Name(function, "load"), list(arguments), [], None, None)


def _mark_sum(node: nodes.Assign, target: nodes.Expr, loop: nodes.Const) -> None:
    """Mark ``text = text + …`` and ``text = text ~ …`` of one variable."""
    parent = None
    term = node.node
    while isinstance(term, nodes.Add):
        parent = term
        term = term.left
    if isinstance(term, nodes.Concat) and term.nodes[0] == target:
        term.nodes[0] = _call("_appended", target, loop)
    elif parent is not None and term == target:
        parent.left = _call("_appended", target, loop)
