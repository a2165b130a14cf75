"""Predictions of models of transformers and of own modules, which are traced with all contents."""

from typing import Any

import pytest

from fsdptoys.config.schema import Config
from fsdptoys.device import Device
from fsdptoys.device.profile import load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import FSDP2Config
from fsdptoys.plan.predict import predict
from fsdptoys.plan.search.search import search
from fsdptoys.train.trainer import Trainer
from tests.harness.foreign_runs import foreign_config, tiny_model
from tests.harness.full_trace import predict_in_full
from tests.harness.levels import by_level
from tests.harness.own_module import OwnConfig
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.oracle

MODELS: dict[str, ModelConfig] = {
    "llama": tiny_model("llama", num_hidden_layers=3),
    "qwen3_moe": tiny_model("qwen3_moe", num_hidden_layers=3),
    "gpt_oss": tiny_model("gpt_oss"),
    "gemma2": tiny_model("gemma2"),
    "own module": OwnConfig(),
}


def run_config(model: Any, ranks: int = 2) -> Config:
    return foreign_config(model, FSDP2Config(), ranks, seq_len=64, steps=2)


def count_peak(config: Config) -> int | None:
    """Peak bytes of a real run's two steps, on the first rank, which counts."""
    device = Device("cpu")
    Trainer(config, device).train()
    memory = device.memory()
    return None if memory is None else memory.peak_bytes


@pytest.mark.parametrize("name", by_level(MODELS, ("qwen3_moe", "own module")))
def test_planned_peak_is_close_to_that_of_a_real_run(name: str) -> None:
    """Oracle: PyTorch's records of its CPU allocator over two steps of a real run in float32.

    gloo's thread frees gathered units unseen, as in ``test_real_allocations``. The module's peak is
    0.4 MB, so that small tensors weigh more.
    """
    tolerance = 0.15 if name == "own module" else 0.1
    config = run_config(MODELS[name])
    planned = predict(config, load_hardware("cpu"), 2)
    measured = run_ranks(2, count_peak, run_config(MODELS[name]))[0]
    assert planned.method == "traced"
    assert planned.memory.peak_bytes == pytest.approx(measured, rel=tolerance)


@pytest.mark.extended
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_two_depths_give_the_numbers_of_a_full_trace(family: str) -> None:
    """Oracle: a trace of all 24 layers."""
    settings: dict[str, Any] = {"num_hidden_layers": 24}
    if family == "gemma3_text":
        settings |= {"layer_types": ["sliding_attention", "full_attention"] * 12}
    config = run_config(tiny_model(family, **settings), 4)
    hardware = load_hardware("h100")
    predicted: list[Prediction] = [
        predict(config, hardware, 4),
        predict_in_full(config, hardware, 4),
    ]
    mine, full = predicted
    assert mine.memory.peak_bytes == pytest.approx(full.memory.peak_bytes, rel=0.05)
    assert mine.time.step_seconds == pytest.approx(full.time.step_seconds, rel=0.05)


def test_a_search_is_refused() -> None:
    """Oracle: the words of the sentence."""
    config = run_config(MODELS["llama"])
    hardware = load_hardware("h100")
    with pytest.raises(ConfigError, match="compare single settings"):
        search(config, [], hardware, 2, 1e9, lambda _: pytest.fail("predicted"))
