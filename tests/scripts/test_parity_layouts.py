"""Parity over layouts: equal bits in real runs, and detection of bugs that are made on purpose."""

import io

import pytest
from rich.console import Console

from scripts import parity
from scripts.equality.parity_bugs import BUGS, inject_all
from scripts.equality.parity_layouts import Training, compare_layouts
from tests.harness.levels import by_level

FEW = {
    "gpt2_debug": ["ddp", "cp 2 gathered"],
    "qwen3_moe_debug": ["fsdp1", "cp 4, ep 2", "hsdp, cp 2, ep 2"],
    "llama4_debug": ["cp 2 ulysses", "ep 4", "pp 2, cp 2, ep 2"],
    "llama_debug": ["pp 4 1f1b", "pp 2, tp 2"],
}
"""Preset → layouts that it is trained in on four ranks; together with ``tests/parallel`` all of
them."""


@pytest.mark.extended
@pytest.mark.parametrize("model", FEW)
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("layout", "float32"), ("layout", "bfloat16"), ("default", "float32")],
)
def test_layouts_have_the_promised_bits(model: str, mode: str, dtype: str) -> None:
    """Oracle: one ordinary process with the global batch, over two steps."""
    console = Console(file=io.StringIO(), width=200)
    args = parity.parse_arguments(
        [
            "--world-sizes",
            "4",
            "--steps",
            "2",
            "--seq-len",
            "32",
            "--layouts",
            *FEW[model],
        ]
    )
    training = Training(model, dtype, mode, args.steps, args.seq_len)
    assert compare_layouts(args, training, console) == []
    table = console.file.getvalue()
    rows = [
        [cell.strip() for cell in line.split("│")[2:-1]]
        for line in table.splitlines()
        if line.startswith("│")
    ]
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
SHORT = {
    "labels shifted after the cut",
    "wrong divide factor",
    "norm of the rank's own shard",
}


@pytest.mark.parametrize("bug", by_level(BUGS, SHORT))
def test_injected_bug_is_caught_and_named_at_step_1(bug: str) -> None:
    """Oracle: the part of the training that the bug changes."""
    console = Console(file=io.StringIO(), width=400)
    assert inject_all([bug], 1, 32, console) == []
    (row,) = [
        line for line in console.file.getvalue().splitlines() if line.startswith("│")
    ]
    assert bug in row and NAMED.get(bug, "") in row
