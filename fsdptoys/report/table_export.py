"""Export tables as Markdown, and as CSV and JSON with all columns and raw numbers."""

import csv
import dataclasses
import io
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.tables import markdown_table
from fsdptoys.utils.text import printable, value_text

from .columns import MEASURES, TableColumn, measured_steps
from .setting_diff import as_override, overrides_of
from .table import Table


def to_markdown(table: Table) -> str:
    """Format title, common values, rows, notes and skipped combinations as Markdown."""
    parts = [f"# {escape(table.title)}"]
    if table.commands:
        parts.append(
            "\n".join(f"    {value_text(command)}" for command in table.commands)
        )
    if table.everywhere:
        parts.append(f"Everywhere: {'; '.join(map(escape, table.everywhere))}")
    if table.records:
        parts.append(_rows(table.columns))
    if table.notes:
        parts.append("\n".join(f"- {escape(note)}" for note in table.notes))
    if table.skipped:
        lines = ["Skipped:", ""]
        for skipped in table.skipped:
            overrides = " ".join(
                as_override(key, value) for key, value in skipped.varied.items()
            )
            lines.append(f"- {escape(overrides)}: {escape(skipped.reason)}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def to_csv(table: Table) -> str:
    """Format one line per row, with empty cells for missing values.

    Line breaks become spaces, and texts that a spreadsheet would run as a formula get an apostrophe
    in front.
    """
    file = io.StringIO()
    flat = [_flat_row(table, index) for index in range(len(table.records))]
    rows = [
        {_defused(name): _defused(value) for name, value in row.items()} for row in flat
    ]
    writer = csv.DictWriter(
        file, list(rows[0]) if rows else ["run"], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def to_json(table: Table) -> str:
    """Format all data of each row as JSON in ASCII, which every terminal can print; non-finite
    numbers become null."""
    tree = {
        "title": table.title,
        "commands": table.commands,
        "everywhere": table.everywhere,
        "loss_step": table.loss_step,
        "notes": table.notes,
        "rows": [_deep_row(table, index) for index in range(len(table.records))],
        "skipped": [
            {"varied": skipped.varied, "reason": skipped.reason}
            for skipped in table.skipped
        ],
    }
    return json.dumps(_finite(tree), indent=2, allow_nan=False, default=str) + "\n"


def escape(text: str) -> str:
    """Escape text for Markdown, on one line."""
    marked = re.sub(r"([\\|*`\[\]<>~$])", r"\\\1", value_text(text))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", marked).replace("&", "&amp;")


def _rows(columns: Sequence[TableColumn]) -> str:
    texts = (
        [column.heading, *(cell.text for cell in column.cells)] for column in columns
    )
    rows = list(zip(*(map(escape, column) for column in texts), strict=True))
    return markdown_table(
        rows, [index for index, column in enumerate(columns) if column.numeric]
    )


def _flat_row(table: Table, index: int) -> dict[str, Any]:
    record = table.records[index]
    values = {column.name: column.cells[index].value for column in table.everything}
    settings = {
        column.name: values[column.name]
        for column in table.everything
        if column.setting
    }
    disagreement = table.disagreements.get(record.name)
    row = {
        "run": record.name,
        "path": str(record.path),
        "status": record.status.value,
        "reason": record.reason,
        **{
            key: value_text(value) if isinstance(value, (bool, list)) else value
            for key, value in settings.items()
        },
        **_measured(record.run),
        "loss_step": table.loss_step,
        "loss": values.get("loss"),
        "eval_loss": values.get("eval_loss"),
        "disagrees_with": disagreement.reference if disagreement else None,
        "disagrees_from_step": disagreement.step if disagreement else None,
    }
    return dict(_finite(row))


def _measured(run: RecordedRun | None) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "steps": run.results.steps if run else None,
        "measured_steps": measured_steps(run) if run else None,
        "warmup_steps": run.results.warmup_steps if run else None,
    }
    for measure in MEASURES:
        numbers |= measure.export(run)
    return numbers


def _deep_row(table: Table, index: int) -> dict[str, Any]:
    record = table.records[index]
    run = record.run
    settings = {column.name for column in table.everything if column.setting}
    disagreement = table.disagreements.get(record.name)
    return {
        **{
            key: value
            for key, value in _flat_row(table, index).items()
            if key not in settings
        },
        "varied": record.varied,
        "words": overrides_of(record),
        "settings": table.settings[index],
        "disagreement": dataclasses.asdict(disagreement) if disagreement else None,
        "prediction": run.prediction.to_dict() if run and run.prediction else None,
        "environment": run.environment if run else None,
    }


def _defused(value: Any) -> Any:
    """Neutralize control characters and spreadsheet formulas."""
    if not isinstance(value, str):
        return value
    text = printable(re.sub(r"\s", " ", value))
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
