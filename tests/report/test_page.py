"""The page in a real browser, from a file: it is drawn, sorts, filters, zooms, turns dark, and
loads nothing."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fsdptoys.report.html_page import pictures_folder, write_page
from fsdptoys.report.runs_table import gather
from tests.harness.coverage import without_coverage
from tests.report.device_runs import write_device_run, write_device_sweep

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium on the PATH"
)
PATIENCE_MS = 120_000

OVERLAPS = """() => {
  const found = [];
  for (const plot of document.querySelectorAll('.plot')) {
    const texts = [...plot.querySelectorAll('text')]
      .filter((t) => t.textContent.trim() && t.getClientRects().length);
    const boxes = texts.map((t) => [t.textContent, t.getBoundingClientRect()]);
    const frame = plot.getBoundingClientRect();
    for (const [text, box] of boxes)
      if (box.left < frame.left - 1 || box.right > frame.right + 1)
        found.push([plot.id, text, 'leaves its picture']);
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const [a, b] = [boxes[i][1], boxes[j][1]];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 2 && down > 3) found.push([plot.id, boxes[i][0], boxes[j][0]]);
    }
  }
  return found;
}"""
"""Texts of pictures that overlap or are clipped."""


@dataclass
class Loaded:
    """A page in a browser, with its messages and requests since loading."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def wait_for(self, expression: str, value: Any) -> None:
        """Wait until an expression of the page has a value."""
        equal = f"value => JSON.stringify({expression}) === JSON.stringify(value)"
        self.page.wait_for_function(equal, arg=value)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Pages of a sweep and of one run, with their pictures."""
    folder = tmp_path_factory.mktemp("pages")
    sweep = write_device_sweep(folder / "sweep")
    run = write_device_run(folder / "run")
    titled = replace(gather([run]), title="One <b>run</b>")
    with without_coverage():
        return {
            "sweep": write_page(gather([sweep]), folder / "sweep.html"),
            "run": write_page(titled, folder / "run.html"),
        }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the PATH")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="there is no playwright to drive the browser"
    )
    with sync_api.sync_playwright() as playwright:
        launch = playwright.chromium.launch
        browser = launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE_MS
        )
        yield browser
        browser.close()


def load(browser: Any, path: Path, width: int) -> Loaded:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="light"
    )
    context.set_default_timeout(PATIENCE_MS)
    loaded = Loaded(context.new_page())
    loaded.page.on(
        "console",
        lambda message: loaded.messages.append(f"{message.type}: {message.text}"),
    )
    loaded.page.on("pageerror", lambda error: loaded.messages.append(str(error)))
    loaded.page.on("request", lambda request: loaded.requests.append(request.url))
    loaded.page.goto(path.resolve().as_uri(), timeout=PATIENCE_MS)
    loaded.page.wait_for_selector("html[data-drawn=true]", state="attached")
    return loaded


@pytest.fixture(scope="module")
def wide(browser: Any, files: dict[str, list[Path]]) -> Loaded:
    return load(browser, files["sweep"][0], 1280)


@pytest.fixture
def narrow(wide: Loaded) -> Iterator[Loaded]:
    """The same page while its window is narrow, as on a rotated phone."""
    for width in (390, 1280):
        wide.page.set_viewport_size({"width": width, "height": 900})
        wide.page.wait_for_function(
            (
                "width => [...document.querySelectorAll('.plot')].every((plot) => "
                "plot._fullLayout.width <= width) && "
                "document.getElementById('plot-losses')._fullLayout.width > width / 2"
            ),
            arg=width,
        )
        if width == 390:
            yield wide


@pytest.fixture(scope="module")
def single(browser: Any, files: dict[str, list[Path]]) -> Loaded:
    return load(browser, files["run"][0], 390)


def column(loaded: Loaded, table: str, number: int) -> list[str]:
    return loaded.page.eval_on_selector_all(
        f"#{table} tbody tr:not([hidden]) > :nth-child({number})",
        "cells => cells.map((cell) => cell.textContent)",
    )


one_run = pytest.param("single", marks=pytest.mark.extended)


@needs_browser
@pytest.mark.parametrize("size", ["wide", one_run])
def test_page_renders_without_browser_messages_or_requests(
    size: str, request: pytest.FixtureRequest
) -> None:
    """Oracle: the browser's console and its own list of requests, with the file as the only one."""
    loaded = request.getfixturevalue(size)
    assert loaded.messages == []
    assert [
        url for url in loaded.requests if not url.startswith(("data:", "blob:"))
    ] == [loaded.page.url]
    plots = loaded.page.locator(".plot")
    assert (
        plots.count() == loaded.page.locator(".plot .main-svg:first-child").count() >= 7
    )
    # And not the result of scripts in a reason
    assert loaded.page.title() in (
        "imagined",
        "One <b>run</b>",
    )


@needs_browser
@pytest.mark.parametrize("size", ["wide", "narrow", one_run])
def test_page_fits_its_window_without_overlapping_text(
    size: str, request: pytest.FixtureRequest
) -> None:
    """Oracle: the browser's layout: widths, and the boxes of all texts of each picture."""
    loaded = request.getfixturevalue(size)
    assert (
        loaded.page.evaluate("document.documentElement.scrollWidth")
        <= loaded.page.viewport_size["width"]
    )
    assert loaded.page.evaluate(OVERLAPS) == []
    for box in loaded.page.locator(".box").all():
        assert (
            box.evaluate(
                "e => e.clientWidth <= innerWidth && getComputedStyle(e).overflowX"
            )
            == "auto"
        )


@needs_browser
def test_headings_sort_by_numbers_and_by_keyboard(wide: Loaded) -> None:
    """Oracle: Python's sort of the numbers written into the runs; rows without a number come
    last."""
    names = wide.page.eval_on_selector_all(
        "#rows thead th", "heads => heads.map((head) => head.textContent)"
    )
    number = next(n for n, name in enumerate(names, 1) if name.startswith("Step Time"))
    head = wide.page.locator(f"#rows thead th:nth-child({number})")
    before = column(wide, "rows", 1)
    head.locator("button").focus()
    wide.page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(wide, "rows", 1) == ["04", "01", "05", "06", "02", "03", "07", "08"]
    wide.page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert column(wide, "rows", 1) == ["03", "02", "06", "05", "01", "04", "07", "08"]
    wide.page.keyboard.press("Enter")
    assert column(wide, "rows", 1) == before


@needs_browser
def test_filter_hides_rows(wide: Loaded) -> None:
    """Oracle: the jobs that contain the terms; a minus excludes."""
    field_ = wide.page.get_by_label("Filter rows").first
    field_.fill("fsdp2 full")
    assert column(wide, "rows", 1) == ["05", "06"]
    assert wide.page.locator(".filter output").first.text_content() == "2 of 8 rows"
    field_.fill("FSDP1 -full")
    assert column(wide, "rows", 1) == ["01"]
    field_.fill("")
    assert len(column(wide, "rows", 1)) == 8


@needs_browser
def test_dragging_zooms_and_a_double_click_shows_all(wide: Loaded) -> None:
    """Oracle: plotly's own range of the axis."""
    span = "document.getElementById('plot-losses')._fullLayout.xaxis.range.reduce((a, b) => b - a)"
    near = f"([share, whole]) => Math.abs({span} / whole - share) < 0.1 * share"
    plot = wide.page.locator("#plot-losses .nsewdrag").first
    plot.scroll_into_view_if_needed()
    before = wide.page.evaluate(span)
    box = plot.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    wide.page.mouse.move(box["x"] + 0.3 * box["width"], middle)
    wide.page.mouse.down()
    wide.page.mouse.move(box["x"] + 0.5 * box["width"], middle + 100, steps=6)
    wide.page.mouse.up()
    wide.page.wait_for_function(near, arg=[0.2, before])
    plot.dblclick()
    wide.page.wait_for_function(near, arg=[1.0, before])


@needs_browser
def test_theme_button_switches_page_and_plots(wide: Loaded) -> None:
    """Oracle: colors as the browser computes them, of the page and of a picture's text."""
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('#plot-losses .xtitle')).fill"
    colors = f"[document.getElementById('theme').textContent, {paper}, {ink}]"
    light = wide.page.evaluate(colors)
    dark = ["Light", "rgb(20, 24, 29)", "rgb(230, 234, 238)"]
    assert light[:2] == ["Dark", "rgb(255, 255, 255)"] and light[2] != dark[2]
    for expected in (dark, light):
        wide.page.locator("#theme").click()
        wide.wait_for(colors, expected)


@needs_browser
def test_legend_buttons_hide_series(wide: Loaded) -> None:
    """Oracle: plotly's own list of visible series."""
    visible = "document.getElementById('plot-losses')._fullData[1].visible"
    button = wide.page.locator("#losses .legend button").nth(1)
    button.click()
    wide.wait_for(visible, False)
    assert button.get_attribute("aria-pressed") == "false"
    button.press("Enter")
    wide.wait_for(visible, True)


def test_run_page_has_the_files_of_the_run(files: dict[str, list[Path]]) -> None:
    """Oracle: the text written into the run's files, in the page as written."""
    page = files["run"][0].read_text()
    assert re.findall(r"<h2[^>]*>([^<]*)", page) == [
        "At a glance", "Curves", "Memory by category", "Predicted and measured",
        "Where the time goes", "Starts", "Settings", "Environment",
        "How the numbers are measured",
    ]  # fmt: skip
    assert page.count('id="memory_timeline"') == 1
    operators = page[page.index('id="operators-table"') :].split("</table>")[0]
    for text in ("aten::mm", "1,350", "12.50 ms", "a|b"):
        assert text in operators
    assert "unigram entropy of the data: 3.244" in page and "An imagined device" in page


def test_failed_and_skipped_rows_show_their_reasons(
    files: dict[str, list[Path]],
) -> None:
    """Oracle: the sweep as written; text that looks like a script is shown as text."""
    page = files["sweep"][0].read_text()
    failed = page[page.index('id="failed-table"') :].split("</table>")[0]
    for text in (
        "out of memory",
        "the memory of the cuda device ran out",
        "timed out",
        "it took too long",
        "skipped",
    ):
        assert text in failed
    assert "one process has no ranks to shard over" in failed
    assert (
        "<script>document.title" not in page
        and "&lt;script&gt;document.title" in failed
    )


def test_every_picture_is_saved_with_the_page(files: dict[str, list[Path]]) -> None:
    """Oracle: the links of the page, files that decode, and alternative text for every picture."""
    for page, *pictures in files.values():
        text = page.read_text()
        links = re.findall(r'href="([^"]+\.png)"', text)
        assert len(set(re.findall(r'aria-label="PNG: ([^"]+)"', text))) == len(links)
        assert sorted(links) == sorted(
            str(path.relative_to(page.parent)) for path in pictures
        )
        assert (
            len(re.findall(r'role="img" aria-label="[^"]{20,}"', text))
            == len(pictures)
            >= 7
        )
        for path in pictures:
            assert path.parent == pictures_folder(page)
            with Image.open(path) as image:
                image.load()
                assert len(image.convert("RGB").getcolors(2**20) or []) > 20
        assert page.stat().st_size < 7_000_000
