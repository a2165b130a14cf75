"""Texts of pages, without a browser."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.report.comparison_page import short_name
from fsdptoys.report.html_page import check_page, embed_json, write_page
from fsdptoys.report.runs_table import Collection, gather
from fsdptoys.sweep import Job, JobStatus, Skipped, Sweep
from fsdptoys.utils.figure_png import render_png
from fsdptoys.utils.figures import Picture
from tests.harness.recorded_runs import GPU_STEP, STEP, record_of, run_of, write_run
from tests.report.device_runs import device_prediction


@pytest.fixture
def without_pngs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the PNGs, for tests of the pages' text."""
    monkeypatch.setattr(
        "fsdptoys.report.html_page.draw_png", lambda path, picture: None
    )


def test_pages_without_predictions_explain_missing_splits(
    tmp_path: Path, without_pngs: None
) -> None:
    """Oracle: the run directories have no prediction.json, and are of a CPU."""
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, run_of(6))
    page = write_page(gather([tmp_path / "runs"]), tmp_path / "report.html")[
        0
    ].read_text()
    assert "Measured totals; a breakdown needs a prediction" in page
    assert "There is no prediction" in page and page.count("plan.hardware") >= 2
    body = page[page.index("<main>") : page.index("</main>")]
    assert "Diamonds" not in body and "Bars: predicted" not in body
    assert "the peak resident set of rank 0&#39;s process" in page


ODD = "a`b` **c** $d$ <i>\udcff"
"""A valid folder name with a byte outside UTF-8."""


def test_names_of_settings_are_marked_as_code(
    tmp_path: Path, without_pngs: None
) -> None:
    """Oracle: written by hand, for a heading of a table and a definition."""
    for name in ("a", "b"):
        write_run(
            tmp_path / name, run_of(6), {"train.seq_len": 16 if name == "a" else 32}
        )
    page = write_page(
        gather([tmp_path / "a", tmp_path / "b"]), tmp_path / "report.html"
    )[0]
    text = page.read_text()
    assert "<code>train.seq_len</code>" in text and "<code>data=chat</code>" in text
    assert "&lt;code&gt;" not in text


def test_manipulated_runs_render(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the defects written here; names appear in the page unchanged, except for control
    characters."""
    monkeypatch.setattr(
        "fsdptoys.report.html_page.draw_png",
        lambda path, picture: drawn.append(picture),
    )
    drawn: list[Picture] = []
    runs = tmp_path / "runs"
    write_run(
        runs / "a",
        run_of(6),
        {"model": None, "profile": {"enabled": True}},
        {"versions": []},
    )
    idle = [
        replace(step, valid_tokens=0, tokens_per_second=0.0, mfu=0.0)
        for step in run_of(6, GPU_STEP)
    ]
    elsewhere = {"versions": None, "device.type": "cuda"}
    write_run(
        runs / "b", idle, environment=elsewhere, prediction=device_prediction(0.5, 70.0)
    )
    try:
        write_run(runs / ODD, run_of(6))
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    page = write_page(replace(gather([runs]), title=ODD), tmp_path / "all.html")[
        0
    ].read_text()
    assert "a`b` **c** $d$ &lt;i&gt;\\udcff" in page and "<strong>" not in page
    assert "Steps under the profiler are slower; medians include them: a." in page
    render_png(next(picture for picture in drawn if picture.name == "time_split"))
    for name in ("a", "b"):
        own = write_page(gather([runs / name]), tmp_path / f"{name}.html")[
            0
        ].read_text()
        assert ("Steps under the profiler are slower; medians" in own) is (name == "a")


def test_sweep_with_one_job_still_lists_skipped_combinations(
    tmp_path: Path, without_pngs: None
) -> None:
    """Oracle: the reason as written into the sweep."""
    write_run(tmp_path / "jobs" / "01" / "run", run_of(6))
    job = Job("01", (), {"parallel": "fsdp2"}, "print 1", JobStatus.completed, 0)
    Sweep(
        tmp_path,
        "one",
        "command",
        [job],
        [Skipped({"parallel": "single"}, "it has one rank")],
        None,
    ).write()
    page = write_page(gather([tmp_path]), tmp_path / "report.html")[0].read_text()
    assert "it has one rank" in page


def test_unfinished_rows_are_never_the_best(tmp_path: Path, without_pngs: None) -> None:
    """Oracle: the killed run is faster, smaller and has the lower loss."""
    better = replace(
        STEP,
        loss=3.0,
        resident_set_gib=0.1,
        resident_set_peak_gib=0.1,
        tokens_per_second=1e6,
    )
    write_run(tmp_path / "runs" / "ended", run_of(6))
    write_run(tmp_path / "runs" / "killed", run_of(6, better), finished=False)
    page = write_page(gather([tmp_path / "runs"]), tmp_path / "report.html")[
        0
    ].read_text()
    glance = page[page.index('class="cards"') :].split("</dl>")[0]
    assert glance.count("<small>ended") == 3 and "killed" not in glance


def test_names_show_the_varied_settings(tmp_path: Path) -> None:
    """Oracle: the value of a group, and key and value of a setting."""
    varied = {"parallel": "fsdp2", "optim.lr": "0.1"}
    record = record_of(write_run(tmp_path / "1", run_of(3)), varied=varied)
    assert short_name(record) == "1 fsdp2 lr=0.1"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("report.pdf", r"report\.pdf must end in \.html; write --out report\.html"),
        (
            "no/report.html",
            r"report\.html is in .*no, which is not a folder; write --out report\.html",
        ),
        ("folder.html", r"folder\.html is a folder; write --out report\.html"),
    ],
)
def test_invalid_page_path_is_reported_in_one_sentence(
    tmp_path: Path, name: str, problem: str
) -> None:
    """Oracle: the message names the file and the fix, and no option that the user did not type."""
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigError, match=f"^--out .*{problem}$"):
        check_page(tmp_path / name)
    with pytest.raises(ConfigError, match=f"^the page .*{problem}$"):
        write_page(Collection("nothing", [], [], []), tmp_path / name)


def test_missing_plotly_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: Python's own failure to import a module; nothing is written."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[report\]'"):
        write_page(Collection("nothing", [], [], []), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_numbers_in_the_page_cannot_end_their_script() -> None:
    """Oracle: HTML ends a script at the first "</script", regardless of its surroundings."""
    assert "<" not in embed_json(["</script><!--"])
