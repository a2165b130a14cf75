"""Context parallelism: ranks that share sequences train like one process."""

import dataclasses
import functools
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.memory import ActivationOffload, GradientCheckpointing, MemoryConfig
from fsdptoys.models import Context, use_context
from fsdptoys.models.context import FULL_SEQUENCES
from fsdptoys.models.generate import Draw, generate
from fsdptoys.models.ops import Ops, choose_ops
from fsdptoys.parallel import STRATEGIES, FSDP2Config, SingleConfig, ToyCPConfig
from fsdptoys.parallel.config import ReducingConfig
from fsdptoys.parallel.context import ContextForm, build_context
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.parallel.precision import DType
from fsdptoys.train import parallelize as prepare_module
from fsdptoys.train.compile import compile_blocks
from fsdptoys.train.trainer import Trainer
from tests.harness import outcomes
from tests.harness.folders import build
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import Pairs, Row, levels, trained_rows
from tests.harness.tiny import DOCUMENTS, FAMILIES, TINY, make_config, tiny_model
from tests.parallel.numeric_outcomes import Outcome, assert_close, train_all

ULYSSES, GATHERED, RING = FORMS = tuple(
    form for form in ContextForm if form is not ContextForm.auto
)
FULL = GradientCheckpointing.full
SELECTIVE = GradientCheckpointing.selective


def train(configs: list[Config]) -> list[Outcome] | None:
    """Train all; activations of any size are offloaded, and the compiler generates no machine
    code."""
    prepare_module.ActivationOffload = functools.partial(ActivationOffload, min_bytes=0)  # type: ignore[attr-defined]
    prepare_module.compile_blocks = functools.partial(
        compile_blocks, backend="aot_eager"
    )  # type: ignore[attr-defined]
    return train_all(configs)


def families() -> dict[str, Row]:
    """Return all families with each form on four ranks; four cannot exchange six heads, so they
    share two by two."""
    options = {"steps": 1, "deterministic": False, "eval_every": 1, "eval_batches": 1}
    rows: dict[str, Row] = {}
    for family, model in FAMILIES.items():
        for form, cp_size in ((ULYSSES, 2), (GATHERED, 4), (RING, 4)):
            parallel = FSDP2Config(context=form)
            rows[f"{family} {form.value}"] = Row(
                parallel, 4, {"cp_size": cp_size}, {"model": model, **options}
            )
    # with which FSDP2 replicates on a CPU
    for form in FORMS if TORCH >= (2, 8) else ():
        layout = {"cp_size": 2, "fsdp_size": 2}
        rows[f"hsdp2 {form.value}"] = Row(
            FSDP2Config(context=form), 4, layout, {"model": TINY["llama4"], **options}
        )
    return rows


def switches() -> dict[str, Row]:
    """Return memory switches and documents, over two steps with a norm that clips.

    Llama 4 has chunked attention, layers without positions, temperatures and experts. Recomputation
    repeats the collectives of its attention.
    """
    chunks = {"chunk_loss": True, "chunk_tokens": "16"}
    full = MemoryConfig(gradient_checkpointing=FULL)
    selective = MemoryConfig(gradient_checkpointing=SELECTIVE)
    qwen3 = {"model": TINY["qwen3"]}
    documents = {"data": DOCUMENTS}
    cases: dict[str, tuple[DType, dict[str, Any], dict[str, Any]]] = {
        "full, offload, chunked loss": (
            DType.float32,
            {},
            {
                "memory": MemoryConfig(
                    gradient_checkpointing=FULL, activation_offload=True, **chunks
                )
            },
        ),
        "selective": (DType.float32, {}, {"memory": selective}),
        "selective, offload": (
            DType.float32,
            {},
            {
                "memory": MemoryConfig(
                    gradient_checkpointing=SELECTIVE, activation_offload=True
                )
            },
        ),
        "documents": (DType.float32, documents, {"memory": selective}),
        "documents of gpt2": (DType.float32, {"model": TINY["gpt2"], **documents}, {}),
        "bf16": (DType.bfloat16, qwen3, {}),
        "bf16, documents": (DType.bfloat16, {**qwen3, **documents}, {}),
        "compiled": (DType.float32, qwen3, {"memory": full, "compile": True}),
    }
    common = {"steps": 2, "deterministic": False, "model": TINY["llama4"]}
    return {
        f"{form.value}, {name}": Row(
            FSDP2Config(context=form, param_dtype=dtype),
            4 if dtype is DType.bfloat16 else 2,
            {"cp_size": 2, **layout},
            {**common, **options},
        )
        for name, (dtype, options, layout) in cases.items()
        for form in FORMS
        if form is not RING or "documents" not in name
    }


def toys() -> dict[str, Row]:
    """Return the toy's own exchange: Ulysses where the ranks divide the heads, rings without chunks
    of attention."""
    rows: dict[str, Row] = {}
    for cp_size, (family, model) in product((2, 4), FAMILIES.items()):
        options = {
            "model": model,
            "steps": 2,
            "deterministic": False,
            "eval_every": 2,
            "eval_batches": 1,
        }
        checkpointed = MemoryConfig(gradient_checkpointing=FULL, chunk_loss=True)
        memory = {"memory": checkpointed} if family == "qwen3" else {}
        for form in ToyCPConfig.capabilities.context_forms:
            if family != "llama4" if form is RING else model.n_heads % cp_size == 0:
                layout = {"cp_size": cp_size, **memory}
                rows[f"toy {family} {form.value} {cp_size}"] = Row(
                    ToyCPConfig(context=form), 4, layout, options
                )
    return rows


ROWS = families() | switches() | toys()
SHORT = {
    *(
        "llama ulysses",
        "llama4 gathered",
        "qwen3_moe ring",
        "gathered, full, offload, chunked loss",
    ),
    *(
        "ring, selective, offload",
        "ulysses, documents",
        "ring, bf16",
        "toy qwen3 ulysses 2",
        "toy gpt2 ring 4",
    ),
}
trained = trained_rows(ROWS, train)


@pytest.mark.parametrize("row", levels(ROWS, SHORT))
def test_shared_sequences_train_like_one_process(row: str, trained: Pairs) -> None:
    """Oracle: losses, norms and held-out losses of one process over two micro-batches with ragged
    padding."""
    # A rounding to 16 bits that falls otherwise is 2**-9 of a value; norms add many of them.
    tolerances = (
        (2e-4, 1e-2)
        if ROWS[row].parallel.param_dtype is DType.bfloat16
        else (2e-6, 1e-5)
    )
    assert_close(*trained[row], *tolerances, tensors=False)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_strategies_agree_in_every_bit_in_the_deterministic_mode(ranks: int) -> None:
    """Oracle: each other's losses, norms and parameters; and the losses of one process."""
    # The toy of context parallelism has an exchange of its own.
    kinds = [
        kind
        for kind in STRATEGIES.values()
        if kind.capabilities.context_forms and kind is not ToyCPConfig
    ]
    parallels = [
        kind(context=ULYSSES) for kind in kinds if issubclass(kind, ReducingConfig)
    ]
    # without one process and the toys of the two axes
    assert len(parallels) == len(STRATEGIES) - 3
    configs = [
        make_config(parallel, ranks, cp_size=2, steps=2) for parallel in parallels
    ]
    first, *others = run_ranks(ranks, outcomes.train_all, configs)[0]
    single = make_config(SingleConfig(simulated_ranks=ranks // 2), 1, steps=2)
    (alone,) = run_ranks(1, outcomes.train_all, [single])[0]
    assert first.losses == pytest.approx(alone.losses, rel=2e-6)
    assert first.grad_norms == pytest.approx(alone.grad_norms, rel=1e-5)
    assert [
        kind.name
        for kind, other in zip(parallels[1:], others, strict=True)
        if other != first
    ] == []


def attend(
    context: Context,
    full: list[Tensor],
    kernels: Ops,
    chunk_len: int | None,
    segments: Tensor | None,
) -> Any:
    """Attention of a rank's part, and gradients of queries, keys and values, for the part of an
    upstream gradient."""
    *leaves, upstream = (context.cut(x, 2).clone().requires_grad_() for x in full)
    q, k, v = leaves
    mask = None if segments is None else context.mask(segments, kernels, q.dtype)
    out = context.attend(q, k, v, kernels, chunk_len, mask)
    return out, *torch.autograd.grad(out, leaves, upstream)


def differences(
    cases: list[tuple[ContextForm, int, int, torch.dtype, str]],
) -> list[float]:
    """Largest difference of each case from attention over full sequences, over chunk lengths and
    documents."""
    group = dist.group.WORLD
    largest = []
    assert group is not None
    for form, n_heads, n_kv_heads, dtype, attention in cases:
        context = build_context(form, group, compiles=False)
        kernels = choose_ops({"attention": attention})
        worst = 0.0
        generator = torch.Generator().manual_seed(0)
        shapes = [
            (2, heads, 48, 8) for heads in (n_heads, n_kv_heads, n_kv_heads, n_heads)
        ]
        full = [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in shapes
        ]
        for chunk_len in (None, 10, 7):
            for documents in (False, True) if form is not RING else (False,):
                numbers = torch.tensor([[0] * 29 + [1] * 19, [0] * 7 + [1] * 41]) * 48
                segments = (
                    numbers + torch.arange(48) // (chunk_len or 48)
                    if documents
                    else None
                )
                # Of rows in two dtypes the wider is the oracle.
                expected = attend(
                    FULL_SEQUENCES,
                    [x.double() for x in full],
                    kernels,
                    chunk_len,
                    segments,
                )
                for part, right in zip(
                    attend(context, full, kernels, chunk_len, segments),
                    expected,
                    strict=True,
                ):
                    worst = max(
                        worst,
                        (part.double() - context.cut(right, 2)).abs().max().item(),
                    )
        largest.append(worst)
    return largest


@pytest.mark.parametrize(
    "ranks",
    [3, *(pytest.param(ranks, marks=pytest.mark.extended) for ranks in (2, 4, 6))],
)
def test_attention_matches_that_of_full_sequences(ranks: int) -> None:
    """Oracle: one rank's attention in float64, values and gradients, for grouped heads, chunks and
    documents.

    Head counts are odd, shared by fewer heads than ranks, or not divided by the ranks.
    """
    heads = [(12, 12), (12, 2), (12, 3), (12, 1)]
    cases = [
        (form, *counts, torch.float64, "torch") for form in FORMS for counts in heads
    ]
    cases += [
        (form, 5, 5, torch.float64, attention)
        for form in (GATHERED, RING)
        for attention in ("torch", "math")
    ]
    cases += [
        (form, 12, 2, dtype, "torch")
        for form in FORMS
        for dtype in (torch.bfloat16, torch.float16)
    ]
    for case, difference in zip(
        cases, run_ranks(ranks, differences, cases)[0], strict=True
    ):
        assert difference < (1e-12 if case[3] is torch.float64 else 0.1), case


def generates_like_a_plain_model(form: ContextForm) -> bool:
    group = dist.group.WORLD
    assert group is not None
    model = build(TINY["gpt2"])
    prompt_T = torch.arange(1, 6)
    alone = generate(model, prompt_T, 8, 24, Draw(0.0))
    use_context(model, build_context(form, group, compiles=False))
    return torch.equal(generate(model, prompt_T, 8, 24, Draw(0.0)), alone)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
def test_generation_needs_no_parts_of_sequences(form: ContextForm) -> None:
    """Oracle: the tokens that the same model generates by itself."""
    assert run_ranks(3, generates_like_a_plain_model, form) == [True] * 3


def activation_bytes(configs: list[Config]) -> list[float]:
    """Peak of a step without parameters, gradients and optimizer states, in GiB, of each run."""
    peaks = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        peaks.append(trainer.history[-1].memory_rest_gib or 0.0)
        del trainer
    return peaks


@pytest.mark.parametrize(
    ("ranks", "seq_len"), [(2, 1024), pytest.param(4, 2048, marks=pytest.mark.extended)]
)
def test_ranks_hold_their_share_of_the_activations(ranks: int, seq_len: int) -> None:
    """Oracle: the bytes that tensors hold at the peak of a step with the same global batch, divided
    by the ranks."""
    sizes = {
        "dim": 64,
        "n_layers": 2,
        "n_heads": 8,
        "n_kv_heads": 4,
        "ffn_dim": 160,
        "max_seq_len": seq_len,
    }
    model = dataclasses.replace(tiny_model(), **sizes)
    settings: dict[str, Any] = {
        "model": model,
        "seq_len": seq_len,
        "batch_size": 1,
        "steps": 2,
        "deterministic": False,
    }
    configs = [make_config(FSDP2Config(), ranks, grad_accum=1, **settings)]
    configs += [
        make_config(
            FSDP2Config(context=form),
            ranks,
            cp_size=ranks,
            grad_accum=ranks,
            **settings,
        )
        for form in FORMS
    ]
    alone, *shared = run_ranks(ranks, activation_bytes, configs)[0]
    # A CPU's attention repeats shared key heads before torch 2.9: 0.31 to 0.33 of four ranks with
    # gathered keys.
    most = 1.2 if TORCH >= (2, 9) else 1.4
    for form, nbytes in zip(FORMS, shared, strict=True):
        assert 0.8 < ranks * nbytes / alone < most, form.value
