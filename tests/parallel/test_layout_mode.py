"""``train.deterministic=layout``: every layout of a global batch has the bits of one ordinary
process."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.config.saved import read_config
from fsdptoys.config.schema import Config
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.report.setting_effects import bits_of
from tests.harness.outcomes import hash_parameters
from tests.harness.ranks import run_ranks
from tests.harness.resumed_runs import run_to_the_end, run_until, with_checkpoints
from tests.harness.run_tables import Pairs, levels, trained_rows
from tests.harness.tiny import (
    make_config,
    refusal,
)
from tests.parallel.layout_mode_rows import (
    BATCH,
    LAST,
    MODELS,
    ROWS,
    SHORT,
    Sharded,
    config,
)
from tests.parallel.numeric_outcomes import assert_close, train_all
from tests.parallel.split_models import FEATURES, STAGES, needs_sums

trained = trained_rows(ROWS, train_all)


def bits(tensors: dict[str, numpy.ndarray]) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_layout_has_the_bits_of_one_process(row: str, trained: Pairs) -> None:
    """Oracle: one process, one micro-batch, no checkpointing: losses, held-out losses, norms,
    gradients, parameters."""
    result, expected = trained[row]
    assert result.grads.keys() == expected.grads.keys() and result.grads
    assert [
        name
        for name, grad in result.grads.items()
        if not (grad == expected.grads[name]).all()
    ] == []
    assert result.losses == expected.losses and result.norms == expected.norms
    assert bits(result.parameters) == bits(expected.parameters)
    assert len(result.losses) > len(result.norms)


def test_micro_batches_change_last_bits_outside_this_mode() -> None:
    """Oracle: ``train.deterministic=true`` with other micro-batches; the comparison above would
    find a difference."""
    control = {"deterministic": True, "steps": 2}
    configs = [
        config(SingleConfig(), 1, MODELS["llama"], batch_size=n, **control)
        for n in (1, 4)
    ]
    one, other = run_ranks(1, train_all, configs)[0]
    assert one.losses == pytest.approx(other.losses, rel=1e-6)
    assert bits(one.parameters) != bits(other.parameters)


def resume(run_config: Config, killed_in: int | None) -> dict[str, str]:
    """Run until a step, or to the end; return the hashes of the parameters."""
    if killed_in is not None:
        run_until(run_config, killed_in)
        return {}
    return hash_parameters(run_to_the_end(run_config))


Part = tuple[ParallelConfig, int, dict[str, Any]]
FEATURES_OF_2, FEATURES_OF_4 = (
    (FSDP2Config(), ranks, {"tp_size": 2}) for ranks in (2, 4)
)
STAGES_OF_2, STAGES_OF_4 = (
    (
        FSDP2Config(schedule=LAST if ranks == 2 else PipelineSchedule("1f1b")),
        ranks,
        {"pp_size": 2},
    )
    for ranks in (2, 4)
)
CHAINS: dict[str, tuple[ModelConfig, dict[str, Any], list[Part]]] = {
    "strategies": (
        MODELS["gpt2"],
        {},
        [(Sharded(), 2, {}), (DDPConfig(), 2, {"batch_size": 2})],
    ),
    "features": (
        FEATURES["gpt2"],
        {"slices": 2},
        [(FSDP2Config(), 2, {}), FEATURES_OF_2],
    ),
    "stages": (STAGES["gpt2"], {}, [(DDPConfig(), 2, {}), STAGES_OF_2]),
    "features of four ranks": (
        *(FEATURES["gpt2"], {"slices": 2}),
        [FEATURES_OF_4, (FSDP2Config(), 2, {"batch_size": 2}), FEATURES_OF_2],
    ),
    "stages of four ranks": (
        STAGES["gpt2"],
        {},
        [STAGES_OF_4, (DDPConfig(), 2, {"batch_size": 2}), STAGES_OF_2],
    ),
}
"""Label → model, settings, and the layouts of a run's parts; one process takes the last."""


@needs_sums
@pytest.mark.parametrize("chain", levels(CHAINS, {"strategies", "features", "stages"}))
def test_a_run_resumed_on_other_layouts_has_the_bits_of_an_uninterrupted_one(
    chain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one process in one piece; the other run is resumed under each layout of the chain."""
    # Most of the time of such small runs.
    monkeypatch.setattr("fsdptoys.metrics.figures.draw_loss", lambda *_: None)
    model, options, parts = CHAINS[chain]
    options = {"steps": 4, "eval_every": 2, "eval_batches": 1, **options}

    def part(
        parallel: ParallelConfig, ranks: int, folder: str = "run", **more: Any
    ) -> Config:
        return with_checkpoints(
            config(parallel, ranks, model, **options, **more),
            tmp_path / folder,
            every=1,
        )

    (expected,) = run_ranks(
        1, resume, part(SingleConfig(), 1, "whole", batch_size=BATCH), None
    )
    for killed_in, (parallel, ranks, layout) in enumerate(parts, start=2):
        run_ranks(ranks, resume, part(parallel, ranks, **layout), killed_in)
    (hashes,) = run_ranks(1, resume, part(SingleConfig(), 1), None)
    assert hashes == expected


def test_fsdp2_that_only_averages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the message; FSDP1 sums in every version."""
    monkeypatch.setattr(
        "fsdptoys.config.rules.layout_mode.fsdp2_can_sum", lambda: False
    )
    message = refusal(FSDP2Config(), 2, deterministic="layout")
    assert re.search(
        r"FSDP2 of torch .* only averages; set parallel=ddp or parallel=fsdp1", message
    )
    make_config(FSDP1Config(), 2, deterministic="layout")


@pytest.mark.parametrize(
    "word, mode", [("false", False), ("true", True), ("on", True), ("layout", "layout")]
)
def test_words_and_saved_booleans_name_the_modes(word: str, mode: bool | str) -> None:
    """Oracle: the modes' values, which are what configurations of earlier versions say."""
    composed = compose_config(["model=llama_debug", f"train.deterministic={word}"])
    assert composed.train.deterministic is Deterministic(mode)
    tree = composed.to_dict()
    assert tree["train"]["deterministic"] == mode
    assert read_config(tree, "config.yaml").train.deterministic is Deterministic(mode)


def test_reports_expect_equal_bits_of_runs_with_the_same_global_batch() -> None:
    """Oracle: equal keys for other ranks and micro-batches in this mode alone, other keys for other
    grains."""
    model = MODELS["llama"]

    def key(config: Config, ranks: int, **train: Any) -> object:
        changed = dataclasses.replace(
            config, train=dataclasses.replace(config.train, **train)
        )
        return bits_of(changed.to_dict(), ranks, "cpu")

    one = config(SingleConfig(), 1, model, batch_size=BATCH)
    three = make_config(
        DDPConfig(), 3, model=model, batch_size=1, deterministic="layout", grains=4
    )
    assert key(one, 1) == key(three, 3) is not None
    assert key(one, 1, grains=3) != key(one, 1)
    for mode in (True, False):
        first, second = (
            key(run_config, ranks, deterministic=mode, grains=8)
            for run_config, ranks in ((one, 1), (three, 2))
        )
        assert first != second or first is None


def test_losses_and_gradients_are_close_to_those_of_the_default_mode() -> None:
    """Oracle: one process by default, every family; sums by grains are other roundings of the same
    training."""
    rows = [
        config(
            SingleConfig(),
            1,
            model,
            batch_size=2,
            steps=1,
            grad_accum=1,
            deterministic=mode,
        )
        for model in MODELS.values()
        for mode in (False, "layout")
    ]
    outcomes = iter(run_ranks(1, train_all, rows)[0])
    for plain, by_grains in zip(outcomes, outcomes, strict=True):
        assert_close(by_grains, plain, 2e-6, 1e-5, tensors=False)
        torch.testing.assert_close(by_grains.grads, plain.grads)
