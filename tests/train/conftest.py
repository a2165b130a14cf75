"""Fixtures of the tests of training runs."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def without_pictures() -> Iterator[None]:
    """Skip the plots, which take most of the time of such small runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdptoys.metrics.figures.draw_loss", lambda *_: None)
        patch.setattr("fsdptoys.metrics.figures.draw_experts", lambda *_: None)
        yield
