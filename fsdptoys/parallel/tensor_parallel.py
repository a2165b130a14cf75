"""Tensor parallelism with sequence parallelism: ``mesh.tp_size`` consecutive ranks split the
features of each layer.

Between attentions and feed-forwards a rank has 1/N of the tokens of a sequence; norms, residuals
and routers work on these (sequence parallelism, arXiv:2205.05198). A layer begins with an
all-gather of tokens; then each rank computes H/N heads, or F/N channels of the hidden layer, and a
reduce-scatter sums the N partial results (arXiv:1909.08053):

    projection           weight (out, in)    each rank has
    q, k, v, gate, up    columns             out/N rows of the weight: all-gather before, none after
    o, down              rows                in/N columns: none before, reduce-scatter after; then
                                             the bias
    embedding, head      vocabulary          V/N rows; the loss works on split logits
                                             (``loss.vocabulary``)
    norms, biases of rows, GPT-2's positions, routers: in full; each rank's tokens give a part of
    their gradient

The backward of an all-gather is a reduce-scatter and the other way round, so forward and backward
of a block send as much: 2 · (N - 1)/N · B·T·D numbers for attention, and as many for the
feed-forward. Experts stay whole: their layer takes the rank's own tokens, and their stacks are
sharded over all ranks of a copy (``mesh``, sparse view).

Why not ``parallelize_module``: its styles make DTensors of activations. Their dispatch costs host
time around every collective, the kernels and the sums of ``train.deterministic=layout`` would have
to unwrap them, and their parallel loss cannot be chunked. Here parameters are plain tensors of a
rank's features, which FSDP2 shards as usual. Layers declare how they are split, and call the
collectives as their ``exchange`` (``models.exchange``). Full parameters (checkpoints, initial
values) are DTensors that ``FeatureSplit.to_global_dtensor`` makes of the shards.

Memory: a layer's gathered input is kept for the backward, once for all of its projections;
activation checkpointing drops it. Not covered: overlap of collectives and matmuls; key heads that N
does not divide; experts split by features.

Shapes: B batch, T tokens of a sequence (or of this rank's part under context parallelism), t = T/N,
D width, V classes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from fsdptoys.models import DecoderModel
from fsdptoys.models.exchange import Exchange
from fsdptoys.models.moe import Experts
from fsdptoys.models.ops import Layer, leave_uncompiled, use_exchange, use_ops
from fsdptoys.utils.dtensor import is_dtensor, local_tensor, sharded_like

from .collectives import all_gather, reduce_scatter
from .mesh import SHARD_AXIS, TENSOR_AXIS


class TensorExchange(Exchange):
    """Collectives of the ranks that split features; tokens are the last dim but one.

    The compiler skips them, as compiled backwards may order collectives otherwise than FSDP's on
    each rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = group.size()
        self.rank = group.rank()
        self.dtype: torch.dtype | None = None
        """Compute dtype where layers get and give float64 (``exact.slices``); None where they use
        their own."""
        self.in_full = False
        """Whether every rank has all tokens, as in generation, where one token cannot be split."""

    def gather_tokens(self, part_BtD: Tensor) -> Tensor:
        """All ranks' tokens in the order of ranks, in each sequence. A collective."""
        part_BtD = part_BtD.contiguous()
        B, t, D = part_BtD.shape
        gathered = part_BtD.new_empty(self.ranks * B, t, D)
        all_gather(gathered, part_BtD, group=self.group)
        return (
            gathered.view(self.ranks, B, t, D)
            .transpose(0, 1)
            .reshape(B, self.ranks * t, D)
        )

    def scatter_tokens(self, partial_BTD: Tensor) -> Tensor:
        """This rank's tokens of the sum over ranks. A collective."""
        B, T, D = partial_BTD.shape
        sent = (
            partial_BTD.view(B, self.ranks, T // self.ranks, D)
            .transpose(0, 1)
            .flatten(0, 1)
            .contiguous()
        )
        received = sent.new_empty(B, T // self.ranks, D)
        reduce_scatter(received, sent, group=self.group)
        return received

    def begin(self, in_full: bool) -> None:
        """See ``Exchange``."""
        self.in_full = in_full

    def own_tokens(self, positions: Tensor) -> Tensor:
        """See ``Exchange``."""
        if self.in_full:
            return positions
        size = positions.shape[-1] // self.ranks
        return positions.narrow(-1, self.rank * size, size)

    def embed(
        self,
        embedding: Callable[[Tensor, Tensor], Tensor],
        ids_BT: Tensor,
        table_VD: Tensor,
    ) -> Tensor:
        """One rank has a token's row; zeros of the others leave it exact. A collective."""
        classes = table_VD.shape[0]
        local_BT = ids_BT - self.rank * classes
        outside_BT = (local_BT < 0) | (local_BT >= classes)
        rows_BTD = embedding(local_BT.clamp(0, classes - 1), table_VD)
        return self.leave(rows_BTD.masked_fill(outside_BT.unsqueeze(-1), 0.0))

    @leave_uncompiled
    def enter(self, hidden: Tensor) -> Tensor:
        """Begin a layer: gather all tokens; the backward sums their gradients over ranks. A
        collective, in forward and backward."""
        if self.in_full:
            return hidden if self.dtype is None else hidden.double()
        part_BtD = hidden if hidden.ndim == 3 else hidden.unsqueeze(0)
        full_BTD: Tensor = _Enter.apply(part_BtD, self)
        return full_BTD if hidden.ndim == 3 else full_BTD.squeeze(0)

    @leave_uncompiled
    def leave(self, partial: Tensor) -> Tensor:
        """End a layer: this rank's tokens of the sum over ranks. A collective, in forward and
        backward."""
        if self.in_full:
            dist.all_reduce(partial, group=self.group)
            return partial if self.dtype is None else partial.to(self.dtype)
        partial_BTD = partial if partial.ndim == 3 else partial.unsqueeze(0)
        own_BtD: Tensor = _Leave.apply(partial_BTD, self)
        return own_BtD if partial.ndim == 3 else own_BtD.squeeze(0)

    @leave_uncompiled
    def sum_gradient(self, param: Tensor) -> Tensor:
        """Sum the gradient of a parameter that all ranks have. A collective in the backward."""
        summed: Tensor = _SumGradient.apply(param, self.group)
        return summed

    def gather_classes(self, logits_BTV: Tensor) -> Tensor:
        """Logits of all classes, without gradients. A collective."""
        parts = [torch.empty_like(logits_BTV) for _ in range(self.ranks)]
        dist.all_gather(parts, logits_BTV.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_BtD: Tensor, exchange: TensorExchange) -> Tensor:
        ctx.exchange = exchange
        ctx.dtype = part_BtD.dtype
        full_BTD = exchange.gather_tokens(part_BtD)
        return full_BTD if exchange.dtype is None else full_BTD.double()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.scatter_tokens(grad_BTD.contiguous()).to(ctx.dtype), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_BTD: Tensor, exchange: TensorExchange) -> Tensor:
        ctx.exchange = exchange
        ctx.dtype = partial_BTD.dtype
        own_BtD = exchange.scatter_tokens(partial_BTD.contiguous())
        return own_BtD if exchange.dtype is None else own_BtD.to(exchange.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.gather_tokens(grad_BtD).to(ctx.dtype), None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return param.view_as(param)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A copy, since others may use the gradient; 16 bits would round each part of the sum.
        total = grad.to(
            torch.promote_types(grad.dtype, torch.float32), copy=True
        ).contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.to(grad.dtype), None


class FeatureSplit:
    """Shard the features of a model over ranks; expose full parameters as DTensors.

    Args:
        exchange: of the ranks.
        whole_mesh: of ``device_mesh.tensor_axis_first``.
    """

    def __init__(self, exchange: TensorExchange, whole_mesh: DeviceMesh) -> None:
        self.exchange = exchange
        self._mesh = whole_mesh
        self._shapes: dict[str, torch.Size] = {}
        self.dims: dict[str, int | None] = {}
        """Name of a parameter → the dim along which it is split, None where all ranks have it; not
        of experts."""

    def apply(self, model: DecoderModel) -> None:
        """Split the parameters of a model on the meta device as its layers declare, and set their
        exchange."""
        names = {param: name for name, param in model.named_parameters()}
        shapes = {name: param.shape for param, name in names.items()}
        split: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one
        elsewhere: set[nn.Parameter] = set()
        for module in model.modules():
            if isinstance(module, Layer) and module.split is not None:
                self._split(module, module.split.value, names, split)
            if isinstance(module, Experts):
                elsewhere |= set(module.parameters())
        missing = [
            name
            for param, name in names.items()
            if name not in self.dims and param not in elsewhere
        ]
        assert not missing, f"layers declare no split of {missing}"
        self._shapes = {name: shapes[name] for name in self.dims}
        self.exchange.dtype = model.ops.exchanged_dtype
        use_exchange(model, self.exchange)
        use_ops(model, model.ops.split_features(self.exchange.ranks))

    def _split(
        self,
        module: Layer,
        dim: int | None,
        names: dict[nn.Parameter, str],
        split: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        for attribute, param in list(module.named_parameters(recurse=False)):
            # The bias of rows is added after their sum.
            cut = dim if dim is not None and param.ndim > dim else None
            self.dims.setdefault(names.get(param, ""), cut)
            if param not in split and cut is not None:
                assert param.is_meta and param.shape[cut] % self.exchange.ranks == 0, (
                    "the sizes were not checked"
                )
                shape = [
                    size // self.exchange.ranks if d == cut else size
                    for d, size in enumerate(param.shape)
                ]
                split[param] = nn.Parameter(param.new_empty(shape))
            setattr(module, attribute, split.get(param, param))

    def to_global_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """A shard of a parameter, or of a tensor of its shape, as a DTensor of the full one that
        shares its memory."""
        if name not in self.dims or not is_dtensor(tensor):
            return tensor
        from torch.distributed.tensor import DTensor, Replicate, Shard

        axes = self._mesh.mesh_dim_names
        shape = self._shapes[name]
        dim = self.dims[name]
        assert axes is not None
        placements = dict.fromkeys(axes, Replicate()) | {
            SHARD_AXIS: tensor.placements[-1]
        }
        if dim is not None:
            placements[TENSOR_AXIS] = Shard(dim)
        local = local_tensor(tensor)
        whole = torch.empty(shape, device="meta")
        # Without memory: ``from_local`` would move a local tensor to the mesh's device.
        meta_dtensor = DTensor.from_local(
            torch.empty_like(local, device="meta"),
            self._mesh,
            [placements[axis] for axis in axes],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        return sharded_like(meta_dtensor, local)

    def in_every_part(
        self, parameters: Iterator[tuple[str, nn.Parameter]]
    ) -> Iterator[nn.Parameter]:
        """Parameters that all ranks have."""
        return (param for name, param in parameters if self.dims.get(name, 0) is None)
