"""Rows of a benchmark in a JSON file, so that a later call continues where an earlier one ran out
of time.

The file is written after each row. It holds the settings that the rows were measured with; a call
with other settings stops instead of mixing the two.
"""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS_LEFT = 75
"""Exit status of a benchmark that ran out of time with rows left (EX_TEMPFAIL): the same command
continues."""


class FinishedRows:
    """Rows by key.

    Args:
        path: of the file; None to keep the rows in memory alone.
        settings: arguments, versions and machine on which the rows depend; plain JSON values.
        resume: whether to keep the rows of a present file; otherwise the first row replaces it.
        seconds: of the call; by default no limit.

    Raises:
        SystemExit: if the file was written with other settings.
    """

    def __init__(
        self,
        path: Path | None,
        settings: dict[str, Any],
        resume: bool,
        seconds: float | None = None,
    ) -> None:
        self.path = path
        self.settings = settings
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self.left = 0
        """Rows that no time was left for."""
        self.rows: dict[str, dict[str, Any]] = {}
        if resume and path is not None and path.exists():
            tree = json.loads(path.read_text())
            for name, value in settings.items():
                if tree["settings"].get(name) != value:
                    raise SystemExit(
                        f"{path} was measured with {name}={tree['settings'].get(name)!r}, and "
                        f"this call has {value!r}; name another file"
                    )
            self.rows = tree["rows"]

    def get(self, key: str) -> dict[str, Any] | None:
        """The row, or None if it has not been measured."""
        return self.rows.get(key)

    def measure(
        self,
        key: str,
        measure: Callable[[float], dict[str, Any]],
        limit_seconds: float,
        least_seconds: float,
    ) -> dict[str, Any] | None:
        """The row of an earlier call, or a new one; None if the call has no time left for it.

        Args:
            key: of the row.
            measure: measures it within these seconds.
            limit_seconds: for the row.
            least_seconds: it is not begun with less.
        """
        if key in self.rows:
            return self.rows[key]
        left = self._end - time.monotonic()
        if left < least_seconds:
            self.left += 1
            return None
        row = measure(min(limit_seconds, left))
        if time.monotonic() < self._end:
            self.add(key, row)
        else:
            self.left += 1  # a later call has more time for it
        return row

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Add a row and write the file; a call killed meanwhile leaves the previous file."""
        self.rows[key] = row
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_name(self.path.name + ".new")
            beside.write_text(
                json.dumps({"settings": self.settings, "rows": self.rows}, indent=1)
                + "\n"
            )
            os.replace(beside, self.path)
