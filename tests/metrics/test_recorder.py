"""The recorder: from steps to pictures and pages."""

import json
import math
import re
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest

from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import Console, MetricsConfig, Recorder, StepMetrics, environment
from fsdptoys.metrics.plot import draw_loss
from fsdptoys.metrics.summary import fence, summarize

STEP = StepMetrics(1, 5.5, 1.0, 1e-3, 0.1, 512, 5120.0, 0.1, None, None, None, None, 0.5)
GPU_STEP = replace(STEP, mfu=0.4, memory_allocated_gib=1.0, memory_peak_gib=2.0, memory_reserved_gib=3.0)
REFERENCES = {"uniform": math.log(256), "unigram": 3.0}
TREE = {"model": {"dim": 64, "norm": {"eps": 1e-5}}, "train": {"sample_prompt": "a | `b`\n", "seed": None}}


def run_of(count: int, step: StepMetrics = STEP) -> list[StepMetrics]:
    """Steps whose loss falls from 5.5 and whose first two are slow."""
    return [
        replace(
            step,
            step=number,
            loss=5.5 - 0.01 * number,
            grad_norm=50.0 / number,
            step_time_seconds=9.0 if number <= 2 else 0.1 * number,
            eval_loss=5.0 if number % 10 == 0 else None,
        )
        for number in range(1, count + 1)
    ]


def make_recorder(tmp_path: Path, console: Console = Console.none, steps: int = 20, title: str = "tiny") -> Recorder:
    found = environment(Device("cpu"), 2, ["fsdptoys", "train"])
    config = MetricsConfig(run_dir=str(tmp_path / "run"), console=console, log_every=10)
    return Recorder(config, title, TREE, found, steps, REFERENCES)


def test_a_run_leaves_every_file_and_says_how_it_ended(tmp_path, capsys):
    """Oracle: the files, and the closing lines word for word."""
    with make_recorder(tmp_path, Console.plain) as recorder:
        for metrics in run_of(15):
            recorder.step(metrics)
        recorder.message("hello")
        recorder.finish("train.max_seconds=2 was reached", sample="def f():")
    run_dir = tmp_path / "run"
    assert recorder.run_dir == run_dir
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.yaml", "environment.json", "loss.png", "metrics.jsonl", "summary.md",
    ]  # fmt: skip
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 15
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny"
    assert lines[1].startswith("2 ranks on ") and lines[1].endswith(f"20 steps into {run_dir}")
    assert [line.split("  ")[0] for line in lines[2:6]] == [
        "step 10/20", "step 10: held-out loss 5.0000 nats a token", "hello", "step 15/20",
    ]  # fmt: skip
    assert lines[-4:] == [
        "15 of 20 steps; train.max_seconds=2 was reached",
        "last loss 5.3500, held-out loss 5.0000, uniform 5.5452, unigram 3.0000 (nats a token)",
        "median step 900.0 ms, 5,120 tokens/s over all ranks (without the first 2 steps)",
        f"run directory: {run_dir}",
    ]


def test_medians_leave_out_the_warmup():
    """Oracle: steps 3 to 15 take 0.3 to 1.5 s: median 0.9, deciles 0.42 and 1.38 by linear interpolation."""
    results = summarize(run_of(15), warmup_steps=2)
    assert results.step_time_seconds is not None
    assert results.step_time_seconds.median == pytest.approx(0.9)
    assert results.step_time_seconds.p10 == pytest.approx(0.42)
    assert results.step_time_seconds.p90 == pytest.approx(1.38)
    with_warmup = summarize(run_of(15), warmup_steps=0).step_time_seconds
    assert with_warmup is not None and with_warmup.median == pytest.approx(1.0)


def test_results_are_the_steps_own_numbers():
    """Oracle: the formula of each, over fifteen steps with losses 5.49 to 5.35."""
    results = summarize(run_of(15, GPU_STEP), warmup_steps=2)
    assert (results.first_loss, results.last_loss) == (pytest.approx(5.49), pytest.approx(5.35))
    assert results.mean_last_loss == pytest.approx(sum(5.5 - 0.01 * n for n in range(6, 16)) / 10)
    assert (results.eval_loss, results.eval_step) == (5.0, 10)
    assert (results.memory_peak_gib, results.resident_set_gib) == (2.0, 0.5)
    assert results.mfu is not None and results.mfu.median == pytest.approx(0.4)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_run_shorter_than_its_warmup_reports_no_medians(tmp_path, capsys, count):
    """Oracle: the page says so in words, and everything is written all the same."""
    with make_recorder(tmp_path, Console.plain) as recorder:
        for metrics in run_of(count):
            recorder.step(metrics)
        recorder.finish("stopped")
    page = (tmp_path / "run" / "summary.md").read_text()
    assert "| step time | not measured: every step was a warm-up step |" in page
    assert f"| steps | {count} of 20; stopped |" in page
    assert ("| last loss | no step was done |" in page) == (count == 0)
    assert (tmp_path / "run" / "loss.png").stat().st_size > 0
    assert "median" not in capsys.readouterr().out


def test_the_page_tells_what_came_out(tmp_path):
    """Oracle: rows of the page, worked out by hand."""
    with make_recorder(tmp_path) as recorder:
        for metrics in run_of(15, GPU_STEP):
            recorder.step(metrics)
        recorder.finish("all done", sample="x\n````\n# not a heading")
    page = (tmp_path / "run" / "summary.md").read_text()
    for row in (
        "# tiny",
        "| steps | 15 of 20; all done |",
        "| first loss | 5.4900 nats |",
        "| held-out loss after step 10 | 5.0000 nats |",
        "| reference: uniform | 5.5452 nats |",
        "| step time | 900.00 ms (p10 420.00, p90 1,380.00) |",
        "| tokens/s, all ranks | 5,120 (p10 5,120, p90 5,120) |",
        "| TFLOP/s a rank | 0.100 (p10 0.100, p90 0.100) |",
        "| MFU | 40.0 % (p10 40.0, p90 40.0) |",
        "| peak device memory of rank 0 | 2.000 GiB |",
        "| model | `dim=64` `norm.eps=1e-05` |",
        "| train | `sample_prompt=\"a \\| 'b'\\n\"` `seed=null` |",
        "`````text\nx\n````\n# not a heading\n`````",
    ):
        assert f"\n{row}\n" in f"\n{page}", row
    assert "leave out the first 2 steps" in page


@pytest.mark.parametrize("sample", ["", "plain", "```", "a\n`````python\n```\n", "`" * 50])
def test_no_sample_can_end_its_block(sample):
    """Oracle: CommonMark: a block ends at a line of at least as many backticks as it began with."""
    first, *body, last = fence(sample).split("\n")
    marks = first.removesuffix("text")
    assert len(marks) >= 3 and set(marks) == {"`"} and last == marks
    assert not any(re.match(rf" {{0,3}}`{{{len(marks)},}}\s*$", line) for line in body)
    assert "\n".join(body) == sample


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(run_of(120), id="smoothed"),
        pytest.param(run_of(8), id="few"),
        pytest.param(run_of(1), id="one"),
        pytest.param([], id="none"),
        pytest.param([replace(step, loss=math.nan, grad_norm=math.inf) for step in run_of(60)], id="not finite"),
        pytest.param([replace(step, grad_norm=0.0) for step in run_of(5)], id="no gradient"),
    ],
)
def test_the_picture_is_a_png_of_its_size(tmp_path, steps):
    """Oracle: matplotlib reads it back as 9 by 6 inches at 150 points each, with no warning on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_loss(tmp_path / "loss.png", "a $title$ " * 20, steps, REFERENCES | {"_$x": 1.0})
    assert matplotlib.image.imread(tmp_path / "loss.png").shape[:2] == (900, 1350)


def test_a_run_that_dies_keeps_its_steps(tmp_path, capsys):
    """Oracle: valid lines for every step recorded, the last one printed, and the error passed on."""
    with pytest.raises(ZeroDivisionError), make_recorder(tmp_path, Console.plain) as recorder:
        for metrics in run_of(3):
            recorder.step(metrics)
        raise ZeroDivisionError
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert not (tmp_path / "run" / "summary.md").exists()
    assert capsys.readouterr().out.splitlines()[-1].startswith("step  3/20")


def test_a_loss_that_is_not_finite_stands_out_on_the_page(tmp_path):
    """Oracle: the page's own row."""
    with make_recorder(tmp_path) as recorder:
        recorder.step(replace(STEP, loss=math.nan))
        recorder.finish("the loss is not finite")
    assert "| last loss | **nan** |" in (tmp_path / "run" / "summary.md").read_text()


def test_a_folder_that_vanishes_becomes_a_sentence(tmp_path):
    """Oracle: the sentence, with the system's own words."""
    import shutil

    with make_recorder(tmp_path) as recorder:
        recorder.step(STEP)
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(
            ConfigError, match=r"^metrics\.run_dir=.*run cannot be written \(No such file or directory\)"
        ):
            recorder.finish("done")
