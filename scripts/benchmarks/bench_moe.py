"""How fast is a mixture-of-experts block? Against transformers' block and a dense block of equal
active FLOPs.

    python scripts/benchmarks/bench_moe.py
    python scripts/benchmarks/bench_moe.py --dim 1024 --ffn-dim 512 --threads 1
    python scripts/benchmarks/bench_moe.py --device cuda --write benchmarks/moe_h200.md

One run, one set of weights, the same inputs: this project's router and experts; transformers'
Qwen3MoeSparseMoeBlock in both its implementations, the loop over experts (``eager``) and
``grouped_mm``, which models built by transformers use by default; and one SwiGLU as wide as a
token's experts together.

Contestants take turns, and every turn has a new input, so that loads differ from turn to turn as
they do in training. Figures are medians over turns; ratios are medians of the ratios within a turn.
Before anything is timed, outputs and all gradients are compared with transformers'.

Exits with status 1 where forward+backward is slower than 3 times the default implementation of
transformers, or than 60% of the dense block. On an accelerator transformers calls the same grouped
kernel as this project; there the first target is to be as fast within 5%.
"""

import argparse
import functools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from fsdptoys.device import DEVICE_TYPES, Device
from fsdptoys.models.layers import SwiGLU
from fsdptoys.models.moe import MoE, Scores
from fsdptoys.utils.tables import markdown_table
from scripts.benchmarks.turns import median_ratio, take_turns
from scripts.common.machine import machine
from scripts.common.page import command_line, page_parser, publish
from scripts.common.progress import progress, unit

SIZES = [(1024, 512), (1024, 256), (2048, 768)]
"""Width and expert width of the default tables; the last is the default of transformers'
Qwen3MoeConfig."""
SPEEDUP_TARGET = 3.0
"""Forward and backward, against transformers' default implementation on a CPU."""
SAME_KERNEL_TARGET = 0.95
"""The same on an accelerator."""
DENSE_TARGET = 0.6
"""Forward and backward, against a dense block of equal active FLOPs."""
WARMUP = 2
"""Turns that are not measured."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference from transformers, relative, in the Frobenius norm."""
OURS = "FSDPToys"
GROUPED = "transformers grouped_mm (default)"
EAGER = "transformers eager"
DENSE = "dense SwiGLU"


class Transformers(nn.Module):
    """transformers' block for rows instead of batches."""

    def __init__(
        self, dim: int, ffn_dim: int, n_experts: int, top_k: int, implementation: str
    ) -> None:
        super().__init__()
        config = transformers.Qwen3MoeConfig(
            hidden_size=dim,
            moe_intermediate_size=ffn_dim,
            num_experts=n_experts,
            num_experts_per_tok=top_k,
            norm_topk_prob=True,
        )
        config._experts_implementation = implementation
        self.block = Qwen3MoeSparseMoeBlock(config)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Apply."""
        return self.block(hidden_ND[None])[0]


def main() -> int:
    """Run all sizes; 0 if every target is met."""
    parser = page_parser(__doc__)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument(
        "--dim", type=int, help="one size instead of the default ones; needs --ffn-dim"
    )
    parser.add_argument("--ffn-dim", type=int)
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="bfloat16 by default, float32 on a CPU",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=DEVICE_TYPES, default="cpu")
    parser.add_argument("--repeats", type=int, help="turns; 30 by default, 9 on a CPU")
    args = parser.parse_args()
    if (args.dim is None) != (args.ffn_dim is None):
        parser.error("--dim and --ffn-dim go together")
    on_cpu = args.device == "cpu"
    args.dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    args.repeats = args.repeats or (9 if on_cpu else 30)
    torch.set_num_threads(args.threads)
    sizes = SIZES if args.dim is None else [(args.dim, args.ffn_dim)]
    texts = [
        "# Mixture-of-experts block",
        command_line(),
        machine(args.device, ["transformers"]),
    ]
    with progress(len(sizes) * (1 + 2 * (args.repeats + WARMUP))):
        for dim, ffn_dim in sizes:
            texts += run_size(args, dim, ffn_dim)
    publish("\n\n".join(texts), args.write)
    return 1 if any(text.startswith("missed") for text in texts) else 0


def run_size(args: argparse.Namespace, dim: int, ffn_dim: int) -> list[str]:
    """Compare and time one size; returns its table and the missed targets."""
    dtype = getattr(torch, args.dtype)
    blocks = build(args, dim, ffn_dim, dtype)
    generator = torch.Generator().manual_seed(1)
    *inputs, grad_ND = (
        torch.randn(args.tokens, dim, generator=generator).to(args.device, dtype)
        for _ in range(args.repeats + WARMUP + 1)
    )
    for hidden_ND in inputs:
        hidden_ND.requires_grad_()
    with unit(f"dim {dim}, comparison"):
        compare(blocks, inputs[0], grad_ND, TOLERANCE[dtype])
    rows = [["phase", "block", "median ms", "tokens/s", "FSDPToys is … times as fast"]]
    for phase, step in (("forward", forward), ("forward+backward", forward_backward)):
        steps = {
            name: functools.partial(step, block, inputs, grad_ND)
            for name, block in blocks.items()
        }
        title = f"dim {dim}, {phase}"
        seconds = take_turns(title, steps, args.repeats, WARMUP, Device(args.device))
        ratios = {name: median_ratio(seconds, name, OURS) for name in blocks}
        for name, times in seconds.items():
            median = statistics.median(times)
            ratio = "" if name == OURS else f"{ratios[name]:.2f}"
            rows.append(
                [
                    phase,
                    name,
                    f"{median * 1e3:.1f}",
                    f"{args.tokens / median:,.0f}",
                    ratio,
                ]
            )
    threads = f", {args.threads} threads" if args.device == "cpu" else ""
    title = (
        f"{args.experts} experts, top-{args.top_k}, {args.tokens} tokens, dim {dim}, ffn_dim "
        f"{ffn_dim}, {args.dtype}, {args.device}{threads}"
    )
    speedup = SPEEDUP_TARGET if args.device == "cpu" else SAME_KERNEL_TARGET
    missed = [
        f"missed: dim {dim}, ffn_dim {ffn_dim}: {ratios[name]:.2f} of {name}, target {target}"
        for name, target in ((GROUPED, speedup), (DENSE, DENSE_TARGET))
        if ratios[name] < target
    ]
    return [title, markdown_table(rows, (2, 3, 4)), *missed]


def build(
    args: argparse.Namespace, dim: int, ffn_dim: int, dtype: torch.dtype
) -> dict[str, nn.Module]:
    """The contestants, with the same weights."""
    shape = (dim, ffn_dim, args.experts, args.top_k)
    blocks = {
        OURS: MoE(*shape, Scores.normalized_softmax),
        GROUPED: Transformers(*shape, "grouped_mm"),
        EAGER: Transformers(*shape, "eager"),
        DENSE: SwiGLU(dim, args.top_k * ffn_dim),
    }
    torch.manual_seed(0)
    for block in (blocks[OURS], blocks[DENSE]):
        for param in block.parameters():
            nn.init.normal_(param, std=0.02)
    for name in (GROUPED, EAGER):
        blocks[name].load_state_dict(
            {
                f"block.{_peer_name(key)}": value
                for key, value in blocks[OURS].state_dict().items()
            }
        )
    return {name: block.to(args.device, dtype) for name, block in blocks.items()}


def _peer_name(name: str) -> str:
    return name.replace("router.", "gate.")


def forward(
    block: nn.Module, inputs: list[Tensor], grad_ND: Tensor, turn: int
) -> Tensor:
    """Forward alone, as in evaluation."""
    with torch.no_grad():
        return block(inputs[turn])


def forward_backward(
    block: nn.Module, inputs: list[Tensor], grad_ND: Tensor, turn: int
) -> Tensor:
    """Forward, and gradients of the input and all parameters, as in training."""
    inputs[turn].grad = None
    block.zero_grad(set_to_none=True)
    out_ND = block(inputs[turn])
    out_ND.backward(grad_ND)
    return out_ND.detach()


def compare(
    blocks: dict[str, nn.Module], hidden_ND: Tensor, grad_ND: Tensor, tolerance: float
) -> None:
    """Hold our output and gradients against both implementations of transformers.

    Raises:
        SystemExit: naming the difference.
    """
    results = {}
    for name in (OURS, GROUPED, EAGER):
        out_ND = forward_backward(blocks[name], [hidden_ND], grad_ND, 0)
        grads = {
            _peer_name(key).removeprefix("block."): param.grad
            for key, param in blocks[name].named_parameters()
        }
        results[name] = {"output": out_ND, "input gradient": hidden_ND.grad, **grads}
        blocks[name].zero_grad(set_to_none=True)
    for name in (GROUPED, EAGER):
        for key, expected in results[name].items():
            error = (
                (results[OURS][key] - expected).float().norm() / expected.float().norm()
            ).item()
            if not error <= tolerance:
                raise SystemExit(
                    f"{key} differs from {name} by {error:.1e} relative, more than {tolerance:.0e}"
                )


if __name__ == "__main__":
    sys.exit(main())
