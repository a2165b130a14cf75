"""A table of runs, with its output formats."""

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
"""Appended to the name of a row whose losses disagree with its reference."""


@dataclass(frozen=True)
class Table:
    """Rows, columns and notes."""

    title: str
    records: list[Record]
    settings: list[Settings]
    """All effective settings of each row."""
    columns: list[Column]
    """Displayed columns."""
    everything: list[Column]
    """All columns, including empty ones and those equal in all rows."""
    everywhere: list[str]
    """Values equal in all rows, as texts."""
    loss_step: int | None
    """Step of the loss column; None if no row has steps."""
    notes: list[str]
    """Sentences on definitions, comparability, disagreements and failures."""
    disagreements: dict[str, Disagreement] = field(default_factory=dict)
    """Row name → first difference from its reference."""
    skipped: list[Skipped] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def print(self, console: Console) -> None:
        """Print to a terminal, dropping columns that do not fit."""
        print_table(self, console)

    def markdown(self) -> str:
        """Format as Markdown."""
        return to_markdown(self)

    def csv(self) -> str:
        """Format as CSV: one line per row, raw numbers."""
        return to_csv(self)

    def json(self) -> str:
        """Format as JSON: all columns, settings and environments."""
        return to_json(self)
