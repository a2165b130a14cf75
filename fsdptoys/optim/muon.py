"""Muon: matrices of the blocks move by their orthogonalized momentum, all other parameters by
AdamW, in one optimizer.

Matrices are dealt out to ranks, the largest first: in a round each rank owns one. If they are
sharded (DTensors), an all-to-all brings the shards to their owners in the dtype of the matmuls, the
owners orthogonalize (``orthogonalize``), and a second all-to-all returns the shards: a rank holds
about four full matrices at a time, and sends as many bytes as an all-gather and a reduce-scatter.
If every rank has them in full (DDP), owners broadcast the result, so replicas cannot drift apart.
The owner sees the same matrix as one process would: bits do not depend on the layout.

Stacks are updated matrix by matrix; stacks sharded between matrices need no exchange. Under HSDP
each replica repeats the work.

Not covered: parameters not sharded along a dim (FSDP1, the toys' ZeRO), matrices that only some
ranks have gradients for, overlap of exchange and matmuls, batched matmuls for matrices of one
shape.
Sources: https://kellerjordan.github.io/posts/muon/; Moonlight (arXiv:2502.16982) for decay and
scale.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdptoys.utils.bounds import at_least, between
from fsdptoys.utils.dtensor import is_dtensor, local_tensor
from fsdptoys.utils.options import Effect, Stage, option

from .adamw import AdamWSettings
from .config import check_nesterov
from .matrix_optimizer import MATRICES, Groups, MatrixOptimizer

MOST_NS_STEPS = 99  # the limit of ``torch.optim.Muon``
# Keller Jordan's ``a``, ``b`` and ``c`` of Newton-Schulz's polynomial
COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)
EPS = 1e-7  # lower bound of the norm that a matrix is divided by: zeros stay zeros


class MatmulDType(Enum):
    """dtype of Newton-Schulz's matmuls, and of the exchanged shards."""

    auto = "auto"
    """bfloat16; float32 with ``train.deterministic=true``."""
    float32 = "float32"
    bfloat16 = "bfloat16"

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype; ``auto`` must be resolved."""
        return {
            MatmulDType.float32: torch.float32,
            MatmulDType.bfloat16: torch.bfloat16,
        }[self]


class UpdateScale(Enum):
    """Length of an orthogonalized update."""

    match_adamw = "match_adamw"
    """``0.2 * sqrt(max(rows, columns))``: AdamW's usual root mean square, for AdamW's learning
    rates."""
    original = "original"
    """``sqrt(max(1, rows / columns))``, for learning rates of about 0.02."""

    def factor(self, rows: int, columns: int) -> float:
        """Factor of the update of a matrix."""
        if self is UpdateScale.match_adamw:
            # AdamW's usual root mean square, 0.2, for any shape (arXiv:2502.16982).
            return 0.2 * math.sqrt(max(rows, columns))
        # Keller Jordan's: one spectral norm for all but tall matrices.
        return math.sqrt(max(1.0, rows / columns))


@dataclass
class MuonConfig(AdamWSettings):
    """Muon for the blocks' matrices, AdamW for everything else
    (https://kellerjordan.github.io/posts/muon/)."""

    name: ClassVar[str] = "muon"
    exchanges_matrices: ClassVar[bool] = True

    momentum: float = option(
        0.95, between(0, 1, below=True), effect=Effect.training, acts=Stage.update
    )
    """Decay of the mean of the matrices' gradients."""
    nesterov: bool = option(True, effect=Effect.training, acts=Stage.update)
    """Look ahead by one momentum step."""
    ns_steps: int = option(
        5, between(1, MOST_NS_STEPS), effect=Effect.training, acts=Stage.update
    )
    """Rounds of Newton-Schulz."""
    ns_dtype: MatmulDType = option(
        MatmulDType.auto, effect=Effect.format, acts=Stage.update
    )
    """dtype of its matmuls."""
    update_scale: UpdateScale = option(
        UpdateScale.match_adamw, effect=Effect.training, acts=Stage.update
    )
    """Length of an orthogonalized update."""
    adamw_lr: float | None = option(
        None, at_least(0, 1e6), effect=Effect.training, acts=Stage.update
    )
    """Highest learning rate of AdamW's part; null for ``lr``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nesterov(self.momentum, self.nesterov, fix=0.95)

    def is_matrix(self, shape: Sequence[int], in_block: bool) -> bool:
        """Whether a parameter is orthogonalized."""
        return in_block and len(shape) >= 2

    def state_bytes(
        self, shape: Sequence[int], elements: int, in_block: bool
    ) -> tuple[int, ...]:
        """Bytes of the momentum in float32 for matrices, of AdamW's moments for the rest."""
        return (
            (4 * elements,)
            if self.is_matrix(shape, in_block)
            else super().state_bytes(shape, elements, in_block)
        )

    def resolve(self, device_type: str, *, deterministic: bool, on_host: bool) -> None:
        """Choose the dtype of the matmuls too."""
        super().resolve(device_type, deterministic=deterministic, on_host=on_host)
        if self.ns_dtype is MatmulDType.auto:
            self.ns_dtype = (
                MatmulDType.float32 if deterministic else MatmulDType.bfloat16
            )

    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct Muon with its AdamW."""
        for group in params:
            of_adamw = self.lr if self.adamw_lr is None else self.adamw_lr
            group["lr"] = self.lr if group[MATRICES] else of_adamw
        return Muon(params, self)


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix, as views of this rank's part of parameter, gradient and momentum."""

    shape: tuple[int, int]
    param: Tensor
    grad: Tensor
    buffer: Tensor
    # Sharded dim; None where each rank of the group has the matrix in full
    dim: int | None
    # The ranks that share the work; None where this rank works alone
    group: dist.ProcessGroup | None

    @property
    def ranks(self) -> int:
        """Number of ranks that share the work."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def lengths(self) -> list[int]:
        """Rows or columns of each rank, as ``torch.chunk`` splits them."""
        assert self.dim is not None
        size = self.shape[self.dim]
        chunk = -(-size // self.ranks)
        return [min(chunk, max(0, size - rank * chunk)) for rank in range(self.ranks)]

    def sizes(self) -> list[int]:
        """Elements of each rank."""
        assert self.dim is not None
        return [length * self.shape[1 - self.dim] for length in self.lengths()]


class Muon(MatrixOptimizer):
    """Muon over groups with ``MATRICES``, AdamW over the others. A step is a collective."""

    def __init__(self, groups: Groups, config: MuonConfig) -> None:
        super().__init__(groups, config.build_adamw)
        self.config = config
        self.dtype = config.ns_dtype.torch

    def make_matrix_states(self, param: nn.Parameter) -> dict[str, Any]:
        """A momentum of zeros."""
        return {"momentum_buffer": torch.zeros_like(param)}

    def step_matrices(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group that have a gradient. A collective."""
        matrices: list[Matrix] = []
        for param in group["params"]:
            if param.grad is not None:
                buffer = local_tensor(self.state[param]["momentum_buffer"])
                buffer.lerp_(local_tensor(param.grad), 1 - self.config.momentum)
                matrices += split_matrices(param, buffer)
        dealt = [matrix for matrix in matrices if matrix.ranks > 1]
        dealt.sort(key=lambda matrix: -math.prod(matrix.shape))
        for matrix in matrices:
            if matrix.ranks == 1:
                self._apply(
                    matrix,
                    orthogonalize(self._momentum_step(matrix), self.config.ns_steps),
                    group,
                )
        # Those of experts may be others
        for shared_by in dict.fromkeys(matrix.group for matrix in dealt):
            self._step_together(
                [matrix for matrix in dealt if matrix.group is shared_by], group
            )

    def _step_together(self, dealt: list[Matrix], group: dict[str, Any]) -> None:
        """Update matrices that one group of ranks shares, in rounds."""
        while dealt:
            ranks = dealt[0].ranks
            in_full = dealt[0].dim is None
            this_round, dealt = dealt[:ranks], dealt[ranks:]
            assert all((matrix.dim is None) == in_full for matrix in this_round), (
                "a strategy shards all matrices or none"
            )
            for matrix, update in (
                self._broadcast(this_round) if in_full else self._exchange(this_round)
            ):
                self._apply(matrix, update, group)

    def _momentum_step(self, matrix: Matrix) -> Tensor:
        """This rank's part of the matrix to orthogonalize."""
        update = (
            matrix.grad.lerp(matrix.buffer, self.config.momentum)
            if self.config.nesterov
            else matrix.buffer
        )
        return update.to(self.dtype)

    def _apply(self, matrix: Matrix, update: Tensor, group: dict[str, Any]) -> None:
        matrix.param.mul_(1 - group["lr"] * group["weight_decay"])
        factor = self.config.update_scale.factor(*matrix.shape)
        matrix.param.add_(update.to(matrix.param.dtype), alpha=-group["lr"] * factor)

    def _exchange(self, matrices: list[Matrix]) -> Iterator[tuple[Matrix, Tensor]]:
        """Each rank works on one matrix of a round, sharded over all; yields this rank's part of
        the results."""
        group = matrices[0].group
        rank = dist.get_rank(matrices[0].group)
        parts = [self._momentum_step(matrix) for matrix in matrices]
        sent_sizes = [part.numel() for part in parts] + [0] * (
            matrices[0].ranks - len(matrices)
        )
        mine = matrices[rank] if rank < len(matrices) else None
        received_sizes = mine.sizes() if mine is not None else [0] * len(sent_sizes)
        sent = torch.cat([part.reshape(-1) for part in parts])
        del parts
        received = torch.empty(
            sum(received_sizes), dtype=self.dtype, device=sent.device
        )
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
        if mine is not None:
            assert mine.dim is not None
            shape = (-1, mine.shape[1]) if mine.dim == 0 else (mine.shape[0], -1)
            whole = torch.cat(
                [part.view(shape) for part in received.split(received_sizes)],
                dim=mine.dim,
            )
            del received
            whole = orthogonalize(whole, self.config.ns_steps)
            received = torch.cat(
                [part.reshape(-1) for part in whole.split(mine.lengths(), dim=mine.dim)]
            )
            del whole
        dist.all_to_all_single(sent, received, sent_sizes, received_sizes, group=group)
        for matrix, piece in zip(matrices, sent.split(sent_sizes), strict=False):
            yield matrix, piece.view(matrix.param.shape)

    def _broadcast(self, matrices: list[Matrix]) -> Iterator[tuple[Matrix, Tensor]]:
        """Each rank works on one matrix of a round, replicated on all; yields the results."""
        group = matrices[0].group
        rank = dist.get_rank(matrices[0].group)
        mine = None
        if rank < len(matrices):
            mine = orthogonalize(
                self._momentum_step(matrices[rank]), self.config.ns_steps
            )
        for owner, matrix in enumerate(matrices):
            update = mine if owner == rank else None
            if update is None:
                update = torch.empty(
                    matrix.shape, dtype=self.dtype, device=matrix.param.device
                )
            dist.broadcast(update, owner, group=group)
            yield matrix, update


def split_matrices(param: nn.Parameter, buffer: Tensor) -> list[Matrix]:
    """Return this rank's part of a parameter's matrices; a stack has several.

    ``buffer`` is this rank's momentum. The parameter has a gradient and two or three dims, and is
    plain or a DTensor sharded along one of them.
    """
    dim, group = _layout(param)
    local = local_tensor(param.detach())
    grad = local_tensor(param.grad)  # type: ignore[arg-type]
    rows, columns = param.shape[-2:]
    if param.ndim == 2:
        return [Matrix((rows, columns), local, grad, buffer, dim, group)]
    if dim == 0:
        # Each rank has matrices of its own.
        dim = None
        group = None
    inner = None if dim is None else dim - 1
    return [
        Matrix((rows, columns), *views, inner, group)
        for views in zip(local.unbind(), grad.unbind(), buffer.unbind(), strict=True)
    ]


def _layout(param: nn.Parameter) -> tuple[int | None, dist.ProcessGroup | None]:
    """Sharded dim of a parameter, and the ranks that share it or replicate it, if several."""
    if not is_dtensor(param):
        shared = dist.is_initialized() and dist.get_world_size() > 1
        return None, dist.group.WORLD if shared else None
    from torch.distributed.tensor import Shard

    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Shard) and param.device_mesh.size(axis) > 1:
            return placement.dim, param.device_mesh.get_group(axis)
    return None, None


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Approximate the nearest matrix with orthonormal rows or columns by Newton-Schulz, which takes
    matmuls only.

    A matrix ``U S Vᵀ`` is scaled to singular values of at most 1, and ``a x + b x³ + c x⁵`` is
    applied to all of them, round after round. Muon's coefficients are so steep at 0 that five
    rounds are enough, at the price that singular values end between about 0.7 and 1.2 rather than
    at 1.

    ``matrix`` is 2-D and in the dtype to compute in; returns a contiguous one of its shape and
    dtype.
    Source: https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    # The gram matrix is then of the shorter side. Copied, so that bits do not depend on alignment.
    x = (matrix.T if tall else matrix).clone(memory_format=torch.contiguous_format)
    x.div_(x.norm().clamp(min=EPS))
    for _ in range(steps):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, gram, x, beta=a)
    return x.T.contiguous() if tall else x
