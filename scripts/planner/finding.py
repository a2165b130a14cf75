"""A prediction of the planner beside its published value."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A prediction and its published value."""

    row: str
    what: str
    published: float
    predicted: float
    bar: float
    relative: bool = True

    @property
    def error(self) -> float:
        """Relative error, or the difference in GiB."""
        difference = self.predicted - self.published
        return difference / self.published if self.relative else difference

    @property
    def met(self) -> bool:
        """Whether the error is within the bar; published values have two digits after the point."""
        return abs(self.error) <= self.bar + (0 if self.relative else 0.005)

    def cells(self) -> list[str]:
        """Cells of the table."""
        error, bar = (
            (f"{self.error:+.1%}", f"{self.bar:.0%}")
            if self.relative
            else (f"{self.error:+.3f}", f"{self.bar}")
        )
        figures = [f"{self.published:.2f}", f"{self.predicted:.2f}"]
        return [self.row, self.what, *figures, error, bar, "met" if self.met else "**missed**"]
