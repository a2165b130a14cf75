"""Parity over layouts: equal bits in real runs, and detection of bugs that are made on purpose."""

import io
import math

import numpy as np
import pytest
import torch
from rich.console import Console

from scripts import parity, parity_rows
from scripts.parity_bugs import BUGS, inject_all
from scripts.parity_compare import PARAMETERS, Measure, Trajectory, compare, kind_of
from scripts.parity_layouts import LAYOUT_MODES, LAYOUTS, breach_of, compare_layouts, rows_of

FEW = {
    "gpt2_debug": ["ddp", "cp 2 gathered"],
    "qwen3_moe_debug": ["fsdp1", "cp 4, ep 2", "hsdp, cp 2, ep 2"],
    "llama4_debug": ["cp 2 ulysses", "ep 4", "pp 2, cp 2, ep 2"],
    "llama_debug": ["pp 4 1f1b", "pp 2, tp 2"],
}
"""Preset → layouts that it is trained in on four ranks; together with ``tests/parallel`` all of them."""


@pytest.mark.extended
@pytest.mark.parametrize("model", FEW)
@pytest.mark.parametrize(("mode", "dtype"), [("layout", "float32"), ("layout", "bfloat16"), ("default", "float32")])
def test_layouts_have_the_promised_bits(model: str, mode: str, dtype: str) -> None:
    """Oracle: one ordinary process with the global batch, over two steps."""
    console = Console(file=io.StringIO(), width=200)
    args = parity.parse_arguments(["--world-sizes", "4", "--steps", "2", "--seq-len", "32", "--layouts", *FEW[model]])
    assert compare_layouts(args, model, dtype, mode, console) == []
    table = console.file.getvalue()
    rows = [[cell.strip() for cell in line.split("│")[2:-1]] for line in table.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == FEW[model]
    if mode == "layout":
        assert all(cell == "0" for row in rows for cell in row[1:-1])


NAMED = {
    "averaged experts": "experts.gate_up_proj has 2 times the norm",
    "dropped partial sum": "attn.k_proj.weight",
    "labels shifted after the cut": "step 1: loss",
    "replicas counted in the norm": "step 1: gradient norm",
    "wrong divide factor": "has 0.5 times the norm",
    "missing router gradient": "router.weight is missing",
    "positions from zero on each rank": "step 1: loss",
    "auxiliary loss of the local batch": "router.weight",
    "padding counted as valid": "step 1: loss",
    "ring accumulates in bf16": "attn.v_proj.weight",
    "division after the last stage's backward": "layers.0",
    "last micro-batch alone": "step 1: gradient of",
    "norm of one stage": "step 1: gradient norm",
    "activations of another micro-batch": "step 1: loss",
    "bias of rows on each rank": "bias has 2 times the norm",
    "gradient of row biases divided": "bias has 0.5 times the norm",
    "average of the ranks' means": "step 1: gradient of",
    "norm of the rank's own shard": "step 1: gradient norm",
}
"""Bug → the part of the training that it changes, as the table names it."""
SHORT = {"labels shifted after the cut", "wrong divide factor", "norm of the rank's own shard"}


def test_there_are_21_bugs() -> None:
    """Oracle: the number on the page."""
    assert len(BUGS) == 21 and set(NAMED) <= set(BUGS)


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in SHORT else pytest.mark.extended) for bug in BUGS])
def test_injected_bug_is_caught_and_named_at_step_1(bug: str) -> None:
    """Oracle: the part of the training that the bug changes."""
    console = Console(file=io.StringIO(), width=400)
    assert inject_all([bug], 1, 32, console) == []
    (row,) = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert bug in row and NAMED.get(bug, "") in row


def trajectory(loss: float = 1.0, gradient: float = 1.0) -> Trajectory:
    grads = {"layers.0.mlp.up_proj.weight": np.array([gradient, 2.0], dtype=np.float32)}
    return Trajectory([2.0, loss], [1.0, 1.0], {1: grads, 2: grads}, dict(grads))


@pytest.mark.parametrize(
    ("row", "breaches"),
    [
        (trajectory(), []),
        (trajectory(loss=1.0 + 1e-7), ["layout"]),
        (trajectory(loss=1.0 + 1e-5), ["layout", "default"]),
        (trajectory(loss=math.nan), ["layout", "default"]),
        (trajectory(gradient=1.0 + 1e-6), ["layout"]),
        (trajectory(gradient=1.01), ["layout", "default"]),
        (trajectory(gradient=math.nan), ["layout", "default"]),
    ],
)
def test_breaches_of_either_mode_are_detected(row: Trajectory, breaches: list[str]) -> None:
    """Oracle: differences made by hand."""
    measure = Measure(trajectory())
    for step, named in [*row.gradients.items(), (PARAMETERS, row.parameters)]:
        measure.add(step, ((name, torch.from_numpy(values)) for name, values in named.items()))
    compared = compare(row.losses, row.norms, measure.total(), trajectory())
    assert [mode for mode in ("layout", "default") if breach_of(compared, mode)] == breaches


def test_parameters_have_a_kind_and_layouts_fit_where_their_axes_divide() -> None:
    """Oracle: names by hand; a dense model splits no experts, and four heads are no eight."""
    names = ["embed_tokens.weight", "layers.0.attn.q_norm.weight", "layers.1.attn.o_proj.weight", "lm_head.weight"]
    names += ["layers.0.mlp.router.weight", "layers.0.mlp.experts.down_proj", "layers.0.mlp.down_proj.weight"]
    kinds = ["embedding", "norms", "attention", "head", "router", "experts", "mlp"]
    assert [kind_of(name) for name in names] == kinds
    dense, experts = "llama_debug", "qwen3_moe_debug"
    assert not LAYOUTS["ep 2"].fits(4, dense, "layout") and LAYOUTS["ep 2"].fits(4, experts, "layout")
    assert LAYOUTS["ep 8"].fits(8, experts, "layout") and not LAYOUTS["ep 8"].fits(8, "llama4_debug", "layout")
    assert not LAYOUTS["cp 2, ep 4"].fits(2, experts, "layout") and not LAYOUTS["hsdp"].fits(2, experts, "layout")
    assert not LAYOUTS["cp 2 ring"].fits(2, "qwen3_debug", "default")  # whose documents are masked
    assert not LAYOUTS["cp 2 ring"].fits(2, dense, "layout") and LAYOUTS["cp 2 ring"].fits(2, dense, "default")


def test_pairs_leave_out_numbers_of_ranks_but_no_layout_of_a_model_mode_and_dtype() -> None:
    """Oracle: the rows of all layouts; two models have every number of ranks in layout mode and float32."""
    tables = [("layout", "float32"), ("layout", "bfloat16"), ("default", "float32")]
    assert {mode for mode, _ in tables} == set(LAYOUT_MODES)
    every, pairs = (
        {
            (model, dtype, mode, name, world_size)
            for model in parity_rows.PRESETS
            for mode, dtype in tables
            for world_size in (2, 4, 8)
            for name in rows_of(args, model, dtype, mode, world_size)
        }
        for args in (
            parity.parse_arguments(["--world-sizes", "2", "4", "8", "--layouts", word]) for word in ("all", "pairs")
        )
    )
    assert pairs < every and {row[:-1] for row in pairs} == {row[:-1] for row in every}
    full = {row for row in every if row[0] in ("llama_debug", "qwen3_moe_debug") and row[1:3] == ("float32", "layout")}
    assert full <= pairs
    assert len(pairs - full) == len({row[:-1] for row in pairs - full})
