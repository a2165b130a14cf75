"""The Markdown table of ``mutations.py``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.mutation.mutation_sites import Site


def write_report(
    path: Path,
    rows: Sequence[tuple[Site, dict[str, Any]]],
    passed_over: Sequence[Site],
    note: str,
) -> None:
    """Write the totals and the table."""
    counts = {
        level: [row[level] for _, row in rows].count("yes")
        for level in ("short", "all")
    }
    undecided = [row["all"] for _, row in rows].count("not decided")
    lines = [
        "# Broken lines that the tests catch",
        "",
        (
            "`scripts/mutation/mutations.py` breaks one line of the product at a time and runs the "
            "tests that execute it. Ruff, mypy and the import contracts are not counted."
        ),
        "",
        (
            f"Of {len(rows)} broken lines, the short level catches {counts['short']} and "
            f"everything (`--all`) {counts['all']}; {undecided} are not decided. Drawn "
            f"lines that no test executes: {len(passed_over)}."
        ),
        "",
        note,
        "",
        "| site | kind | before | after | short | all | by |",
        "|---|---|---|---|---|---|---|",
    ]
    for site, row in rows:
        cells = [
            f"{site.path}:{site.line}",
            site.kind,
            _code(site.before),
            _code(site.after),
        ]
        lines.append(
            f"| {' | '.join([*cells, row['short'], row['all'], _code(row['test'])])} |"
        )
    if passed_over:
        lines += ["", "Executed by no test:", ""]
        lines += [
            f"- {site.path}:{site.line} {_code(site.before)}" for site in passed_over
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _code(text: str) -> str:
    text = text.strip().replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`" if text else ""
