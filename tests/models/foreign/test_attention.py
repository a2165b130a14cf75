"""Models of transformers whose sequences ranks share, and whose documents are kept apart."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.errors import ConfigError
from fsdptoys.memory import GradientCheckpointing, MemoryConfig
from fsdptoys.models import DecoderModel, TransformersConfig
from fsdptoys.models.context import FULL_SEQUENCES
from fsdptoys.models.documents import document_positions
from fsdptoys.models.foreign import attention as foreign_attention
from fsdptoys.models.foreign.attention import attend, attends_by, make_mask, one_rank
from fsdptoys.models.kernels import dense_mask
from fsdptoys.models.ops import Ops
from fsdptoys.parallel import FSDP2Config, SingleConfig
from fsdptoys.parallel.context import ContextForm, build_context
from tests.harness.folders import build
from tests.harness.foreign_families import SETTINGS
from tests.harness.foreign_runs import (
    foreign_config,
    tiny_model,
    train,
    train_plainly,
)
from tests.harness.levels import by_level
from tests.harness.ranks import run_ranks
from tests.harness.tiny import DOCUMENTS, make_config

pytestmark = pytest.mark.oracle

SHORT = ("llama", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "mistral")
REFUSED = {
    "bloom": "could not be followed",
    "deepseek_v32": "could not be followed",
    "deepseek_v4": "could not be followed",
    "falcon": "could not be followed",
    "glm_moe_dsa": "could not be followed",
    "granitemoehybrid": "convolution",
    "kimi_linear": "convolution",
    "lfm2": "convolution",
    "mamba2": "convolution",
    "minimax": "could not be followed",
    "mpt": "could not be followed",
    "qwen3_next": "convolution",
    "qwen3_5_text": "convolution",
    "qwen3_5_moe_text": "convolution",
}
"""Families with layers that mix tokens otherwise than by an attention of the registry → words of
the reason."""
SHARED = [family for family in SETTINGS if family not in REFUSED]
OVERRIDES: dict[str, dict[str, Any]] = {"granitemoe": {"attention_multiplier": 0.25}}
"""Settings with which scores of random weights stay small, so that rounding does not grow."""
COMPUTED = {"beta": 0.5, "eps": -1e-6}
"""Buffers of apertus that only weights set → values of its constructor."""
END = 7
LENGTHS = ([1, 12, 4, 15], [18, 14])
"""Lengths of the documents of two sequences; windows and chunks have 8 tokens."""
TOKENS = 32


def packed_tokens() -> Tensor:
    """Two sequences of documents."""
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(END + 1, 256, (2, TOKENS), generator=generator)
    for row, lengths in enumerate(LENGTHS):
        ends = torch.tensor(lengths).cumsum(0) - 1
        tokens_BT[row, ends[:-1]] = END
    return tokens_BT


def documents(tokens_BT: Tensor) -> Iterator[tuple[int, slice]]:
    """Row and span of each document."""
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            yield row, slice(start, start + length)
            start += length


def projection() -> Tensor:
    return torch.randn(2, TOKENS, 256, generator=torch.Generator().manual_seed(2))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {
        name: torch.zeros_like(param) if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return grads


def assert_equal(
    grads: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    """Compare norms of differences; a gradient that is zero in exact arithmetic has no norm to
    divide by."""
    largest = max(grad.norm() for grad in expected.values())
    for name, grad in expected.items():
        difference = (grads[name] - grad).norm()
        assert difference <= tolerance * torch.maximum(grad.norm(), 1e-2 * largest), (
            name
        )


def project(model: DecoderModel) -> Tensor:
    """A number that all logits of this rank's tokens enter, after its backward."""
    tokens_BT = packed_tokens()
    logits_BTV = model(tokens_BT)
    weights_BTV = model.context.cut(projection(), 1)
    total: Tensor = (logits_BTV * weights_BTV).sum()
    total.backward()
    return total.detach()


def shared_results(configs: dict[str, TransformersConfig]) -> dict[str, str]:
    """Family → the first comparison that fails, on one of two ranks."""
    failures = {}
    for family, config in configs.items():
        try:
            compare_forms(config)
        except Exception as failure:  # of any kind, so that the others are compared
            failures[family] = f"{type(failure).__name__}: {failure}"
    return failures


def filled_model(config: TransformersConfig) -> DecoderModel:
    """A model with values in all parameters and buffers."""
    model = build(config)
    if config.model_type == "apertus":
        for name, buffer in model.named_buffers():
            value = COMPUTED.get(name.rpartition(".")[2])
            if value is not None:
                buffer.fill_(value)
    return model


def compare_forms(config: TransformersConfig) -> None:
    model = filled_model(config)
    for end in (None, END):
        model.document_end = end
        model.context = FULL_SEQUENCES
        expected = project(model)
        expected_grads = gradients(model)
        for form in (ContextForm.ulysses, ContextForm.gathered):
            model.context = build_context(form, dist.group.WORLD, compiles=False)
            total = project(model)
            grads = gradients(model)
            for tensor in (total, *grads.values()):
                dist.all_reduce(tensor)
            label = f"{form.value}, document_end={end}"
            scale = max(1.0, expected.abs().item())
            assert (total - expected).abs() <= 1e-4 * scale, label
            assert_equal(grads, expected_grads)


@functools.cache
def failures_of(families: tuple[str, ...]) -> list[dict[str, str]]:
    """Compare families in one process group, on every rank."""
    configs = {
        family: tiny_model(family, **OVERRIDES.get(family, {})) for family in families
    }
    return run_ranks(2, shared_results, configs)


@pytest.mark.parametrize("family", by_level(SHARED, SHORT))
def test_ranks_that_share_sequences_have_the_gradients_of_one_process(
    family: str,
) -> None:
    """Oracle: one process, with transformers' own attention where documents are not kept apart;
    gradients of all parameters, by Ulysses and gathered keys."""
    others = tuple(other for other in SHARED if other not in SHORT)
    for failures in failures_of(SHORT if family in SHORT else others):
        assert family not in failures, failures[family]


@pytest.mark.parametrize("family", by_level(SHARED, SHORT))
def test_packed_documents_have_the_logits_and_gradients_of_separate_ones(
    family: str,
) -> None:
    """Oracle: the same model on one document at a time, with transformers' own attention."""
    model = filled_model(tiny_model(family))
    tokens_BT = packed_tokens()
    weights_BTV = projection()
    model.document_end = END
    logits_BTV = model(tokens_BT)
    (logits_BTV * weights_BTV).sum().backward()
    grads = gradients(model)
    model.document_end = None
    for row, span in documents(tokens_BT):
        alone_1TV = model(tokens_BT[row : row + 1, span])
        torch.testing.assert_close(
            logits_BTV[row : row + 1, span], alone_1TV, rtol=1e-4, atol=1e-4
        )
        (alone_1TV * weights_BTV[row : row + 1, span]).sum().backward()
    assert_equal(grads, gradients(model))


@pytest.mark.parametrize("family", by_level(SETTINGS, (*SHORT, *REFUSED)))
def test_families_that_mix_tokens_otherwise_are_found(family: str) -> None:
    """Oracle: the list of families with a mask or a mixing of their own."""
    obstacle = tiny_model(family).sequence_obstacle()
    if family in REFUSED:
        assert obstacle is not None and REFUSED[family] in obstacle
    else:
        assert obstacle is None


@pytest.mark.parametrize(
    ("family", "form", "checkpointing"),
    [
        ("llama", ContextForm.ring, "none"),
        ("gemma3_text", ContextForm.gathered, "full"),
        pytest.param(
            "gpt_oss", ContextForm.ulysses, "full", marks=pytest.mark.extended
        ),
    ],
)
def test_runs_that_share_sequences_match_a_plain_loop(
    family: str, form: ContextForm, checkpointing: str
) -> None:
    """Oracle: transformers' own model in a plain loop: losses and norms of each step."""
    memory = MemoryConfig(gradient_checkpointing=GradientCheckpointing(checkpointing))
    model = tiny_model(family)
    parallel = FSDP2Config(context=form)
    config = foreign_config(model, parallel, memory=memory, cp_size=2)
    plain = foreign_config(model, SingleConfig(), 1)
    expected = run_ranks(1, train_plainly, plain)[0]
    for curve in run_ranks(2, train, config):
        assert curve.error(expected) < 1e-5


@pytest.mark.parametrize(
    ("family", "settings", "phrase"),
    [
        ("qwen3_next", {}, ["model=qwen3_next", "convolution", "mesh.cp_size=1"]),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            ["rope_type dynamic", "mesh.cp_size=1"],
        ),
    ],
)  # fmt: skip
def test_refusals_name_the_model_the_reason_and_the_fix(
    family: str, settings: dict[str, Any], phrase: list[str]
) -> None:
    """Oracle: the words of the sentence."""
    model = tiny_model(family, **settings)
    with pytest.raises(ConfigError) as refusal:
        foreign_config(model, FSDP2Config(), cp_size=2)
    for word in phrase:
        assert word in str(refusal.value)
    with pytest.raises(ConfigError, match=r"data\.mask_documents=false"):
        make_config(FSDP2Config(), 2, model=model, data=DOCUMENTS)


def test_a_ring_refuses_windows() -> None:
    """Oracle: the words of the sentence."""
    ring = FSDP2Config(context=ContextForm.ring)
    with pytest.raises(ConfigError, match=r"parallel\.context=ring .* windows"):
        foreign_config(tiny_model("gemma3_text"), ring, cp_size=2)


def test_compiled_blocks_are_refused_where_ranks_share_sequences() -> None:
    """Oracle: the words of the sentence."""
    with pytest.raises(ConfigError, match=r"train\.compile=false or mesh\.cp_size=1"):
        foreign_config(tiny_model("llama"), FSDP2Config(), cp_size=2, compile=True)


def causal_mask() -> Any:
    from transformers.masking_utils import causal_mask_function

    with attends_by(one_rank(Ops())):
        return make_mask(mask_function=causal_mask_function)


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "both directions"),
        ({"mask": torch.zeros(1)}, "a way of its own"),
    ],
)
def test_attention_refuses_what_it_would_ignore(
    options: dict[str, Any], phrase: str
) -> None:
    """Oracle: the arguments that change attention, and are not computed."""
    x_BHTK = torch.randn(1, 2, 4, 8)
    arguments = dict(options)
    mask = arguments.pop("mask", None)
    with pytest.raises(ValueError, match=phrase):
        attend(
            nn.Identity(),
            x_BHTK,
            x_BHTK,
            x_BHTK,
            causal_mask() if mask is None else mask,
            **arguments,
        )


def test_a_dropped_window_or_sink_changes_the_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: comparisons above see each of two injected faults by far."""
    model = build(tiny_model("gpt_oss"))
    model.document_end = END
    tokens_BT = packed_tokens()
    logits_BTV = model(tokens_BT)
    plain = foreign_attention._attend_plainly

    @functools.wraps(plain)
    def without_sinks(*args: Any) -> Tensor:
        return plain(*args[:-1], None)

    with monkeypatch.context() as patch:
        patch.setattr(foreign_attention, "_attend_plainly", without_sinks)
        assert (model(tokens_BT) - logits_BTV).abs().max() > 1e-2
    with monkeypatch.context() as patch:
        patch.setattr(foreign_attention.Mask, "_make_rows", rows_of_documents)
        assert (model(tokens_BT) - logits_BTV).abs().max() > 1e-2


def rows_of_documents(
    mask: foreign_attention.Mask, start: int, queries: int, like: Tensor
) -> Tensor:
    """Documents without windows."""
    assert start == 0
    return dense_mask(document_starts(packed_tokens()), like.dtype)


def document_starts(tokens_BT: Tensor) -> Tensor:
    """Place of the first token of each token's document."""
    return torch.arange(TOKENS) - document_positions(tokens_BT, END)


def test_positions_of_documents_restart() -> None:
    """Oracle: counting by hand."""
    positions_BT = document_positions(packed_tokens(), END)
    assert positions_BT[0].tolist() == [*range(1), *range(12), *range(4), *range(15)]
