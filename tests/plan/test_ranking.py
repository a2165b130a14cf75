"""The frontier of candidates, and effects of the settings of the best."""

import dataclasses

import pytest

from fsdptoys.device import GIB
from fsdptoys.plan.search.effects import effects
from fsdptoys.plan.search.ranking import Candidate, frontier
from fsdptoys.plan.search.switches import read, vary
from fsdptoys.utils.text import value_text
from tests.plan.formula_search import (
    HARDWARE,
    MODEL,
    compose,
    find_once,
    formula,
)


def point(gib: float, speed: float) -> Candidate:
    config = compose(MODEL)
    prediction = formula(config, HARDWARE, 8)
    prediction = dataclasses.replace(
        prediction,
        tokens_per_step=int(1000 * speed),
        memory=dataclasses.replace(prediction.memory, reserved_bytes=int(gib * GIB)),
        time=dataclasses.replace(prediction.time, step_seconds=1000.0),
    )
    return Candidate((f"{gib}", f"{speed}"), config, prediction, 0)


def test_frontier_is_the_set_of_undominated_points() -> None:
    """Oracle: the definition, pair by pair, over points on a grid with many ties."""
    points = [point(1 + 7 * k % 11, 100 + 5 * k % 13) for k in range(60)]
    chosen = frontier(points)

    def beats(one: Candidate, other: Candidate) -> bool:
        a = (one.reserved_bytes, -one.tokens_per_second)
        b = (other.reserved_bytes, -other.tokens_per_second)
        return a[0] <= b[0] and a[1] <= b[1] and a != b

    unbeaten = {
        (one.reserved_bytes, one.tokens_per_second)
        for one in points
        if not any(beats(two, one) for two in points)
    }
    assert [(one.reserved_bytes, one.tokens_per_second) for one in chosen] == sorted(
        unbeaten
    )


@pytest.mark.usefixtures("unmeasured")
def test_effects_are_those_of_one_setting_of_the_best() -> None:
    """Oracle: the formula of the best combination with that setting's other value."""
    result = find_once(8, 40)
    effects_of_best = effects(result.best, result.candidates, result.over)
    assert len(
        {effect.setting.partition("=")[0] for effect in effects_of_best}
    ) > 3 and not all(effect.fits for effect in effects_of_best)
    best = result.best.prediction
    for effect in effects_of_best:
        key = effect.setting.partition("=")[0]
        other = next(
            one
            for one in [*result.candidates, *result.over]
            if value_text(read(one.config, key)) == effect.instead_of
            and one.tokens_per_second
            == pytest.approx(best.tokens_per_second / (1 + effect.speedup))
        )
        config = vary(result.best.config, {key: read(other.config, key)})
        again = formula(config, HARDWARE, 8)
        assert (
            again.memory.reserved_bytes - best.memory.reserved_bytes
            == effect.saved_bytes
        )
        assert best.time.step_seconds - again.time.step_seconds == pytest.approx(
            effect.added_seconds
        )
