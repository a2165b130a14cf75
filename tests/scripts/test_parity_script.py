"""The parity script: no breaches in real runs, and detection of artificial ones."""

import argparse
import io
import math

import pytest
from rich.console import Console

from scripts import parity
from scripts.equality import parity_rows
from tests.harness.levels import extended


def arguments(*argv: str) -> argparse.Namespace:
    return parity.parse_arguments(
        ["--world-sizes", "2", "--steps", "2", "--seq-len", "16", *argv]
    )


MODES = EXACT, USUAL, ROUNDED = tuple(parity_rows.MODES)
NATIVES = ["ddp", "fsdp1", "fsdp2"]
TOYS = ["ddp", *(name for name in parity_rows.STRATEGIES if name.startswith("toy-"))]


@pytest.mark.parametrize(
    ("model", "strategies", "mode"),
    [
        ("llama_debug", ["fsdp1", "fsdp2"], EXACT),
        ("gpt2_debug", ["ddp", "toy-fsdp"], USUAL),
        *(
            extended(model, strategies, mode)
            for model, strategies in {
                "llama_debug": NATIVES,
                "qwen3_moe_debug": NATIVES,
                "gpt2_debug": TOYS,
            }.items()
            for mode in MODES
        ),
    ],
)
def test_script_prints_a_row_per_strategy_without_breaches(
    model: str, strategies: list[str], mode: str
) -> None:
    """Oracle: the promise, in two steps on two ranks."""
    console = Console(file=io.StringIO(), width=140)
    args = arguments("--strategies", *strategies)
    assert parity.compare(args, model, mode, "float32", console) == []
    table = console.file.getvalue()
    rows = [
        line.split("│")[2].strip()
        for line in table.splitlines()
        if line.startswith("│")
    ]
    assert rows == ["single", *strategies]


def outcome(loss: float, parameters: str = "same") -> parity.Outcome:
    return parity.Outcome([1.0, loss], [1.0, 1.0], {"weight": parameters})


@pytest.mark.parametrize(
    ("mode", "outcomes", "breaches"),
    [
        (EXACT, {"fsdp1": outcome(1.0), "fsdp2": outcome(1.0)}, 0),
        (EXACT, {"fsdp1": outcome(1.0, "other"), "fsdp2": outcome(1.0)}, 1),
        (EXACT, {"fsdp1": outcome(1.0), "fsdp2": outcome(1.0 + 1e-9)}, 1),
        (ROUNDED, {"fsdp1": outcome(1.0 + 1e-7), "fsdp2": outcome(1.0)}, 0),
        (ROUNDED, {"fsdp1": outcome(1.0 + 1e-5), "fsdp2": outcome(1.0)}, 1),
        (ROUNDED, {"toy-zero1": outcome(1.0 + 1e-7), "ddp": outcome(1.0)}, 0),
        (ROUNDED, {"toy-ddp": outcome(1.0 + 1e-7), "ddp": outcome(1.0)}, 1),
        (USUAL, {"fsdp1": outcome(1.0 + 1e-7), "fsdp2": outcome(1.0 + 1e-7)}, 0),
        (USUAL, {"fsdp1": outcome(1.0 + 1e-5), "fsdp2": outcome(1.0 + 1e-5)}, 2),
        (USUAL, {"fsdp1": outcome(1.0 + 1e-7), "fsdp2": outcome(1.0)}, 1),
        (USUAL, {"ddp": outcome(math.nan)}, 1),
        (
            USUAL,
            {"toy-fsdp": outcome(1.0 + 1e-7), "fsdp2": outcome(1.0 + 1e-7, "other")},
            1,
        ),
        (USUAL, {"toy-ddp": outcome(1.0), "ddp": outcome(1.0 + 1e-7)}, 1),
        (USUAL, {"toy-zero3": outcome(1.0 + 1e-7), "ddp": outcome(1.0)}, 1),
    ],
)
def test_breaches_of_parity_are_detected(
    mode: str, outcomes: dict[str, parity.Outcome], breaches: int
) -> None:
    """Oracle: breaches made by hand, on two ranks in float32, with one micro-batch."""
    messages = [
        parity.judge(name, outcomes, outcome(1.0), 2, "float32", mode, 1).breach
        for name in outcomes
    ]
    assert len([message for message in messages if message]) == breaches
