"""Sphinx configuration: ``python -m sphinx -W --keep-going -n -b html docs OUT`` builds the site
into OUT.

The pages are Markdown that also reads well in a repository browser, so links are relative paths of
files. Links to files outside ``docs/`` become downloads; ``docs/benchmarks`` is a link to
``benchmarks/``, so the site has its pages.
"""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

project = "FSDPToys"
author = "the FSDPToys authors"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
autodoc_typehints = "none"
nitpick_ignore_regex = [(r"py:.*", r".*")]  # types that have no page
exclude_patterns = ["_build"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "FSDPToys"
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"


def _link_benchmark_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    # A path would be resolved through the link docs/benchmarks, to a file that is no page; a
    # document's name is not.
    source[0] = re.sub(
        r"\[([^]]+)\]\((?:\.\./)+benchmarks/(\w+)\.md\)",
        r"{doc}`\1 </benchmarks/\2>`",
        source[0],
    )


def setup(app: Sphinx) -> None:
    """Resolve links to ``benchmarks/`` within the site."""
    app.connect("source-read", _link_benchmark_pages)
