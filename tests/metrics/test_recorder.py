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
from fsdptoys.metrics import Console, MetricsConfig, RunRecorder, StepMetrics, environment
from fsdptoys.metrics.config import RUN_FILES
from fsdptoys.metrics.layout import Layout, RankBytes, Unit
from fsdptoys.metrics.plots import draw_experts, draw_loss
from fsdptoys.metrics.recorder import closing_lines
from fsdptoys.metrics.results import read_result, summarize
from fsdptoys.metrics.step import (
    RoutingMetrics,
)
from fsdptoys.metrics.summary import (
    fence,
)

STEP = StepMetrics(1, 5.5, 1.0, 1e-3, 0.1, 512, 5120.0, 0.1, None, None, None, None, 0.5, 0.75)
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


def run_with_experts(count: int, layers: int = 2, experts: int = 4) -> list[StepMetrics]:
    """The same, with one more token for the first expert in each step."""
    return [
        replace(
            metrics,
            routing=RoutingMetrics(
                aux_loss=2.0 + metrics.step / 100,
                z_loss=3.5,
                entropy=0.9,
                max_load=1.5 + metrics.step / 100,
                min_load=0.25,
                counts=[[100 + metrics.step, *[100] * (experts - 1)]] * layers,
            ),
        )
        for metrics in run_of(count)
    ]


def make_recorder(
    tmp_path: Path,
    console: Console = Console.none,
    steps: int = 20,
    title: str = "tiny",
    layout: Layout | None = None,
) -> RunRecorder:
    found = environment(Device("cpu"), 2, ["fsdptoys", "train"])
    config = MetricsConfig(run_dir=str(tmp_path / "run"), console=console, log_every=10)
    return RunRecorder(config, title, TREE, found, steps, REFERENCES, layout=layout)


def test_run_writes_all_files_and_prints_its_results(tmp_path, capsys):
    """Oracle: the files, and the closing lines word for word."""
    with make_recorder(tmp_path, Console.plain) as recorder:
        for metrics in run_of(15):
            recorder.step(metrics)
        recorder.message("hello")
        recorder.finish("train.max_seconds=2 was reached", sample="def f():")
    run_dir = tmp_path / "run"
    assert recorder.run_dir == run_dir
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.yaml", "environment.json", "loss.png", "metrics.jsonl", "result.json", "summary.md",
    ]  # fmt: skip
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 15
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny"
    assert lines[1].startswith("2 ranks on ") and lines[1].endswith(f"20 steps into {run_dir}")
    assert [line.split("  ")[0] for line in lines[2:6]] == [
        "step 10/20", "step 10: held-out loss 5.0000 nats per token", "hello", "step 15/20",
    ]  # fmt: skip
    assert lines[-4:] == [
        "15 of 20 steps; train.max_seconds=2 was reached",
        "last loss 5.3500, held-out loss 5.0000, uniform 5.5452, unigram 3.0000 (nats per token)",
        "median step 900.0 ms, 5,120 tokens/s over all ranks (excluding the first 2 steps)",
        f"run directory: {run_dir}",
    ]


def test_layout_is_printed_before_the_first_step(tmp_path, capsys):
    """Oracle: the lines, with aligned texts, after the two of the title."""
    held = dict.fromkeys(("parameters", "gradients", "optimizer states"), RankBytes(8192, 0))
    layout = Layout(4096, 2048, 1, Unit("root", 4096, 16384), Unit("root", 4096, 16384), {"shard": 2}, "all", held)
    with make_recorder(tmp_path, Console.plain, layout=layout):
        pass
    assert capsys.readouterr().out.splitlines()[2:] == [
        "parameters      4,096, of which a rank holds 2,048",
        "units           1; largest root (4,096 parameters, 16.00 KiB gathered), "
        "smallest root (4,096 parameters, 16.00 KiB gathered)",
        "mesh            shard=2: all split over 2 ranks",
        "bytes per rank  parameters 8.00 KiB, gradients 8.00 KiB, optimizer states 8.00 KiB",
    ]


def test_medians_exclude_the_warmup():
    """Oracle: steps 3 to 15 take 0.3 to 1.5 s: median 0.9, deciles 0.42 and 1.38 by linear interpolation."""
    results = summarize(run_of(15), warmup_steps=2)
    assert results.step_time_seconds is not None
    assert results.step_time_seconds.median == pytest.approx(0.9)
    assert results.step_time_seconds.p10 == pytest.approx(0.42)
    assert results.step_time_seconds.p90 == pytest.approx(1.38)
    with_warmup = summarize(run_of(15), warmup_steps=0).step_time_seconds
    assert with_warmup is not None and with_warmup.median == pytest.approx(1.0)


def test_results_follow_their_formulas():
    """Oracle: the formula of each, over fifteen steps with losses 5.49 to 5.35."""
    results = summarize(run_of(15, GPU_STEP), warmup_steps=2)
    assert (results.first_loss, results.last_loss) == (pytest.approx(5.49), pytest.approx(5.35))
    assert results.mean_last_loss == pytest.approx(sum(5.5 - 0.01 * n for n in range(6, 16)) / 10)
    assert (results.eval_loss, results.eval_step) == (5.0, 10)
    assert (results.memory_peak_gib, results.resident_set_gib, results.resident_set_peak_gib) == (2.0, 0.5, 0.75)
    old = [replace(metrics, resident_set_peak_gib=None) for metrics in run_of(3)]
    assert summarize(old, warmup_steps=2).resident_set_peak_gib is None
    assert results.mfu is not None and results.mfu.median == pytest.approx(0.4)


def test_stall_fraction_excludes_the_warmup(tmp_path, capsys):
    """Oracle: 15 ms of 300 and 60 ms of 400 are 75 of 700; the warm-up, which waits 8 s of 9, does not count."""
    waits = [8.0, 8.0, 0.015, 0.06]
    steps = [replace(metrics, data_wait_seconds=wait) for metrics, wait in zip(run_of(4), waits, strict=True)]
    assert summarize(steps, warmup_steps=2).data_stall == pytest.approx(0.075 / 0.7)
    assert summarize(steps[:2], warmup_steps=2).data_stall is None
    assert summarize(run_of(4), warmup_steps=2).data_stall is None
    with make_recorder(tmp_path) as recorder:
        for metrics in steps:
            recorder.step(metrics)
        recorder.finish("all done")
    assert "| waiting for data | 10.71% of the step time |" in (tmp_path / "run" / "summary.md").read_text()
    result = read_result(tmp_path / "run")
    assert result is not None and "\n".join(closing_lines(result)).count("10.71% of the time") == 1
    result = replace(result, steps=replace(result.steps, data_stall=None))
    assert "waiting" not in "\n".join(closing_lines(result))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_run_shorter_than_its_warmup_reports_no_medians(tmp_path, capsys, count):
    """Oracle: the summary's text, and all files."""
    with make_recorder(tmp_path, Console.plain) as recorder:
        for metrics in run_of(count):
            recorder.step(metrics)
        recorder.finish("stopped")
    page = (tmp_path / "run" / "summary.md").read_text()
    assert "| step time | not measured: every step was a warm-up step |" in page
    assert f"| steps | {count} of 20; stopped |" in page
    assert ("| last loss | no steps |" in page) == (count == 0)
    assert (tmp_path / "run" / "loss.png").stat().st_size > 0
    assert "median" not in capsys.readouterr().out


def test_summary_has_the_results(tmp_path):
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
        "| TFLOP/s per rank | 0.100 (p10 0.100, p90 0.100) |",
        "| MFU | 40.0 % (p10 40.0, p90 40.0) |",
        "| peak device memory of rank 0 | 2.000 GiB |",
        "| largest resident set of rank 0 after a step | 0.500 GiB |",
        "| peak resident set of rank 0 | 0.750 GiB |",
        "| model | `dim=64` `norm.eps=1e-05` |",
        "| train | `sample_prompt=\"a \\| 'b'\\n\"` `seed=null` |",
        "`````text\nx\n````\n# not a heading\n`````",
    ):
        assert f"\n{row}\n" in f"\n{page}", row
    assert "exclude the first 2 steps" in page


def test_summary_splits_the_counted_peak(tmp_path):
    """Oracle: the parts of the step with the highest peak, and the last values of the others."""
    low = replace(STEP, memory_allocated_gib=0.03, memory_peak_gib=0.25, memory_host_gib=0.5)
    low = replace(low, memory_parameters_gib=0.05, memory_gradients_gib=0.0, memory_optimizer_gib=0.1)
    low = replace(low, memory_rest_gib=0.1)
    high = replace(low, memory_peak_gib=0.375, memory_rest_gib=0.225)
    with make_recorder(tmp_path) as recorder:
        for metrics in [low, replace(high, step=2)]:
            recorder.step(metrics)
        recorder.finish("all done")
    page = (tmp_path / "run" / "summary.md").read_text()
    parts = "parameters 0.05, gradients 0, optimizer states 0.1, the rest 0.225"
    for row in (
        f"| peak device memory of rank 0 | 0.375 GiB ({parts}) |",
        "| device memory of rank 0 after the last step | 0.03 GiB |",
        "| offloaded by rank 0, in the host's place | 0.500 GiB |",
    ):
        assert row in page


@pytest.mark.parametrize(("count", "written"), [(15, [1, 10, 15]), (20, [1, 10, 20]), (1, [1])])
def test_run_of_an_moe_model_writes_its_routing(tmp_path, count, written):
    """Oracle: two files more; the tokens given in the first, every tenth and the last step; rows worked out by hand."""
    steps = run_with_experts(count)
    with make_recorder(tmp_path) as recorder:
        for metrics in steps:
            recorder.step(metrics)
        recorder.finish("all done")
    run_dir = tmp_path / "run"
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.yaml", "environment.json", "experts.png", "loss.png", "metrics.jsonl", "result.json", "routing.jsonl",
        "summary.md",
    ]  # fmt: skip
    assert [json.loads(line) for line in (run_dir / "routing.jsonl").read_text().splitlines()] == [
        {"step": step, "expert_tokens": [[100 + step, 100, 100, 100]] * 2} for step in written
    ]
    page = (run_dir / "summary.md").read_text()
    for row in (
        f"| load-balancing loss, last step | {2 + count / 100:.4f} |",
        "| router z-loss, last step | 3.5000 |",
        "| router entropy, last step | 0.9000 |",
        f"| busiest expert, last step | {1.5 + count / 100:.2f} times the mean |",
        "| idlest expert, last step | 0.25 times the mean |",
        "![load of each expert, and the balance over the steps](experts.png)",
    ):
        assert f"\n{row}\n" in page, row
    for path in run_dir.iterdir():
        assert f"\n| `{path.name}` | " in page and path.name in RUN_FILES
    assert "Perfect balance gives K, the number of experts per token (`model.top_k`)" in page


def test_summary_of_a_dense_model_does_not_mention_experts(tmp_path):
    """Oracle: the page's text."""
    with make_recorder(tmp_path) as recorder:
        recorder.step(STEP)
        recorder.finish("all done")
    page = (tmp_path / "run" / "summary.md").read_text().lower()
    assert not [word for word in ("expert", "rout", "balanc", "entropy,") if word in page]


def test_non_finite_router_loss_is_shown(tmp_path):
    """Oracle: the row of the page."""
    (step,) = run_with_experts(1)
    assert step.routing is not None
    with make_recorder(tmp_path) as recorder:
        recorder.step(replace(step, routing=replace(step.routing, z_loss=math.inf)))
        recorder.finish("the loss is not finite")
    assert "| router z-loss, last step | **inf** |" in (tmp_path / "run" / "summary.md").read_text()


@pytest.mark.parametrize("sample", ["", "plain", "```", "a\n`````python\n```\n", "`" * 50])
def test_sample_cannot_close_its_code_block(sample):
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
def test_loss_plot_has_the_documented_size(tmp_path, steps):
    """Oracle: matplotlib reads 9 by 6 inches at 150 dpi, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_loss(tmp_path / "loss.png", "a $title$ " * 20, steps, REFERENCES | {"_$x": 1.0})
    assert matplotlib.image.imread(tmp_path / "loss.png").shape[:2] == (900, 1350)


@pytest.mark.parametrize(
    ("steps", "inches"),
    [
        pytest.param(run_with_experts(40, layers=2, experts=8), 5.1, id="2x8"),
        pytest.param(run_with_experts(3, layers=10, experts=20), 7.0, id="10x20"),
        pytest.param(run_with_experts(3, layers=48, experts=128), 9.5, id="48x128"),
        pytest.param(run_with_experts(1, layers=1, experts=1), 5.1, id="one expert"),
        pytest.param(
            [
                replace(step, routing=replace(step.routing, entropy=math.nan, max_load=math.inf))
                for step in run_with_experts(2)
            ],
            5.1,
            id="not finite",
        ),
    ],
)
def test_expert_plot_height_follows_the_number_of_layers(tmp_path, steps, inches):
    """Oracle: matplotlib reads 9 inches by the expected height at 150 dpi, without warnings."""
    counts = steps[-1].routing.counts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_experts(tmp_path / "experts.png", "a $title$ " * 20, [step.without_counts() for step in steps], counts)
    assert matplotlib.image.imread(tmp_path / "experts.png").shape[:2] == (round(inches * 150), 1350)


def test_failed_run_keeps_its_steps(tmp_path, capsys):
    """Oracle: valid lines for every step recorded, the last one printed, and the error passed on."""
    with pytest.raises(ZeroDivisionError), make_recorder(tmp_path, Console.plain) as recorder:
        for metrics in run_of(3):
            recorder.step(metrics)
        raise ZeroDivisionError
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert not (tmp_path / "run" / "summary.md").exists()
    assert capsys.readouterr().out.splitlines()[-1].startswith("step  3/20")


def test_non_finite_loss_is_bold_in_the_summary(tmp_path):
    """Oracle: the page's own row."""
    with make_recorder(tmp_path) as recorder:
        recorder.step(replace(STEP, loss=math.nan))
        recorder.finish("the loss is not finite")
    assert "| last loss | **nan** |" in (tmp_path / "run" / "summary.md").read_text()


def test_removed_folder_becomes_a_config_error(tmp_path):
    """Oracle: the expected message, with the system's error text."""
    import shutil

    with make_recorder(tmp_path) as recorder:
        recorder.step(STEP)
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(
            ConfigError, match=r"^metrics\.run_dir=.*run cannot be written \(No such file or directory\)"
        ):
            recorder.finish("done")
