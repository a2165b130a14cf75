"""The documentation site, and links between all pages of the repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, code_spans, links

TOPS = (ROOT, ROOT / "fsdptoys")
SOURCES = ["fsdptoys", "models", "patches", "configs", "scripts", "tests", "run_fsdp.sh", "pyproject.toml"]


@pytest.mark.extended
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Oracle: Sphinx, which warns of dead links, missing headings, and pages outside the navigation; and the HTML."""
    options = ["-q", "-W", "--keep-going", "-n", "-b", "html", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path / "site")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    front = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    for page in ("memory.html", "architecture.html", "toys/README.html", "benchmarks/peers.html"):
        assert (tmp_path / "site" / page).is_file() and f'href="{page}"' in front, page


def test_links_name_files_and_headings_that_exist() -> None:
    """Oracle: the file system and the headings, including files outside the site."""
    dead = []
    for page in PAGES:
        for target in links(page):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, fragment = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or not file.is_relative_to(ROOT) or (fragment and fragment not in anchors(file)):
                dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert not dead


def test_pages_named_in_sources_exist() -> None:
    """Oracle: the file system, for each mention of a page in code, settings, scripts and tests."""
    missing = []
    for source in SOURCES:
        files = [ROOT / source] if (ROOT / source).is_file() else (ROOT / source).rglob("*")
        for file in files:
            if file.suffix in (".py", ".sh", ".yaml", ".toml", ".sbatch"):
                named = re.findall(r"(?<![\w/.])docs/[\w/]+\.md", file.read_text(encoding="utf-8"))
                missing += [f"{file.relative_to(ROOT)}: {page}" for page in named if not (ROOT / page).exists()]
    assert not missing


def test_files_named_on_pages_exist() -> None:
    """Oracle: the file system, for code spans that look like paths below the root or below ``fsdptoys``."""
    shape = r"(?:fsdptoys|models|patches|plan|scripts|tests|train|launch|configs)/[a-z_\d./]+\.[a-z]+"
    missing = []
    for page in PAGES:
        paths = (path for path in code_spans(page) if re.fullmatch(shape, path))
        missing += [f"{page.name}: {path}" for path in paths if not any((top / path).exists() for top in TOPS)]
    assert not missing
