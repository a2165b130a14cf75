"""The recorder: from steps to pictures and pages."""

import json
import math
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.metrics import Console, RunRecorder, StepMetrics
from fsdptoys.metrics.config import RUN_FILES
from fsdptoys.metrics.definitions import LAYOUT_DEFINITION
from fsdptoys.metrics.figures import draw_experts, draw_loss
from fsdptoys.metrics.layout import Layout, RankBytes, Unit
from fsdptoys.metrics.recorder import closing_lines
from fsdptoys.metrics.results import read_result, summarize
from fsdptoys.metrics.summary import fence
from tests.harness.recording import GPU_STEP, ROUTING, STEP, open_recorder

REFERENCES = {"uniform": math.log(256), "unigram": 3.0}
TREE = {
    "model": {"dim": 64, "norm": {"eps": 1e-5}},
    "train": {"sample_prompt": "a | `b`\n", "seed": None},
}
PLAIN_FILES = [
    "config.yaml",
    "environment.json",
    "loss.png",
    "metrics.jsonl",
    "result.json",
    "summary.md",
]


def run_of(count: int, step: StepMetrics = STEP) -> list[StepMetrics]:
    """Steps with a loss that falls from 5.5; the first two are slow."""
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


def run_with_experts(
    count: int, layers: int = 2, experts: int = 4, **changes: float
) -> list[StepMetrics]:
    """The same, with one more token for the first expert in each step."""
    steps = []
    for metrics in run_of(count):
        counts = [[100 + metrics.step, *[100] * (experts - 1)]] * layers
        numbers = {
            "aux_loss": 2.0 + metrics.step / 100,
            "max_load": 1.5 + metrics.step / 100,
        } | changes
        steps.append(
            replace(metrics, routing=replace(ROUTING, counts=counts, **numbers))
        )
    return steps


def recorder_of(folder: Path, **options: Any) -> RunRecorder:
    return open_recorder(
        run_dir=folder / "run", tree=TREE, steps=20, references=REFERENCES, **options
    )


def write_run(
    folder: Path,
    steps: list[StepMetrics],
    reason: str = "all done",
    defaults: Mapping[str, Any] = {},
    **ending: Any,
) -> str:
    """Record a run of these steps; return its summary."""
    with recorder_of(folder, defaults=defaults) as recorder:
        for metrics in steps:
            recorder.step(metrics)
        recorder.finish(reason, **ending)
    return (folder / "run" / "summary.md").read_text()


def test_run_writes_all_files_and_prints_its_results(tmp_path, capsys):
    """Oracle: the files, which the result lists, and the closing lines word for word."""
    with recorder_of(tmp_path, console=Console.plain) as recorder:
        for metrics in run_of(15):
            recorder.step(metrics)
        recorder.message("hello")
        recorder.finish("train.max_seconds=2 was reached", sample="def f():")
    run_dir = tmp_path / "run"
    assert recorder.run_dir == run_dir
    assert sorted(path.name for path in run_dir.iterdir()) == PLAIN_FILES
    assert (
        sorted(json.loads((run_dir / "result.json").read_text())["files"])
        == PLAIN_FILES
    )
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 15
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny"
    assert lines[1].startswith("2 ranks on ") and lines[1].endswith(
        f"20 steps into {run_dir}"
    )
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
    """Oracle: the lines, with aligned texts, after the two of the title; the summary defines
    them."""
    live = dict.fromkeys(
        ("parameters", "gradients", "optimizer states"), RankBytes(8192, 0)
    )
    root = Unit("root", 4096, 16384)
    layout = Layout(4096, 2048, 1, root, root, {"shard": 2}, "all", live)
    with recorder_of(tmp_path, console=Console.plain, layout=layout) as recorder:
        printed = capsys.readouterr().out.splitlines()
        recorder.finish("done")
    assert LAYOUT_DEFINITION in (tmp_path / "run" / "summary.md").read_text()
    assert LAYOUT_DEFINITION not in write_run(tmp_path / "without", run_of(3))
    assert printed[2:] == [
        "parameters      4,096, of which a rank holds 2,048",
        "units           1; largest root (4,096 parameters, 16.00 KiB gathered), "
        "smallest root (4,096 parameters, 16.00 KiB gathered)",
        "mesh            shard=2: all split over 2 ranks",
        "bytes per rank  parameters 8.00 KiB, gradients 8.00 KiB, optimizer states 8.00 KiB",
    ]


def test_stall_fraction_excludes_the_warmup(tmp_path):
    """Oracle: 15 ms of 300 and 60 ms of 400 are 75 of 700; the warm-up, which waits 8 s of 9, does
    not count."""
    waits = [8.0, 8.0, 0.015, 0.06]
    steps = [
        replace(metrics, data_wait_seconds=wait)
        for metrics, wait in zip(run_of(4), waits, strict=True)
    ]
    assert summarize(steps, warmup_steps=2).data_stall == pytest.approx(0.075 / 0.7)
    assert summarize(steps[:2], warmup_steps=2).data_stall is None
    assert summarize(run_of(4), warmup_steps=2).data_stall is None
    assert "| waiting for data | 10.71% of the step time |" in write_run(
        tmp_path, steps
    )
    result = read_result(tmp_path / "run")
    assert (
        result is not None
        and "\n".join(closing_lines(result)).count("10.71% of the time") == 1
    )
    result = replace(result, steps=replace(result.steps, data_stall=None))
    assert "waiting" not in "\n".join(closing_lines(result))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_run_shorter_than_its_warmup_reports_no_medians(tmp_path, count):
    """Oracle: the summary's text, and all files."""
    page = write_run(tmp_path, run_of(count), "stopped")
    assert "| step time | not measured: every step was a warm-up step |" in page
    assert f"| steps | {count} of 20; stopped |" in page
    assert ("| last loss | no steps |" in page) == (count == 0)
    assert (tmp_path / "run" / "loss.png").stat().st_size > 0
    result = read_result(tmp_path / "run")
    assert result is not None and "median" not in "\n".join(closing_lines(result))


def test_summary_has_the_results(tmp_path):
    """Oracle: rows of the page, worked out by hand."""
    defaults = {"train.seed": None, "train.sample_prompt": "", "model.dim": 64.5}
    steps = run_of(15, GPU_STEP)
    page = write_run(
        tmp_path, steps, defaults=defaults, sample="x\n````\n# not a heading"
    )
    for row in (
        "# tiny",
        "| steps | 15 of 20; all done |",
        "| first loss | 5.4900 nats |",
        "| mean loss of the last 10 steps | 5.3950 nats |",
        "| held-out loss after step 10 | 5.0000 nats |",
        "| reference: uniform | 5.5452 nats |",
        "| step time | 900.00 ms (p10 420.00, p90 1,380.00) |",
        "| tokens/s, all ranks | 5,120 (p10 5,120, p90 5,120) |",
        "| TFLOP/s per rank | 0.100 (p10 0.100, p90 0.100) |",
        "| MFU | 40.0 % (p10 40.0, p90 40.0) |",
        "| peak device memory of rank 0 | 2.00 GiB |",
        "| largest resident set of rank 0 after a step | 512.00 MiB |",
        "| peak resident set of rank 0 | 768.00 MiB |",
        "| model | `dim=64` `norm.eps=1e-05` |",
        "| train | `sample_prompt=\"a \\| 'b'\\n\"` |",
        "`````text\nx\n````\n# not a heading\n`````",
    ):
        assert f"\n{row}\n" in f"\n{page}", row
    assert "exclude the first 2 steps" in page
    headings = re.findall("^## (.*)", page, re.MULTILINE)
    assert headings[0] == "Results" and headings[-1] == "Configuration"
    absent = ("expert", "rout", "balanc", "entropy,", "spike", "skipped")
    assert not [word for word in absent if word in page.lower()]


def test_summary_splits_the_counted_peak(tmp_path):
    """Oracle: the parts of the step with the highest peak, and the last values of the others."""
    low = replace(
        STEP, memory_allocated_gib=0.03, memory_peak_gib=0.25, memory_host_gib=0.5
    )
    low = replace(
        low,
        memory_parameters_gib=0.05,
        memory_gradients_gib=0.0,
        memory_optimizer_gib=0.1,
    )
    low = replace(low, memory_rest_gib=0.1)
    high = replace(low, memory_peak_gib=0.375, memory_rest_gib=0.225)
    page = write_run(tmp_path, [low, replace(high, step=2)])
    parts = (
        "parameters 51.20 MiB, gradients 0 bytes, optimizer states 102.40 MiB, "
        "the rest 230.40 MiB"
    )
    for row in (
        f"| peak device memory of rank 0 | 384.00 MiB ({parts}) |",
        "| device memory of rank 0 after the last step | 30.72 MiB |",
        "| offloaded by rank 0, in the host's place | 512.00 MiB |",
    ):
        assert row in page


@pytest.mark.parametrize(
    ("count", "logged_steps"), [(15, [1, 10, 15]), (20, [1, 10, 20]), (1, [1])]
)
def test_run_of_an_moe_model_writes_its_routing(tmp_path, count, logged_steps):
    """Oracle: two files more; the tokens given in the first, every tenth and the last step; rows
    worked out by hand."""
    page = write_run(tmp_path, run_with_experts(count))
    run_dir = tmp_path / "run"
    names = sorted([*PLAIN_FILES, "experts.png", "routing.jsonl"])
    assert sorted(path.name for path in run_dir.iterdir()) == names
    assert [
        json.loads(line)
        for line in (run_dir / "routing.jsonl").read_text().splitlines()
    ] == [
        {"step": step, "expert_tokens": [[100 + step, 100, 100, 100]] * 2}
        for step in logged_steps
    ]
    for row in (
        f"| load-balancing loss, last step | {2 + count / 100:.4f} |",
        "| router z-loss, last step | 3.5000 |",
        "| router entropy, last step | 0.9000 |",
        f"| busiest expert, last step | {1.5 + count / 100:.2f} times the mean |",
        "| idlest expert, last step | 0.25 times the mean |",
        "![load of each expert, and the balance over the steps](experts.png)",
        *(f"| `{name}` | " for name in names),
    ):
        assert f"\n{row}" in page, row
    assert set(names) <= set(RUN_FILES)
    assert (
        "Perfect balance gives K, the number of experts per token (`model.top_k`)"
        in page
    )


@pytest.mark.parametrize(
    ("step", "row"),
    [
        (replace(STEP, loss=math.nan), "| last loss | **nan** |"),
        (
            run_with_experts(1, z_loss=math.inf)[0],
            "| router z-loss, last step | **inf** |",
        ),
    ],
    ids=["loss", "router loss"],
)
def test_non_finite_number_is_bold_in_the_summary(tmp_path, step, row):
    """Oracle: the page's own row."""
    assert row in write_run(tmp_path, [step], "the loss is not finite")


@pytest.mark.parametrize(
    "sample", ["", "plain", "```", "a\n`````python\n```\n", "`" * 50]
)
def test_sample_cannot_close_its_code_block(sample):
    """Oracle: CommonMark: a block ends at a line of at least as many backticks as it began with."""
    first, *body, last = fence(sample).split("\n")
    marks = first.removesuffix("text")
    assert len(marks) >= 3 and set(marks) == {"`"} and last == marks
    assert not any(re.match(rf" {{0,3}}`{{{len(marks)},}}\s*$", line) for line in body)
    assert "\n".join(body) == sample


LOSS_RUNS = {
    "smoothed": (run_of(120), 6.0),
    "few": (run_of(8), 6.0),
    "one": (run_of(1), 6.0),
    "none": ([], 4.4),
    "not finite": (
        [replace(step, loss=math.nan, grad_norm=math.inf) for step in run_of(60)],
        4.4,
    ),
    "no gradient": ([replace(step, grad_norm=0.0) for step in run_of(5)], 6.0),
    "loss scale": (run_of(4, replace(STEP, loss_scale=2.0, skipped=True)), 7.3),
}
EXPERT_RUNS = {
    "2x8": (run_with_experts(40, layers=2, experts=8), 5.1),
    "10x20": (run_with_experts(3, layers=10, experts=20), 7.0),
    "48x128": (run_with_experts(3, layers=48, experts=128), 9.5),
    "one expert": (run_with_experts(1, layers=1, experts=1), 5.1),
    "not finite": (run_with_experts(2, entropy=math.nan, max_load=math.inf), 3.7),
}


@pytest.mark.parametrize(
    ("steps", "inches"),
    [*LOSS_RUNS.values(), *EXPERT_RUNS.values()],
    ids=[*LOSS_RUNS, *EXPERT_RUNS],
)
def test_height_of_a_plot_follows_its_panels(tmp_path, steps, inches):
    """Oracle: matplotlib reads 9 inches by the expected height at 150 dpi, without warnings."""
    path = tmp_path / "plot.png"
    title = "a $title$ " * 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if steps and steps[-1].routing is not None:
            plain = [step.without_counts() for step in steps]
            draw_experts(path, title, plain, steps[-1].routing.counts)
        else:
            draw_loss(path, title, steps, REFERENCES | {"_$x": 1.0})
    assert matplotlib.image.imread(path).shape[:2] == (round(inches * 150), 1350)


def test_failed_run_keeps_its_steps(tmp_path, capsys):
    """Oracle: valid lines for every step recorded, the last one printed, and the error passed
    on."""
    with (
        pytest.raises(ZeroDivisionError),
        recorder_of(tmp_path, console=Console.plain) as recorder,
    ):
        for metrics in run_of(3):
            recorder.step(metrics)
        raise ZeroDivisionError
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert not (tmp_path / "run" / "summary.md").exists()
    assert capsys.readouterr().out.splitlines()[-1].startswith("step  3/20")


def test_removed_folder_becomes_a_config_error(tmp_path):
    """Oracle: the expected message, with the system's error text."""
    message = r"^metrics\.run_dir=.*run cannot be written \(No such file or directory\)"
    with recorder_of(tmp_path) as recorder:
        recorder.step(STEP)
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(ConfigError, match=message):
            recorder.finish("done")


def test_medians_include_all_steps_without_a_warmup():
    """Oracle: thirteen steps of 0.3 to 1.5 s and two of 9 s: median 1.0."""
    times = summarize(run_of(15), warmup_steps=0).step_time_seconds
    assert times is not None and times.median == pytest.approx(1.0)


def test_results_follow_their_formulas():
    """Oracle: the formula of each, over fifteen steps with losses 5.49 to 5.35."""
    results = summarize(run_of(15, GPU_STEP), warmup_steps=2)
    assert (results.first_loss, results.last_loss) == (
        pytest.approx(5.49),
        pytest.approx(5.35),
    )
    assert results.mean_last_loss == pytest.approx(
        sum(5.5 - 0.01 * n for n in range(6, 16)) / 10
    )
    assert (results.eval_loss, results.eval_step) == (5.0, 10)
    assert (
        results.memory_peak_gib,
        results.resident_set_gib,
        results.resident_set_peak_gib,
    ) == (
        2.0,
        0.5,
        0.75,
    )
    old = run_of(3, replace(STEP, resident_set_peak_gib=None))
    assert summarize(old, warmup_steps=2).resident_set_peak_gib is None
    assert results.mfu is not None and results.mfu.median == pytest.approx(0.4)
