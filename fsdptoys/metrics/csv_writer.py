"""Writes the numbers of each step into ``metrics.csv``, for spreadsheets and pandas.

The columns are the keys of ``metrics.jsonl``, in its order; a number that was not measured is an
empty cell. A resumed run drops the rows after its checkpoint. A new column, as of a callback that
adds a number later, rewrites the file.
"""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.regular_file import open_regular, read_regular

from .config import CSV_FILE
from .results import RunResults
from .step import StepMetrics
from .writer import RunStart, Writer, WriterConfig

LARGEST_BYTES = 2**30


@dataclass
class CSVConfig(WriterConfig):
    """One line per step in ``metrics.csv``."""

    name: ClassVar[str] = "csv"

    def build(self) -> Writer:
        """Construct the writer."""
        return CSVWriter()


class CSVWriter(Writer):
    """Appends to ``metrics.csv`` of the run directory."""

    label = "CSV"

    def __init__(self) -> None:
        self._path = Path()
        self._columns: list[str] = []
        self._file: IO[str] | None = None

    def start(self, run: RunStart) -> None:
        """Open the file, with the rows up to the resumed step."""
        self._path = run.run_dir / CSV_FILE
        rows = self._read() if run.resumed_step and self._path.exists() else []
        self._rewrite([row for row in rows if _step_of(row) <= run.resumed_step])

    def step(self, metrics: StepMetrics) -> None:
        """Write the numbers of ``metrics.jsonl``, under the same names."""
        assert self._file is not None
        values = {
            name: "" if value is None else str(value)
            for name, value in metrics.values().items()
        }
        columns = [name for name in values if name not in self._columns]
        if columns:
            rows = self._read()
            self._columns += columns
            self._rewrite(rows)
        self._write(self._file, [values])
        self._file.flush()

    def flush(self) -> None:
        """Flush all rows to the system."""
        assert self._file is not None
        self._file.flush()

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Flush the rows; results have a file of their own."""
        self.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> list[dict[str, str]]:
        """Read the rows, and the columns if there are none yet; a cut last row is left out."""
        text = read_regular(self._path, LARGEST_BYTES).decode("utf-8", "replace")
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        rows = [row for row in reader if None not in row and None not in row.values()]
        self._columns = self._columns or list(reader.fieldnames or ())
        return rows

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        self.close()
        text = io.StringIO(newline="")
        if self._columns:
            csv.writer(text).writerow(self._columns)
        self._write(text, rows)
        write_atomically(self._path, text.getvalue())
        self._file = open_regular(self._path, "a", encoding="utf-8", newline="")

    def _write(self, file: IO[str], rows: list[dict[str, str]]) -> None:
        writer = csv.DictWriter(file, self._columns, restval="")
        writer.writerows(rows)


def _step_of(row: Mapping[str, str]) -> float:
    try:
        return float(row.get("step", "inf"))
    except ValueError:
        return float("inf")
