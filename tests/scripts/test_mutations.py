"""Lines broken by ``scripts/mutations.py``: their choice, the probes, and a whole check of a small project."""

import shutil
from pathlib import Path

import pytest

from scripts import mutations
from scripts.mutation_places import find_places


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = 'é' != (a) is not b", ["x = 'é' == (a) is not b", "x = 'é' != (a) is b"]),
        ("x = a and b or c", ["x = a and b and c", "x = a or b or c"]),
        ("x = 1, 2.5, True", ["x = 2, 2.5, True", "x = 1, 3.5, True", "x = 1, 2.5, False"]),
        ("x = a[b:c]", ["x = a[b:(c) + 1]"]),
        ("x = max(a, b)", ["x = min(a, b)"]),
        ("a.add(b)", ["pass"]),
        ("if a: pass", ["if not (a): pass"]),
        ("x = b if not a else c", ["x = b if a else c"]),
        ("def f(a): return a", ["def f(a): return None"]),
        ("def f(): return None", []),
        ("raise ValueError(1 + 2)", []),
        ("print(f'{a + 1}', 2)", []),
        ("timeout_seconds = 30.0", []),
    ],
)
def test_break_replaces_one_piece_and_spares_messages(line: str, broken: list[str]) -> None:
    """Oracle: the broken lines, written out."""
    assert sorted(place.after for place in find_places("a.py", line)) == sorted(broken)


TESTS = """
import pytest
from fsdptoys.one.core import *
def test_add():
    assert add(1, 2) == 3
@pytest.mark.extended
def test_times():
    assert times(2, 3) == 6
def test_both():
    both(1, 2)
"""


def write_project(root: Path) -> None:
    for folder in ("fsdptoys/one", "tests/one"):
        (root / folder).mkdir(parents=True)
    (root / "fsdptoys" / "__init__.py").touch()
    functions = {"add": "a + b", "times": "a * b", "minus": "a - b", "both": "a and b"}
    text = "\n\n".join(f"def {name}(a, b):\n    return {value}" for name, value in functions.items())
    (root / "fsdptoys" / "one" / "core.py").write_text(text + "\n")
    shutil.copytree(mutations.ROOT / "tests" / "harness", root / "tests" / "harness")
    for name in ("tests/conftest.py", "tests/measuring.py", "pyproject.toml"):
        shutil.copy(mutations.ROOT / name, root / name)
    (root / "tests" / "one" / "test_core.py").write_text(TESTS)


@pytest.mark.extended
def test_report_says_which_level_catches_a_line(tmp_path: Path) -> None:
    """Oracle: a project with a line for each case; ``--resume`` finds everything done."""
    write_project(tmp_path / "project")
    report = tmp_path / "report.md"
    options = ["--checkout", str(tmp_path / "project"), "--places", "4", "--folder", str(tmp_path / "found")]
    for more in ([], ["--resume", "--jobs", "0"]):  # without jobs nothing can be checked
        report.unlink(missing_ok=True)
        mutations.main([*options, "--report", str(report), *more])
        rows = [line.split(" | ") for line in report.read_text().splitlines() if line.startswith("| fsdptoys")]
        levels = {cells[2]: tuple(cells[-3:-1]) for cells in rows}
        assert levels == {
            "`return a + b`": ("yes", "yes"),
            "`return a * b`": ("no", "yes"),
            "`return a and b`": ("no", "no"),
        }
        assert report.read_text().rstrip().endswith("- fsdptoys/one/core.py:8 `return a - b`")
