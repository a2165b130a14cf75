"""A patch: an undoable replacement of one private attribute of PyTorch, for a range of versions.

Versions are compared by their first two numbers, so 2.13.0+cpu and 2.13.0a0+git1234 count as 2.13.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Undo = Callable[[], None]
"""Restores the original attribute."""


@dataclass(frozen=True)
class Patch:
    """One patch; its module's docstring states Target, Why, Upstream and Versions."""

    name: str
    """The word in ``patches=[...]``."""
    strategy: str
    """The word after ``parallel=``: the strategy whose internals are replaced."""
    lowest: tuple[int, int]
    """First torch version of the range."""
    below: tuple[int, int]
    """First torch version beyond the range."""
    effect: str
    """Effect, after "applied: "."""
    beyond: str
    """Reason from ``below`` on: "not needed because" or "not applied because", with ``{torch}`` for
    the version."""
    install: Callable[[], Undo]
    """Replaces the attribute in any version."""
    between_roots: bool = False
    """Whether it acts only where a process has several FSDP roots."""

    @property
    def versions(self) -> str:
        """The range, such as ``torch >=2.7,<2.10``."""
        return f"torch >={_dotted(self.lowest)},<{_dotted(self.below)}"

    def reason_against(self, torch_version: str) -> str | None:
        """Why a torch version (``torch.__version__``) is not patched; None if it is."""
        version = parse_version(torch_version)
        if version < self.lowest:
            return f"not applied because torch {torch_version} is older than {_dotted(self.lowest)}"
        return (
            self.beyond.format(torch=torch_version) if version >= self.below else None
        )


def parse_version(torch_version: str) -> tuple[int, int]:
    """First two numbers of a version.

    Raises:
        ValueError: if it does not start with two numbers.
    """
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    if match is None:
        raise ValueError(
            f"torch.__version__={torch_version!r} does not start with two numbers; set patches=[]"
        )
    return int(match[1]), int(match[2])


def replace(owner: Any, attribute: str, replacement: Any) -> Undo:
    """Set an attribute of a class or module; undoing keeps later replacements by others."""
    original = getattr(owner, attribute)
    setattr(owner, attribute, replacement)

    def undo() -> None:
        if getattr(owner, attribute) is replacement:
            setattr(owner, attribute, original)

    return undo


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
