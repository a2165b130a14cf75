"""Blocks compiled one by one: their gradients, and the activations saved under a budget."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from fsdptoys.errors import ConfigError
from fsdptoys.memory.activation_checkpointing import GradientCheckpointing, checkpoint_blocks
from fsdptoys.memory.activation_offload import ActivationOffload
from fsdptoys.models import DecoderModel
from fsdptoys.models.lora import Samples, add_adapters
from fsdptoys.models.nf4 import is_packed, pack, quantize_linears, unquantized_name
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.train.compile import compile_blocks
from fsdptoys.tune import Base
from tests.memory.blocks import build, forward, gradients
from tests.models.families import SMALL

NONE, FULL, SELECTIVE = GradientCheckpointing
BACKEND = "aot_eager_decomp_partition"
"""Partitions graphs like inductor, without code generation."""


def run(model: DecoderModel) -> tuple[dict[str, Tensor], int]:
    """Gradients of two micro-batches, and bytes of activations that one saves for its backward."""
    weights = {param.data_ptr() for param in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    forward(model, 1).backward()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(model, 2)
    loss.backward()
    return gradients(model), sum(saved.values())


def compiled(family: str, mode: GradientCheckpointing = NONE, offload: bool = False, **options: Any) -> DecoderModel:
    torch._dynamo.reset()
    counters.clear()
    model = build(SMALL[family])
    host = ActivationOffload(torch.device("cpu"), min_bytes=0) if offload else None
    checkpoint_blocks(model.layers, mode, offload=host)
    compile_blocks(model.layers, backend=BACKEND, **options)
    return model


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To 1e-5 of each gradient's largest element."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("family", "mode", "options"),
    [
        ("llama2", NONE, {}),
        ("llama2", FULL, {}),
        ("llama2", FULL, {"offload": True}),
        ("llama2", FULL, {"inner_hooks": True}),
        ("llama2", SELECTIVE, {}),
        ("qwen3_moe", NONE, {}),
        ("qwen3_moe", FULL, {}),
        ("qwen3_moe", FULL, {"offload": True}),
    ],
    ids=str,
)
def test_compiled_blocks_have_the_gradients_of_eager_blocks(
    family: str, mode: GradientCheckpointing, options: dict[str, bool]
) -> None:
    """Oracle: the same model without checkpointing, in eager mode; graphs counted by Dynamo; bytes saved."""
    expected, plain_bytes = run(build(SMALL[family]))
    got, saved_bytes = run(compiled(family, mode, **options))
    assert_close(got, expected)
    assert counters["stats"]["unique_graphs"] >= 1
    assert saved_bytes < plain_bytes


def adapted(base: Base) -> DecoderModel:
    """Adapters with dropout, and values that depend only on parameter names."""
    model, samples = build(SMALL["llama3 scaled tied"]), Samples(1)
    add_adapters(model, ["q_proj", "up_proj"], 4, 8.0, 0.2, samples)
    samples.numbers_B = torch.tensor([3, 4])
    for name, param in model.layers.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(param, 0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    if base is Base.nf4:
        for mlp in [block.mlp for block in model.layers]:
            mlp.down_proj.__class__ = torch.nn.Linear  # of 112 columns
        weights = dict(model.layers.named_parameters())
        quantize_linears(model)
        model.init_buffers(torch.device("cpu"))
        for name, param in model.layers.named_parameters():
            if is_packed(name):
                pack(weights[unquantized_name(name)], param)
    return model


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("base", Base)
@pytest.mark.parametrize("mode", [NONE, FULL])
def test_compiled_adapters_have_the_gradients_of_eager_ones(mode: GradientCheckpointing, base: Base) -> None:
    """Oracle: the same model in eager mode; graphs counted by Dynamo.

    Layers that drop other elements share one; the first has its own, since its input needs no gradient.
    """
    expected, _ = run(adapted(base))
    torch._dynamo.reset()
    counters.clear()
    model = adapted(base)
    checkpoint_blocks(model.layers, mode)
    compile_blocks(model.layers, backend=BACKEND)
    got, _ = run(model)
    assert_close(got, expected)
    assert len(got) == 12 and not counters["graph_break"]
    # Torch 2.7 compiles checkpointed blocks once more, 2.11 does not.
    assert counters["stats"]["unique_graphs"] == 2 + (mode is FULL and TORCH < (2, 11))


def test_equal_blocks_share_one_compilation() -> None:
    """Oracle: graphs counted by Dynamo."""
    run(compiled("llama3 scaled tied"))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("family", ["llama2", "qwen3_moe"])
def test_lower_memory_budget_saves_fewer_bytes_with_equal_gradients(family: str) -> None:
    """Oracle: eager mode, with losses of routers that receive their gradients after the forward; bytes counted."""
    expected, _ = run(build(SMALL[family]))
    before = torch._functorch.config.activation_memory_budget
    saved = []
    for budget in (0.0, 0.5, 1.0):
        got, saved_bytes = run(compiled(family, budget=budget))
        assert_close(got, expected)
        saved.append(saved_bytes)
    assert saved[0] < saved[1] < saved[2]
    assert torch._functorch.config.activation_memory_budget == before


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3_moe", {}), ("llama2", {"offload": True}), ("llama2", {"inner_hooks": True})],
    ids=["experts", "offload", "inner hooks"],
)
def test_selective_checkpointing_refuses_unsupported_compiled_blocks(family: str, options: dict[str, Any]) -> None:
    """Oracle: the message with the configuration key."""
    with pytest.raises(ConfigError, match=r"memory\.gradient_checkpointing=selective .*; set"):
        compiled(family, SELECTIVE, **options)
