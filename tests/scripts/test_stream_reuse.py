"""The script that predicts the memory of shared streams, on a small model."""

import pytest

from scripts import stream_reuse

SMALL = ["model=llama_debug", "train.seq_len=64"]


@pytest.mark.extended
@pytest.mark.parametrize(("case", "differs"), [("one root", False), ("frozen reference", True)])
def test_sharing_streams_changes_reserved_memory_only_with_a_second_root(case: str, differs: bool) -> None:
    """Oracle: equal tensors, so an equal peak; a root's two streams with memory are used by the second one too."""
    own, shared = (stream_reuse.measure_elsewhere(case, "fsdp2", patched, "h100", SMALL) for patched in (False, True))
    assert own[1] == shared[1]
    assert (own[0] > shared[0], own[2] > shared[2]) == (differs, differs)
