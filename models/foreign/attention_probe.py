"""What a transformers model asks of attention, found by forwards on the meta device.

Ranks can share sequences, and documents can be kept apart, only if all that mixes tokens is an
attention that transformers' registry chooses. Forwards without memory show what each block does:
how often it attends, with which arguments, and whether it mixes tokens elsewhere: by convolutions,
by running sums, or by scores of its own. Experts are left out; they work on single tokens.

Found by their shapes: the number of tokens is a prime that no width of a model has.

Not covered: a layer that changes beyond the longer of the two lengths that are tried.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode

from ..ops import Ops
from .attention import NAME, Mask, attend, attends_by, make_mask, one_rank
from .base import TransformersSettings

PROBE = f"{NAME}_probe"
"""Name of the recording attention in transformers' registries."""
LENGTHS = (61, 8191)
"""Tokens of the forwards. The second one is for layers that change with the length, such as those
that compress keys; it is not reached by recurrences, which take time for each token."""
MIXERS = frozenset(
    (
        "convolution",
        "cumprod",
        "cumsum",
        "cummax",
        "flip",
        "logcumsumexp",
        "roll",
    )
)
"""Operators that combine tokens if the dim is that of tokens."""
MOST_CHARACTERS = 200
"""Longest quote of a foreign error."""
CALL_DEPENDENT_ROPES = ("dynamic", "longrope")
"""Rotary positions that depend on the longest position of a call, so on a rank's part."""


@dataclass
class AttentionUse:
    """How the blocks of a model attend."""

    calls: list[int]
    """Calls of the registered attention, per block."""
    heads: set[int] = field(default_factory=set)
    """Numbers of query heads."""
    is_plain: bool = True
    """Whether all attention is causal, without windows, chunks, caps, sinks or other widths of
    values."""
    obstacle: str | None = None
    """Why ranks cannot share sequences, nor documents be kept apart, as a clause; None if they
    can."""


def attention_use(config: TransformersSettings) -> AttentionUse:
    """Probe the model of a configuration; once."""
    key = (config.text, config.layers)
    if key not in _USES:
        with torch.device("meta"):
            model = config.build()
        _USES[key] = probe_attention(model.hf, model.decoder, list(model.layers))
    return _USES[key]


_USES: dict[tuple[str, int | None], AttentionUse] = {}


def probe_attention(
    model: Any, decoder: nn.Module, blocks: Sequence[nn.Module]
) -> AttentionUse:
    """Run two forwards on the meta device.

    Args:
        model: transformers' model, with parameters and buffers on the meta device.
        decoder: the module that runs the blocks.
        blocks: the model's blocks.
    """
    use = AttentionUse([0] * len(blocks))
    use.obstacle = _declared_obstacle(model.config, blocks)
    if use.obstacle is not None:
        return use
    for tokens in LENGTHS:
        use.calls = [0] * len(blocks)
        use.obstacle = _observed_obstacle(model, decoder, blocks, use, tokens)
        if use.obstacle is not None:
            return use
    return use


def _observed_obstacle(
    model: Any,
    decoder: nn.Module,
    blocks: Sequence[nn.Module],
    use: AttentionUse,
    tokens: int,
) -> str | None:
    """Run a forward, and return what it shows; ``use`` gets the calls."""
    watch = _Watch(use, tokens)
    with (
        _recorded_attention(model, decoder, watch),
        _watched_blocks(blocks, watch),
        _without_experts(blocks),
        mock.patch.object(Distribution, "_validate_args", False),
        torch.device("meta"),
        torch.no_grad(),
        attends_by(one_rank(Ops())),
        watch,
    ):
        tokens_BT = torch.zeros(1, tokens, dtype=torch.int64)
        try:
            decoder(
                input_ids=tokens_BT,
                attention_mask=torch.ones_like(tokens_BT),
                position_ids=torch.zeros_like(tokens_BT),
                use_cache=False,
            )
        except Exception as error:  # of foreign code, with a mask that is no tensor
            reason = str(error).strip().partition("\n")[0]
            return f"its attention could not be followed ({reason[:MOST_CHARACTERS]})"
    silent = [index for index, count in enumerate(use.calls) if not count]
    if silent:
        kind = type(blocks[silent[0]]).__name__
        return f"block {silent[0]} ({kind}) does not attend by transformers' registry"
    return watch.mixes


def _declared_obstacle(config: Any, blocks: Sequence[nn.Module]) -> str | None:
    """What the configuration or the modules say."""
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)]
    for rope in nested or [ropes]:
        if rope.get("rope_type") in CALL_DEPENDENT_ROPES:
            return (
                f"its rotary positions (rope_type {rope['rope_type']}) depend on the length of "
                "each call"
            )
    for index, block in enumerate(blocks):
        for module in block.modules():
            if isinstance(module, nn.Conv1d):
                return f"block {index} has a convolution over tokens"
    return None


class _Watch(TorchDispatchMode):
    """Looks for operators that combine tokens within a block."""

    def __init__(self, use: AttentionUse, tokens: int) -> None:
        super().__init__()
        self.use = use
        self.tokens = tokens
        self.block: int | None = None
        """The block that runs."""
        self.mixes: str | None = None
        """What was found, as a clause."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if self.mixes is None:
            shape = result.shape if isinstance(result, Tensor) else ()
            if self.block is None:
                if name == "arange" and self.tokens in shape:
                    self.mixes = "it counts positions itself"
            elif (name in MIXERS and _covers(self.tokens, name, args)) or list(
                shape
            ).count(self.tokens) > 1:
                self.mixes = (
                    f"block {self.block} combines tokens outside of attention ({name})"
                )
        return result

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Record a call, which must be one that ``attention.attend`` computes."""
        block, self.block = self.block, -1
        mixes = self.mixes
        attend(module, query, key, value, attention_mask, **options)
        self.block = block
        self.mixes = mixes
        if block is None:
            self.mixes = "attention is called outside of its blocks"
        else:
            self.use.calls[block] += 1
        self.use.heads.add(query.shape[1])
        width = value.shape[-1]
        self.use.is_plain &= (
            isinstance(attention_mask, Mask)
            and attention_mask.is_plain
            and options.get("softcap") is None
            and options.get("s_aux") is None
            and width == query.shape[-1]
        )
        batch, heads, tokens, _ = query.shape
        return query.new_empty(batch, tokens, heads, width), None


def _covers(tokens: int, name: str, args: Any) -> bool:
    """Whether an operator works along the dim of tokens, as far as it says."""
    if name == "convolution":
        return tokens in args[0].shape
    dims = args[-1] if len(args) > 1 else ()
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    shape = args[0].shape
    return any(
        isinstance(dim, int)
        and -len(shape) <= dim < len(shape)
        and shape[dim] == tokens
        for dim in dims
    )


@contextmanager
def _recorded_attention(
    model: Any, decoder: nn.Module, watch: _Watch
) -> Iterator[None]:
    """Choose the recording attention for all parts of a model."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, watch.attend)
    AttentionMaskInterface.register(PROBE, make_mask)
    configs = {id(config): config for config in (model.config, _config_of(decoder))}
    chosen = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = PROBE
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = chosen[key]


def _config_of(module: nn.Module) -> Any:
    return getattr(module, "config", None)


@contextmanager
def _watched_blocks(blocks: Sequence[nn.Module], watch: _Watch) -> Iterator[None]:
    """Tell which block runs."""
    handles = []
    for index, block in enumerate(blocks):

        def begin(*_: Any, index: int = index) -> None:
            watch.block = index

        def end(*_: Any) -> None:
            watch.block = None

        handles.append(block.register_forward_pre_hook(begin))
        handles.append(block.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_experts(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Let experts return zeros: their matmuls depend on values, which meta tensors lack."""
    experts: list[nn.Module] = [
        module
        for block in blocks
        for module in block.modules()
        if type(module).__name__.endswith("Experts")
    ]

    def zeros(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(hidden)

    forward: Callable[..., Any] = zeros
    for module in experts:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in experts:
            del module.__dict__["forward"]
