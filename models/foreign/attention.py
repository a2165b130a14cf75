"""Attention of transformers' models by this project: shared sequences, and documents kept apart.

transformers chooses attention by a name in two registries. ``attend`` is the function of one, and
``Mask`` what the other makes: instead of a tensor it has transformers' own rule of which query sees
which key. The rule is evaluated at the positions of full sequences, inside the attention of the
run's ``Context``, so windows and chunks need no knowledge of a family. Without context parallelism
and documents, transformers' own attention computes.

Not covered: rules that read tensors of their own, biases by position, dropout, bidirectional
attention, a cache. An argument that ``attend`` does not know is refused.

Shapes: B batch, T tokens of a full sequence, t of this rank's part, P queries, S keys before the
last of them, H query heads, G key/value heads, h and g those of a rank, K width of a head, V width
of its values.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import masked_attention
from ..context import FULL_SEQUENCES, Context
from ..ops import Ops, leave_uncompiled

NAME = "fsdptoys"
"""Name of the attention in transformers' registries."""

UNUSED = frozenset(
    (
        "cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)
"""Arguments that do not change the attention of a full sequence."""

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``sees(rows, heads, queries, keys)``: bool, of tensors that broadcast."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of one forward, as attention needs them."""

    context: Context
    ops: Ops
    positions_BT: Tensor | None = None
    """Position of each token of the full sequences in its document; None for one document."""


_sequences: ContextVar[Sequences] = ContextVar("sequences")


@contextmanager
def attends_by(sequences: Sequences) -> Iterator[None]:
    """Make the masks of a forward inside for these sequences."""
    token = _sequences.set(sequences)
    try:
        yield
    finally:
        _sequences.reset(token)


class Mask:
    """Which keys a query sees, at positions of full sequences.

    It is no tensor: a model that computes with its mask fails here, rather than train otherwise.
    """

    def __init__(self, sees: Sees, is_causal: bool, sequences: Sequences) -> None:
        self.sequences = sequences
        self.is_plain = is_causal and sequences.positions_BT is None
        """Whether each query sees all keys up to its own."""
        self._sees = sees
        self._rows: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @leave_uncompiled
    def rows(self, start: int, queries: int, like: Tensor) -> Tensor:
        """Additive mask of rows over the keys up to the last of them, (1 or B, 1, P, S).

        All layers of a forward, and its recomputation, share it.
        """
        key = start, queries, like.dtype
        if key not in self._rows:
            self._rows[key] = self._make_rows(start, queries, like)
        return self._rows[key]

    def _make_rows(self, start: int, queries: int, like: Tensor) -> Tensor:
        device = like.device
        end = start + queries
        rows_B111 = torch.arange(like.shape[0], device=device).view(-1, 1, 1, 1)
        heads = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
        positions_BT = self.sequences.positions_BT
        if positions_BT is None:
            places_S = torch.arange(end, device=device)
            queries_P1 = places_S[start:].view(1, 1, -1, 1)
            visible = self._sees(
                rows_B111, heads, queries_P1, places_S.view(1, 1, 1, -1)
            )
        else:
            keys_BS = positions_BT[:, :end]
            # A document by the place of its first token
            documents_BS = torch.arange(end, device=device) - keys_BS
            queries_BP1 = keys_BS[:, start:, None].unsqueeze(1)
            visible = self._sees(rows_B111, heads, queries_BP1, keys_BS[:, None, None])
            visible = visible & (
                documents_BS[:, start:, None] == documents_BS[:, None]
            ).unsqueeze(1)
        added = torch.full(visible.shape, -torch.inf, dtype=like.dtype, device=device)
        return added.masked_fill_(visible, 0.0)


def make_mask(
    *, mask_function: Sees, use_vmap: bool = False, config: Any = None, **_: Any
) -> Mask:
    """Make a mask as transformers asks for one, of the sequences of ``attends_by``."""
    from transformers.masking_utils import causal_mask_function

    if use_vmap:
        raise ValueError(
            f"model_type {getattr(config, 'model_type', '?')} masks attention by a function of its "
            "own, which is not known at positions of full sequences; set mesh.cp_size=1 and "
            "data.mask_documents=false"
        )
    return Mask(mask_function, mask_function is causal_mask_function, _sequences.get())


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it, over full sequences of the run's ``Context``.

    Args:
        module: the attention layer.
        query: (B, H, t, K).
        key: (B, G, t, K).
        value: (B, G, t, V).
        attention_mask: made by ``make_mask``.
        scaling: factor of the scores; None for 1/sqrt(K).
        dropout: must be 0.
        softcap: limit c of the scores, as c·tanh(scores/c).
        s_aux: a score of each head that takes part in the softmax, without a value (sinks).
        is_causal: must not be false.
        sliding_window: is in the mask.
        others: unknown ones must be None.

    Returns:
        (B, t, H, V), and None for the weights.
    """
    kind = type(module).__name__
    unknown = sorted(
        name
        for name, argument in others.items()
        if argument is not None and name not in UNUSED
    )
    if unknown:
        raise ValueError(
            f"{kind} gives its attention {', '.join(unknown)}, which fsdptoys does not compute"
        )
    if not isinstance(attention_mask, Mask):
        raise ValueError(f"{kind} masks attention in a way of its own")
    if dropout:
        raise ValueError(f"{kind} has attention dropout {dropout:g}; set it to 0")
    if is_causal is False:
        raise ValueError(f"{kind} attends in both directions")
    mask = attention_mask
    context = mask.sequences.context
    width = query.shape[-1]
    scale = 1 / math.sqrt(width) if scaling is None else scaling
    same_width = value.shape[-1] == width
    if mask.is_plain and softcap is None and s_aux is None and same_width:
        out_BHtV = context.attend(
            _scale_queries(query, scale), key, value, mask.sequences.ops
        )
    else:

        def attend_rows(
            q_BhPK: Tensor, k_BgSK: Tensor, v_BgSV: Tensor, heads: slice, start: int
        ) -> Tensor:
            added = mask.rows(start, q_BhPK.shape[2], q_BhPK)
            if softcap is None and s_aux is None:
                scaled = _scale_queries(q_BhPK, scale)
                return masked_attention(scaled, k_BgSK, v_BgSV, added)
            sinks = None if s_aux is None else s_aux[heads]
            return _attend_plainly(q_BhPK, k_BgSK, v_BgSV, added, scale, softcap, sinks)

        out_BHtV = context.attend_rows(query, key, value, attend_rows)
    return out_BHtV.transpose(1, 2).contiguous(), None


def _scale_queries(q_BHPK: Tensor, scale: float) -> Tensor:
    """Queries for a kernel that multiplies scores by 1/sqrt(K)."""
    factor = scale * math.sqrt(q_BHPK.shape[-1])
    return q_BHPK if math.isclose(factor, 1, rel_tol=1e-6) else q_BHPK * factor


def _attend_plainly(
    q_BhPK: Tensor,
    k_BgSK: Tensor,
    v_BgSV: Tensor,
    added: Tensor,
    scale: float,
    softcap: float | None,
    sinks_h: Tensor | None,
) -> Tensor:
    """Matmuls and a softmax in float32, which write (B, h, P, S) scores."""
    share = q_BhPK.shape[1] // k_BgSK.shape[1]
    if share > 1:
        k_BgSK = k_BgSK.repeat_interleave(share, dim=1)
        v_BgSV = v_BgSV.repeat_interleave(share, dim=1)
    scores = q_BhPK @ k_BgSK.mT * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) + added
    if sinks_h is not None:
        sinks = sinks_h.to(scores.dtype).view(1, -1, 1, 1)
        sinks = sinks.expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)
    if sinks_h is not None:
        weights = weights[..., :-1]
    return weights.to(v_BgSV.dtype) @ v_BgSV


def register_attention() -> None:
    """Put this attention into transformers' registries; twice does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def one_rank(ops: Ops, positions_BT: Tensor | None = None) -> Sequences:
    """Sequences that one rank computes."""
    return Sequences(FULL_SEQUENCES, ops, positions_BT)


def choose_attention(configs: Iterable[Any], name: str) -> None:
    """Let layers with these configurations attend by an entry of the registries."""
    for config in configs:
        if config._attn_implementation != name:
            config._attn_implementation = name


def share_decoder(decoder: Any, sequences: Sequences, tokens_BT: Tensor) -> Tensor:
    """Run a decoder over this rank's part of sequences; returns hidden_BtD.

    Positions are given, and a mask of ones: without it transformers would look for documents in a
    part's positions.
    """
    context = sequences.context
    positions_BT = sequences.positions_BT
    if positions_BT is None:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        positions_BT = places_T.unsqueeze(0)
    own_Bt = context.cut(tokens_BT, 1)
    with attends_by(sequences):
        output = decoder(
            input_ids=own_Bt,
            attention_mask=torch.ones_like(own_Bt),
            position_ids=context.cut(positions_BT, 1),
            use_cache=False,
        )
    hidden_BtD: Tensor = output[0]
    return hidden_BtD
