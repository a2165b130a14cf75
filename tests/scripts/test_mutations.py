"""Lines broken by ``scripts/mutation/mutations.py``: their choice, the probes, and a whole check of
a small project."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.mutation import mutations
from scripts.mutation.mutation_sites import add_probes, draw_sites, find_sites


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = 'é' != a is not b", ["x = 'é' == a is not b", "x = 'é' != a is b"]),
        ("x = a + b // c", ["x = a - b // c", "x = a + b * c"]),
        ("x = a and b or c", ["x = (a and b) and c", "x = (a or b) or c"]),
        (
            "x = [1, 2.5, True]",
            ["x = [2, 2.5, True]", "x = [1, 3.5, True]", "x = [1, 2.5, False]"],
        ),
        ("x = a[b:c]", ["x = a[b:c + 1]"]),
        ("x = max(a, b)", ["x = min(a, b)"]),
        ("a.add(b)", ["..."]),
        ("if a: pass", ["if not a:"]),
        ("x = b if not a else c", ["x = b if a else c"]),
        ("def f(a): return a", ["return None"]),
        ("def f(): return None", []),
        ("raise ValueError(1 + 2)", []),
        ("print(f'{a + 1}', 2)", []),
        ("x: Literal[1]", []),
        ("if TYPE_CHECKING: x = 1", []),
        ("timeout_seconds = 30.0", []),
        ("x = zip(a, b, strict=True)", []),
        ("@dataclass(frozen=True)\nclass A: pass", []),
        ("def __repr__(self): return self.name", []),
    ],
)
def test_break_replaces_one_piece_and_spares_messages(
    line: str, broken: list[str]
) -> None:
    """Oracle: the broken lines, written out."""
    assert sorted(site.after for site in find_sites("a.py", line)) == sorted(broken)


MODULE = """
class A:
    def f(self, a=2):
        if a == 3:
            return self
        elif a == 4:
            return a + 5
        return [a]
"""


@pytest.mark.parametrize(
    ("argument", "lines"),
    [(3, {3, 4, 5}), (4, {3, 4, 6, 7}), (5, {3, 4, 6, 8})],
    ids=["if", "elif", "else"],
)
def test_probes_record_the_executed_sites(
    monkeypatch: pytest.MonkeyPatch, argument: int, lines: set[int]
) -> None:
    """Oracle: the lines that Python executes; those of the class run with its definition."""
    sites = dict(enumerate(find_sites("a.py", MODULE)))
    hits: set[int] = set()
    monkeypatch.setitem(sys.modules, "mutation_probe", SimpleNamespace(hit=hits.add))  # type: ignore[arg-type]
    names: dict[str, type] = {}
    exec(add_probes(MODULE, sites), names)
    names["A"]().f(argument)
    assert {sites[number].line for number in hits} == lines


TESTS = """
import logging
import pytest
from fsdptoys.one.core import *
def test_add():
    logging.error("is no result of a test")
    assert add(1, 2) == 3
@pytest.mark.extended
def test_times():
    assert times(2, 3) == 6
def test_both():
    both(1, 2)
"""

LIMIT_TESTS = """
from fsdptoys.one.core import LIMIT
assert LIMIT == 2
def test_nothing():
    pass
"""


def write_project(root: Path) -> None:
    for folder in ("fsdptoys/one", "fsdptoys/config", "tests/one"):
        (root / folder).mkdir(parents=True)
    (root / "fsdptoys" / "__init__.py").touch()
    functions = {"add": "a + b", "times": "a * b", "minus": "a - b", "both": "a and b"}
    text = (
        "\n\n".join(
            f"def {name}(a, b):\n    return {value}"
            for name, value in functions.items()
        )
        + "\n\nLIMIT = 2"
    )
    (root / "fsdptoys" / "one" / "core.py").write_text(text + "\n")
    # For the conftest, which would import PyTorch with the installed product's.
    (root / "fsdptoys" / "config" / "compose.py").write_text("compose_config = list\n")
    own_tests = shutil.ignore_patterns("test_*")
    shutil.copytree(
        mutations.ROOT / "tests" / "harness",
        root / "tests" / "harness",
        ignore=own_tests,
    )
    for name in ("tests/conftest.py", "tests/harness/coverage.py", "pyproject.toml"):
        shutil.copy(mutations.ROOT / name, root / name)
    (root / "tests" / "one" / "test_core.py").write_text(TESTS)
    (root / "tests" / "one" / "test_limit.py").write_text(LIMIT_TESTS)


def test_draw_depends_on_seed_and_files_only(tmp_path: Path) -> None:
    """Oracle: a second copy of the project."""
    for name in ("a", "b"):
        write_project(tmp_path / name)
    first = draw_sites(tmp_path / "a", 2, seed=0)
    assert (
        first
        == draw_sites(tmp_path / "b", 2, seed=0)
        != draw_sites(tmp_path / "a", 2, seed=2)
    )
    with pytest.raises(
        ValueError, match="--sites=0 must be at least the number of packages, 2"
    ):
        draw_sites(tmp_path / "a", 0, seed=0)


@pytest.mark.extended
def test_report_says_which_level_catches_a_line(tmp_path: Path) -> None:
    """Oracle: a project with a line for each case; ``--resume`` finds everything done."""
    write_project(tmp_path / "project")
    report = tmp_path / "report.md"
    options = [
        "--checkout",
        str(tmp_path / "project"),
        "--sites",
        "5",
        "--folder",
        str(tmp_path / "found"),
    ]
    # without jobs nothing can be checked
    for more in (
        [],
        ["--resume", "--jobs", "0"],
    ):
        report.unlink(missing_ok=True)
        mutations.main([*options, "--report", str(report), *more])
        rows = [
            line.split(" | ")
            for line in report.read_text().splitlines()
            if line.startswith("| fsdptoys")
        ]
        levels = {cells[2]: tuple(cells[-3:-1]) for cells in rows}
        assert levels == {
            "`return a + b`": ("yes", "yes"),
            "`return a * b`": ("no", "yes"),
            "`return a and b`": ("no", "no"),
            "`LIMIT = 2`": ("yes", "yes"),
        }
        assert (
            report.read_text()
            .rstrip()
            .endswith("- fsdptoys/one/core.py:8 `return a - b`")
        )
