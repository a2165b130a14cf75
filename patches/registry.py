"""Patches by name: choose those of a run, apply them, and undo them.

``auto`` takes every patch of the strategy that is for the installed torch. A named patch
that would do nothing is refused before any worker starts. Patches are process-wide and are applied
before the model is wrapped; several holders may apply the same one, and the last to undo restores
PyTorch's attribute. A root keeps the streams of its first forward.
"""

import difflib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn

from . import fsdp1_stream_reuse, fsdp2_backward_prefetch, fsdp2_stream_reuse
from .patch import Patch, Undo
from .streams import has_other_roots

AUTO = "auto"

PATCHES: dict[str, Patch] = {
    module.PATCH.name: module.PATCH
    for module in (fsdp1_stream_reuse, fsdp2_stream_reuse, fsdp2_backward_prefetch)
}
"""All patches, in the order of application."""

_holders: Counter[str] = Counter()
_undo: dict[str, Undo] = {}


class AppliedPatches(ExitStack):
    """The patches of one holder; a context manager that undoes them."""

    report: list[tuple[str, str]]
    """Name and outcome of each requested patch: "applied: ...", or with ``auto`` "not needed
    because ..." or "not applied because ..."."""

    def __init__(self) -> None:
        super().__init__()
        self.report = []

    def outcomes(self, model: nn.Module) -> dict[str, str]:
        """``report``, with a note on patches that do nothing for this wrapped model; before its
        first forward."""
        outcomes = dict(self.report)
        between = [
            name
            for name, outcome in self.report
            if PATCHES[name].between_roots and outcome.startswith("applied")
        ]
        if between and not has_other_roots(model):
            outcomes |= {
                name: f"{outcomes[name]}, no effect in this run: one root"
                for name in between
            }
        return outcomes

    def undo(self) -> None:
        """Release the patches; the last holder restores PyTorch's attributes. May be called
        twice."""
        self.close()

    def hold(self, patch: Patch) -> None:
        """Apply a patch, unless another holder has."""
        if not _holders[patch.name]:
            _undo[patch.name] = patch.install()
        _holders[patch.name] += 1
        self.callback(_release, patch.name)


def _release(name: str) -> None:
    _holders[name] -= 1
    if not _holders[name]:
        _undo.pop(name)()


def apply_patches(names: Sequence[str] | str, strategy: str) -> AppliedPatches:
    """Apply patches, in every worker, before the model is wrapped.

    Args:
        names: names of patches, or ``auto``.
        strategy: the word after ``parallel=``.

    Raises:
        ValueError: as ``check_patches``.
    """
    check_patches(names, strategy)
    applied = AppliedPatches()
    try:
        for patch in PATCHES.values():
            if patch.strategy != strategy if names == AUTO else patch.name not in names:
                continue
            reason = patch.reason_against(torch.__version__)
            if reason is None:
                applied.hold(patch)
            applied.report.append((patch.name, reason or f"applied: {patch.effect}"))
    except BaseException:
        applied.undo()
        raise
    return applied


def check_patches(names: Sequence[str] | str, strategy: str) -> None:
    """Refuse unknown names, and patches that would do nothing here.

    Args:
        names: names of patches, or ``auto``.
        strategy: the word after ``parallel=``.

    Raises:
        ValueError: naming key, value and fix.
    """
    if names == AUTO:
        return
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) for name in names
    ):
        raise ValueError(
            f"patches={names} must be auto or a list of names; set patches=auto, or patches=[] "
            "for none"
        )
    for name in names:
        patch = PATCHES.get(name)
        if patch is None:
            near = difflib.get_close_matches(name, PATCHES, n=1)
            fix = f"choose from {', '.join(PATCHES)}, or set patches=auto"
            if near:
                fix = f"did you mean patches=[{near[0]}]?"
            raise ValueError(f"patches=[{name}] is not the name of a patch; {fix}")
        if patch.strategy != strategy:
            raise ValueError(
                f"patches=[{name}] concerns parallel={patch.strategy}, and parallel={strategy} "
                "is chosen; leave it out or set patches=auto"
            )
        reason = patch.reason_against(torch.__version__)
        if reason is not None:
            raise ValueError(
                f"patches=[{name}] applies to {patch.versions}, and is {reason}; leave it out or "
                "set patches=auto"
            )
