"""Split of a model into stages, and a model with some of them.

The blocks are split so that the most expensive stage is as cheap as it can be. The cost of a part
is the sum of its shares of the model's parameters (memory) and of its FLOPs (time), so that an
embedding counts half as much as a head. Not covered: tied embeddings, whose weight two stages would
have.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from torch import nn

from .decoder import DecoderModel, flops_per_token
from .stages import LAST, Stage


class SomeBlocks(nn.ModuleList):
    """Blocks under their indices in the full model, in ascending order."""

    def __init__(self, blocks: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for index, block in blocks:
            self.add_module(index, block)


def split_model(model: DecoderModel, count: int, seq_len: int) -> list[Stage]:
    """Split a full model into stages of at least one block.

    Args:
        model: on any device.
        count: stages; at most the number of blocks.
        seq_len: tokens of a sequence, for the FLOPs of attention.
    """
    n_blocks = len(model.layers)
    assert 1 <= count <= n_blocks, "the number of stages was not checked"
    parts = [
        [
            module
            for name, module in model.named_children()
            if name not in ("layers", *LAST)
        ]
    ]
    parts += [[block] for block in model.layers] + [[model.norm, model.lm_head]]
    sizes = [[_parameters(part), flops_per_token(part, seq_len)] for part in parts]
    totals = [sum(size) for size in zip(*sizes, strict=True)]
    first, *costs, last = [
        sum(amount / total for amount, total in zip(size, totals, strict=True))
        for size in sizes
    ]
    costs[0] += first
    costs[-1] += last
    ends = list(accumulate(balanced_sizes(costs, count)))
    starts = [0, *ends[:-1]]
    return [
        Stage(start, end, start == 0, end == n_blocks)
        for start, end in zip(starts, ends, strict=True)
    ]


def balanced_sizes(costs: Sequence[float], count: int) -> list[int]:
    """Sizes of ``count`` runs of consecutive costs, none empty, with the smallest largest sum.

    Of several such splits, one with a small sum of squares.
    """
    before = [0.0, *accumulate(costs)]
    # best[end]: (largest sum, sum of squares, sizes) of the first runs, which end there.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for run in range(1, count + 1):
        ends = range(run, len(costs) - count + run + 1)
        longer: dict[int, tuple[float, float, list[int]]] = {}
        for end in ends:
            options = []
            for start, (largest, squares, sizes) in best.items():
                if start < end:
                    cost = before[end] - before[start]
                    options.append(
                        (max(largest, cost), squares + cost**2, [*sizes, end - start])
                    )
            longer[end] = min(options)
        best = longer
    return best[len(costs)][2]


def keep_stages(model: DecoderModel, stages: Sequence[Stage]) -> None:
    """Drop the parts of a model that none of its stages has, before anything wraps them; an
    identity replaces them."""
    blocks = list(model.layers.named_children())
    model.layers = SomeBlocks(
        (index, block)
        for index, block in blocks
        if any(stage.has(f"layers.{index}") for stage in stages)
    )
    for name, _ in list(model.named_children()):
        if name != "layers" and not any(stage.has(name) for stage in stages):
            setattr(model, name, nn.Identity())


def _parameters(modules: Iterable[nn.Module]) -> int:
    return sum(param.numel() for module in modules for param in module.parameters())
