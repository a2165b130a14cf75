"""Checks of kernels against float64: the loss, attention by every implementation, and the experts'
products."""

import copy
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptoys.device import Device
from fsdptoys.loss import build_loss
from fsdptoys.loss.objective import IGNORE_INDEX, Objective
from fsdptoys.loss.softmax import softmax_gradient_
from fsdptoys.models.attention import masked_attention
from fsdptoys.models.grouped import choose_product, works
from fsdptoys.models.kernels import IMPLEMENTATIONS
from fsdptoys.models.moe import MoE, Scores
from scripts.smoke.device import relative_error
from scripts.smoke.report import Report

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative, in the Frobenius norm."""


def milliseconds(device: str, call: Callable[[], object]) -> float:
    """One call on the clock, to the end of the device's work."""
    on = Device(device, 0)
    on.synchronize()
    start = time.perf_counter()
    call()
    on.synchronize()
    return 1e3 * (time.perf_counter() - start)


def check_loss(report: Report, device: str) -> None:
    """Losses and gradients with ignored rows, smoothing and z-loss, of logits and of the chunked
    head."""
    N, V, D = (512, 128256, 256) if device == "cuda" else (24, 1009, 32)
    generator = torch.Generator().manual_seed(0)
    labels_N = torch.randint(V, (N,), generator=generator)
    labels_N[::5] = IGNORE_INDEX
    logits_NV = 4 * torch.randn(N, V, generator=generator)
    objective = Objective(label_smoothing=0.1, z_loss_coef=1e-3)
    for dtype in (torch.float32, torch.bfloat16):
        rounded_NV = logits_NV.to(dtype)
        exact_NV = (
            rounded_NV.to(device, torch.float64)
            if device == "cuda"
            else rounded_NV.double()
        )
        exact_NV.requires_grad_()
        exact_N = _exact_losses(exact_NV, labels_N.to(exact_NV.device), objective)
        exact_N.sum().backward()
        assert exact_NV.grad is not None
        got_NV = rounded_NV.to(device)
        got_N = torch.full((N,), float("nan"), device=device)
        softmax_gradient_(got_NV, labels_N.to(device), got_N, objective, gradient=True)
        report.error(
            f"{dtype} losses of {N}×{V} logits", relative_error(got_N, exact_N), 1e-5
        )
        report.error(
            f"{dtype} gradient of these",
            relative_error(got_NV, exact_NV.grad),
            TOLERANCE[dtype],
        )
    if device == "cuda":
        from fsdptoys.loss.head_products import _adds_to_float32
        from fsdptoys.loss.softmax import _triton_kernel

        report.expect(_triton_kernel() is not None, "the loss's Triton kernel compiles")
        report.fact("addmm of bf16 adds to float32", _adds_to_float32())
    _check_head(report, device, N, V, D)


def _exact_losses(logits_NV: Tensor, labels_N: Tensor, objective: Objective) -> Tensor:
    losses_N = F.cross_entropy(
        logits_NV, labels_N, reduction="none", label_smoothing=objective.label_smoothing
    )
    return losses_N + objective.z_loss_coef * logits_NV.logsumexp(1).square() * (
        labels_N != IGNORE_INDEX
    )


def _check_head(report: Report, device: str, N: int, V: int, D: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden_ND = torch.randn(N, D, generator=generator).bfloat16()
    weight_VD = (0.1 * torch.randn(V, D, generator=generator)).bfloat16()
    labels_N = torch.randint(V, (N,), generator=generator).to(device)
    where = device if device == "cuda" else "cpu"
    exact = [
        x.to(where, torch.float64).requires_grad_() for x in (hidden_ND, weight_VD)
    ]
    F.cross_entropy(
        exact[0] @ exact[1].t(), labels_N.to(where), reduction="sum"
    ).backward()
    inputs = [x.to(device).requires_grad_() for x in (hidden_ND, weight_VD)]
    loss_fn = build_loss(chunk_loss=True)
    report.fact(
        "chunked loss, first call, ms",
        milliseconds(device, lambda: loss_fn(*inputs, labels_N).backward()),
    )
    for name, actual, expected in zip(
        ("hidden states", "weight"), inputs, exact, strict=True
    ):
        assert actual.grad is not None and expected.grad is not None
        report.error(
            f"chunked loss's gradient of the {name}",
            relative_error(actual.grad, expected.grad),
            2e-2,
        )


def check_attention(report: Report, device: str) -> None:
    """Outputs and gradients of every implementation, with first and second call on the clock."""
    long, odd = (4096, 704) if device == "cuda" else (64, 48)
    K = 128 if device == "cuda" else 16
    names = [name for name in IMPLEMENTATIONS["attention"] if name != "npu"]
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, grad = _inputs(
            device, dtype, long if dtype is torch.bfloat16 else odd, K, 8, 2
        )
        exact = _exact_attention(q, k, v, grad, _causal(q.shape[2], q.device))
        for name in names:
            attend = IMPLEMENTATIONS["attention"][name]
            _compare(
                report,
                device,
                f"{name} {dtype} T={q.shape[2]}",
                attend,
                (q, k, v),
                grad,
                exact,
                name == "torch",
            )
    for length in (odd, long):
        _check_documents(report, device, length, K)
    _check_decoding(report, device, K)


def _check_documents(report: Report, device: str, length: int, K: int) -> None:
    """Documents of odd lengths, with rows of scores below -88; float32's exponential of these is
    zero.

    cuDNN's backward gave NaN for such rows under a mask
    (https://github.com/pytorch/pytorch/issues/196678).
    """
    q, k, v, grad = _inputs(device, torch.bfloat16, length, K, 8, 8)
    # A document's first token sees itself alone, with a score near -160
    k = q * (-160 / K**0.5)
    segments_BT = (torch.arange(length, device=q.device) // (length // 3 + 5)).expand(
        len(q), -1
    )
    visible = _causal(length, q.device) & (
        segments_BT[0, :, None] == segments_BT[0, None, :]
    )
    exact = _exact_attention(q, k, v, grad, visible)
    for name, documents in IMPLEMENTATIONS["document_attention"].items():
        if name == "flex" and device != "cuda":
            continue
        mask = documents.mask(segments_BT, q.dtype)

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            documents: object = documents,
            mask: object = mask,
        ) -> Tensor:
            return documents.attend(q, k, v, mask)  # type: ignore[attr-defined,no-any-return]

        _compare(
            report,
            device,
            f"documents {name} T={length}",
            attend,
            (q, k, v),
            grad,
            exact,
            True,
        )


def _check_decoding(report: Report, device: str, K: int) -> None:
    """One query over growing keys, as in generation: a plan for each length would show as slow
    later calls."""
    for dtype in (torch.bfloat16, torch.float32):
        times = []
        for length in (1000, 1001, 1002):
            q, k, v, _ = _inputs(device, dtype, length, K, 8, 2)
            q = q[:, :, -1:]
            with torch.no_grad():
                out: list[Tensor] = []
                times.append(
                    milliseconds(
                        device,
                        lambda q=q, k=k, v=v, out=out: out.append(
                            masked_attention(q, k, v, None)
                        ),
                    )
                )  # type: ignore[misc]
            exact = _exact_output(
                q, k, v, torch.ones(1, length, dtype=torch.bool, device=q.device)
            )
            report.error(
                f"decoding {dtype}, {length} keys",
                relative_error(out[0], exact),
                TOLERANCE[dtype],
            )
        report.fact(f"decoding {dtype}, ms of 1000, 1001 and 1002 keys", times)


def _inputs(
    device: str, dtype: torch.dtype, length: int, K: int, heads: int, shared: int
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(
        torch.randn(1, count, length, K, generator=generator).to(device, dtype)
        for count in (heads, shared, shared, heads)
    )


def _causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_()


def _exact_output(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention by its formula in float64; on a device other than CUDA, on the CPU."""
    if q.device.type != "cuda":
        q, k, v, visible = (x.cpu() for x in (q, k, v, visible))
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeats, 1) for x in (k, v))
    scores = (q.double() @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(
        ~visible, -torch.inf
    )
    return scores.softmax(3) @ v


def _exact_attention(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, visible: Tensor
) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    wide = [x.double() for x in inputs]
    for x in wide:
        x.retain_grad()
    out = _exact_output(*wide, visible)
    out.backward(grad.to(out.device, torch.float64))
    return [out.detach(), *(x.grad for x in wide)]  # type: ignore[list-item]


def _compare(
    report: Report,
    device: str,
    name: str,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: tuple[Tensor, ...],
    grad: Tensor,
    exact: list[Tensor],
    required: bool,
) -> None:
    """Compare output and gradients; an implementation that refuses these inputs is a fact unless it
    is required."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs: list[Tensor] = []

    def call() -> None:
        for leaf in leaves:
            leaf.grad = None
        outputs[:] = [attend(*leaves)]
        outputs[0].backward(grad)

    try:
        times = [milliseconds(device, call) for _ in range(2)]
    except Exception as error:
        report.fact(f"{name}: refused", str(error).splitlines()[0])
        report.expect(not required, f"{name} runs, or is not required")
        return
    report.fact(f"{name}: first and second call, ms", times)
    results = [outputs[0], *(leaf.grad for leaf in leaves)]
    for part, actual, expected in zip(
        ("output", "q's", "k's", "v's"), results, exact, strict=True
    ):
        assert actual is not None
        part = part if part == "output" else f"{part} gradient"
        report.error(
            f"{name} {part}", relative_error(actual, expected), TOLERANCE[grad.dtype]
        )


def check_experts(report: Report, device: str) -> None:
    """The chosen product with an empty group, and a block of experts in forward and backward."""
    for dtype in (torch.bfloat16, torch.float32):
        product = choose_product(device, dtype, 64, 128)
        report.fact(f"product for {dtype}", type(product).__name__)
        report.expect(
            works(product, device, dtype),
            f"{type(product).__name__} multiplies {dtype} with an empty group",
        )
        _check_block(report, device, dtype)


def _check_block(report: Report, device: str, dtype: torch.dtype) -> None:
    """The oracle is the same block in float32 on the CPU, one expert after the other."""
    torch.manual_seed(0)
    block = MoE(64, 128, 8, 2, Scores.normalized_softmax)
    for param in block.parameters():
        torch.nn.init.normal_(param, std=0.1)
    block.to(dtype)
    expected_block = copy.deepcopy(block).float()
    hidden_ND = torch.randn(333, 64).to(dtype)
    grad_ND = torch.randn(333, 64).to(dtype)
    results = []
    for layer, where, kind in (
        (block, device, dtype),
        (expected_block, "cpu", torch.float32),
    ):
        layer.to(where)
        inputs = hidden_ND.clone().to(where, kind).requires_grad_()
        outputs = layer(inputs)
        outputs.backward(grad_ND.to(where, kind))
        gradients = {
            f"{name} gradient": param.grad for name, param in layer.named_parameters()
        }
        values = {"output": outputs, "input gradient": inputs.grad}
        results.append(values | {"experts": layer.router.counts_E} | gradients)
    actual, expected = results
    report.fact(f"tokens of the experts, {dtype}", actual.pop("experts").tolist())
    expected.pop("experts")
    # A token whose router logits are nearly equal may choose another expert in bf16.
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    for name, value in actual.items():
        report.error(
            f"block of experts in {dtype}, {name}",
            relative_error(value, expected[name]),
            tolerance,
        )
