"""Time and peak memory of the head's loss with its gradients, compared with other implementations
of the same loss.

    python scripts/benchmarks/bench_loss.py
    python scripts/benchmarks/bench_loss.py --threads 1 --dtypes bfloat16 --repeats 9
    python scripts/benchmarks/bench_loss.py --device cuda --write benchmarks/loss.md

Contestants, all from hidden states, weight and labels to the gradients of the first two: the plain
loss over whole logits; torch's own chunked ``F.linear_cross_entropy`` with its default options, if
torch has it; the plain loss over checkpointed chunks, as long as ours; and this project's chunked
loss, which adds up the weight's gradient in float32 or in bf16. Losses and gradients are compared
with the plain loss in float64 before anything is timed.

The contestants take turns; times are medians over turns, ratios medians of the ratios within a
turn, so that other load on the machine affects all alike. Peak memory is the most that one step
allocates beyond its inputs: on an accelerator ``max_memory_allocated``; on a CPU the count of
``fsdptoys.device.AllocationCount``, to which scratch memory of oneDNN and MKL is invisible.

Exits with status 1 where the default chunked loss takes more than 0.9 of the time or 25% of the
memory of the plain one on a CPU, or more than 20 ms for the large shape in bf16 on CUDA (a target
for an H200).
"""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdptoys.device import AllocationCount, Device
from fsdptoys.loss import LossFn, build_loss, cross_entropy_sum
from fsdptoys.loss.chunked import auto_chunk_tokens
from fsdptoys.utils.tables import markdown_table
from scripts.benchmarks.turns import median_ratio, take_turns
from scripts.common.machine import machine
from scripts.common.page import command_line, page_parser, publish
from scripts.common.progress import progress, unit

SHAPE = (4096, 1024, 32000)
"""Tokens, width, vocabulary."""
LARGE_SHAPE = (4096, 4096, 128256)
"""Llama 3 8B's head; on CUDA only."""
TIME_TARGET = 0.9
MEMORY_TARGET = 0.25
LARGE_TARGET_MS = 20.0
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest error of loss and gradients, relative, in the Frobenius norm."""
LOSS_TOLERANCE_OF_TORCH = 0.05
"""torch 2.13's own adds up its loss in the dtype of the inputs."""
MIB = 2**20
PLAIN = "plain"
TORCH = "F.linear_cross_entropy"
CHECKPOINTED = "checkpointed chunks"
OURS = "chunked"
OURS_BF16 = "chunked, bf16 sum"


def shape(word: str) -> tuple[int, ...]:
    """``4096x1024x32000`` as numbers."""
    sizes = tuple(int(size) for size in word.split("x"))
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"{word} must be three sizes, as in 4096x1024x32000"
        )
    return sizes


def main(argv: list[str] | None = None) -> int:
    """Run all shapes and dtypes; 0 if every bar is met."""
    parser = page_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="NxDxV",
        type=shape,
        help="tokens x width x vocabulary",
    )
    dtypes = ["bfloat16", "float32"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        help="tokens a chunk; chosen by the loss if left out",
    )
    args = parser.parse_args(argv)
    shapes = args.shapes or ([SHAPE] if args.device == "cpu" else [SHAPE, LARGE_SHAPE])
    torch.set_num_threads(args.threads)
    texts = [
        "# Chunked loss",
        command_line(argv),
        machine(torch.device(args.device).type),
    ]
    contestants = 5 if hasattr(F, "linear_cross_entropy") else 4
    with progress(
        len(shapes) * len(args.dtypes) * (2 + 2 * contestants + args.repeats)
    ):
        for sizes in shapes:
            for dtype in args.dtypes:
                texts += run_case(args, sizes, getattr(torch, dtype))
    publish("\n\n".join(texts), args.write)
    return 1 if any(text.startswith("MISSED") for text in texts) else 0


def run_case(
    args: argparse.Namespace, sizes: tuple[int, ...], dtype: torch.dtype
) -> list[str]:
    """Check, time and measure one shape in one dtype; returns its table and its bars."""
    inputs = make_inputs(args.device, sizes, dtype)
    losses = contestants(args, sizes, inputs[1])
    errors = check(losses, *inputs)
    peaks = {}
    for name, loss_fn in losses.items():
        with unit(f"{dtype}, memory of {name}") as progress_unit:
            peaks[name] = peak_bytes(loss_fn, *inputs)
            progress_unit.note = f"{peaks[name] / MIB:.0f} MiB"
    steps = {
        name: functools.partial(timed_step, loss_fn, inputs)
        for name, loss_fn in losses.items()
    }
    seconds = take_turns(str(dtype), steps, args.repeats, 1, Device(args.device))
    ratios = {name: median_ratio(seconds, name, PLAIN) for name in losses}
    milliseconds = {
        name: 1e3 * statistics.median(times) for name, times in seconds.items()
    }
    columns = [
        "median ms",
        "× plain",
        "peak MiB",
        "× plain",
        "error of weight's gradient",
    ]
    rows = [["loss and gradients", *columns]]
    for name in losses:
        rows.append([
            name, f"{milliseconds[name]:.1f}", f"{ratios[name]:.2f}", f"{peaks[name] / MIB:.0f}",
            f"{peaks[name] / peaks[PLAIN]:.2f}", f"{errors[name]:.1e}",
        ])  # fmt: skip
    bars = []
    if args.device == "cpu":
        bars.append(("time over plain", ratios[OURS], TIME_TARGET))
        bars.append(("memory over plain", peaks[OURS] / peaks[PLAIN], MEMORY_TARGET))
    elif sizes == LARGE_SHAPE and dtype == torch.bfloat16:
        bars.append(("time in ms", milliseconds[OURS], LARGE_TARGET_MS))
    n_tokens, dim, vocab_size = sizes
    threads = f", {args.threads} threads" if args.device == "cpu" else ""
    return [
        f"{n_tokens} tokens, width {dim}, vocabulary {vocab_size}, "
        f"{str(dtype).removeprefix('torch.')}, {args.device}{threads}",
        markdown_table(rows, range(1, 6)),
        *(
            f"{'met' if value <= limit else 'MISSED'}: {dtype}: {name} {value:.2f}, bar {limit:.2f}"
            for name, value, limit in bars
        ),
    ]


def make_inputs(
    device: str, sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states as after a normalization, a head as it is initialized, and labels that all
    count."""
    n_tokens, dim, vocab_size = sizes
    generator = torch.Generator().manual_seed(0)
    hidden_ND = (
        torch.randn(n_tokens, dim, generator=generator)
        .to(device, dtype)
        .requires_grad_()
    )
    weight_VD = (
        (torch.randn(vocab_size, dim, generator=generator) * 0.02)
        .to(device, dtype)
        .requires_grad_()
    )
    return (
        hidden_ND,
        weight_VD,
        torch.randint(vocab_size, (n_tokens,), generator=generator).to(device),
    )


def contestants(
    args: argparse.Namespace, sizes: tuple[int, ...], weight_VD: Tensor
) -> dict[str, LossFn]:
    """Name → loss function."""
    chunk_tokens = args.chunk_tokens or auto_chunk_tokens(sizes[0], weight_VD, 0)

    def checkpointed(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
        loss = torch.zeros((), device=hidden_ND.device)
        for hidden_CD, labels_C in zip(
            hidden_ND.split(chunk_tokens), labels_N.split(chunk_tokens), strict=True
        ):
            loss = loss + checkpoint(
                cross_entropy_sum, hidden_CD, weight_VD, labels_C, use_reentrant=False
            )
        return loss

    losses: dict[str, LossFn] = {PLAIN: build_loss(chunk_loss=False)}
    if hasattr(F, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        losses[TORCH] = lambda *inputs: F.linear_cross_entropy(
            *inputs, reduction="sum", options=options
        )
    losses[CHECKPOINTED] = checkpointed
    losses[OURS] = build_loss(True, args.chunk_tokens, torch.float32)
    losses[OURS_BF16] = build_loss(True, args.chunk_tokens, torch.bfloat16)
    return losses


def step(
    loss_fn: LossFn, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor
) -> Tensor:
    """Loss and gradients of its mean; as in training, the sum is divided after the head."""
    hidden_ND.grad = weight_VD.grad = None
    loss = loss_fn(hidden_ND, weight_VD, labels_N)
    (loss / len(labels_N)).backward()
    return loss.detach()


def timed_step(
    loss_fn: LossFn, inputs: tuple[Tensor, Tensor, Tensor], turn: int
) -> None:
    """Take a step, the same in each turn."""
    step(loss_fn, *inputs)


def check(
    losses: dict[str, LossFn], hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor
) -> dict[str, float]:
    """Relative error of the weight's gradient of each contestant, against the plain loss in
    float64.

    Raises:
        SystemExit: naming the first difference.
    """
    with unit(f"{hidden_ND.dtype}, exact outcome"):
        exact = float64_outcome(hidden_ND, weight_VD, labels_N)
    errors = {}
    for name, loss_fn in losses.items():
        with unit(f"{hidden_ND.dtype}, check of {name}"):
            outcome = (
                step(loss_fn, hidden_ND, weight_VD, labels_N),
                hidden_ND.grad,
                weight_VD.grad,
            )
        for key, value, expected in zip(
            ("loss", "hidden gradient", "weight gradient"), outcome, exact, strict=True
        ):
            error = ((value - expected).norm() / expected.norm()).item()
            tolerance = TOLERANCE[
                torch.bfloat16 if name == OURS_BF16 else hidden_ND.dtype
            ]
            if name == TORCH and key == "loss":
                tolerance = LOSS_TOLERANCE_OF_TORCH
            if not error <= tolerance:
                raise SystemExit(
                    f"{key} of {name} is off by {error:.1e} relative, more than {tolerance:.0e}"
                )
        errors[name] = error
    return errors


def float64_outcome(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and gradients of its mean, by autograd over a few tokens at a time."""
    hidden_ND, weight_VD = (
        x.detach().double().requires_grad_() for x in (hidden_ND, weight_VD)
    )
    total = torch.zeros((), dtype=torch.float64, device=hidden_ND.device)
    for hidden_CD, labels_C in zip(
        hidden_ND.split(512), labels_N.split(512), strict=True
    ):
        loss = F.cross_entropy(
            F.linear(hidden_CD, weight_VD), labels_C, reduction="sum"
        )
        (loss / len(labels_N)).backward()
        total += loss.detach()
    assert hidden_ND.grad is not None and weight_VD.grad is not None
    return total, hidden_ND.grad, weight_VD.grad


def peak_bytes(
    loss_fn: Callable[..., Tensor],
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
) -> int:
    """The most that a step holds beyond its inputs, gradients included."""
    hidden_ND.grad = weight_VD.grad = None
    if hidden_ND.device.type != "cpu":
        # Kernels and workspaces that stay
        step(loss_fn, hidden_ND, weight_VD, labels_N)
        hidden_ND.grad = weight_VD.grad = None
        torch.accelerator.synchronize()
        backend = getattr(torch, hidden_ND.device.type)
        before = backend.memory_allocated()
        backend.reset_peak_memory_stats()
        step(loss_fn, hidden_ND, weight_VD, labels_N)
        torch.accelerator.synchronize()
        return backend.max_memory_allocated() - before
    count = AllocationCount({})
    step(loss_fn, hidden_ND, weight_VD, labels_N)
    counted = count.finish({})
    return counted.peak_bytes - counted.before_bytes


if __name__ == "__main__":
    sys.exit(main())
