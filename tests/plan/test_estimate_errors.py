"""The script's comparison of the closed form with traces."""

import pytest

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware
from fsdptoys.metrics.prediction import Prediction
from scripts import estimate_errors
from scripts.estimate_errors import Error, Searched, render
from tests.plan.formula_search import MODEL, find
from tests.plan.test_search import SMALL


@pytest.mark.extended
@pytest.mark.usefixtures("unmeasured")
def test_sgd_on_one_rank_agrees_with_its_trace() -> None:
    """Oracle: the trace of all 30 layers: SGD's decayed gradients are temporaries of the parameters' size."""
    (error,) = estimate_errors.estimate_errors(jobs=1, count=1)
    assert "optim=sgd" in error.name and error.worst < 0.1


@pytest.mark.parametrize(("slowdown", "right"), [(1.0, True), (1.005, True), (1.5, False)])
def test_search_is_wrong_if_another_candidate_is_faster_by_more_than_a_tie(slowdown: float, right: bool) -> None:
    """Oracle: traces that equal the formula, except that the three chosen combinations take longer."""
    result = find(MODEL, 8, 40, SMALL)
    chosen = {id(one.config) for one in result.leading(3)}

    def trace(runs: list[tuple[Config, Hardware, int]]) -> list[object]:
        predictions: dict[int, Prediction] = {
            id(one.config): one.prediction for one in [*result.candidates, *result.over]
        }
        made = []
        for config, _, _ in runs:
            found = predictions[id(config)]
            time = found.time.__class__(found.time.step_seconds * (slowdown if id(config) in chosen else 1), 0, 0, 0, 0)
            made.append((found.memory, time))
        return made

    judged = estimate_errors._judge("search", result, trace)  # type: ignore[arg-type]
    assert judged.right is right and judged.candidates == len(result.candidates) + len(result.over)


def test_page_counts_runs_over_the_bar_and_wrong_searches() -> None:
    """Oracle: the two sentences, and the bars: 10%, and 95 of 100 searches."""
    searches = [Searched("good", 9, 1, 0.0)] * 19 + [Searched("bad", 9, 4, 0.2)]
    lines, met = render([Error("run", 0.01, -0.09, 0.0)], searches)
    page = "\n".join(lines)
    assert met and "0 of 1 runs over 10%" in page and "In 19 of 20 the best" in page and "20.0% slower: bad" in page
    assert not render([Error("run", 0.01, -0.11, 0.0)], [])[1] and not render([], searches[-2:])[1]
