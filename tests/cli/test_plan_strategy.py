"""Strategy of a plan whose words name none."""

import pytest

from fsdptoys.cli.plan import compose_hypothetical

ONE = ["model=llama3_1b", "plan.hardware=h200", "plan.world_size=1"]


@pytest.mark.parametrize(
    ("words", "searches", "strategy"),
    [
        (ONE, False, "single"),
        (["experiment=null", *ONE], False, "single"),
        ([*ONE, "parallel=fsdp2"], False, "fsdp2"),
        ([*ONE, "memory.cpu_offload=true"], False, "fsdp2"),
        ([*ONE[:2], "plan.world_size=2"], False, "fsdp2"),
        (ONE, True, "fsdp2"),
    ],
)
def test_plan_of_one_rank_shards_nothing(words: list[str], searches: bool, strategy: str) -> None:
    """Oracle: the strategy with which ``fsdptoys train`` runs one rank on an accelerator; a search varies it."""
    run = compose_hypothetical(words, searches=searches)
    assert run.config.parallel.name == strategy
    assert ("parallel=single" in run.words) == (strategy == "single")
