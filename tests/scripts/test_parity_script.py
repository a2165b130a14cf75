"""The parity script: no breaches in real runs, and detection of artificial ones."""

import argparse
import io
import math
from collections.abc import Callable

import pytest
from rich.console import Console

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import SCHEMAS
from fsdptoys.errors import ConfigError
from fsdptoys.models import MODELS
from scripts import parity, parity_rows


def arguments(*words: str) -> argparse.Namespace:
    return parity.parse_arguments(["--world-sizes", "2", "--steps", "2", "--seq-len", "16", *words])


MODES = EXACT, USUAL, ROUNDED = tuple(parity_rows.MODES)
NATIVES = ["ddp", "fsdp1", "fsdp2"]
TOYS = ["ddp", *(name for name in parity_rows.STRATEGIES if name.startswith("toy-"))]


@pytest.mark.parametrize(
    ("model", "strategies", "mode"),
    [
        ("llama_debug", ["fsdp1", "fsdp2"], EXACT),
        ("gpt2_debug", ["ddp", "toy-fsdp"], USUAL),
        *(
            pytest.param(model, strategies, mode, marks=pytest.mark.extended)
            for model, strategies in {"llama_debug": NATIVES, "qwen3_moe_debug": NATIVES, "gpt2_debug": TOYS}.items()
            for mode in MODES
        ),
    ],
)
def test_script_prints_a_row_per_strategy_without_breaches(model: str, strategies: list[str], mode: str) -> None:
    """Oracle: the promise, in two steps on two ranks."""
    console = Console(file=io.StringIO(), width=140)
    args = arguments("--strategies", *strategies)
    assert parity.compare(args, model, mode, "float32", console) == []
    table = console.file.getvalue()
    rows = [line.split("│")[2].strip() for line in table.splitlines() if line.startswith("│")]
    assert rows == ["single", *strategies]


def test_every_toy_has_a_row_and_a_native_counterpart() -> None:
    """Oracle: the strategies that the command line knows, without those that share sequences or split experts."""
    toys = {name.replace("_", "-") for name in SCHEMAS["parallel"] if name.startswith("toy_")} - {"toy-cp", "toy-ep"}
    assert toys == set(TOYS[1:]) == {*parity_rows.NATIVE, *parity_rows.REDUCES_OFTENER}


def test_default_models_cover_every_family() -> None:
    """Oracle: the families, and the presets there are."""
    models = parity.parse_arguments([]).models
    assert [compose_config([f"model={model}"]).model.family for model in models] == list(MODELS)


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
        (USUAL, {"toy-fsdp": outcome(1.0 + 1e-7), "fsdp2": outcome(1.0 + 1e-7)}, 0),
        (USUAL, {"toy-fsdp": outcome(1.0 + 1e-7), "fsdp2": outcome(1.0 + 1e-7, "other")}, 1),
        (USUAL, {"toy-ddp": outcome(1.0), "ddp": outcome(1.0 + 1e-7)}, 1),
        (USUAL, {"toy-zero3": outcome(1.0 + 1e-7), "ddp": outcome(1.0 + 1e-7)}, 0),
        (USUAL, {"toy-zero3": outcome(1.0 + 1e-7), "ddp": outcome(1.0)}, 1),
    ],
)
def test_breaches_of_parity_are_detected(mode: str, outcomes: dict[str, parity.Outcome], breaches: int) -> None:
    """Oracle: breaches made by hand, on two ranks in float32, with one micro-batch."""
    found = [parity.judge(name, outcomes, outcome(1.0), 2, "float32", mode, 1).breach for name in outcomes]
    assert len([breach for breach in found if breach]) == breaches


def test_bitwise_parity_requires_equally_frequent_reductions() -> None:
    """Oracle: a difference made by hand, which is a breach with one micro-batch."""
    outcomes = {"toy-zero2": outcome(1.0 + 1e-7), "ddp": outcome(1.0)}
    verdicts = [parity.judge("toy-zero2", outcomes, outcome(1.0), 2, "float32", USUAL, count) for count in (1, 2)]
    assert [verdict.breach is None for verdict in verdicts] == [False, True]


def test_float32_only_strategies_refuse_bfloat16() -> None:
    """Oracle: the expected message that refuses it."""
    for name in parity_rows.FLOAT32_ONLY:
        words = ["model=gpt2_debug", *parity_rows.STRATEGIES[name], "parallel.param_dtype=bfloat16"]
        with pytest.raises(ConfigError, match=r"parallel\.param_dtype=bfloat16 is not an option"):
            parity.compose_row(words, 2, "cpu")


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (lambda: parity.check_world_sizes([2, 3], "cpu"), "--world-sizes 3 must be a power of two"),
        (lambda: parity.check_world_sizes([1], "npu"), "--world-sizes 1 needs as many npu devices"),
        (lambda: parity.check_device("cpu", True), "--against-cpu has nothing to compare with --device cpu; leave it"),
        (lambda: parity.check_device("npu", False), "launch.device=npu (needs torch_npu|finds no device)"),
    ],
    ids=["power", "devices", "itself", "missing"],
)
def test_unsupported_world_sizes_and_devices_are_refused(check: Callable[[], object], sentence: str) -> None:
    """Oracle: the expected message."""
    with pytest.raises(ConfigError, match=sentence):
        check()


def test_default_modes_follow_the_dtypes_of_the_devices_collectives() -> None:
    """Oracle: the expected message that refuses the deterministic mode without float64."""
    assert parity.parse_arguments(["--device", "npu"]).modes == [ROUNDED]
    assert parity.parse_arguments(["--device", "cuda"]).modes == [EXACT, USUAL]
    words = {mode: [*parity.overrides(arguments(), "gpt2_debug", mode, "float32"), "parallel=fsdp2"] for mode in MODES}
    with pytest.raises(ConfigError, match=r"reduce_dtype=float64 .* cannot run on npu"):
        parity.compose_row(words[EXACT], 2, "npu")
    sums = {mode: parity.compose_row(words[mode], 2, "npu").train.sum_dtype.value for mode in (USUAL, ROUNDED)}
    assert sums == {USUAL: "float32", ROUNDED: "float32"}
    assert parity.compose_row(words[ROUNDED], 2, "cpu").train.sum_dtype.value == "float32"
