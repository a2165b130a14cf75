"""Verify the small forms of all model presets and of families of transformers, and write a page of
verdicts.

    python scripts/benchmarks/verify_models.py --out benchmarks/verify.md

Presets of one family that differ in sizes alone have the same small form, and are verified once.
Each model runs in a process of its own, as ``fsdptoys verify MODEL --json``. Verdicts do not depend
on the load of the machine; the page has no times. Exits with status 1 if a row differs or fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdptoys.config.choices import list_choices
from fsdptoys.config.compose import compose_presets
from fsdptoys.models import ModelConfig
from fsdptoys.utils.tables import markdown_table
from fsdptoys.verify.rows import ROWS
from fsdptoys.verify.shrink import shrink_model
from scripts.common.progress import progress, unit
from tests.harness.foreign_families import SETTINGS, write_config

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"equal": "=", "within": "within", "refused": "–"}


def small_forms() -> dict[str, list[str]]:
    """The first preset of each small form → all presets that have it."""
    names = [name for name in list_choices()["model"] if name != "transformers"]
    groups: dict[str, list[str]] = {}
    for name, config in zip(names, compose_presets(names), strict=True):
        groups.setdefault(form_of(config), []).append(name)
    return {group[0]: group for group in groups.values()}


def form_of(config: ModelConfig) -> str:
    """All that is left of a preset in its small form."""
    fields = vars(config) | shrink_model(config)
    return f"{config.family} { ({**fields, 'name': ''}) }"


def verify(model: str, rows: str, ranks: int) -> dict[str, Any]:
    """Run ``fsdptoys verify`` and return its numbers."""
    command = [sys.executable, "-m", "fsdptoys", "verify", model]
    process = subprocess.run(
        [*command, "--rows", rows, "--ranks", str(ranks), "--json"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if not process.stdout:
        sentence = process.stderr.strip().splitlines()[-1].removeprefix("fsdptoys: ")
        return {"rows": [], "status": process.returncode, "summary": sentence}
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def cells(result: dict[str, Any], columns: Sequence[str]) -> list[str]:
    """The verdicts of a model, by row."""
    verdicts = {row["row"]: row for row in result["rows"]}
    texts = []
    for name in columns:
        row = verdicts.get(name)
        if row is None:
            texts.append("")
            continue
        word = SHORT.get(row["outcome"], f"**{row['outcome']}**")
        texts.append(
            row["verdict"].removeprefix("within ") if word == "within" else word
        )
    return texts


def page(results: dict[str, dict[str, Any]], command: str) -> str:
    """The page in Markdown."""
    columns = [
        name
        for name in ROWS
        if any(
            row["row"] == name for result in results.values() for row in result["rows"]
        )
    ]
    lines = [[name, *cells(result, columns)] for name, result in results.items()]
    faults = [
        f"- {name}, {row['row']}: {row['verdict']}"
        for name, result in results.items()
        for row in result["rows"]
        if row["outcome"] in ("differs", "failed")
    ]
    faults += [
        f"- {name}: {result['summary']}"
        for name, result in results.items()
        if not result["rows"]
    ]
    trained = [row["outcome"] for result in results.values() for row in result["rows"]]
    counted = ", ".join(
        f"{trained.count(outcome)} {text}"
        for outcome, text in {
            "equal": "equal in every bit",
            "within": "within rounding",
            "refused": "refused",
            "differs": "different",
            "failed": "failed",
        }.items()
    )
    machine = next(
        sentence
        for result in results.values()
        for sentence in [*result.get("description", []), "torch unknown"]
        if sentence.startswith("torch ")
    )
    return "\n".join(
        [
            "# Sharding against a plain loop",
            "",
            f"Command: `{command}`. {machine}.",
            "",
            "Each cell is one row of `fsdptoys verify` ([docs/verify.md](../docs/verify.md)) on "
            "the small form of a model: `=` is equal to the plain loop in every bit, a number is "
            "the largest relative difference of any number, which rounding explains, `–` is "
            "refused by name.",
            "",
            f"{len(results)} models, {len(trained)} rows: {counted}.",
            "",
            *faults,
            *[""] * bool(faults),
            markdown_table([["model", *columns], *lines]),
            "",
        ]
    )


def main() -> int:
    """Write the page; 1 if a row differs or fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "verify.md")
    parser.add_argument("--rows", default="usual")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--presets", nargs="*", help="default: all")
    parser.add_argument("--families", nargs="*", help="of transformers; default: all")
    args = parser.parse_args()
    forms = small_forms() if args.presets is None else {p: [p] for p in args.presets}
    families = list(SETTINGS) if args.families is None else args.families
    results = {}
    with progress(len(forms) + len(families)), tempfile.TemporaryDirectory() as folder:
        for name, presets in forms.items():
            with unit(name) as row:
                result = verify(name, args.rows, args.ranks)
                row.note = result["summary"]
            results[", ".join(presets)] = result
        for name in families:
            with unit(name) as row:
                path = write_config(Path(folder, name), name)
                result = verify(str(path), args.rows, args.ranks)
                row.note = result["summary"]
            results[f"transformers: {name}"] = result
    command = f"python {Path(__file__).relative_to(ROOT)} --rows {args.rows} --ranks {args.ranks}"
    args.out.write_text(page(results, command), encoding="utf-8")
    return int(any(result["status"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
