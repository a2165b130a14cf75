"""Backend of attention that a plan assumes, and the rate at which it runs."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.config.compose import compose_config
from fsdptoys.device.profile import AttentionKind, load_hardware
from fsdptoys.plan.estimate.estimate import closed_form
from fsdptoys.plan.predict import doubts
from fsdptoys.plan.simulator.events import KernelKind
from fsdptoys.plan.trace.fake_kernels import replace_kernels
from fsdptoys.plan.trace.op_costs import PREFERS_CUDNN, attention_of
from tests.plan.simulator.imagined import imagined_hardware

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
FLASH, CUDNN = [SDPBackend.FLASH_ATTENTION], [SDPBackend.CUDNN_ATTENTION]
BF16, FP32 = torch.bfloat16, torch.float32


class Names(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "dtype", "causal", "backends", "expected"),
    [
        ("cudnn", BF16, True, (), "cudnn"),
        ("cudnn", BF16, True, FLASH, "flash"),
        ("cudnn", BF16, False, (), "flash"),
        ("cudnn", FP32, True, (), "efficient"),
        ("flash", BF16, True, (), "flash"),
        ("flash", BF16, True, CUDNN, "cudnn"),
    ],
)
def test_plans_take_the_backend_that_pytorch_would(
    kind: str, dtype: torch.dtype, causal: bool, backends: Sequence[SDPBackend], expected: str
) -> None:
    """Oracle: the order of ``cuda/sdp_utils.cpp`` among the enabled backends; cuDNN takes causal 16 bits alone."""
    query, key, value = (torch.empty(1, 4, 64, 32, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
    with replace_kernels(AttentionKind(kind)), Names() as seen, sdpa_kernel(backends) if backends else nullcontext():
        F.scaled_dot_product_attention(query, key, value, is_causal=causal).sum().backward()
    fused = [name for name in seen.names if "_scaled_dot_product_" in name]
    assert fused == [f"aten::_scaled_dot_product_{expected}_attention{suffix}" for suffix in ("", "_backward")]


@pytest.mark.parametrize(
    ("hardware", "words", "expected"),
    [
        ("h200", (), "cudnn" if TORCH >= PREFERS_CUDNN else "flash"),
        ("h200", ("train.deterministic=true",), "flash"),
        ("a100", (), "flash"),
    ],
)
def test_deterministic_runs_take_flash_attention(hardware: str, words: Sequence[str], expected: str) -> None:
    """Oracle: ``check_cudnn_deterministic`` and ``check_prefer_cudnn_attention`` of ``cuda/sdp_utils.cpp``."""
    assert attention_of(compose_config(["experiment=null", *words]), load_hardware(hardware)).value == expected


@pytest.mark.skipif(TORCH < PREFERS_CUDNN, reason="this torch prefers FlashAttention")
def test_closed_form_prices_attention_by_backend_and_head_width() -> None:
    """Oracle: the FLOPs of causal attention, 7 B·H·T²·K a layer in both passes, at cuDNN's rate for narrow heads."""
    words = ["model=llama_debug", "parallel=single", "parallel.param_dtype=bfloat16", "train.seq_len=512"]
    config = compose_config(["experiment=null", *words])
    config.validate(1, "cuda")
    hardware = load_hardware("h200")
    model = config.model
    flops = 7 * model.n_heads * 512**2 * (model.dim // model.n_heads) * model.n_layers * config.train.batch_size
    slow = imagined_hardware(memory_bandwidth=1e30)
    slow.attention_backends["cudnn 64"] = hardware.attention_backends["cudnn 64"]
    object.__setattr__(slow, "attention", AttentionKind.cudnn)
    seconds = closed_form(config, slow, 1).time.kinds[KernelKind.attention.value]
    assert seconds == pytest.approx(flops / hardware.attention_backends["cudnn 64"].value, rel=1e-6)


@pytest.mark.skipif(TORCH < PREFERS_CUDNN, reason="this torch prefers FlashAttention")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("parallel.param_dtype=bfloat16",), True),
        (("parallel.param_dtype=bfloat16", "kernels.attention=flash"), False),
        (("parallel.param_dtype=bfloat16", "kernels.attention=cudnn"), True),
        (("parallel.param_dtype=float32",), False),
    ],
)
def test_plans_state_that_they_assume_cudnn(words: Sequence[str], expected: bool) -> None:
    """Oracle: 16-bit causal attention whose backend is not another one; a named backend is no unmeasured kernel."""
    config = compose_config(["experiment=null", "model=llama_debug", "parallel=single", *words])
    config.validate(1, "cuda")
    sentences = doubts(config, load_hardware("h200"), 1)
    assert any("assumes attention by cuDNN" in sentence for sentence in sentences) is expected
    assert not any("attention=" in sentence for sentence in sentences)
