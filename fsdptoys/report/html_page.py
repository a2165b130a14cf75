"""``report.html``: a self-contained page of one or several runs that needs neither server nor
network.

The file holds plotly.js (4.8 MB of every page), the page's script, its style and the data of the
figures; a content security policy forbids loading anything else. PNGs of the figures, drawn from
the same descriptions, are written next to the page. Curves of long runs are downsampled, and their
captions say so.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

import fsdptoys
from fsdptoys.errors import ConfigError
from fsdptoys.utils.atomic_write import check_output, write_atomically
from fsdptoys.utils.figure_png import draw_png
from fsdptoys.utils.figures import Picture
from fsdptoys.utils.from_tree import look_up

from .comparison_page import comparison_page
from .figures_plotly import check_plotly, figure, plotly_script
from .page_parts import Section, render
from .run_page import run_page
from .runs_table import Collection

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: "
    "blob:; base-uri 'none'; form-action 'none'"
)


def check_page(path: Path, path_name: str = "--out") -> None:
    """Check a page's path and that plotly is installed, before any run is read.

    Args:
        path: of the page.
        path_name: what messages call the path.

    Raises:
        ConfigError: for another suffix than .html or .htm, a path that cannot be written, or
            missing plotly.
    """
    check_output(path, "--out", "report.html", (".html", ".htm"), path_name)
    check_plotly()


def pictures_folder(path: Path) -> Path:
    """Folder of a page's PNGs, next to the page."""
    return path.with_name(f"{path.stem}_pictures")


def write_page(collection: Collection, path: Path) -> list[Path]:
    """Write the page and its PNGs, replacing existing files; a single run with steps gets the page
    of one run.

    Raises:
        ConfigError: if plotly is missing, or the files cannot be written.
    """
    check_page(path, "the page")
    folder = pictures_folder(path)
    first = collection.records[0] if len(collection.records) == 1 else None
    if first and first.run is not None and first.run.steps and not collection.skipped:
        sections, pictures = run_page(first, first.run, folder.name)
    else:
        sections, pictures = comparison_page(collection, folder.name)
    page = render_page(collection.title, _subtitle(collection), sections, pictures)
    files = [path]
    try:
        for picture in pictures:
            folder.mkdir(exist_ok=True)
            files.append(folder / f"{picture.name}.png")
            draw_png(files[-1], picture)
        write_atomically(path, page)
    except OSError as mistake:
        raise ConfigError(
            f"the page {path} cannot be written ({mistake.strerror or mistake}); write --out "
            "report.html"
        ) from mistake
    return files


def render_page(
    title: str, subtitle: str, sections: Sequence[Section], pictures: Sequence[Picture]
) -> str:
    """The page as HTML text."""
    style, script = (
        Markup(Path(__file__).with_name(name).read_text(encoding="utf-8"))
        for name in ("page.css", "page.js")
    )
    figures = embed_json(
        [{"name": picture.name, **figure(picture)} for picture in pictures]
    )
    scripts = [Markup(plotly_script()), script] if pictures else [script]
    texts = title, subtitle, sections, fsdptoys.__version__, Markup(POLICY), style
    return render("page", *texts, Markup(figures), scripts)


def embed_json(value: object) -> str:
    """Serialize JSON for a ``<script>`` element, escaped so that it cannot close the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _subtitle(collection: Collection) -> str:
    runs = [record.run for record in collection.records if record.run is not None]
    devices = sorted({f"{run.device_name} ({run.device_type})" for run in runs})
    models = sorted(
        {str(name) for run in runs if (name := look_up(run.tree, "model.name"))}
    )
    started = sorted(str(run.environment.get("started_at", ""))[:10] for run in runs)
    dates = " to ".join(dict.fromkeys([*started[:1], *started[-1:]]))
    return " · ".join(filter(None, [", ".join(models), ", ".join(devices), dates]))
