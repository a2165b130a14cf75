"""TODO."""

from dataclasses import dataclass, field

from rich.console import Console

from fsdptoys.sweep import Skipped

from .columns import (
    Column,
)
from .loss_agreement import Disagreement
from .runs_table import Record
from .setting_diff import Settings
from .table_export import to_csv, to_json, to_markdown
from .table_terminal import print_table

MARK = " ≠"
"""Behind the name of a row whose losses are not those that they should be."""


@dataclass(frozen=True)
class Table:
    """Rows and columns, and sentences about them."""

    title: str
    records: list[Record]
    settings: list[Settings]
    """Of each row, all of them."""
    columns: list[Column]
    """What is shown."""
    everything: list[Column]
    """With what is the same in all rows, and what is empty."""
    everywhere: list[str]
    """What is the same in all rows."""
    loss_step: int | None
    """Of the losses that are compared."""
    notes: list[str]
    """Sentences: how numbers were made, what does not compare, what failed."""
    disagreements: dict[str, Disagreement] = field(default_factory=dict)
    """Row → in what its losses differ from those they should be equal to."""
    skipped: list[Skipped] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def print(self, console: Console) -> None:
        """Print for a terminal, without the columns for which it has no room."""
        print_table(self, console)

    def markdown(self) -> str:
        """The same as Markdown."""
        return to_markdown(self)

    def csv(self) -> str:
        """A line each row, raw numbers."""
        return to_csv(self)

    def json(self) -> str:
        """All that is known of each row."""
        return to_json(self)
