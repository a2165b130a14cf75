"""The order of samples, compared with sets, one process, and an uninterrupted run."""

import pytest
import torch

from fsdptoys.data import IGNORE_INDEX, BatchStream, eval_batches
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.errors import ConfigError
from tests.data.samples import SEQ_LEN, NumberedSamples


def take_numbers(stream: BatchStream, steps: int) -> list[int]:
    return [
        int(row[0])
        for _ in range(steps)
        for tokens_BT, _ in stream.next_step()
        for row in tokens_BT
    ]


def one_process(samples, global_batch: int, seed: int = 0) -> BatchStream:
    return BatchStream(samples, global_batch, 1, range(1), 1, seed)


@pytest.mark.parametrize(
    ("ranks", "batch_size", "microbatches"),
    [(1, 1, 12), (1, 4, 3), (2, 3, 2), (3, 2, 2), (4, 3, 1), (6, 1, 2), (12, 1, 1)],
)
def test_steps_do_not_depend_on_the_number_of_ranks(ranks, batch_size, microbatches):
    """Oracle: one process with the full global batch of 12, over two and a half epochs of 29
    samples."""
    samples = NumberedSamples(29)
    reference = one_process(samples, 12)
    streams = [
        BatchStream(samples, batch_size, microbatches, range(r, r + 1), ranks, 0)
        for r in range(ranks)
    ]
    together = BatchStream(samples, batch_size, microbatches, range(ranks), ranks, 0)
    for _ in range(6):
        (expected, _), *_ = reference.next_step()
        apart = [stream.next_step() for stream in streams]
        batches = [steps[number] for number in range(microbatches) for steps in apart]
        assert torch.equal(torch.cat([tokens_BT for tokens_BT, _ in batches]), expected)
        for batch, other in zip(together.next_step(), batches, strict=True):
            tokens_BT, labels_BT = batch
            assert tokens_BT.dtype == labels_BT.dtype == torch.int64
            assert torch.equal(tokens_BT, other[0]) and torch.equal(labels_BT, other[1])
            assert torch.equal(labels_BT, tokens_BT + 1)


@pytest.mark.parametrize(
    ("count", "global_batch"), [(12, 4), (29, 12), (5, 12), (1, 3)]
)
def test_every_epoch_has_each_sample_exactly_once(count, global_batch):
    """Oracle: sorted numbers, also where a global batch straddles one epoch or several."""
    steps = -(-3 * count // global_batch)
    numbers = take_numbers(one_process(NumberedSamples(count), global_batch), steps)
    for epoch in range(3):
        assert sorted(numbers[epoch * count : (epoch + 1) * count]) == list(
            range(count)
        )


def test_order_depends_on_the_seed_and_the_epoch():
    """Oracle: a second stream of the same seed, and two epochs of one."""
    samples = NumberedSamples(50)
    numbers = take_numbers(one_process(samples, 10, seed=1), 10)
    assert numbers == take_numbers(one_process(samples, 10, seed=1), 10)
    assert numbers != take_numbers(one_process(samples, 10, seed=2), 10)
    assert numbers[:50] != numbers[50:] and numbers[:50] != sorted(numbers[:50])


def test_order_is_stable_across_versions():
    """Oracle: recorded numbers; they depend only on integers and BLAKE2b."""
    assert take_numbers(one_process(NumberedSamples(8), 8, seed=0), 1) == [
        2,
        1,
        4,
        6,
        7,
        3,
        5,
        0,
    ]


def test_endless_samples_are_taken_in_order():
    """Oracle: counting."""
    assert take_numbers(one_process(NumberedSamples(100, endless=True), 6), 3) == list(
        range(18)
    )


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1, 3, 5])
@pytest.mark.parametrize(
    ("ranks", "batch_size", "microbatches"), [(1, 2, 6), (2, 3, 2)]
)
def test_resumed_stream_equals_uninterrupted(
    endless, steps_before, ranks, batch_size, microbatches
):
    """Oracle: an uninterrupted stream; the resumed one has a different layout than the stopped
    one."""
    samples = NumberedSamples(100 if endless else 29, endless)
    uninterrupted = take_numbers(one_process(samples, 12), 8)
    stopped = BatchStream(samples, 4, 1, range(3), 3, 0, "print")
    before = take_numbers(stopped, steps_before)
    resumed = BatchStream(
        samples, batch_size, microbatches, range(ranks), ranks, 0, "print"
    )
    resumed.next_step()
    resumed.load_state_dict(stopped.state_dict())
    assert before + take_numbers(resumed, 8 - steps_before) == uninterrupted


def test_state_holds_sample_count_fingerprint_and_order():
    """Oracle: 2 steps of 3 micro-batches of 5 rows on 4 ranks; endless samples have no named
    order."""
    stream = BatchStream(NumberedSamples(7), 5, 3, range(2, 3), 4, 0, "print")
    take_numbers(stream, 2)
    assert stream.state_dict() == {
        "samples": 120,
        "fingerprint": "print",
        "order": "feistel-8",
    }
    assert (
        one_process(NumberedSamples(7, endless=True), 1).state_dict()["order"] is None
    )


def test_changed_data_is_refused():
    """Oracle: the expected message, for synthetic data of other sequence length."""
    streams = []
    for seq_len in (8, 16):
        dataset = SyntheticConfig().build(seq_len, 32, 0)
        streams.append(
            BatchStream(dataset.train, 1, 1, range(1), 1, 0, dataset.fingerprint)
        )
    with pytest.raises(
        ConfigError,
        match=r"^data has changed since the checkpoint .* or start a new run$",
    ):
        streams[0].load_state_dict(streams[1].state_dict())
    streams[0].load_state_dict(streams[0].state_dict())


@pytest.mark.parametrize("order", [None, "feistel-4"])
def test_checkpoint_of_another_sample_order_is_refused(order):
    """Oracle: the message, for a checkpoint that names no order, as earlier versions wrote them, or
    another."""
    stream = one_process(NumberedSamples(7), 3)
    state = stream.state_dict() | {"order": order}
    recorded_order = order or "of an earlier version"
    with pytest.raises(
        ConfigError,
        match=rf"^the checkpoint's data came in the order {recorded_order}, and this version's is",
    ):
        stream.load_state_dict(
            {key: value for key, value in state.items() if value is not None}
        )


@pytest.mark.parametrize(
    ("count", "batches", "expected_batches"),
    [(24, 2, 2), (30, 2, 2), (13, 2, 2), (1, 5, 1)],
)
def test_evaluation_has_the_first_samples_in_equal_numbers_of_batches(
    count, batches, expected_batches
):
    """Oracle: counting, for 3 ranks and batches of 4; rows past the end have only ignored
    labels."""
    samples = NumberedSamples(count)
    by_rank = [list(eval_batches(samples, 4, batches, rank, 3)) for rank in range(3)]
    assert [len(batches_of_rank) for batches_of_rank in by_rank] == [
        expected_batches
    ] * 3
    in_order = [
        shares[number] for number in range(expected_batches) for shares in by_rank
    ]
    tokens_NT, labels_NT = (
        torch.cat(tensors) for tensors in zip(*in_order, strict=True)
    )
    assert tokens_NT.shape == labels_NT.shape == (12 * expected_batches, SEQ_LEN)
    assert tokens_NT.dtype == labels_NT.dtype == torch.int64
    count_taken = min(count, 12 * batches)
    assert tokens_NT[:count_taken, 0].tolist() == list(range(count_taken))
    assert (labels_NT[:count_taken] != IGNORE_INDEX).all()
    assert (tokens_NT[count_taken:] == 0).all() and (
        labels_NT[count_taken:] == IGNORE_INDEX
    ).all()
