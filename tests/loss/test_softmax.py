"""The softmax of a chunk of logits: losses, and gradients in place."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fsdptoys.loss import softmax
from fsdptoys.loss.objective import IGNORE_INDEX, Objective


def test_large_logits_keep_the_precision_of_the_loss() -> None:
    """Oracle: float64; logits near 1e4, whose logsumexp in float32 has no correct digit of the
    loss."""
    logits_CV = torch.linspace(0, 3, 40).repeat(3, 1) + 1e4
    labels_C = torch.tensor([5, IGNORE_INDEX, 39])
    expected = F.cross_entropy(logits_CV.double(), labels_C, reduction="none")
    losses_C = torch.empty(3)
    softmax.softmax_gradient_(logits_CV, labels_C, losses_C, Objective(), gradient=True)
    torch.testing.assert_close(losses_C, expected.float(), rtol=1e-6, atol=0)


INTERPRETED = """
import sys, torch
from fsdptoys.loss.objective import Objective
from fsdptoys.loss.softmax_triton import softmax_gradient_
results = []
for logits, labels, objective, gradient in torch.load(sys.argv[1], weights_only=False):
    losses = torch.empty(len(labels))
    softmax_gradient_(logits, labels, losses, Objective(*objective), gradient)
    results.append((losses, logits))
torch.save(results, sys.argv[2])
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernel_matches_autograd(tmp_path: Path) -> None:
    """Oracle: autograd in float64. Triton's interpreter runs the kernel on the CPU, over rows of
    one block and more."""
    cases = []
    for v in (17, 5000):
        for dtype in (torch.float32, torch.bfloat16):
            logits_CV = (
                torch.randn(5, v, generator=torch.Generator().manual_seed(v)) * 3
            )
            logits_CV[0] += 300
            labels_C = torch.tensor([0, 4, IGNORE_INDEX, v - 1, v])
            for objective in ((0.0, 0.0), (0.1, 1e-2)):
                cases += [
                    (logits_CV.to(dtype, copy=True), labels_C, objective, gradient)
                    for gradient in (True, False)
                ]
    torch.save(cases, tmp_path / "cases.pt")
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            INTERPRETED,
            tmp_path / "cases.pt",
            tmp_path / "results.pt",
        ],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
    )
    if "only 0-dimensional arrays can be converted" in run.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert run.returncode == 0, run.stderr
    results = torch.load(tmp_path / "results.pt")
    for (logits_CV, labels_C, (smoothing, z_loss_coef), gradient), (
        losses_C,
        changed_CV,
    ) in zip(cases, results, strict=True):
        leaf_CV = logits_CV[:4].double().requires_grad_()
        expected_C = F.cross_entropy(
            leaf_CV, labels_C[:4], label_smoothing=smoothing, reduction="none"
        )
        expected_C = expected_C + z_loss_coef * leaf_CV.logsumexp(1).square() * (
            labels_C[:4] != IGNORE_INDEX
        )
        expected_C.sum().backward()
        torch.testing.assert_close(
            losses_C[:4], expected_C.detach().float(), rtol=1e-6, atol=1e-6
        )
        assert losses_C[4].isnan()  # the label after the last class
        assert leaf_CV.grad is not None
        if gradient:
            torch.testing.assert_close(
                changed_CV[:4], leaf_CV.grad.to(logits_CV.dtype), rtol=8e-3, atol=1e-6
            )
        else:
            assert torch.equal(changed_CV, logits_CV)
