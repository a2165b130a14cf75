"""Context parallelism: ranks that share sequences train like one process."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.schema import Config
from fsdptoys.data import SyntheticConfig
from fsdptoys.memory import ActivationOffload, GradientCheckpointing, MemoryConfig
from fsdptoys.models import Context, ModelConfig, use_context
from fsdptoys.models.context import FULL_SEQUENCES
from fsdptoys.models.generate import Draw, generate
from fsdptoys.models.kernels import Kernels, choose_kernels
from fsdptoys.parallel import STRATEGIES, FSDP2Config, SingleConfig
from fsdptoys.parallel.context import ContextForm, build_context
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.parallel.precision import DType
from fsdptoys.parallel.strategy import ReducingConfig
from fsdptoys.train import build as prepare_module
from fsdptoys.train.compile import compile_blocks
from fsdptoys.train.trainer import Trainer
from scripts.parity import train_all
from scripts.ranks import run_ranks
from tests.checkpoint.folders import build
from tests.parallel.runs import TINY, make_config, tiny_model

ULYSSES, GATHERED, RING = FORMS = tuple(form for form in ContextForm if form is not ContextForm.auto)
MODELS: dict[str, ModelConfig] = {"llama": tiny_model(), **TINY}
DOCUMENTS = SyntheticConfig(branching=60, mask_documents=True)

Losses = list[tuple[float, float]]


def train(configs: list[Config]) -> list[Losses]:
    """Losses and gradient norms of each run; activations of any size are offloaded, and compiled code is not built."""
    prepare_module.ActivationOffload = functools.partial(ActivationOffload, min_bytes=0)  # type: ignore[attr-defined]
    prepare_module.compile_blocks = functools.partial(compile_blocks, backend="aot_eager")  # type: ignore[attr-defined]
    results = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        results.append([(step.loss, step.grad_norm) for step in trainer.history])
    return results


def assert_alike(found: Losses, expected: Losses, case: str, loss: float = 2e-6, norm: float = 1e-5) -> None:
    for (loss_found, norm_found), (loss_expected, norm_expected) in zip(found, expected, strict=True):
        assert loss_found == pytest.approx(loss_expected, rel=loss), case
        assert norm_found == pytest.approx(norm_expected, rel=norm), case


def test_families_train_like_one_process() -> None:
    """Oracle: losses and norms of one process over two micro-batches with ragged padding; every form, on four ranks.

    Four ranks cannot exchange six heads, so they share them two by two there.
    """
    settings: dict[str, Any] = {"steps": 1, "deterministic": False}
    singles = [
        make_config(SingleConfig(simulated_ranks=ranks), 1, model=model, **settings)
        for ranks in (1, 2)
        for model in MODELS.values()
    ]
    losses = dict(zip([(r, f) for r in (1, 2) for f in MODELS], run_ranks(1, train, singles)[0], strict=True))
    layouts = {ULYSSES: 2, GATHERED: 4, RING: 4}
    cases = [(family, form, cp, -1) for family in MODELS for form, cp in layouts.items()]
    if TORCH >= (2, 8):  # with which FSDP2 replicates on a CPU
        cases += [("llama4", form, 2, 2) for form in FORMS]
    configs = [
        make_config(FSDP2Config(context=form), 4, cp_size=cp, fsdp_size=size, model=MODELS[family], **settings)
        for family, form, cp, size in cases
    ]
    for case, found in zip(cases, run_ranks(4, train, configs)[0], strict=True):
        assert_alike(found, losses[4 // case[2], case[0]], str(case))


def test_memory_switches_and_documents_train_like_one_process() -> None:
    """Oracle: one process with the same data and dtype, over two steps with a norm that clips.

    Llama 4 has chunked attention, layers without positions, temperatures and experts. Recomputation repeats the
    collectives of its attention.
    """
    full, selective = GradientCheckpointing.full, GradientCheckpointing.selective
    offloaded = MemoryConfig(gradient_checkpointing=full, activation_offload=True, chunk_loss=True, chunk_tokens="16")
    selected = MemoryConfig(gradient_checkpointing=selective)
    selected_offload = MemoryConfig(gradient_checkpointing=selective, activation_offload=True)
    low = {"param_dtype": DType.bfloat16}
    compiled: dict[str, Any] = {"model": TINY["qwen3"], "memory": MemoryConfig(gradient_checkpointing=full)}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "full, offload, chunked loss": ({}, {"memory": offloaded}),
        "selective": ({}, {"memory": selected}),
        "selective, offload": ({}, {"memory": selected_offload}),
        "documents": ({}, {"data": DOCUMENTS, "memory": selected}),
        "documents of gpt2": ({}, {"data": DOCUMENTS, "model": TINY["gpt2"]}),
        "bf16": (low, {"model": TINY["qwen3"]}),
        "bf16, documents": (low, {"data": DOCUMENTS, "model": TINY["qwen3"]}),
        "compiled": ({}, compiled | {"compile": True}),
    }
    common: dict[str, Any] = {"steps": 2, "deterministic": False, "model": TINY["llama4"]}

    def configs(parallel: Any, ranks: int, cp_size: int, names: list[str], **settings: Any) -> list[Config]:
        return [
            make_config(parallel(**settings, **cases[name][0]), ranks, cp_size=cp_size, **{**common, **cases[name][1]})
            for name in names
        ]

    alone = run_ranks(1, train, configs(SingleConfig, 1, 1, list(cases), simulated_ranks=2))[0]
    expected = dict(zip(cases, alone, strict=True))
    assert expected["documents"] != expected["selective"]
    for form in FORMS:
        names = [name for name in cases if form is not RING or "documents" not in name]
        for name, found in zip(
            names, run_ranks(4, train, configs(FSDP2Config, 4, 2, names, context=form))[0], strict=True
        ):
            # A rounding to 16 bits that falls otherwise is 2**-9 of a value; norms add many of them.
            tolerances = (2e-4, 1e-2) if name.startswith("bf16") else (2e-6, 1e-5)
            assert_alike(found, expected[name], f"{form.value}, {name}", *tolerances)


def test_strategies_agree_in_every_bit_in_the_deterministic_mode() -> None:
    """Oracle: each other's losses, norms and parameters; and the losses of one process."""
    parallels = [kind(context=ULYSSES) for kind in STRATEGIES.values() if issubclass(kind, ReducingConfig)]
    assert len(parallels) == len(STRATEGIES) - 1
    configs = [make_config(parallel, 4, cp_size=2, steps=2) for parallel in parallels]
    first, *others = run_ranks(4, train_all, configs)[0]
    alone = run_ranks(1, train, [make_config(SingleConfig(simulated_ranks=2), 1, steps=2)])[0][0]
    assert_alike(list(zip(first.losses, first.grad_norms, strict=True)), alone, "one process")
    for parallel, other in zip(parallels[1:], others, strict=True):
        assert other == first, parallel.name


def evaluate(config: Config) -> list[float | None]:
    trainer = Trainer(config)
    trainer.train()
    return [step.eval_loss for step in trainer.history]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
def test_evaluation_covers_the_sequences_of_one_process(form: ContextForm) -> None:
    """Oracle: the held-out loss of one process over as many sequences."""
    sizes: dict[str, Any] = {"eval_every": 1, "steps": 1}
    alone = run_ranks(1, evaluate, make_config(SingleConfig(simulated_ranks=2), 1, eval_batches=4, **sizes))[0]
    shared = run_ranks(4, evaluate, make_config(FSDP2Config(context=form), 4, cp_size=2, eval_batches=2, **sizes))
    assert shared[0] == shared[3] and shared[0] == pytest.approx(alone, rel=1e-6)


def attend(
    context: Context, full: list[Tensor], kernels: Kernels, chunk_len: int | None, segments: Tensor | None
) -> Any:
    """Attention of a rank's part, and gradients of queries, keys and values, for the part of an upstream gradient."""
    *leaves, upstream = (context.cut(x, 2).clone().requires_grad_() for x in full)
    q, k, v = leaves
    seen = None if segments is None else context.mask(segments, kernels, q.dtype)
    out = context.attend(q, k, v, kernels, chunk_len, seen)
    return out, *torch.autograd.grad(out, leaves, upstream)


def differences(cases: list[tuple[ContextForm, int, int, torch.dtype, str]]) -> list[float]:
    """Largest difference of each case from attention over full sequences, over chunk lengths and documents."""
    group, found = dist.group.WORLD, []
    assert group is not None
    for form, n_heads, n_kv_heads, dtype, attention in cases:
        context, kernels, worst = (
            build_context(form, group, compiles=False),
            choose_kernels({"attention": attention}),
            0.0,
        )
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, heads, 48, 8) for heads in (n_heads, n_kv_heads, n_kv_heads, n_heads)]
        full = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        for chunk_len in (None, 10, 7):
            for documents in (False, True) if form is not RING else (False,):
                numbers = torch.tensor([[0] * 29 + [1] * 19, [0] * 7 + [1] * 41]) * 48 + torch.arange(48) // (
                    chunk_len or 48
                )
                segments = numbers if documents else None
                # Of rows in two dtypes the wider is the oracle.
                expected = attend(FULL_SEQUENCES, [x.double() for x in full], kernels, chunk_len, segments)
                for part, right in zip(attend(context, full, kernels, chunk_len, segments), expected, strict=True):
                    worst = max(worst, (part.double() - context.cut(right, 2)).abs().max().item())
        found.append(worst)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_attention_matches_that_of_full_sequences(ranks: int) -> None:
    """Oracle: one rank's attention in float64, values and gradients, for grouped heads, chunks and documents.

    Head counts are odd, shared by fewer heads than ranks, or not divided by the ranks.
    """
    heads = [(12, 12), (12, 2), (12, 3), (12, 1)]
    cases = [(form, *each, torch.float64, "torch") for form in FORMS for each in heads]
    cases += [(form, 5, 5, torch.float64, attention) for form in (GATHERED, RING) for attention in ("torch", "math")]
    cases += [(form, 12, 2, dtype, "torch") for form in FORMS for dtype in (torch.bfloat16, torch.float16)]
    for case, found in zip(cases, run_ranks(ranks, differences, cases)[0], strict=True):
        assert found < (1e-12 if case[3] is torch.float64 else 0.1), case


def parts_of_rows(form: ContextForm) -> bool:
    """Compare the labels that this rank's loss gets, and its generated tokens, with those of full sequences."""
    group = dist.group.WORLD
    assert group is not None
    model, kept = build(MODELS["gpt2"]), []
    tokens_BT = torch.arange(1, 2 * 24 + 1).view(2, 24)
    labels_BT = torch.cat((tokens_BT[:, 1:], torch.full((2, 1), -100)), dim=1)
    alone = generate(model, tokens_BT[0, :5], 8, 24, Draw(0.0))

    def loss(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
        kept.append(labels_N)
        return hidden_ND.sum()

    context = build_context(form, group, compiles=False)
    use_context(model, context)
    model(tokens_BT, labels_BT, loss)
    own_BT = context.cut(tokens_BT, 1)
    # In this order of tokens the next one is the number after it, also where a rank's part ends.
    next_BT = torch.where(own_BT % 24 == 0, -100, own_BT + 1)
    return torch.equal(kept[0].view_as(own_BT), next_BT) and torch.equal(
        generate(model, tokens_BT[0, :5], 8, 24, Draw(0.0)), alone
    )


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.value)
def test_labels_of_a_part_follow_its_tokens_and_generation_needs_no_parts(form: ContextForm) -> None:
    """Oracle: the next token of the full row; the tokens that the same model generates by itself."""
    assert run_ranks(3, parts_of_rows, form) == [True] * 3


def activation_bytes(configs: list[Config]) -> list[float]:
    """Peak of a step without parameters, gradients and optimizer states, in GiB, of each run."""
    found = []
    for config in configs:
        trainer = Trainer(config)
        trainer.train()
        found.append(trainer.history[-1].memory_rest_gib or 0.0)
        del trainer
    return found


def test_four_ranks_hold_a_quarter_of_the_activations() -> None:
    """Oracle: the bytes that tensors hold at the peak of a step with the same global batch on four ranks."""
    model = tiny_model()
    model.dim, model.n_heads, model.n_kv_heads, model.ffn_dim, model.max_seq_len = 64, 8, 4, 160, 2048
    model.n_layers = 2
    settings: dict[str, Any] = {"model": model, "seq_len": 2048, "batch_size": 1, "steps": 2, "deterministic": False}
    configs = [make_config(FSDP2Config(), 4, grad_accum=1, **settings)]
    configs += [make_config(FSDP2Config(context=form), 4, cp_size=4, grad_accum=4, **settings) for form in FORMS]
    alone, *shared = run_ranks(4, activation_bytes, configs)[0]
    for form, found in zip(FORMS, shared, strict=True):
        assert 0.2 * alone < found < 0.30 * alone, (form.value, found / alone)
