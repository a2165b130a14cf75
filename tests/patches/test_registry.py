"""Patches are chosen by name or version, refused in one sentence, and undone by their last
holder."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import _runtime_utils
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPCommContext,
    FSDPParamGroup,
)

from fsdptoys.patches import PATCHES, apply_patches, check_patches
from fsdptoys.patches.patch import parse_version

ALL = ["fsdp1_stream_reuse", "fsdp2_stream_reuse", "fsdp2_backward_prefetch"]


def targets() -> list[object]:
    """Return the targets of the three patches, in the order of ``ALL``."""
    return [
        _runtime_utils._init_streams,
        FSDPCommContext.lazy_init,
        FSDPParamGroup.post_forward,
    ]


def changed(before: list[object]) -> list[bool]:
    """Return which targets have been replaced."""
    return [now is not then for now, then in zip(targets(), before, strict=True)]


@pytest.fixture
def torch_2_7(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version to which all patches apply."""
    monkeypatch.setattr(torch, "__version__", "2.7.1")


@pytest.mark.usefixtures("torch_2_7")
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_patch_stays_until_its_last_holder_undoes_it(order: tuple[int, ...]) -> None:
    """Oracle: the identity of PyTorch's attributes; three holders, one of them with one patch
    more."""
    before = targets()
    holders = [
        apply_patches(names, "fsdp2")
        for names in (["fsdp2_stream_reuse"], "auto", ["fsdp2_stream_reuse"])
    ]
    patched = targets()
    assert changed(before) == [False, True, True]
    left = set(range(3))
    for index in order:
        assert targets()[1] is patched[1]
        assert targets()[2] is (patched if 1 in left else before)[2]
        holders[index].undo()
        holders[index].undo()
        left.discard(index)
    assert targets() == before


@pytest.mark.usefixtures("torch_2_7")
def test_failed_patch_undoes_all_patches() -> None:
    """Oracle: the identity of PyTorch's attributes; the second patch finds its target gone."""
    before = targets()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPParamGroup, "post_forward")
        with pytest.raises(AttributeError):
            apply_patches("auto", "fsdp2")
    assert targets() == before


def test_undo_keeps_later_replacements_by_other_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: identity; other libraries replace the same methods when they are first used."""

    def around(*args: object) -> None:
        """Stands for another library's replacement."""

    # Comes back after this test
    monkeypatch.setattr(FSDPCommContext, "lazy_init", FSDPCommContext.lazy_init)
    patches = apply_patches(["fsdp2_stream_reuse"], "fsdp2")
    monkeypatch.setattr(FSDPCommContext, "lazy_init", around)
    patches.undo()
    assert FSDPCommContext.lazy_init is around


SHARED = "applied: the {} roots of a process share their streams"
ORDER = "applied: recomputed forwards do not disturb the order of backward prefetching"
NOT_NEEDED = (
    "not needed because torch {} keeps recomputed forwards out of the prefetch "
    "order itself"
)
TOO_OLD = "not applied because torch 2.6.0 is older than 2.7"
TOO_NEW = (
    "not applied because torch 2.16.0 is newer than the versions it was written against"
)


@pytest.mark.parametrize(
    ("strategy", "version", "report"),
    [
        ("fsdp1", "2.7.1+cu126", {"fsdp1_stream_reuse": SHARED.format("FSDP1")}),
        (
            "fsdp2",
            "2.9.1",
            {
                "fsdp2_stream_reuse": SHARED.format("FSDP2"),
                "fsdp2_backward_prefetch": ORDER,
            },
        ),
        (
            "fsdp2",
            "2.10.0a0+git1",
            {
                "fsdp2_stream_reuse": SHARED.format("FSDP2"),
                "fsdp2_backward_prefetch": NOT_NEEDED.format("2.10.0a0+git1"),
            },
        ),
        ("fsdp1", "2.16.0", {"fsdp1_stream_reuse": TOO_NEW}),
        ("fsdp1", "2.6.0", {"fsdp1_stream_reuse": TOO_OLD}),
        ("fsdp1", "2.15.0", {"fsdp1_stream_reuse": SHARED.format("FSDP1")}),
        ("ddp", "2.13.0+cpu", {}),
        ("single", "2.7.0", {}),
    ],
)
def test_auto_applies_patches_by_strategy_and_torch_version(
    strategy: str, version: str, report: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: written by hand; patches reported as applied have replaced their targets, until the
    context ends."""
    before = targets()
    monkeypatch.setattr(torch, "__version__", version)
    assert list(PATCHES) == ALL
    with apply_patches("auto", strategy) as applied:
        assert applied.report == list(report.items())
        assert changed(before) == [
            report.get(name, "").startswith("applied") for name in ALL
        ]
    assert targets() == before


def test_only_named_patches_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: written by hand; a repeated name counts once."""
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    before = targets()
    with apply_patches([], "fsdp2") as applied:
        assert applied.report == [] and targets() == before
    with apply_patches(["fsdp2_backward_prefetch"] * 2, "fsdp2") as applied:
        assert applied.report == [("fsdp2_backward_prefetch", ORDER)]
    assert targets() == before


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (
            ["x"],
            f"is not the name of a patch; choose from {', '.join(ALL)}, or set patches=auto",
        ),
        (
            3,
            "must be auto or a list of names; set patches=auto, or patches=[] for none",
        ),
        (
            [3],
            "must be auto or a list of names; set patches=auto, or patches=[] for none",
        ),
        (
            ["fsdp2_stream_reuse", "fsdp1_stream_reuse"],
            (
                "concerns parallel=fsdp1, and parallel=fsdp2 is chosen; leave it out or set "
                "patches=auto"
            ),
        ),
        (
            ["fsdp2_backward_prefetch"],
            (
                f"applies to torch >=2.7,<2.10, and is {NOT_NEEDED.format('2.13.0+cpu')}; leave it "
                "out or set patches=auto"
            ),
        ),
    ],
)
@pytest.mark.parametrize("call", [check_patches, apply_patches])
def test_invalid_and_ineffective_patch_names_are_refused(
    names: Any,
    sentence: str,
    call: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: written by hand; the check and the application raise the same message."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    before = targets()
    patch = f"[{names[-1]}]" if isinstance(names, list) else names
    with pytest.raises(ValueError) as refusal:
        call(names, "fsdp2")
    assert str(refusal.value) == f"patches={patch} {sentence}"
    assert targets() == before


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13)), ("2.12.0a0+git3f1b2c4", (2, 12)), ("2.7.1", (2, 7)),
     ("2.10", (2, 10)), ("2.8.0.dev20250601+cu128", (2, 8)), ("3.0.0rc1", (3, 0))],
)  # fmt: skip
def test_torch_versions_parse_to_numbers(
    version: str, numbers: tuple[int, int]
) -> None:
    """Oracle: written by hand; as text 2.10 would come before 2.7."""
    assert parse_version(version) == numbers
    with pytest.raises(
        ValueError, match=r"torch.__version__='unknown' does not start with two numbers"
    ):
        parse_version("unknown")
