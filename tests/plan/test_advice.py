"""Advice on single switches, the plot of a search, and the script that compares estimates with full
traces."""

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.plan.search.advice import advise
from fsdptoys.plan.search.switches import vary
from scripts.planner import estimate_errors
from scripts.planner.estimate_errors import Error, Searched, render
from tests.plan.formula_search import HARDWARE, MODEL, compose, formula


def advised(config: Config, gib: float, world_size: int = 8) -> list[tuple[str, bool]]:
    def predict(one: Config) -> Prediction:
        return formula(one, HARDWARE, world_size)

    prediction = predict(vary(config, {}))
    return [
        (" ".join(advice.overrides), advice.fits)
        for advice in advise(config, predict, prediction, gib * GIB)
    ]


def test_advice_makes_a_run_fit_or_faster_when_composed() -> None:
    """Oracle: each piece of advice, typed, composed and predicted from scratch."""
    for overrides, gib in (
        ([], 16.0),
        (["memory.gradient_checkpointing=full", "train.batch_size=2"], 80.0),
    ):
        base = compose([*MODEL, *overrides])
        before = formula(base, HARDWARE, 8)
        advice = advised(base, gib)
        assert advice and all(fits for _, fits in advice)
        speeds = []
        for text, _ in advice:
            after = formula(
                compose_config([*MODEL, *overrides, *text.split()]), HARDWARE, 8
            )
            assert after.memory.reserved_bytes <= gib * GIB
            speeds.append(after.tokens_per_second)
        assert speeds == sorted(speeds, reverse=True)
        if before.memory.reserved_bytes <= gib * GIB:
            assert speeds[-1] >= 1.02 * before.tokens_per_second


@pytest.mark.parametrize(("gib", "offloads"), [(80.0, False), (1.5, True)])
def test_a_run_that_fits_is_not_offered_what_saves_memory_alone(
    gib: float, offloads: bool
) -> None:
    """Oracle: no predicted configuration offloads anything; some do where the run does not fit."""
    configs: list[Config] = []

    def predict(config: Config) -> Prediction:
        configs.append(config)
        return formula(config, HARDWARE, 8)

    base = compose([*MODEL, "memory.gradient_checkpointing=full"])
    advise(base, predict, formula(vary(base, {}), HARDWARE, 8), gib * GIB)
    assert (
        any(one.memory.cpu_offload or one.memory.optimizer_offload for one in configs)
        is offloads
    )


def test_advice_falls_back_to_pairs_and_then_to_the_largest_savings() -> None:
    """Oracle: where one change is not enough, two are advised; where two are not, that they do not
    fit."""
    base = compose([*MODEL, "train.batch_size=8"])
    pairs = advised(base, 14)
    assert (
        pairs
        and all(fits for _, fits in pairs)
        and all(len(text.split()) >= 2 for text, _ in pairs)
    )
    hopeless = advised(base, 1.5)
    assert hopeless and not any(fits for _, fits in hopeless)


@pytest.mark.extended
def test_sgd_on_one_rank_agrees_with_its_trace() -> None:
    """Oracle: the trace of all 30 layers: SGD's decayed gradients are temporaries of the
    parameters' size."""
    (error,) = estimate_errors.estimate_errors(jobs=1, count=1)
    assert "optim=sgd" in error.name and error.worst < 0.1


def test_page_counts_runs_over_the_bar_and_wrong_searches() -> None:
    """Oracle: the two sentences, and the bars: 10%, and 95 of 100 searches."""
    searches = [Searched("good", 9, 1, 0.0)] * 19 + [Searched("bad", 9, 4, 0.2)]
    lines, met = render([Error("run", 0.01, -0.09, 0.0)], searches)
    page = "\n".join(lines)
    assert (
        met
        and "0 of 1 runs over 10%" in page
        and "In 19 of 20 the best" in page
        and "20.0% slower: bad" in page
    )
    assert (
        not render([Error("run", 0.01, -0.11, 0.0)], [])[1]
        and not render([], searches[-2:])[1]
    )
