"""One way to read files that someone else may have written."""

import re
from pathlib import Path

import pytest

import fsdptoys

ROOT = Path(fsdptoys.__file__).parent

CALLS = re.compile(r"\b(json|yaml|pickle|marshal|torch)\.(load|loads|safe_load|full_load|unsafe_load|Unpickler)\(")

OWN_FILES = {
    "failures.py": "written by this launcher's ranks into a folder of mode 0700",
    "plan/worker.py": "handed over between a process and its child, in a folder of mode 0700",
    "report/interactive.py": "made by plotly in this process",
    "report/timeline.py": "an unpickler that makes plain values alone",
    "utils/foreign.py": "the parsers themselves",
    "worker.py": "handed over by this rank's launcher, in a folder of mode 0700",
}

OTHERS = {
    "checkpoint/chunks.py",
    "checkpoint/headers.py",
    "checkpoint/index.py",
    "checkpoint/manifest.py",
    "checkpoint/tensors.py",
    "checkpoint/weights.py",
    "data/documents.py",
    "data/encoding.py",
    "data/index.py",
    "data/packing.py",
    "data/writing.py",
    "metrics/resumes.py",
    "metrics/step.py",
}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_foreign_text_is_parsed_in_one_place(path: Path) -> None:
    """Oracle: the source; parsers of the standard library and of PyYAML have no bounds."""
    name = str(path.relative_to(ROOT))
    found = CALLS.search(path.read_text(encoding="utf-8"))
    assert found is None or name in OWN_FILES or name in OTHERS, f"{name} calls {found[0]}...); use utils.foreign"
