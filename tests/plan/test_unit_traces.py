"""Contents of a model's units, by hand."""

import pytest
import torch

from fsdptoys.device.profile import AttentionKind, load_hardware
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.estimate.unit_traces import segments_of
from fsdptoys.plan.simulator.events import Alloc, Free
from fsdptoys.plan.trace.op_costs import fuses_rms_norm
from tests.harness.traced_runs import configured

extended = pytest.mark.extended

BF16 = "parallel.param_dtype=bfloat16"


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [*((kind, "") for kind in AttentionKind), ("npu", "npu"), ("flash", "compiled")],
)
def test_kept_activations_of_a_llama_block(
    kind: AttentionKind | str, kernels: str
) -> None:
    """Oracle: by hand, tensors in bf16: nine of width D with fused normalization, or eight,
    statistics, and of width F four, or three (gate, up, their product) with fused kernels."""
    kind = AttentionKind(kind)
    device_type = "npu" if kernels == "npu" else "cuda"
    overrides = ["model=llama2_7b", BF16, "train.seq_len=4096", "train.batch_size=1"]
    overrides += [
        f"kernels.{operation}={kernels or 'torch'}"
        for operation in ("rms_norm", "rotary", "swiglu")
    ]
    config = configured(overrides, 8, device_type)
    with torch.device("meta"):
        model = config.model.build()
    (block,) = {
        id(block): block for block in segments_of(config, model, kind)[1:-1]
    }.values()
    live: dict[int, int] = {}
    for event in (event for piece in block.forward for event in piece.events):
        if isinstance(event, Alloc):
            live[event.block] = event.bytes
        elif isinstance(event, Free):
            live.pop(event.block, None)
    live_bytes = sum(live.values())
    tokens = 4096
    width = 4096
    ffn_width = 11008
    heads = 32
    # Two normalized inputs, q, k, v, attention's result, the stream twice: after attention and
    # after the block. The input is the previous block's. torch_npu's result is contiguous and kept
    # transposed, too.
    wide = (9 if kind is AttentionKind.npu else 8) * tokens * width * 2
    statistics = tokens * heads * 4 * (16 if kind is AttentionKind.npu else 1)
    expected = wide + (3 if kernels else 4) * tokens * ffn_width * 2 + statistics
    if kernels or (kind.on_cuda and fuses_rms_norm()):
        assert live_bytes == pytest.approx(expected, rel=0.001)
    else:
        # Normalization in parts keeps float32 copies.
        assert live_bytes > expected * 0.97


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=qwen3_0.6b",),
        ("model=gpt2",),
        ("model=qwen3_moe_mini",),
        (
            "model=llama4_mini",
            "memory.gradient_checkpointing=full",
            "memory.checkpointing_every=2",
        ),
        pytest.param(
            ("model=gpt2", "parallel=ddp", "train.grad_accum=2"), marks=extended
        ),
        pytest.param(("model=llama3_1b", "mesh.fsdp_size=1"), marks=extended),
    ],
)
def test_every_parameter_has_a_gradient_in_one_segment(
    overrides: tuple[str, ...],
) -> None:
    """Oracle: the model's parameters; a tied one is in two segments; predictions are
    positive and finite."""
    hardware = load_hardware("h100")
    config = configured([*overrides, BF16], 8, hardware.device_type)
    with torch.device("meta"):
        model = config.model.build()
    segments = segments_of(config, model, AttentionKind.flash)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    inside = [
        f"layers.{index}.{name}"
        for index, block in enumerate(segments[1:-1])
        for name in block.gradients
    ]
    assert sorted([*segments[0].gradients, *inside, *segments[-1].gradients]) == sorted(
        names
    )
    prediction = fast_estimate(config, hardware, 8)
    assert (
        0
        < prediction.memory.end_bytes
        <= prediction.memory.peak_bytes
        <= prediction.memory.reserved_bytes
    )
    assert 0 < prediction.time.step_seconds < 10
    assert 0 < (prediction.mfu or 0) < 1
