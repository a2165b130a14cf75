"""The page in a real browser, from a file: it is drawn, sorts, filters, zooms, turns dark, and loads nothing."""

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fsdptoys.errors import ConfigError
from fsdptoys.report.comparison_page import short_names
from fsdptoys.report.figures import Picture
from fsdptoys.report.figures_matplotlib import draw_png
from fsdptoys.report.html_page import check_page, embed_json, pictures_folder, write_page
from fsdptoys.report.runs_table import Collection, gather
from fsdptoys.sweep import Job, JobStatus, Skipped, Sweep
from tests.measuring import without_coverage
from tests.report.device_runs import device_prediction, write_device_run, write_device_sweep
from tests.report.recorded_runs import GPU_STEP, STEP, record_of, run_of, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")
PATIENCE_MS = 120_000

OVERLAPS = """() => {
  const found = [];
  for (const plot of document.querySelectorAll('.plot')) {
    const texts = [...plot.querySelectorAll('text')].filter((t) => t.textContent.trim() && t.getClientRects().length);
    const boxes = texts.map((t) => [t.textContent, t.getBoundingClientRect()]);
    const frame = plot.getBoundingClientRect();
    for (const [text, box] of boxes)
      if (box.left < frame.left - 1 || box.right > frame.right + 1) found.push([plot.id, text, 'leaves its picture']);
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const [a, b] = [boxes[i][1], boxes[j][1]];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 2 && down > 3) found.push([plot.id, boxes[i][0], boxes[j][0]]);
    }
  }
  return found;
}"""
"""Texts of pictures that lie upon one another, or are cut off."""


@dataclass
class Loaded:
    """A page in a browser, and what it did while it was loaded and used."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Pages of a sweep and of one run, with their pictures."""
    folder = tmp_path_factory.mktemp("pages")
    sweep, run = write_device_sweep(folder / "sweep"), write_device_run(folder / "run")
    with without_coverage():
        return {
            "sweep": write_page(gather([sweep]), folder / "sweep.html"),
            "run": write_page(gather([run]), folder / "run.html", title="One <b>run</b>"),
        }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the PATH")
    sync_api = pytest.importorskip("playwright.sync_api", reason="there is no playwright to drive the browser")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def load(browser: Any, path: Path, width: int) -> Loaded:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme="light")
    context.set_default_timeout(PATIENCE_MS)
    loaded = Loaded(context.new_page())
    loaded.page.on("console", lambda message: loaded.messages.append(f"{message.type}: {message.text}"))
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
    """The same page while its window is narrow, as when a telephone is turned."""
    for width in (390, 1280):
        wide.page.set_viewport_size({"width": width, "height": 900})
        wide.page.wait_for_function(
            "width => [...document.querySelectorAll('.plot')].every((plot) => plot._fullLayout.width <= width)"
            " && document.getElementById('plot-losses')._fullLayout.width > width / 2",
            arg=width,
        )
        if width == 390:
            yield wide


@pytest.fixture(scope="module")
def single(browser: Any, files: dict[str, list[Path]]) -> Loaded:
    return load(browser, files["run"][0], 390)


def column(loaded: Loaded, table: str, number: int) -> list[str]:
    return loaded.page.eval_on_selector_all(
        f"#{table} tbody tr:not([hidden]) > :nth-child({number})", "cells => cells.map((cell) => cell.textContent)"
    )


@needs_browser
@pytest.mark.parametrize("size", ["wide", "single"])
def test_a_page_is_drawn_without_a_message_or_a_request(size: str, request: pytest.FixtureRequest) -> None:
    """Oracle: the browser's console and its own list of requests, of which the file is the only one."""
    loaded = request.getfixturevalue(size)
    assert loaded.messages == []
    assert [url for url in loaded.requests if not url.startswith(("data:", "blob:"))] == [loaded.page.url]
    plots = loaded.page.locator(".plot")
    assert plots.count() == loaded.page.locator(".plot .main-svg:first-child").count() >= 7
    assert loaded.page.title() in ("imagined", "One <b>run</b>")  # and not what a reason would make of it


@needs_browser
@pytest.mark.parametrize("size", ["wide", "narrow", "single"])
def test_a_page_is_as_wide_as_its_window_and_no_text_covers_another(size: str, request: pytest.FixtureRequest) -> None:
    """Oracle: the browser's layout: widths, and the boxes of all texts of each picture."""
    loaded = request.getfixturevalue(size)
    assert loaded.page.evaluate("document.documentElement.scrollWidth") <= loaded.page.viewport_size["width"]
    assert loaded.page.evaluate(OVERLAPS) == []
    for box in loaded.page.locator(".box").all():
        assert box.evaluate("e => e.clientWidth <= innerWidth && getComputedStyle(e).overflowX") == "auto"


@needs_browser
def test_headings_sort_by_numbers_and_by_keyboard(wide: Loaded) -> None:
    """Oracle: Python's sort of the numbers that were written into the runs; rows without a number come last."""
    names = wide.page.eval_on_selector_all("#rows thead th", "heads => heads.map((head) => head.textContent)")
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
def test_the_filter_hides_rows(wide: Loaded) -> None:
    """Oracle: which jobs have the words, as they were written; a minus leaves out."""
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
    span = "() => { const [a, b] = document.getElementById('plot-losses')._fullLayout.xaxis.range; return b - a; }"
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
    assert wide.page.evaluate(span) == pytest.approx(0.2 * before, rel=0.1)
    wide.page.locator("#theme").click()  # what was zoomed into stays when colors change
    assert wide.page.evaluate(span) == pytest.approx(0.2 * before, rel=0.1)
    wide.page.locator("#theme").click()
    wide.page.mouse.dblclick(box["x"] + 0.5 * box["width"], middle)
    wide.page.wait_for_timeout(500)
    assert wide.page.evaluate(span) == pytest.approx(before, rel=0.05)


@needs_browser
def test_the_button_turns_page_and_pictures_dark_and_back(wide: Loaded) -> None:
    """Oracle: colors as the browser computes them, of the page and of a picture's text."""
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('#plot-losses .xtitle')).fill"
    light = wide.page.evaluate(f"[{paper}, {ink}]")
    button = wide.page.locator("#theme")
    assert button.text_content() == "Dark"
    button.click()
    assert button.text_content() == "Light"
    assert light[0] == "rgb(255, 255, 255)"
    assert wide.page.evaluate(paper) == "rgb(20, 24, 29)"
    assert wide.page.evaluate(ink) == "rgb(230, 234, 238)" != light[1]
    button.click()
    assert wide.page.evaluate(f"[{paper}, {ink}]") == light


@needs_browser
def test_a_legend_hides_its_series(wide: Loaded) -> None:
    """Oracle: plotly's own list of what is visible."""
    visible = "document.getElementById('plot-losses')._fullData[1].visible"
    button = wide.page.locator("#losses .legend button").nth(1)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert wide.page.evaluate(visible) is False
    button.press("Enter")
    assert wide.page.evaluate(visible) is True


@needs_browser
def test_dollars_in_a_name_are_no_formula(single: Loaded) -> None:
    """Oracle: plotly warns in the console where it takes a text for TeX and has nothing to set it with."""
    relabel = "text => Plotly.relayout('plot-loss', {'xaxis.title.text': text}).then(() => 0)"
    before = single.page.locator("#plot-loss .xtitle").text_content()
    single.page.evaluate(relabel, "$a$ and $b$")
    assert single.page.locator("#plot-loss .xtitle").text_content() == "$a$ and $b$"
    single.page.evaluate(relabel, before)
    assert single.messages == []


@needs_browser
def test_a_run_page_tells_what_the_run_left(single: Loaded) -> None:
    """Oracle: what was written into the run's files."""
    headings = [head.text_content() for head in single.page.locator("h2").all()]
    assert headings == [
        "At a glance",
        "Curves",
        "Memory by category",
        "Predicted and measured",
        "Where the time goes",
        "Starts and checkpoints",
        "Settings",
        "Environment",
        "How the numbers were made",
    ]
    assert single.page.locator("#memory_timeline").count() == 1
    assert "unigram entropy of the data: 3.244" in (single.page.locator("#plot-loss").text_content() or "")
    assert column(single, "operators-table", 1) == ["aten::mm", "a|b"]
    assert "An imagined device" in (single.page.locator("#environments").text_content() or "")


def test_failed_and_skipped_rows_stand_with_their_reasons(files: dict[str, list[Path]]) -> None:
    """Oracle: the sweep as it was written; what looks like a script is shown as text."""
    page = files["sweep"][0].read_text()
    failed = page[page.index('id="failed-table"') :].split("</table>")[0]
    for words in ("out of memory", "the memory of the cuda device ran out", "timed out", "it took too long", "skipped"):
        assert words in failed
    assert "one process has no ranks to shard over" in failed
    assert "<script>document.title" not in page and "&lt;script&gt;document.title" in failed


def test_every_picture_lies_beside_the_page(files: dict[str, list[Path]]) -> None:
    """Oracle: the links of the page, files that decode, and no picture without words for those who do not see it."""
    for page, *pictures in files.values():
        text = page.read_text()
        links = re.findall(r'href="([^"]+\.png)"', text)
        assert len(set(re.findall(r'aria-label="PNG: ([^"]+)"', text))) == len(links)
        assert sorted(links) == sorted(str(path.relative_to(page.parent)) for path in pictures)
        assert len(re.findall(r'role="img" aria-label="[^"]{20,}"', text)) == len(pictures) >= 7
        for path in pictures:
            assert path.parent == pictures_folder(page)
            with Image.open(path) as image:
                image.load()
                assert len(image.convert("RGB").getcolors(2**20) or []) > 20
        assert page.stat().st_size < 7_000_000


@pytest.fixture
def without_pngs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages alone, for tests of their words."""
    monkeypatch.setattr("fsdptoys.report.html_page.draw_png", lambda picture, path: None)


def test_runs_without_predictions_say_why_nothing_is_split(tmp_path: Path, without_pngs: None) -> None:
    """Oracle: the run directories have no prediction.json, and are of a CPU."""
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, run_of(6))
    page = write_page(gather([tmp_path / "runs"]), tmp_path / "report.html")[0].read_text()
    assert "Measured totals; a breakdown needs a prediction" in page
    assert "There is no prediction" in page and page.count("plan.hardware") >= 2
    told = page[page.index("<main>") : page.index("</main>")]
    assert "Diamonds" not in told and "Bars: predicted" not in told
    assert "the peak resident set of rank 0&#x27;s process" in page


ODD = "a`b` **c** $d$ <i>\udcff"
"""What a folder can be called, with a byte that is no UTF-8."""


def test_runs_that_others_have_touched_make_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what is wrong with each is written here; names stand in the page as they are, but for what is no text."""
    monkeypatch.setattr("fsdptoys.report.html_page.draw_png", lambda picture, path: drawn.append(picture))
    drawn: list[Picture] = []
    runs = tmp_path / "runs"
    write_run(runs / "a", run_of(6), {"model": None, "profile": {"enabled": True}}, {"versions": []})
    idle = [replace(step, valid_tokens=0, tokens_per_second=0.0, mfu=0.0) for step in run_of(6, GPU_STEP)]
    elsewhere = {"versions": None, "device.type": "cuda"}
    write_run(runs / "b", idle, environment=elsewhere, prediction=device_prediction(0.5, 70.0))
    try:
        write_run(runs / ODD, run_of(6))
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    page = write_page(gather([runs]), tmp_path / "all.html", title=ODD)[0].read_text()
    assert "a`b` **c** $d$ &lt;i&gt;\\udcff" in page and "<strong>" not in page
    assert "Steps under the profiler are slower; medians include them: a." in page
    draw_png(next(picture for picture in drawn if picture.name == "time_split"), tmp_path / "time_split.png")
    for name in ("a", "b"):
        own = write_page(gather([runs / name]), tmp_path / f"{name}.html")[0].read_text()
        assert ("with traced steps, which are slower" in own) is (name == "a")


def test_a_sweep_with_one_job_still_tells_what_was_skipped(tmp_path: Path, without_pngs: None) -> None:
    """Oracle: the reason as it was written into the sweep."""
    write_run(tmp_path / "jobs" / "01" / "run", run_of(6))
    job = Job("01", (), {"parallel": "fsdp2"}, "print 1", JobStatus.done, 0)
    Sweep(tmp_path, "one", "command", [job], [Skipped({"parallel": "single"}, "it has one rank")], None).write()
    page = write_page(gather([tmp_path]), tmp_path / "report.html")[0].read_text()
    assert "it has one rank" in page


def test_rows_that_are_not_done_win_nothing(tmp_path: Path, without_pngs: None) -> None:
    """Oracle: the run that was killed is faster, smaller and has the lower loss."""
    better = replace(STEP, loss=3.0, resident_set_gib=0.1, resident_set_peak_gib=0.1, tokens_per_second=1e6)
    write_run(tmp_path / "runs" / "ended", run_of(6))
    write_run(tmp_path / "runs" / "killed", run_of(6, better), finished=False)
    page = write_page(gather([tmp_path / "runs"]), tmp_path / "report.html")[0].read_text()
    glance = page[page.index('class="cards"') :].split("</dl>")[0]
    assert glance.count("<small>ended") == 3 and "killed" not in glance


@pytest.mark.parametrize(
    ("choices", "names"),
    [
        (
            [{"parallel": "fsdp2", "optim.lr": "0.1"}, {"parallel": "fsdp2", "optim.lr": "0.2"}],
            ["1 optim.lr=0.1", "2 optim.lr=0.2"],
        ),
        (
            [{"parallel": "fsdp1", "optim.lr": "0.1"}, *({"parallel": "fsdp2", "optim.lr": v} for v in ("0.1", "0.2"))],
            ["1 fsdp1 optim.lr=0.1", "2 fsdp2 optim.lr=0.1", "3 fsdp2 optim.lr=0.2"],
        ),
        ([{"parallel": "fsdp1"}, {"parallel": "fsdp2"}], ["1 fsdp1", "2 fsdp2"]),
    ],
)
def test_names_tell_what_varies(tmp_path: Path, choices: list[dict[str, str]], names: list[str]) -> None:
    """Oracle: the choices, of which none but the last is told by what is switched on."""
    records = []
    for number, varied in enumerate(choices, 1):
        path = write_run(tmp_path / str(number), run_of(3), {"parallel.name": varied["parallel"]})
        records.append(record_of(path, varied=varied))
    assert short_names(records) == names


def test_rows_that_did_nothing_make_a_page_all_the_same(tmp_path: Path) -> None:
    """Oracle: a run that was killed in its first step has no steps to draw."""
    page = write_page(gather([write_run(tmp_path / "run", [], finished=False)]), tmp_path / "report.html")
    assert len(page) == 1
    assert "No run has a step to draw" in page[0].read_text()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("report.pdf", r"report\.pdf must end in \.html; write --out report\.html"),
        ("no/report.html", r"report\.html lies in .*no, which is no folder; write --out report\.html"),
        ("folder.html", r"folder\.html is a folder; write --out report\.html"),
    ],
)
def test_a_place_for_no_page_is_one_sentence(tmp_path: Path, name: str, problem: str) -> None:
    """Oracle: the sentence names the file and the fix, and no option that was not typed."""
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigError, match=f"^--out .*{problem}$"):
        check_page(tmp_path / name)
    with pytest.raises(ConfigError, match=f"^the page .*{problem}$"):
        write_page(Collection("nothing", [], [], []), tmp_path / name)


def test_without_plotly_the_sentence_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: Python's own way of saying that a module cannot be imported; nothing is written."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"pip install 'fsdptoys\[report\]'"):
        write_page(Collection("nothing", [], [], []), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_numbers_in_the_page_cannot_end_their_script() -> None:
    """Oracle: HTML ends a script at the first "</script", whatever is around it."""
    assert "<" not in embed_json(["</script><!--"])
