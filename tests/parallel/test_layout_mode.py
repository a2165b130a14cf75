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
from fsdptoys.config.rules.pipeline import ZERO_BUBBLE_SINCE
from fsdptoys.config.saved import read_config
from fsdptoys.config.schema import Config
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.parallel.pipeline import PipelineSchedule
from fsdptoys.parallel.precision import DType
from fsdptoys.report.setting_effects import bits_of
from tests.harness.outcomes import hash_parameters
from tests.harness.ranks import run_ranks
from tests.harness.resumed_runs import run_to_the_end, run_until, with_checkpoints
from tests.harness.run_tables import Pairs, Row, levels, trained_rows
from tests.harness.tiny import (
    DOCUMENTS,
    EXPERTS,
    TINY,
    make_config,
    refusal,
    tiny_model,
    with_sizes,
)
from tests.parallel.numeric_outcomes import assert_close, train_all
from tests.parallel.split_models import FEATURES, SELECTIVE, SMOOTH, STAGES, needs_sums

BATCH = 4
"""Sequences of a global batch."""

MODELS: dict[str, ModelConfig] = {
    "llama": tiny_model(),
    "llama tied": tiny_model(tie_embeddings=True),
    "qwen3": TINY["qwen3"],
    "qwen3_moe": with_sizes(TINY["qwen3_moe"], **EXPERTS),
    # Chunks of two grains, so that ranks with parts of sequences have whole grains of them.
    "llama4": with_sizes(TINY["llama4"], **EXPERTS, attention_chunk_len=12),
    "gpt2": TINY["gpt2"],
}

LAST = PipelineSchedule("zero_bubble" if TORCH >= ZERO_BUBBLE_SINCE else "interleaved")

# FSDP2 of torch 2.7 only averages, which the mode refuses.
Sharded = FSDP2Config if fsdp2_can_sum() else FSDP1Config

FULL = MemoryConfig(
    gradient_checkpointing=GradientCheckpointing.full, checkpointing_start_index=1
)
CHUNKED = MemoryConfig(chunk_loss=True, chunk_tokens="20")
MASKED = {"data": DOCUMENTS}


def settings_of(ranks: int, **options: Any) -> dict[str, Any]:
    """Return two steps on the global batch, by four grains a sequence and micro-batches of one
    sequence unless given.

    Then an evaluation on as many held-out sequences.
    """
    shares = ranks // (
        options.get("cp_size", 1)
        * options.get("tp_size", 1)
        * options.get("pp_size", 1)
    )
    size = options.get("batch_size", 1)
    count = BATCH // shares // size
    settings = {
        "batch_size": size,
        "grad_accum": count,
        "steps": 2,
        "eval_every": 2,
        "eval_batches": count,
    }
    settings |= {"deterministic": "layout"} | options
    return (
        settings if settings["deterministic"] != "layout" else {"grains": 4} | settings
    )


def config(
    parallel: ParallelConfig, ranks: int, model: ModelConfig, **options: Any
) -> Config:
    return make_config(parallel, ranks, model=model, **settings_of(ranks, **options))


def layout_row(
    ranks: int,
    model: ModelConfig,
    dtype: DType,
    parallel: ParallelConfig,
    layout: dict[str, Any],
    shared: dict[str, Any] | None = None,
) -> Row:
    """Return a layout of a global batch, to be compared with one process that takes it as one
    micro-batch."""
    shared = {"model": model, **(shared or {})}
    alone = settings_of(1, batch_size=BATCH, **shared)
    parallel = dataclasses.replace(parallel, param_dtype=dtype)
    return Row(
        parallel, ranks, settings_of(ranks, **{**shared, **layout}), shared, alone
    )


def layouts() -> dict[str, Row]:
    """Return layouts of two and four ranks: every axis alone and together with others, every
    switch, every family."""
    float32, bfloat16 = DType.float32, DType.bfloat16
    fsdp2 = FSDP2Config()
    gathered, ulysses = (
        FSDP2Config(context=form)
        for form in (ContextForm.gathered, ContextForm.ulysses)
    )
    one_f_one_b, interleaved, last = (
        FSDP2Config(schedule=schedule)
        for schedule in (
            PipelineSchedule("1f1b"),
            PipelineSchedule("interleaved"),
            LAST,
        )
    )
    hsdp, cp, ep, tp, pp = (
        {f"{axis}_size": 2} for axis in ("fsdp", "cp", "ep", "tp", "pp")
    )
    smooth = {**SMOOTH, "memory": CHUNKED}
    slices: dict[str, Any] = {"slices": 2}
    whole = {"batch_size": 2}
    tied, moe, llama4, gpt2 = (
        MODELS[name] for name in ("llama tied", "qwen3_moe", "llama4", "gpt2")
    )
    rows = {
        "ddp, selective": layout_row(
            2, tied, float32, DDPConfig(), {"memory": SELECTIVE}
        ),
        "fsdp1, chunked loss": layout_row(2, tied, bfloat16, FSDP1Config(), {}, smooth),
        "fsdp2, chunked loss": layout_row(2, tied, bfloat16, Sharded(), {}, smooth),
        "fsdp1, experts": layout_row(2, moe, bfloat16, FSDP1Config(), {"memory": FULL}),
        "fsdp2, chunks": layout_row(
            2, llama4, float32, Sharded(), {"memory": SELECTIVE, "batch_size": 2}
        ),
        "ddp, documents": layout_row(
            2, gpt2, bfloat16, DDPConfig(), {"memory": FULL}, MASKED
        ),
        "fsdp2, documents": layout_row(
            2, TINY["qwen3"], float32, Sharded(), {}, {"grains": 3, **MASKED}
        ),
    }
    sums = {
        "hsdp": layout_row(4, MODELS["llama"], bfloat16, fsdp2, hsdp, {"grains": 8}),
        "cp 4": layout_row(
            4, MODELS["llama"], bfloat16, gathered, {"cp_size": 4}, {"grains": 8}
        ),
        "hsdp1": layout_row(4, TINY["qwen3"], float32, FSDP1Config(), hsdp),
        "cp ulysses": layout_row(4, TINY["qwen3"], float32, ulysses, cp),
        "hsdp cp, documents": layout_row(4, gpt2, float32, gathered, hsdp | cp, MASKED),
        "ep hsdp": layout_row(4, llama4, bfloat16, fsdp2, hsdp | ep),
        "hsdp cp, chunks": layout_row(4, llama4, bfloat16, gathered, hsdp | cp),
        "ep cp": layout_row(4, moe, float32, ulysses, cp | {"ep_size": 4}),
        "ep": layout_row(4, moe, float32, fsdp2, ep),
        "tp 4": layout_row(
            *(4, FEATURES["four key heads"], float32, fsdp2),
            {"tp_size": 4},
            {"slices": 4, "grains": 8},
        ),
        "tp cp, selective": layout_row(
            4,
            FEATURES["qwen3_moe"],
            bfloat16,
            gathered,
            tp | cp | {"memory": SELECTIVE},
            slices,
        ),
        "tp ep, chunked loss": layout_row(
            *(4, FEATURES["llama4"], bfloat16, fsdp2),
            tp | {"ep_size": 4},
            slices | smooth,
        ),
        "tp cp, documents": layout_row(
            *(4, FEATURES["gpt2"], float32, fsdp2),
            tp | cp | {"memory": FULL},
            slices | MASKED,
        ),
        "fsdp1 of slices": layout_row(
            4, FEATURES["gpt2"], float32, FSDP1Config(), {}, slices | MASKED
        ),
        "cp on 2": layout_row(2, TINY["qwen3"], float32, ulysses, cp | whole),
        "cp gathered on 2": layout_row(2, gpt2, bfloat16, gathered, cp | whole, MASKED),
        "ep on 2": layout_row(2, moe, bfloat16, fsdp2, ep | whole),
        "tp on 2": layout_row(
            2, FEATURES["llama4"], bfloat16, fsdp2, tp | whole, slices | smooth
        ),
        "pp on 2": layout_row(2, STAGES["qwen3"], float32, interleaved, pp),
        "pp": layout_row(4, STAGES["llama"], float32, one_f_one_b, pp, slices),
        "pp tp": layout_row(4, STAGES["llama"], float32, last, pp | tp, slices),
        "pp 4": layout_row(
            4,
            STAGES["qwen3"],
            bfloat16,
            one_f_one_b,
            {"pp_size": 4, "memory": SELECTIVE},
            MASKED,
        ),
        "pp ep": layout_row(
            4, STAGES["qwen3_moe"], bfloat16, last, pp | ep, {"memory": CHUNKED}
        ),
        "pp cp": layout_row(
            4, STAGES["qwen3_moe"], bfloat16, interleaved, pp | cp, {"memory": CHUNKED}
        ),
        "pp cp ep": layout_row(
            4, STAGES["llama4"], float32, gathered, pp | cp | ep | {"memory": FULL}
        ),
        "pp hsdp": layout_row(
            4, STAGES["llama4"], float32, interleaved, pp | {"fsdp_size": 1}
        ),
        "pp, documents": layout_row(
            4, STAGES["gpt2"], float32, interleaved, pp, MASKED
        ),
    }
    rows |= sums if fsdp2_can_sum() else {}
    for name in ("qwen3_moe", "gpt2"):
        rows |= {
            f"{name} 1 x 4": layout_row(1, MODELS[name], float32, SingleConfig(), {}),
            f"{name} 2 x 2": layout_row(
                1, MODELS[name], float32, SingleConfig(), {"batch_size": 2}
            ),
            f"{name} 2 x 2 of 2 ranks": layout_row(
                *(1, MODELS[name], float32, SingleConfig(simulated_ranks=2)),
                {"batch_size": 2, "grad_accum": 1},
            ),
        }
    for name, model in MODELS.items():
        # Of the masks of twelve grains, layers of chunks need half.
        shared = {"steps": 1, "eval_every": 1} | (
            {"grains": 12} if name == "llama4" else {}
        )
        for label, memory in (("full", FULL), ("selective", SELECTIVE)):
            layout = {"memory": memory, "batch_size": 2}
            rows[f"{name}, {label}"] = layout_row(
                1, model, float32, SingleConfig(), layout, shared
            )
            if name == "llama4":
                rows[f"{name}, {label} on 2"] = layout_row(
                    2, model, float32, Sharded(), layout, shared
                )
    return rows


ROWS = layouts()
SHORT = {
    *("ddp, selective", "fsdp1, chunked loss", "fsdp2, chunked loss", "ddp, documents"),
    *("fsdp2, documents", "hsdp"),
    *(
        "cp on 2",
        "cp gathered on 2",
        "ep on 2",
        "tp on 2",
        "pp on 2",
        "llama4, full",
        "gpt2 1 x 4",
    ),
    "qwen3_moe 2 x 2 of 2 ranks",
}
trained = trained_rows(ROWS, train_all)


def bits(tensors: dict[str, numpy.ndarray]) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_layout_has_the_bits_of_one_process(row: str, trained: Pairs) -> None:
    """Oracle: one process, one micro-batch, no checkpointing: losses, held-out losses, norms,
    gradients, parameters."""
    found, expected = trained[row]
    assert found.grads.keys() == expected.grads.keys() and found.grads
    assert [
        name
        for name, grad in found.grads.items()
        if not (grad == expected.grads[name]).all()
    ] == []
    assert found.losses == expected.losses and found.norms == expected.norms
    assert bits(found.parameters) == bits(expected.parameters)
    assert len(found.losses) > len(found.norms)


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


def resume(given: Config, killed_in: int | None) -> dict[str, str]:
    """Run until a step, or to the end; return the hashes of the parameters."""
    if killed_in is not None:
        run_until(given, killed_in)
        return {}
    return hash_parameters(run_to_the_end(given))


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
    (found,) = run_ranks(1, resume, part(SingleConfig(), 1), None)
    assert found == expected


def test_fsdp2_that_only_averages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the message; FSDP1 sums in every version."""
    monkeypatch.setattr(
        "fsdptoys.config.rules.layout_mode.fsdp2_can_sum", lambda: False
    )
    found = refusal(FSDP2Config(), 2, deterministic="layout")
    assert re.search(
        r"FSDP2 of torch .* only averages; set parallel=ddp or parallel=fsdp1", found
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
            key(each, ranks, deterministic=mode, grains=8)
            for each, ranks in ((one, 1), (three, 2))
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
