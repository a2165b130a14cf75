"""Statements of pages that code, or another page, could contradict."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from fsdptoys.parallel.mesh import MeshConfig
from scripts.equality.parity_bugs import BUGS
from tests.harness.pages import ROOT, code_spans

DOCS = ROOT / "docs"


def test_strategies_page_has_every_axis_of_the_mesh() -> None:
    """Oracle: the fields of ``MeshConfig``; what the page leaves out is no kind of parallelism."""
    page = DOCS / "strategies.md"
    spans = " ".join(code_spans(page))
    axes = {
        f"mesh.{field.name}"
        for field in dataclasses.fields(MeshConfig)
        if field.name.endswith("_size")
    }
    assert len(axes) == 5 and not {axis for axis in axes if axis not in spans}
    _, _, left_out = page.read_text(encoding="utf-8").partition("## Not covered")
    assert left_out and "parallelism" not in left_out


def test_changelog_has_each_entry_once() -> None:
    """Oracle: the words of an entry before its first colon."""
    _, *entries = re.split(
        r"^- ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    subjects = Counter(entry.partition(": ")[0] for entry in entries)
    assert (
        len(subjects) > 50
        and [subject for subject, count in subjects.items() if count > 1] == []
    )


def test_experiments_page_counts_the_published_steps_with_offload() -> None:
    """Oracle: the rows of the comparison named ``… oo`` or ``… co``."""
    text = (ROOT / "benchmarks" / "plan.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## 3a. ")
    errors = re.findall(
        r"^\| fsdp.* (oo|co) \| s a step \|.*\| ([+-][\d.]+)% \|",
        section.partition("## ")[0],
        re.M,
    )
    longest = {
        kind: max(abs(float(error)) for name, error in errors if name == kind)
        for kind in ("oo", "co")
    }
    page = " ".join((DOCS / "experiments.md").read_text(encoding="utf-8").split())
    assert len(errors) == 6 and "Six published steps with offload" in page
    assert f"to {longest['oo']:.0f}% too short under `memory.optimizer_offload`" in page
    assert f"to {longest['co']:.0f}% too short under `memory.cpu_offload`" in page


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "bit_equality.md"], ids=lambda page: page.stem
)
def test_page_counts_the_injected_bugs(page: Path) -> None:
    """Oracle: the table of the script, and its printed result on the page of the measurement."""
    result = r"(\d+) of \1 bugs caught at step 1; (\d+) would have passed"
    counts = re.search(
        result, (ROOT / "benchmarks" / "parity_layouts.md").read_text(encoding="utf-8")
    )
    text = page.read_text(encoding="utf-8")
    assert counts is not None and int(counts[1]) == len(BUGS)
    assert (
        re.search(rf"\b{counts[1]} (injected )?bugs\b", text)
        and f"{counts[2]} would have passed" in text
    )
