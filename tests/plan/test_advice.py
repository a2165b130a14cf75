"""Advice on single switches and the plot of a search, over a formula of a prediction."""

import math
from pathlib import Path

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.plan.search.advice import advise
from fsdptoys.plan.search.frontier_plot import check_picture, draw_frontier
from fsdptoys.plan.search.switches import vary
from tests.plan.formula_search import HARDWARE, MODEL, compose, find_once, formula


def advised(config: Config, gib: float, world_size: int = 8) -> list[tuple[str, bool]]:
    def predict(one: Config) -> Prediction:
        return formula(one, HARDWARE, world_size)

    prediction = predict(vary(config, {}))
    return [(" ".join(advice.words), advice.fits) for advice in advise(config, predict, prediction, gib * GIB)]


def test_advice_makes_a_run_fit_or_faster_when_composed() -> None:
    """Oracle: each piece of advice, typed, composed and predicted from scratch."""
    for words, gib in (([], 16.0), (["memory.gradient_checkpointing=full", "train.batch_size=2"], 80.0)):
        base = compose([*MODEL, *words])
        before = formula(base, HARDWARE, 8)
        advice = advised(base, gib)
        assert advice and all(fits for _, fits in advice)
        speeds = []
        for text, _ in advice:
            after = formula(compose_config([*MODEL, *words, *text.split()]), HARDWARE, 8)
            assert after.memory.reserved_bytes <= gib * GIB
            speeds.append(after.tokens_per_second)
        assert speeds == sorted(speeds, reverse=True)
        if before.memory.reserved_bytes <= gib * GIB:
            assert speeds[-1] >= 1.02 * before.tokens_per_second


def test_advice_falls_back_to_pairs_and_then_to_the_largest_savings() -> None:
    """Oracle: where one change is not enough, two are advised; where two are not, that they do not fit."""
    base = compose([*MODEL, "train.batch_size=8"])
    pairs = advised(base, 14)
    assert pairs and all(fits for _, fits in pairs) and all(len(text.split()) >= 2 for text, _ in pairs)
    hopeless = advised(base, 1.5)
    assert hopeless and not any(fits for _, fits in hopeless)


def test_invalid_plot_paths_are_refused(tmp_path: Path) -> None:
    """Oracle: the exact messages."""
    check_picture(tmp_path / "plan.png")
    (tmp_path / "folder.png").mkdir()
    for path, sentence in (
        (tmp_path / "plan.pdf", f"--png {tmp_path}/plan.pdf must end in .png; write --png plan.png"),
        (tmp_path / "folder.png", f"--png {tmp_path}/folder.png is a folder; write --png plan.png"),
        (
            tmp_path / "none" / "plan.png",
            f"--png {tmp_path}/none/plan.png is in {tmp_path}/none, which is not a folder; write --png plan.png",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            check_picture(path)
        assert str(caught.value) == sentence


@pytest.mark.usefixtures("unmeasured")
def test_frontier_plot_has_the_documented_size(tmp_path: Path) -> None:
    """Oracle: a PNG of the requested size; its content is not compared."""
    path = tmp_path / "frontier.png"
    draw_frontier(path, "llama2_7b on 64 ranks of an imagined device", find_once(64, 40))
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG") and int.from_bytes(head[16:20], "big") == 1350
    assert math.isclose(int.from_bytes(head[20:24], "big"), 840, abs_tol=2)
