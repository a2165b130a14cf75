"""What the units under one root know together, from a forward to the end of its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .reduction import Reductions
from .unit import Phase, Unit

if TYPE_CHECKING:
    from .hooks import Driver


class Iteration:
    """What the units under one root know together."""

    def __init__(self) -> None:
        self.drivers: list[Driver] = []
        """All, the root first."""
        self.forward_root: Driver | None = None
        """Whose forward is the outermost that runs."""
        self.is_last_backward = True
        self.waits_for_end = False
        """Whether the end of the backward that runs is awaited already."""
        self.order: list[Driver] = []
        """In which forwards began in this step."""
        self.expected: list[Driver] = []
        """The same in the step before."""
        self.guess: Unit | None = None
        """Being gathered because its turn is expected."""
        self.finished: list[Driver] = []
        """Whose forwards ended and whose backward is to come, with repetitions."""
        self.reductions = Reductions()
        self.optimizer_event: Any = None

    def end_backward(self) -> None:
        """Catch up on units whose inputs had no gradient, and wait for the reductions."""
        self.forward_root = None
        for driver in self.drivers:
            driver.to_run.clear()
            if driver.unit.phase is not Phase.post_backward:
                driver.post_backward()
            driver.unit.phase = driver.phase = Phase.idle
            if self.is_last_backward:
                driver.unit.drop()
                driver.turns.clear()
        if self.is_last_backward:
            self.finished.clear()
            self.reductions.finish()
        self.waits_for_end = False

    def refuse_shared_parameters(self) -> None:
        """Each parameter must be in one unit, or it would be two parameters from now on.

        Raises:
            ValueError: naming one that is in two.
        """
        seen: set[int] = set()
        for driver in self.drivers:
            for param in driver.unit.params:
                if param.origin in seen:
                    raise ValueError(
                        f"parameter {param.homes[0][1]!r} is shared with one already managed by another FSDP group; "
                        "call fully_shard([module_a, module_b]) to have its modules in one unit"
                    )
                seen.add(param.origin)
