"""Pages that ``fsdptoys plan`` prints, and texts of their numbers.

A GiB is 2**30 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.plan.search.switches import count_parameters
from fsdptoys.utils.tables import print_grid


@dataclass(frozen=True)
class Page:
    """Prints the parts of a page."""

    console: Console

    def line(self, text: str, style: str | None = None) -> None:
        """Print a text as it is."""
        self.console.print(
            text, style=style, highlight=False, markup=False, emoji=False
        )

    def heading(self, text: str) -> None:
        """Print a heading after an empty line."""
        self.console.print()
        self.line(text, style="bold")

    def model(self, config: Config) -> None:
        """Print the model's name and size."""
        name = config.model.name or config.model.family
        count = count_text(count_parameters(config.model))
        self.line(f"{name}, {count} parameters", style="bold")

    def grid(self, rows: Sequence[tuple[str, ...]], justify: str) -> None:
        """Print rows without a heading."""
        print_grid(rows, justify, self.console)

    def table(
        self, heading: str, rows: Sequence[tuple[str, ...]], justify: str
    ) -> None:
        """Print rows under a heading; the first one has the names of the columns."""
        self.heading(heading)
        print_grid(rows, justify, self.console, headed=True)

    def caveats(self, sentences: Sequence[str]) -> None:
        """Print each sentence once, as a list."""
        if sentences:
            self.heading("Caveats")
            for sentence in dict.fromkeys(sentences):
                bullet = Table.grid(padding=(0, 1, 0, 0))
                bullet.add_row("-", Text(sentence))
                self.console.print(bullet, highlight=False)


def ranks_text(count: int) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{count:,} rank{'s' * (count != 1)}"


def count_text(value: int) -> str:
    """Return three digits of a number and its unit, such as ``8.03B``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def gib_text(size: float) -> str:
    """Return bytes in GiB, MiB or KiB."""
    if size == 0:
        return "0 GiB"
    if abs(size) >= 0.01 * GIB:
        return f"{size / GIB:,.2f} GiB"
    if abs(size) >= 0.1 * 2**20:
        return f"{size / 2**20:.3g} MiB"
    return f"{size / 2**10:.3g} KiB"


def seconds_text(seconds: float) -> str:
    """Return a time in s, ms or us."""
    if seconds < 1e-8:  # rounding error of a difference
        return "0 s"
    if seconds >= 1:
        return f"{seconds:,.3f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
