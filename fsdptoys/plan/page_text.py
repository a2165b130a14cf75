"""Lines, tables and units of the pages that ``fsdptoys plan`` prints.

A GiB is 2**30 bytes.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.plan.search.switches import count_parameters
from fsdptoys.utils.tables import print_grid


def print_caveats(sentences: Sequence[str], console: Console) -> None:
    """Print each sentence once, as a list."""
    if sentences:
        print_heading("Caveats", console)
        for sentence in dict.fromkeys(sentences):
            bullet = Table.grid(padding=(0, 1, 0, 0))
            bullet.add_row("-", Text(sentence))
            console.print(bullet, highlight=False)


def print_model(config: Config, console: Console) -> None:
    """Print the model's name and size."""
    model = config.model
    print_line(
        f"{model.name or model.family}, {count_text(count_parameters(model))} parameters",
        console,
        style="bold",
    )


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
    return (
        f"{size / 2**20:.3g} MiB"
        if abs(size) >= 0.1 * 2**20
        else f"{size / 2**10:.3g} KiB"
    )


def seconds_text(seconds: float) -> str:
    """Return a time in s, ms or us."""
    if seconds < 1e-8:  # rounding error of a difference
        return "0 s"
    if seconds >= 1:
        return f"{seconds:,.3f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def print_heading(text: str, console: Console) -> None:
    """Print a heading after an empty line."""
    console.print()
    print_line(text, console, style="bold")


def print_table(
    heading: str, rows: Sequence[tuple[str, ...]], justify: str, console: Console
) -> None:
    """Print a table under a heading; the first row has the names of the columns."""
    print_heading(heading, console)
    print_grid(rows, justify, console, headed=True)


def print_line(text: str, console: Console, style: str | None = None) -> None:
    """Print a text as it is."""
    console.print(text, style=style, highlight=False, markup=False, emoji=False)
