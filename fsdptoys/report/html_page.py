"""``report.html``: a self-contained page of one or several runs that needs neither server nor
network.

The file holds plotly.js (4.8 MB of every page), the page's script, its style and the data of the
figures; a content security policy forbids loading anything else. PNGs of the figures, drawn from
the same descriptions, are written next to the page. Curves of long runs are downsampled, and their
captions say so.
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import fsdptoys
from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import check_output, write_atomically
from fsdptoys.utils.figure_png import draw_png
from fsdptoys.utils.figures import Picture
from fsdptoys.utils.from_tree import look_up

from .comparison_page import comparison_page
from .figures_plotly import check_plotly, figure, plotly_script
from .page_parts import Section, escape
from .run_page import run_page
from .runs_table import Collection

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: "
    "blob:; base-uri 'none'; form-action 'none'"
)


def check_page(path: Path, named: str = "--out") -> None:
    """Check the page's path, called ``named`` in messages, and that plotly is installed, before any
    run is read.

    Raises:
        ConfigError: for another suffix than .html or .htm, a path that cannot be written, or
            missing plotly.
    """
    check_output(path, "--out", "report.html", (".html", ".htm"), named)
    check_plotly()


def pictures_folder(path: Path) -> Path:
    """Folder of a page's PNGs, next to the page."""
    return path.with_name(f"{path.stem}_pictures")


def write_page(collection: Collection, path: Path, title: str | None = None) -> list[Path]:
    """Write the page and its PNGs, replacing existing files; a single run with steps gets the page
    of one run.

    Args:
        path: path of the page, ending in ``.html`` or ``.htm``.
        title: heading of the page; the collection's title by default.

    Raises:
        ConfigError: if plotly is missing, or the files cannot be written.
    """
    check_page(path, "the page")
    folder = pictures_folder(path)
    first = (
        collection.records[0] if len(collection.records) == 1 and not collection.skipped else None
    )
    if first is not None and first.run is not None and first.run.steps:
        sections, pictures = run_page(first, first.run, folder.name)
    else:
        sections, pictures = comparison_page(collection, folder.name)
    page = render_page(title or collection.title, _subtitle(collection), sections, pictures)
    written = [path]
    try:
        for picture in pictures:
            folder.mkdir(exist_ok=True)
            written.append(folder / f"{picture.name}.png")
            draw_png(written[-1], picture)
        write_atomically(path, page)
    except OSError as mistake:
        raise ConfigError(
            f"the page {path} cannot be written ({mistake.strerror or mistake}); write --out "
            "report.html"
        ) from mistake
    return written


def render_page(
    title: str, subtitle: str, sections: Sequence[Section], pictures: Sequence[Picture]
) -> str:
    """The page as HTML text."""
    own = files("fsdptoys.report")
    style, script = (
        own.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    figures = [{"name": picture.name, **figure(picture)} for picture in pictures]
    links = "".join(
        f'<li><a href="#{part.name}">{escape(part.heading)}</a></li>' for part in sections
    )
    body = "".join(
        f'<section id="{part.name}" aria-labelledby="{part.name}-heading">'
        f'<h2 id="{part.name}-heading">'
        f"{escape(part.heading)}</h2>{part.body}</section>"
        for part in sections
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
            f'<header><div class="top"><div><h1>{escape(title)}</h1>'
            f'<p class="soft">{escape(subtitle)}</p></div>'
            '<button type="button" id="theme" hidden></button></div>'
            f'<nav aria-label="Parts of this page"><ul>{links}</ul></nav></header>',
            (
                "<main><noscript><p class=note>Figures, sorting and filtering need JavaScript, "
                "which is off; the PNG next to each figure's title shows the "
                f"same.</p></noscript>{body}</main>"
            ),
            (
                f"<footer>Written by fsdptoys {escape(fsdptoys.__version__)}. This file is "
                "complete: it loads nothing.</footer>"
            ),
            f'<script type="application/json" id="figures">{embed_json(figures)}</script>',
            f"<script>{plotly_script()}</script>",
            f"<script>{script}</script></body></html>",
            "",
        ]
    )


def embed_json(value: object) -> str:
    """Serialize JSON for a ``<script>`` element, escaped so that it cannot close the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _subtitle(collection: Collection) -> str:
    runs = [record.run for record in collection.records if record.run is not None]
    devices = sorted({f"{run.device_name} ({run.device_type})" for run in runs})
    models = sorted({str(name) for run in runs if (name := look_up(run.tree, "model.name"))})
    started = sorted(str(run.environment.get("started_at", ""))[:10] for run in runs)
    dates = " to ".join(dict.fromkeys([started[0], started[-1]])) if started and started[0] else ""
    return " · ".join(filter(None, [", ".join(models), ", ".join(devices), dates]))
