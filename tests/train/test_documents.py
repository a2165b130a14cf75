"""Training with masked documents: bitwise equal under every strategy, and FLOPs of visible keys."""

import itertools

import pytest

from fsdptoys.data import BatchStream
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.train.step_data import DocumentCounter
from tests.harness.families import SMALL
from tests.harness.folders import build
from tests.harness.outcomes import train_all
from tests.harness.ranks import run_ranks
from tests.harness.tiny import TINY, make_config, tiny_model

END = 0
DATA = SyntheticConfig(branching=60, mask_documents=True)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(tiny_model(), id="llama"),
        pytest.param(TINY["gpt2"], id="gpt2", marks=pytest.mark.extended),
        pytest.param(TINY["llama4"], id="llama4", marks=pytest.mark.extended),
    ],
)
def test_masked_documents_train_bitwise_equal_under_every_strategy(
    model: ModelConfig,
) -> None:
    """Oracle: one process that runs the same micro-batches; training without masks differs."""

    def config(
        parallel: ParallelConfig, ranks: int, data: SyntheticConfig = DATA
    ) -> object:
        memory = MemoryConfig(
            gradient_checkpointing=GradientCheckpointing.selective, chunk_loss=True
        )
        return make_config(
            parallel, ranks, steps=2, model=model, memory=memory, data=data
        )

    one = SingleConfig(simulated_ranks=2)
    alone, mixed = run_ranks(
        1, train_all, [config(one, 1), config(one, 1, SyntheticConfig(branching=60))]
    )[0]
    strategies = [FSDP2Config(), FSDP1Config(), DDPConfig()]
    for outcome in run_ranks(
        2, train_all, [config(strategy, 2) for strategy in strategies]
    )[0]:
        assert outcome == alone
    assert mixed.losses != alone.losses


@pytest.mark.parametrize("case", ["llama2", "llama4"])
def test_flops_count_only_visible_keys(case: str) -> None:
    """Oracle: each document counted as a separate sequence; without ends in the data, full
    sequences."""
    model = build(SMALL[case])
    batches = BatchStream(
        SyntheticConfig(branching=60).build(64, 96, 0).train, 3, 2, range(1), 1, 0
    ).next_step()
    counter = DocumentCounter(model, END, 64)
    rows = [row for tokens_BT, _ in batches for row in tokens_BT.tolist()]
    lengths = []
    for row in rows:
        ends = [position + 1 for position, token in enumerate(row) if token == END]
        edges = [0, *ends, len(row)]
        lengths += [
            stop - start for start, stop in itertools.pairwise(edges) if stop > start
        ]
    assert len(lengths) > len(rows)
    expected = sum(length * model.flops_per_token(length) for length in lengths) / sum(
        lengths
    )
    assert counter.flops_per_token(counter.count(batches)) == pytest.approx(expected)
    whole = DocumentCounter(model, 97, 64)
    assert whole.flops_per_token(whole.count(batches)) == pytest.approx(
        model.flops_per_token(64)
    )
