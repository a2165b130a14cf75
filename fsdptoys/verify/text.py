"""A verification as a grid for terminals, as Markdown, HTML and JSON."""

import json
import platform
from typing import Any

import torch
from rich.console import Console

import fsdptoys
from fsdptoys.report.html_page import render_page
from fsdptoys.report.page_parts import CellRows, HtmlCell, Section, render
from fsdptoys.report.page_parts import table as html_table
from fsdptoys.utils.tables import markdown_table, print_grid
from fsdptoys.utils.text import counted

from .judge import Outcome
from .verify import Report, RowResult

FIGURES = ("loss", "gradients", "norm", "parameters")
SHORT = {"gradients": "grads", "parameters": "params"}
"""Headings in a terminal of 80 columns."""
HEADINGS = ("row", "ranks", *FIGURES, "verdict")
EXPLANATION = (
    "Each row trains the same model on the same global batches as a loop in plain PyTorch in one "
    "process. Numbers are the largest relative differences from it over all steps: 0 is equal in "
    "every bit. Rounding is measured, by running the plain loop once more in a wider dtype; a row "
    "that is further away than six standard deviations of it differs."
)


def summary(report: Report) -> str:
    """Return one sentence on all rows."""
    counts = {
        outcome: sum(result.verdict.outcome is outcome for result in report.results)
        for outcome in Outcome
    }
    phrases = {
        Outcome.equal: "equal in every bit",
        Outcome.within: "within rounding",
        Outcome.differs: "different",
        Outcome.refused: "refused",
        Outcome.failed: "failed",
    }
    parts = [
        f"{counts[outcome]} {text}"
        for outcome, text in phrases.items()
        if counts[outcome]
    ]
    trained = len(report.results) - counts[Outcome.refused]
    end = "sharding changes nothing" if trained else "no row could be trained"
    if report.status:
        end = "see the rows that differ or failed"
    return f"{counted(len(report.results), 'row')}: {', '.join(parts)}; {end}"


def description(report: Report) -> list[str]:
    """Return sentences on the model, its training and this machine."""
    config = report.config
    with torch.device("meta"):
        elements = sum(param.numel() for param in config.model.build().parameters())
    device = report.request.device
    reasons: dict[str, list[str]] = {}
    for name, reason in report.request.selection.left_out.items():
        reasons.setdefault(reason, []).append(name)
    left_out = [
        f"left out, as {reason}: {', '.join(names)}"
        for reason, names in reasons.items()
    ]
    return [
        f"{report.request.title}, {elements:,} parameters, "
        f"{config.train.steps} steps of {config.train.seq_len} tokens a sequence",
        *report.request.notes,
        f"torch {torch.__version__}, Python {platform.python_version()}, {device}, "
        f"{platform.machine()}, fsdptoys {fsdptoys.__version__}",
        *left_out,
    ]


def print_report(report: Report, console: Console) -> None:
    """Print the table and the summary."""
    for sentence in description(report):
        console.print(sentence, highlight=False, markup=False, emoji=False)
    console.print()
    headings = [SHORT.get(heading, heading) for heading in HEADINGS]
    rows = [headings, *(_cells(result) for result in report.results)]
    print_grid(rows, "lrrrrrl", console, headed=True)
    sentences = [
        (result.row.name, result.verdict.text)
        for result in report.results
        if result.verdict.sentence
    ]
    if sentences:
        console.print()
        print_grid(sentences, "ll", console)
    console.print()
    console.print(summary(report), highlight=False, markup=False, emoji=False)


def to_markdown(report: Report, command: str) -> str:
    """Return a page, without times."""
    rows = [
        (
            *_cells(result)[:-1],
            result.verdict.text,
            f"`{result.row.overrides_text()}`",
        )
        for result in report.results
    ]
    table = markdown_table([(*HEADINGS, "settings"), *rows], right=range(1, 6))
    sentences = [f"- {sentence}" for sentence in description(report)]
    return "\n".join(
        [
            f"# {report.request.title}: sharding against a plain loop",
            "",
            f"`{command}`",
            "",
            *sentences,
            "",
            f"**{summary(report)}.**",
            "",
            table,
            "",
            EXPLANATION,
            "",
        ]
    )


def to_html(report: Report, command: str) -> str:
    """Return a self-contained page."""
    marks = {Outcome.differs: "warn", Outcome.failed: "warn", Outcome.refused: "quiet"}
    rows: CellRows = [
        [
            *_cells(result)[:-1],
            HtmlCell(result.verdict.text, mark=marks.get(result.verdict.outcome, "")),
            result.row.overrides_text(),
        ]
        for result in report.results
    ]
    table = html_table("rows", summary(report), [*HEADINGS, "settings"], rows)
    about = render("paragraphs", [command, *description(report), EXPLANATION])
    sections = [Section("rows", "Rows", table), Section("about", "About", about)]
    title = f"{report.request.title}: sharding against a plain loop"
    return render_page(title, summary(report), sections, [])


def to_json(report: Report, command: str) -> str:
    """Return all numbers."""
    rows = [_row(result) for result in report.results]
    tree = {
        "command": command,
        "title": report.request.title,
        "status": report.status,
        "summary": summary(report),
        "description": description(report),
        "rows": rows,
    }
    return json.dumps(tree, indent=2)


def _row(result: RowResult) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "row": result.row.name,
        "ranks": result.row.ranks,
        "settings": result.row.overrides_text(),
        "outcome": verdict.outcome.name,
        "verdict": verdict.text,
        "step": verdict.step,
        "tensor": verdict.tensor,
        # JSON has no infinity
        "differences": {
            name: share if share != float("inf") else None
            for name, share in verdict.shares.items()
        },
        "seconds": round(result.seconds, 2),
    }


def _cells(result: RowResult) -> tuple[str, ...]:
    verdict = result.verdict
    figures = [
        _share(verdict.shares[name]) if verdict.shares else "" for name in FIGURES
    ]
    return result.row.name, str(result.row.ranks), *figures, verdict.short_text


def _share(share: float) -> str:
    return f"{share:.1e}" if share else "0"
