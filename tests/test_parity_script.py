"""The parity script keeps its word, and can fail."""

import argparse
import io
import math

import pytest
from rich.console import Console

from fsdptoys.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.models import FAMILIES
from scripts import parity


def arguments(*words: str) -> argparse.Namespace:
    return parity.parse_arguments(["--world-sizes", "2", "--steps", "2", "--seq-len", "16", *words])


@pytest.mark.parametrize("model", ["llama_debug", "qwen3_moe_debug"])
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "default"])
def test_script_prints_a_row_for_each_strategy_and_finds_no_breach(deterministic: bool, model: str) -> None:
    """Oracle: the promise, in two steps on two ranks."""
    console = Console(file=io.StringIO(), width=140)
    args = arguments("--strategies", "ddp", "fsdp1", "fsdp2")
    assert parity.compare(args, model, deterministic, "float32", console) == []
    table = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split("│")[2].strip() for line in table.splitlines() if line.startswith("│")] == [
        *("single", "ddp", "fsdp1", "fsdp2"),
    ]


def test_a_small_model_of_every_family_is_compared() -> None:
    """Oracle: the families, and the presets there are."""
    models = parity.parse_arguments([]).models
    assert [compose_config([f"model={model}"]).model.family for model in models] == list(FAMILIES)


def outcome(loss: float, parameters: str = "same") -> parity.Outcome:
    return parity.Outcome([1.0, loss], [1.0, 1.0], {"weight": parameters})


@pytest.mark.parametrize(
    ("deterministic", "outcomes", "breaches"),
    [
        (True, {"fsdp1": outcome(1.0), "fsdp2": outcome(1.0)}, 0),
        (True, {"fsdp1": outcome(1.0, "other"), "fsdp2": outcome(1.0)}, 1),
        (True, {"fsdp1": outcome(1.0), "fsdp2": outcome(1.0 + 1e-9)}, 1),
        (False, {"fsdp1": outcome(1.0 + 1e-7), "fsdp2": outcome(1.0 + 1e-7)}, 0),
        (False, {"fsdp1": outcome(1.0 + 1e-5), "fsdp2": outcome(1.0 + 1e-5)}, 2),
        (False, {"fsdp1": outcome(1.0 + 1e-7), "fsdp2": outcome(1.0)}, 1),
        (False, {"ddp": outcome(math.nan)}, 1),
        (False, {"toy-fsdp": outcome(1.0 + 1e-7), "fsdp2": outcome(1.0 + 1e-7)}, 0),
        (False, {"toy-fsdp": outcome(1.0 + 1e-7), "fsdp2": outcome(1.0 + 1e-7, "other")}, 1),
    ],
)
def test_verdicts_find_every_breach(deterministic: bool, outcomes: dict[str, parity.Outcome], breaches: int) -> None:
    """Oracle: breaches made by hand, on two ranks in float32."""
    found = [parity.judge(name, outcomes, outcome(1.0), 2, "float32", deterministic).breach for name in outcomes]
    assert len([breach for breach in found if breach]) == breaches


@pytest.mark.parametrize(
    ("world_sizes", "device", "sentence"),
    [
        ([2, 3], "cpu", "--world-sizes 3 must be a power of two"),
        ([1], "npu", "--world-sizes 1 needs as many npu devices"),
    ],
)
def test_ranks_without_a_promise_or_a_device_are_refused(world_sizes: list[int], device: str, sentence: str) -> None:
    """Oracle: the sentence."""
    with pytest.raises(ConfigError, match=sentence):
        parity.check_world_sizes(world_sizes, device)
