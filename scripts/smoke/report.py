"""What a check reports: facts, and comparisons with an oracle. Needs no torch."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """A check, which runs in a process of its own."""

    name: str
    function: str
    """``module:function`` below ``scripts.smoke``; takes a ``Report`` and the device type."""
    seconds: float
    """Limit on an accelerator; the process is killed after it."""
    devices: Sequence[str] = ("cuda", "npu", "cpu")
    otherwise: str = ""
    """Why other devices have no such check."""
    alone: bool = False
    """Whether it measures times or free memory, and must not run concurrently with others."""


class Report:
    """Facts and comparisons of a check, each written at once: a check that is killed keeps those
    before."""

    def fact(self, name: str, value: Any) -> None:
        """Something measured or found, without a verdict."""
        self._write("fact", name, value)

    def expect(self, met: bool, sentence: str) -> None:
        """A comparison with an oracle.

        Args:
            met: its outcome.
            sentence: what was compared, with both values.
        """
        self._write("met" if met else "failed", sentence, None)

    def close(
        self,
        name: str,
        actual: Sequence[float],
        expected: Sequence[float],
        tolerance: float,
    ) -> None:
        """Expect numbers within a relative tolerance of an oracle's; NaN is never close."""
        errors = [
            abs(a - b) / max(abs(b), 1e-12)
            for a, b in zip(actual, expected, strict=True)
        ]
        self.error(
            name,
            max(errors, key=lambda error: float("inf") if error != error else error),
            tolerance,
        )

    def error(self, name: str, error: float, tolerance: float) -> None:
        """Expect a relative error of at most a tolerance."""
        self.expect(
            error <= tolerance,
            f"{name}: relative error {error:.1e}, tolerance {tolerance:.0e}",
        )

    def _write(self, kind: str, name: str, value: Any) -> None:
        print(json.dumps([kind, name, value]), file=sys.__stdout__, flush=True)
